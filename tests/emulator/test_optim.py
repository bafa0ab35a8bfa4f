import copy
import pickle

import pytest
import torch

from ipu_log_callback.emulator import optim

PAIRS = {
    "SGD": (optim.SGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    "Adam": (optim.Adam, torch.optim.Adam, {"lr": 0.1, "betas": (0.8, 0.9)}),
    "AdamW": (optim.AdamW, torch.optim.AdamW, {"lr": 0.1}),
    "RMSprop": (optim.RMSprop, torch.optim.RMSprop, {"lr": 0.1, "momentum": 0.5, "centered": True}),
}
GRADIENTS = [torch.tensor([1.0, -2.0, 3.0]), torch.tensor([0.5, 0.5, -4.0])]


def weights_after(cls, gradients=GRADIENTS, start=(1.0, 2.0, -2.0), **arguments):
    """The weights after one step per gradient."""
    weight = torch.nn.Parameter(torch.tensor(start))
    optimizer = cls([weight], **arguments)
    for gradient in gradients:
        weight.grad = gradient.clone()
        optimizer.step()
    return weight.detach()


@pytest.mark.parametrize("name", PAIRS)
def test_an_optimizer_steps_as_pytorchs(name):
    """Without the arguments that change the method, the weights are those of PyTorch's class."""
    ours, theirs, arguments = PAIRS[name]
    assert issubclass(ours, theirs)
    number_formats = {"loss_scaling": 128.0, "accum_type": torch.float16}
    assert torch.equal(
        weights_after(ours, **arguments, **number_formats), weights_after(theirs, **arguments)
    )


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW"])
def test_max_grad_norm_clips_all_gradients_together(name):
    """A limit on the norm gives the step of the gradient scaled down to it."""
    ours, theirs, arguments = PAIRS[name]
    clipped = [g * min(1.0, 2.0 / (float(g.norm()) + 1e-6)) for g in GRADIENTS]
    torch.testing.assert_close(
        weights_after(ours, max_grad_norm=2.0, **arguments),
        weights_after(theirs, gradients=clipped, **arguments),
    )


def test_adamw_without_bias_correction_takes_the_raw_moments():
    """After one step the moments are (1 - beta) times the gradient and its square."""
    gradient, start = GRADIENTS[0], torch.tensor([1.0, 2.0, -2.0])
    mean, square = 0.1 * gradient, 0.001 * gradient**2
    expected = start * (1 - 0.1 * 0.01) - 0.1 * mean / (square.sqrt() + 1e-8)
    stepped = weights_after(optim.AdamW, GRADIENTS[:1], lr=0.1, bias_correction=False)
    torch.testing.assert_close(stepped, expected)


@pytest.mark.parametrize("centered", [False, True])
def test_rmsprop_in_tensorflows_variant(centered):
    """TensorFlow's average starts at one, and epsilon is under the root."""
    gradient, start = GRADIENTS[0], torch.tensor([1.0, 2.0, -2.0])
    variance = 0.9 + 0.1 * gradient**2 - (centered * 0.1 * gradient) ** 2
    expected = start - 0.1 * gradient / (variance + 0.5).sqrt()
    stepped = weights_after(
        optim.RMSprop,
        GRADIENTS[:1],
        lr=0.1,
        alpha=0.9,
        eps=0.5,
        centered=centered,
        use_tf_variant=True,
    )
    torch.testing.assert_close(stepped, expected)


def test_rmsprop_in_tensorflows_variant_keeps_the_learning_rate_in_the_momentum():
    """A step with a zero gradient repeats the last one times the momentum, at its learning rate."""
    weight = torch.nn.Parameter(torch.zeros(3))
    optimizer = optim.RMSprop([weight], lr=0.1, momentum=0.5, use_tf_variant=True)
    weight.grad = GRADIENTS[0].clone()
    optimizer.step()
    first = weight.detach().clone()
    optimizer.param_groups[0]["lr"] = 100.0
    weight.grad = torch.zeros(3)
    optimizer.step()
    torch.testing.assert_close(weight.detach() - first, 0.5 * first)


@pytest.mark.parametrize("limit", [None, 2.0])
def test_lamb_moves_a_layer_in_proportion_to_its_norm(limit):
    """The length of a step is the learning rate times the weight's norm, up to the norm's limit."""
    start = (1.0, 2.0, -2.0)
    stepped = weights_after(optim.LAMB, GRADIENTS[:1], start, lr=0.1, max_weight_norm=limit)
    moved = (stepped - torch.tensor(start)).norm()
    torch.testing.assert_close(moved, torch.tensor(0.1 * (limit or 3.0)))


def test_lamb_moves_a_layer_of_zeros_by_the_plain_update():
    """A weight of norm zero would never move; its update is not scaled."""
    stepped = weights_after(optim.LAMB, GRADIENTS[:1], (0.0, 0.0, 0.0), lr=0.1)
    torch.testing.assert_close(stepped, -0.1 * GRADIENTS[0].sign())


def _pickled(optimizer):
    return pickle.loads(pickle.dumps(optimizer))  # noqa: S301  # written a moment ago


@pytest.mark.parametrize("copied", [copy.deepcopy, _pickled])
def test_a_copy_keeps_the_devices_arguments(copied):
    """Copying or pickling an optimizer keeps what PyTorch's class does not know."""
    optimizer = optim.AdamW(
        [torch.nn.Parameter(torch.zeros(1))], lr=0.1, bias_correction=False, max_grad_norm=2.0
    )
    twin = copied(optimizer)
    assert (twin.bias_correction, twin.max_grad_norm) == (False, 2.0)
    assert not twin.variable_attrs.isConstant("lr")


def test_only_a_state_with_a_device_part_can_be_loaded():
    """The state of PyTorch's own optimizer is refused, one's own is accepted."""
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = optim.Adam([weight])
    with pytest.raises(RuntimeError, match="Only IPU optimizer states"):
        optimizer.load_state_dict(torch.optim.Adam([weight]).state_dict())
    with pytest.raises(RuntimeError, match="because it is empty"):
        optimizer.set_state_dict({})
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.ipu_state_is_dirty


def test_what_was_passed_may_change_after_compilation():
    """Attributes that were given are variable, others constant; each can be marked otherwise."""
    attributes = optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1).variable_attrs
    assert not attributes.isConstant("lr")
    assert attributes.isConstant("momentum")
    attributes.markAsVariable("momentum")
    attributes.markAsConstant("lr")
    assert (attributes.isConstant("momentum"), attributes.isConstant("lr")) == (False, True)
    with pytest.raises(AssertionError, match="Unknown attribute speed"):
        attributes.markAsConstant("speed")


def test_accumulation_types_are_float32_or_float16():
    """No other number format can hold gradients."""
    with pytest.raises(AssertionError, match=r"torch\.float32 or torch\.float16"):
        optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1, accum_type=torch.float64)


def test_an_ignored_velocity_scaling_is_reported(caplog):
    """Velocity scaling means something with the combined accumulator only."""
    weight = torch.nn.Parameter(torch.zeros(1))
    combined = optim.SGD([weight], lr=0.1, velocity_scaling=2.0, use_combined_accum=True)
    assert combined.param_groups[0]["velocity_scaling"] == 2.0
    assert not caplog.records
    optim.SGD([weight], lr=0.1, velocity_scaling=2.0)
    assert "velocity_scaling value ignored" in caplog.text


@pytest.mark.parametrize("name", ["AdamW", "RMSprop", "LAMB"])
def test_a_weight_without_gradient_stays(name):
    """A closure is called with gradients and its loss returned; unused weights are left alone."""
    cls = getattr(optim, name)
    own = {"RMSprop": {"use_tf_variant": True}}.get(name, {"bias_correction": False})
    used, unused = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    optimizer = cls([used, unused], lr=0.1, **own)

    def closure():
        loss = (used**2).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 3.0
    assert torch.equal(unused, torch.ones(3))
    assert (used < 1).all()


def test_clipping_without_gradients_does_nothing():
    """A limit on the norm of no gradient at all is kept."""
    weight = torch.nn.Parameter(torch.ones(3))
    optim.SGD([weight], lr=0.1, max_grad_norm=1.0).step()
    assert torch.equal(weight, torch.ones(3))


@pytest.mark.parametrize("cls", [optim.AdamW, optim.LAMB])
def test_moments_without_bias_correction_add_up(cls):
    """Two steps take the running means of both gradients, whatever the count."""
    start = torch.tensor([1.0, 2.0, -2.0])
    weight, mean, square = start.clone(), torch.zeros(3), torch.zeros(3)
    for gradient in GRADIENTS:
        mean = 0.9 * mean + 0.1 * gradient
        square = 0.999 * square + 0.001 * gradient**2
        update = mean / (square.sqrt() + 1e-8)
        trust = weight.norm() / update.norm() if cls is optim.LAMB else 1.0
        weight = weight - 0.1 * trust * update
    stepped = weights_after(cls, lr=0.1, bias_correction=False, weight_decay=0.0, eps=1e-8)
    torch.testing.assert_close(stepped, weight)


def test_python_of_a_subclass_of_a_subclass_is_announced(poptorch, caplog):
    """Only the known class takes effect, and that is said.

    PopTorch 3.4 `_optimizer_attributes.py`.
    """

    class Mine(torch.optim.SGD):
        pass

    class Further(Mine):
        pass

    module = torch.nn.Linear(1, 1)
    optim.check(Mine(module.parameters(), lr=0.1))
    assert not caplog.records
    poptorch.trainingModel(module, optimizer=Further(module.parameters(), lr=0.1))
    assert "does not run Python optimizer code" in caplog.text
    assert "Further" in caplog.text


def test_maximising_is_refused():
    """The device minimises, so an optimizer that maximises cannot be honoured."""
    with pytest.raises(NotImplementedError, match=r"SGD\(maximize=True\)"):
        optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1, maximize=True)


@pytest.mark.parametrize(
    ("optimizer", "error", "message"),
    [
        (torch.optim.Adagrad, AssertionError, "Unsupported optimizer type"),
        (lambda p: torch.optim.Adam(p, amsgrad=True), ValueError, "Only non-amsgrad"),
        (lambda p: torch.optim.SGD(p, 0.1, maximize=True), NotImplementedError, "maximize"),
    ],
)
def test_a_model_refuses_an_optimizer_that_the_device_has_not(poptorch, optimizer, error, message):
    """Whatever the device cannot run is refused when the model is built."""
    module = torch.nn.Linear(1, 1)
    with pytest.raises(error, match=message):
        poptorch.trainingModel(module, optimizer=optimizer(module.parameters()))
