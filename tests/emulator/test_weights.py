import copy
import gc
import io
import pickle

import pytest
import torch
from torch.nn import functional as F


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 2)
        self.register_buffer("seen", torch.zeros(1))
        self.register_buffer("count", torch.zeros(1, dtype=torch.int64))

    def forward(self, x):
        self.seen += x.sum().detach()
        self.count += 1
        return F.mse_loss(self.linear(x), torch.ones(len(x), 2))


X = torch.ones(4, 3)


def trained(poptorch, **settings):
    """A module and its executor after one execution."""
    model = Net()
    executor = poptorch.trainingModel(
        model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), **settings
    )
    executor(X)
    return model, executor


def test_weights_come_back_when_touched(poptorch):
    """Any touch of a parameter or buffer copies all weights once.

    PopTorch 3.4 `PoptorchParameter`.
    """
    touches = [
        lambda model: model.linear.weight.shape,
        lambda model: model.linear.weight.grad,
        lambda model: model.seen.sum(),
        lambda model: model.state_dict(),
        lambda model: list(model.named_buffers()),
        lambda model: torch.equal(model.linear.bias, model.linear.bias),
    ]
    for touch in touches:
        model, executor = trained(poptorch)
        assert executor.counters.implicit_copies_to_host == 0
        touch(model)
        touch(model)
        assert executor.counters.implicit_copies_to_host == 1


def test_what_does_not_touch_weights(poptorch):
    """Walking the modules, holding a parameter and reading the optimizer's rate copy nothing.

    PopTorch 3.4 `_poplar_executor.py`.
    """
    model, executor = trained(poptorch)
    list(model.modules())
    held = model.linear.weight
    assert executor._optimizer.param_groups[0]["lr"] == 0.1
    assert executor.counters.implicit_copies_to_host == 0
    del held


def test_explicit_copies_are_counted_apart(poptorch):
    """``copyWeightsToHost`` and ``copyWeightsToDevice`` are the user's own doing."""
    model, executor = trained(poptorch)
    executor.copyWeightsToHost()
    with torch.no_grad():
        model.linear.weight.zero_()
    executor.copyWeightsToDevice()
    assert (
        executor.counters.explicit_copies_to_host,
        executor.counters.explicit_copies_to_device,
    ) == (1, 1)
    assert executor.counters.implicit_copies_to_host == 0
    expected = F.mse_loss(model.linear.bias.data.expand(4, 2), torch.ones(4, 2))
    torch.testing.assert_close(executor(X), expected)


def test_float_buffers_move_and_integer_buffers_do_not(poptorch):
    """A float buffer updated in place lives on the device and comes back.

    An integer one is a constant.

    PopTorch 3.4 `JitDispatch.cpp`, `addParameter`.
    """
    model, executor = trained(poptorch)
    executor(X)
    assert model.seen.item() == 24
    assert model.count.item() == 0


def test_inference_keeps_its_buffers_on_the_device(poptorch):
    """An inference model brings buffers back only when asked.

    PopTorch 3.4 `buffers_test.py`.
    """
    model = Net()
    executor = poptorch.inferenceModel(model)
    executor(X)
    executor(X)
    assert model.seen.item() == 0
    executor.copyWeightsToHost()
    assert model.seen.item() == 24


def test_inference_follows_its_training_twin(poptorch):
    """A model that shares the module fetches trained weights before it runs.

    PopTorch 3.4 `__call__`.
    """
    model = torch.nn.Sequential(torch.nn.Linear(3, 1))

    class WithLoss(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, x):
            out = self.inner(x)
            return out, F.mse_loss(out, torch.zeros(len(x), 1))

    both = WithLoss()
    training = poptorch.trainingModel(both, optimizer=torch.optim.SGD(both.parameters(), lr=0.1))
    inference = poptorch.inferenceModel(both)
    training(X)
    before = inference(X)[1]
    copies = inference.counters.implicit_copies_to_device
    training(X)
    assert inference(X)[1] < before
    assert inference.counters.implicit_copies_to_device == copies + 1


def test_removing_is_an_error(poptorch):
    """A step keeps the buffers that it has.

    PopTorch 3.4 `errorOnBufferOrParameterAddressChanges`.
    """

    class Forgets(Net):
        def forward(self, x):
            loss = super().forward(x)
            del self.seen
            return loss

    with pytest.raises(poptorch.Error, match="Buffer seen is removed from the model"):
        poptorch.inferenceModel(Forgets())(X)


@pytest.mark.parametrize("name", ["seen", "linear.bias"])
def test_reassigning_is_an_error(poptorch, name):
    """A buffer or parameter must be updated in place.

    PopTorch 3.4 `errorOnBufferOrParameterAddressChanges`.
    """

    class Bad(Net):
        def forward(self, x):
            owner, attribute = (self, "seen") if name == "seen" else (self.linear, "bias")
            value = getattr(owner, attribute) * 1
            if name == "seen":
                setattr(owner, attribute, value)
            else:
                owner._parameters[attribute] = value
            return x + 1

    kind = "Buffer" if name == "seen" else "Parameter"
    with pytest.raises(poptorch.Error, match=f"{kind} {name} is reassigned within the model"):
        poptorch.inferenceModel(Bad())(X)


def test_buffers_and_replicas(poptorch):
    """Updating a buffer with replicas needs ``broadcastBuffers(False)``.

    PopTorch 3.4 `InplaceOps.cpp`.
    """
    options = poptorch.Options().replicationFactor(2)
    with pytest.raises(poptorch.Error, match="PopTorch does not support broadcasting buffers"):
        trained(poptorch, options=options)
    model, _ = trained(
        poptorch, options=poptorch.Options().replicationFactor(2).broadcastBuffers(False)
    )
    assert model.seen.item() == 6


def test_a_destroyed_model_is_as_before(poptorch):
    """``destroy`` brings the weights and gives the module its class back.

    PopTorch 3.4 `destroy`.
    """
    model, executor = trained(poptorch)
    executor.destroy()
    assert type(model) is Net
    assert type(model.linear.weight) is torch.nn.Parameter
    assert type(model.seen) is torch.Tensor
    assert model.seen.item() == 12
    assert not executor.isCompiled()


def test_wrapping_twice(poptorch):
    """A module is trained by one executor at a time.

    PopTorch 3.4 `__init__.py`.
    """
    model, executor = trained(poptorch)
    with pytest.raises(RuntimeError, match=r"already been wrapped in 'poptorch\.trainingModel'"):
        poptorch.trainingModel(model)
    executor.destroy()
    poptorch.trainingModel(model)


def test_copies_and_pickles_of_a_wrapped_module(poptorch):
    """A shallow copy is wrapped like its original; what is pickled is plain, and up to date.

    PopTorch 3.4 `_impl.py`.
    """
    model, executor = trained(poptorch)
    assert type(copy.copy(model)) is type(model)
    plain = pickle.loads(pickle.dumps(model))  # noqa: S301  # our own object
    assert type(plain) is Net
    assert type(plain.seen) is torch.Tensor
    assert plain.seen.item() == 12
    assert executor.counters.implicit_copies_to_host == 1
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    assert all(type(value) is torch.Tensor for value in model.state_dict().values())
    plain = Net()
    plain.load_state_dict(torch.load(io.BytesIO(file.getvalue())))
    assert torch.equal(plain.linear.weight, model.linear.weight)


def test_only_parameters_and_buffers_are_put_back(poptorch):
    """What else the move to the device touched stays there.

    PopTorch 3.4 `_compileWithDispatch`.
    """

    class Keeper(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.kept = torch.ones(2)

        def _apply(self, fn):
            self.kept = fn(self.kept)
            return super()._apply(fn)

        def forward(self, x):
            return x + 1

    model = Keeper()
    poptorch.inferenceModel(torch.nn.Sequential(model))(X)
    assert model.kept.device.type == "ipu"


def test_loading_a_state_reaches_the_device(poptorch):
    """``load_state_dict`` of the executor copies to the device.

    PopTorch 3.4 `load_state_dict`.
    """
    _, executor = trained(poptorch)
    zeros = {name: torch.zeros_like(value) for name, value in Net().state_dict().items()}
    executor.load_state_dict(zeros)
    assert executor(X).item() == 1.0


def test_a_state_loaded_before_compiling(poptorch):
    """It is what the device starts from.

    PopTorch 3.4 `load_state_dict`.
    """
    executor = poptorch.inferenceModel(Net())
    executor.load_state_dict(
        {name: torch.zeros_like(value) for name, value in Net().state_dict().items()}
    )
    assert executor.counters.implicit_copies_to_device == 0
    assert executor(X).item() == 1.0


@pytest.mark.parametrize("training", [False, True])
def test_buffers_sent_by_name(poptorch, training):
    """The buffers that the options name go to the device; weights and other buffers do not.

    PopTorch 3.4 `copyNamedBuffersToDevice`.
    """

    class Shifted(Net):
        def __init__(self):
            super().__init__()
            self.register_buffer("shift", torch.zeros(1))

        def forward(self, x):
            return self.shift * 1, super().forward(x), self.linear.weight.sum()

    model, options = Shifted(), poptorch.Options().updatableNamedBuffers(["shift"])
    if training:
        still_sgd = torch.optim.SGD(model.parameters(), lr=0.0)
        executor = poptorch.trainingModel(model, options, still_sgd)
    else:
        executor = poptorch.inferenceModel(model, options)
    _, _, total = executor(X)
    with torch.no_grad():
        model.linear.weight.zero_()
        model.shift.fill_(5)
        model.seen.fill_(100)
    executor.copyNamedBuffersToDevice()
    shift, _, still = executor(X)
    assert shift.item() == 5
    torch.testing.assert_close(still, total)
    executor.copyWeightsToHost()
    assert model.seen.item() == 24


def test_a_model_outlives_its_executor(poptorch):
    """Once the executor is gone, a module that it wrapped is used like any other.

    PopTorch 3.4 `_poplar_executor.py`: the wrappers hold the executor weakly.
    """
    model, executor = trained(poptorch)
    expected = copy.deepcopy(model.state_dict())
    del executor
    gc.collect()
    plain = Net()
    plain.load_state_dict(expected)
    assert not model.copyWeightsToHostIfNeeded()
    assert torch.equal(model.linear.weight.detach(), plain.linear.weight)
    assert model.seen.item() == 12
    torch.testing.assert_close(model(X), plain(X), check_dtype=False)
    model.destroy()


def test_a_module_can_destroy_its_executor(poptorch):
    """``destroy`` is the wrapped module's method, too.

    PopTorch 3.4 `_poplar_executor.py`.
    """
    model, executor = trained(poptorch)
    model.destroy()
    assert type(model) is Net
    assert not executor.isCompiled()


def test_buffers_of_other_types(poptorch):
    """A parameter that is registered as a buffer cannot be trained with.

    PopTorch 3.4 `_poplar_executor.py`.
    """
    model = Net()
    model.register_buffer("other", torch.nn.Parameter(torch.zeros(1)))
    with pytest.raises(poptorch.Error, match=r"All buffers must be an instance of torch\.Tensor"):
        poptorch.trainingModel(model)


def test_integer_parameters_are_constants(poptorch):
    """They stay as they are; the rest is trained.

    PopTorch 3.4 `JitDispatch.cpp`, `addParameter`.
    """

    class Indexed(Net):
        def __init__(self):
            super().__init__()
            self.order = torch.nn.Parameter(torch.tensor([1, 0]), requires_grad=False)

        def forward(self, x):
            return F.mse_loss(self.linear(x)[:, self.order], torch.tensor([[0.0, 5.0]] * len(x)))

    model = Indexed()
    plain = copy.deepcopy(model)
    executor = poptorch.trainingModel(
        model, optimizer=torch.optim.SGD(model.linear.parameters(), lr=0.1)
    )
    executor(X)
    plain(X).backward()
    torch.optim.SGD(plain.linear.parameters(), lr=0.1).step()
    torch.testing.assert_close(model.linear.weight.data, plain.linear.weight.data)
    assert model.order.tolist() == [1, 0]


def test_tied_weights_stay_tied(poptorch):
    """A parameter used under two names is one parameter on the device.

    PopTorch 3.4 `_compileWithDispatch`.
    """

    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = torch.nn.Linear(3, 3, bias=False), torch.nn.Linear(3, 3, bias=False)
            self.b.weight = self.a.weight

        def forward(self, x):
            return F.mse_loss(self.b(self.a(x)), x)

    torch.manual_seed(0)
    model = Tied()
    plain = copy.deepcopy(model)
    executor = poptorch.trainingModel(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    executor(X)
    plain(X).backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    torch.testing.assert_close(model.a.weight.data, plain.a.weight.data)
    assert model.a.weight is model.b.weight
    state = model.state_dict(keep_vars=True)
    assert state["a.weight"] is state["b.weight"]
