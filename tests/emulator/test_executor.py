import copy

import pytest
import torch
from torch.nn import functional as F

from ipu_log_callback import emulator


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 2)

    def forward(self, x, y):
        out = self.linear(x)
        return out, F.cross_entropy(out, y)


X, Y = torch.randn(4, 3, generator=torch.Generator().manual_seed(1)), torch.tensor([0, 1, 1, 0])


def training(poptorch, options=None, optimizer=torch.optim.SGD, **numbers):
    """A fresh training model, always with the same weights."""
    torch.manual_seed(0)
    model = Net()
    return poptorch.trainingModel(
        model, options, optimizer(model.parameters(), **{"lr": 0.1, **numbers})
    )


def test_options_freeze(poptorch):
    """The user's options freeze when a model is made of them.

    PopTorch 3.4 `_poplar_executor.py`.
    """
    options = poptorch.Options()
    poptorch.inferenceModel(Net(), options)
    with pytest.raises(AttributeError, match="Can't modify frozen Options"):
        options.deviceIterations(2)


def test_the_learning_rate_can_change(poptorch):
    """``setOptimizer`` hands a changed rate to the device.

    PopTorch 3.4 `setOptimizer`.
    """
    model = training(poptorch)
    model(X, Y)
    before = model.linear.weight.detach().clone()
    model._optimizer.param_groups[0]["lr"] = 0.0
    model(X, Y)
    assert not torch.equal(model.linear.weight, before)
    before = model.linear.weight.detach().clone()
    model.setOptimizer(model._optimizer)
    model(X, Y)
    assert torch.equal(model.linear.weight, before)


def test_compiled_in_numbers_cannot_change(poptorch):
    """Momentum 0 is a constant of the compiled model.

    PopTorch 3.4 `_optimizer_attributes.py`.
    """
    model = training(poptorch)
    model(X, Y)
    with pytest.raises(poptorch.Error, match="compiled in as a constant"):
        model.setOptimizer(torch.optim.SGD(model.model.parameters(), lr=0.1, momentum=0.9))
    weight, bias = model.model.parameters()
    with pytest.raises(poptorch.Error, match="setOptimizer with 2 groups"):
        model.setOptimizer(torch.optim.SGD([{"params": [weight]}, {"params": [bias]}], lr=0.1))
    with pytest.raises(poptorch.Error, match="compiled with SGD"):
        model.setOptimizer(torch.optim.Adam(model.model.parameters()))


def test_python_of_an_optimizer_does_not_run(poptorch):
    """The device performs the known class's step whatever a subclass overrides.

    PopTorch 3.4 `_toPoptorchOptimizer`.
    """

    class Odd(torch.optim.SGD):
        def step(self, closure=None):
            raise AssertionError

    odd, plain = training(poptorch, optimizer=Odd), training(poptorch)
    odd(X, Y), plain(X, Y)
    assert torch.equal(odd.linear.weight, plain.linear.weight)


@pytest.mark.parametrize("name", ["Adam", "SGD", "RMSprop"])
def test_optimizer_state_travels(poptorch, name):
    """A PopTorch optimizer's state can be read from one device and written to another.

    PopTorch 3.4 `optim.py`.
    """
    kind, numbers = getattr(poptorch.optim, name), {} if name == "Adam" else {"momentum": 0.9}
    one = training(poptorch, optimizer=kind, **numbers)
    one(X, Y)
    state, weights = one._optimizer.state_dict(), copy.deepcopy(one.model.state_dict())
    # That another model has more weights does not matter.
    state["ipu_state"]["Accl1___other.weight"] = torch.ones(3)
    two = training(poptorch, optimizer=kind, **numbers)
    two.model.load_state_dict(weights)
    two._optimizer.load_state_dict(state)
    one(X, Y), two(X, Y)
    torch.testing.assert_close(one.linear.weight.data, two.linear.weight.data)


def test_another_optimizer_of_poptorch(poptorch):
    """A fresh one brings its numbers and keeps the device's moments; one with moments brings them.

    PopTorch 3.4 `setOptimizer`, `optim.py`.
    """
    model, steady = (training(poptorch, optimizer=poptorch.optim.Adam) for _ in range(2))
    plain = copy.deepcopy(Net())
    plain.load_state_dict(model.model.state_dict())
    adam = torch.optim.Adam(plain.parameters(), lr=0.1)
    first = model._optimizer
    for rate in (0.1, 0.5):
        adam.param_groups[0]["lr"] = rate
        model.setOptimizer(
            first if rate == 0.1 else poptorch.optim.Adam(model.model.parameters(), lr=rate)
        )
        adam.zero_grad()
        plain(X, Y)[1].backward()
        adam.step()
        model(X, Y)
    torch.testing.assert_close(model.linear.weight.data, plain.linear.weight.data)
    state = first.state_dict()
    assert state["ipu_state"]["Step___linear.weight"] == 1

    steady(X, Y), steady(X, Y)
    back = poptorch.optim.Adam(steady.model.parameters(), lr=0.1)
    back.load_state_dict(state)
    steady.setOptimizer(back)
    assert back.state_dict()["ipu_state"]["Step___linear.weight"] == 1
    torch.testing.assert_close(
        back.state_dict()["ipu_state"]["Accl1___linear.weight"],
        state["ipu_state"]["Accl1___linear.weight"],
    )


def test_models_of_models(poptorch):
    """A wrapper may be wrapped; it looks like its module, and a copy of it computes the same.

    PopTorch 3.4 `__init__.py`, `_poplar_executor.py`.
    """
    inference = poptorch.inferenceModel(Net())
    assert repr(inference) == repr(inference.model)
    expected = inference(X, Y)[1]
    assert torch.equal(copy.copy(inference)(X, Y)[1], expected)
    trained = poptorch.trainingModel(inference)
    assert trained.model is inference.model
    torch.testing.assert_close(trained(X, Y)[1], expected)
    assert poptorch.inferenceModel(trained)(X, Y)[1] < expected


def test_compiling_twice(poptorch, caplog):
    """The second time says so and does nothing.

    PopTorch 3.4 `compile`.
    """
    model = poptorch.inferenceModel(Net())
    model.compile(X, Y)
    assert "already compiled" not in caplog.text
    model.compile(X, Y)
    assert "Call to compile() ignored: the executable is already compiled" in caplog.text
    assert model.counters.compiles == 1


def _compiled(poptorch):
    model = poptorch.inferenceModel(Net())
    model.compile(X, Y)
    return model


def _destroyed_twice(poptorch):
    model = training(poptorch)
    for _ in range(2):
        model(X, Y)
        model.destroy()


WRONG = {
    "options": (
        lambda p: p.inferenceModel(Net(), {}),
        r"'options' is of type <class 'dict'> \(Expected poptorch.Options\)",
    ),
    "optimizer": (
        lambda p: p.PoplarExecutor(
            Net(), p.Options(), False, optimizer=torch.optim.SGD(Net().parameters(), lr=0.1)
        ),
        "Optimizer should be None for inference",
    ),
    "buffers": (
        lambda p: p.inferenceModel(Net(), p.Options().updatableNamedBuffers(["no"])).compile(X, Y),
        "Updatable named buffers not found in the model: no",
    ),
    "no option": (
        lambda p: _compiled(p).copyNamedBuffersToDevice(),
        "No named buffers marked as updatable via updatableNamedBuffers option",
    ),
    "destroyed twice": (_destroyed_twice, "model was never wrapped"),
    "many IPUs": (
        lambda p: p.inferenceModel(Net(), p.Options().replicationFactor(65)).compile(
            X.repeat(65, 1), Y.repeat(65)
        ),
        r"Too many IPUs requested \(65\)",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_poptorch_refuses(poptorch, name):
    """With the words that PopTorch has for it.

    PopTorch 3.4 `_poplar_executor.py`, `CompilerImpl.cpp`.
    """
    act, text = WRONG[name]
    with pytest.raises((poptorch.Error, AssertionError), match=text):
        act(poptorch)


def test_anchors(poptorch):
    """Named tensors of the graph can be asked for after an execution.

    PopTorch 3.4 `debug_tensors_test.py`.
    """
    options = poptorch.Options().deviceIterations(2).outputMode(poptorch.OutputMode.All)
    for short, name in [
        ("g", "Gradient___linear.bias"),
        ("u", "UpdatedVar___linear.bias"),
        ("w", "linear.bias"),
    ]:
        options.anchorTensor(short, name)
    model = training(poptorch, options)
    start = model.model.linear.bias.detach().clone()
    model(torch.cat([X, X]), torch.cat([Y, Y]))
    gradient, updated, weight = (model.getAnchoredTensor(name).reshape(2, 2) for name in "guw")
    torch.testing.assert_close(updated, weight - 0.1 * gradient)
    torch.testing.assert_close(weight, torch.stack([start, updated[0]]))
    torch.testing.assert_close(updated[1], model.linear.bias.data)
    assert {"Gradient___linear.bias", "linear.weight", "input", "loss"} <= set(
        model.getTensorNames()
    )


def test_anchored_gradients_are_a_micro_batchs_own(poptorch):
    """They are neither averaged nor summed over accumulation.

    Training is not disturbed by looking at them.
    """
    options = poptorch.Options().outputMode(poptorch.OutputMode.All)
    options.Training.gradientAccumulation(2)
    seen = options.clone()
    seen.anchorTensor("g", "Gradient___linear.bias")
    watched, plain = training(poptorch, seen), training(poptorch, options)
    start = watched.model.linear.bias.detach().clone()
    for model in (watched, plain):
        model(torch.cat([X, -X]), torch.cat([Y, Y]))
    torch.testing.assert_close(watched.linear.bias.data, plain.linear.bias.data)
    mean = watched.getAnchoredTensor("g").reshape(2, 2).mean(0)
    torch.testing.assert_close(watched.linear.bias.data, start - 0.1 * mean)


def test_anchored_gradients_beside_an_unused_weight(poptorch):
    """What the loss does not depend on is not changed, and no gradient of it can be anchored."""

    class Unused(Net):
        def __init__(self):
            super().__init__()
            self.unused = torch.nn.Linear(3, 2)

    options = poptorch.Options()
    options.anchorTensor("used", "Gradient___linear.bias")
    model = Unused()
    plain = copy.deepcopy(model)
    executor = poptorch.trainingModel(
        model, options, torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.0)
    )
    executor(X, Y)
    plain(X, Y)[1].backward()
    torch.testing.assert_close(executor.getAnchoredTensor("used"), plain.linear.bias.grad)
    assert torch.equal(model.unused.bias.detach(), plain.unused.bias)
    assert "Gradient___unused.bias" not in executor.getTensorNames()
    options = poptorch.Options()
    options.anchorTensor("unused", "Gradient___unused.bias")
    with pytest.raises(poptorch.Error, match=r"Gradient___unused\.bias' not in Ir Tensors"):
        poptorch.trainingModel(Unused(), options).compile(X, Y)


def test_an_unknown_anchor(poptorch):
    """A name that the graph has not got fails the compilation."""
    options = poptorch.Options()
    options.anchorTensor("g", "Gradient___nothing")
    with pytest.raises(
        poptorch.Error, match="Anchor tensor `Gradient___nothing' not in Ir Tensors"
    ):
        training(poptorch, options)(X, Y)
    with pytest.raises(
        AssertionError, match="Model must be compiled before calling getTensorNames"
    ):
        training(poptorch).getTensorNames()


def test_counters(poptorch):
    """Compiles, executions, outputs and their bytes are counted, for one executor and over all."""
    emulator.counters.reset()
    options = poptorch.Options().deviceIterations(2).outputMode(poptorch.OutputMode.All)
    model = training(poptorch, options)
    for _ in range(3):
        model(torch.cat([X, X]), torch.cat([Y, Y]))
    for counted in (model.counters, emulator.counters):
        assert (counted.compiles, counted.executions, counted.micro_batches) == (1, 3, 6)
        assert (counted.last_output_tensors, counted.last_output_bytes) == (2, 4 * (8 * 2 + 2))
        assert (counted.output_tensors, counted.stream_copies) == (6, 12)
    emulator.counters.reset()
    assert set(emulator.counters.as_dict().values()) == {0}


def test_hooks_surround_a_compilation(poptorch):
    """Registered hooks run before and after the step's Python, also when it fails.

    PopTorch 3.4 `hooks_test.py`.
    """
    events = []
    before = poptorch.registerPreCompileHook(lambda: events.append("before"))
    after = poptorch.registerPostCompileHook(lambda: events.append("after"))
    try:
        training(poptorch)(X, Y)
        with pytest.raises(IndexError):
            poptorch.inferenceModel(Net())(X[:, :1][5], Y)
    finally:
        before.remove(), after.remove()
    assert events == ["before", "after"]
    with pytest.raises(RuntimeError, match="must be callable"):
        poptorch.registerPreCompileHook(1)


def test_detaching_and_attaching(poptorch):
    """Weights and random numbers survive a detachment.

    PopTorch 3.4 `attach_detach_test.py`.
    """
    model, steady = training(poptorch), training(poptorch)
    model(X, Y), steady(X, Y)
    model.detachFromDevice()
    assert not model.isAttachedToDevice()
    assert model.isCompiled()
    with pytest.raises(poptorch.Error, match="Device is not attached"):
        model.detachFromDevice()
    model.attachToDevice()
    torch.testing.assert_close(model(X, Y)[1], steady(X, Y)[1])
    with pytest.raises(poptorch.Error, match="Device is already attached"):
        model.attachToDevice()


def test_never_attached(poptorch):
    """An offline model can be compiled but not run.

    PopTorch 3.4 `__call__`.
    """
    model = poptorch.inferenceModel(
        Net(), poptorch.Options().connectionType(poptorch.ConnectionType.Never)
    )
    model.compile(X, Y)
    assert model.isCompiled()
    with pytest.raises(AssertionError, match=r"ConnectionType\.Never"):
        model(X, Y)


def test_without_an_executable(poptorch):
    """What needs a compiled model says so.

    PopTorch 3.4 `NO_EXECUTABLE_ERR`.
    """
    model = training(poptorch)
    for use in (
        model.copyWeightsToHost,
        model.copyWeightsToDevice,
        model.detachFromDevice,
        lambda: model.rng_state,
    ):
        with pytest.raises(
            poptorch.Error, match="Model has not been compiled or has been destroyed"
        ):
            use()


def test_saving_and_loading(poptorch, tmp_path):
    """A saved model is restored with its weights, options and optimizer.

    PopTorch 3.4 `precompilation_test.py`.
    """
    model = training(poptorch)
    model(X, Y)
    file = str(tmp_path / "deep" / "model.poptorch")
    model.save(file)
    loss = model(X, Y)[1]
    restored = poptorch.load(file)
    torch.testing.assert_close(restored(X, Y)[1], loss)
    model.save(file, export_model=False)
    with pytest.raises(AssertionError, match="export_model=False"):
        poptorch.load(file)
    other = poptorch.inferenceModel(Net())
    other.loadExecutable(file)
    assert other.isCompiled()


def test_an_inference_model_in_a_file(poptorch, tmp_path, caplog):
    """It comes back without an optimizer, with edited options, and attached.

    PopTorch 3.4 `precompilation_test.py`, `_poplar_executor.py`, `save`.
    """
    offline = poptorch.Options().deviceIterations(2)
    offline.connectionType(poptorch.ConnectionType.Never)
    model = poptorch.inferenceModel(Net(), offline)
    model.compile(X, Y)
    model.save(str(tmp_path), save_rng_state=False)
    file = tmp_path / "model.poptorch"
    assert f"is a directory, saving model to {file}" in caplog.text
    restored = poptorch.load(str(file), lambda o: o.outputMode(poptorch.OutputMode.Final))
    assert restored.isAttachedToDevice()
    with torch.no_grad():
        torch.testing.assert_close(restored(X, Y)[0], model.model(X, Y)[0][2:])


@pytest.mark.parametrize("content", [b"", b"\x00", b"IPU", b"N."])
def test_files_that_hold_no_model(poptorch, tmp_path, content):
    """Both ways of reading name the file.

    PopTorch 3.4 `_poplar_executor.py`, `loadExecutable`; `__init__.py`, `load`.
    """
    file = tmp_path / "other"
    file.write_bytes(content)
    with pytest.raises(AssertionError, match=r"Invalid file .*other"):
        poptorch.load(str(file))
    with pytest.raises(poptorch.Error, match=r"Invalid file .*other"):
        poptorch.inferenceModel(Net()).loadExecutable(str(file))


def test_timings_are_empty(poptorch):
    """Counters of time exist and hold nothing."""
    model = training(poptorch)
    assert model.getPerfCounters()["input"] == [[]]
    assert model.getLatency() == (0.0, 0.0, 0.0)
    with pytest.raises(poptorch.Error, match="Cycle count logging is disabled"):
        model.cycleCount()
