import copy

import pytest
import torch
from torch.nn import functional as F

from ipu_log_callback.emulator.errors import Error


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(1, 3, 3)
        self.norm = torch.nn.BatchNorm2d(3)
        self.head = torch.nn.Linear(12, 4)

    def forward(self, x, y):
        h = F.relu(self.norm(self.conv(x)))
        logits = self.head(h.view(h.size(0), -1)) + torch.ones(4)
        return F.cross_entropy(logits, y), (logits, (logits.argmax(1) == y).float().mean())


def options_of(poptorch):
    """Options for the trace front end with four micro-batches."""
    options = poptorch.Options().deviceIterations(2).outputMode(poptorch.OutputMode.All)
    options.Training.gradientAccumulation(2)
    options.Jit.traceModel(True)
    return options


def test_a_traced_model_trains_like_pytorch(poptorch):
    """Losses, outputs and weights are plain PyTorch's.

    PopTorch 2.6 `_trace_model_and_get_compile_args`.
    """
    torch.manual_seed(0)
    model = Net()
    plain = copy.deepcopy(model)
    trained = poptorch.trainingModel(
        model, options_of(poptorch), torch.optim.SGD(model.parameters(), lr=0.1)
    )
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    x, y = torch.randn(16, 1, 4, 4), torch.randint(0, 4, (16,))
    loss, (logits, _) = trained(x, y)
    parts, losses = zip(x.chunk(4), y.chunk(4)), []
    for _ in range(2):
        optimizer.zero_grad()
        for _ in range(2):
            value, _ = plain(*next(parts))
            (value / 2).backward()
            losses.append(value.detach())
        optimizer.step()
    torch.testing.assert_close(loss, torch.stack(losses))
    assert logits.shape == (16, 4)
    torch.testing.assert_close(model.norm.running_mean, plain.norm.running_mean)
    torch.testing.assert_close(model.conv.weight.data, plain.conv.weight.data)


def infer(poptorch, function, *args):
    """What a traced inference model of `function` returns."""

    class Apply(torch.nn.Module):
        def forward(self, *inputs):
            return function(*inputs)

    options = poptorch.Options()
    options.Jit.traceModel(True)
    return poptorch.inferenceModel(Apply(), options)(*args)


@pytest.mark.parametrize(
    ("output", "text"),
    [
        (lambda x: {"a": x}, "Encountering a dict at the output of the tracer"),
        (lambda x: (x, None), "can be output from traced functions"),
        (lambda x: (x, 1.0), "can be output from traced functions"),
    ],
)
def test_outputs_of_a_trace(poptorch, output, text):
    """Dicts, ``None`` and numbers are `torch.jit.trace`'s own errors.

    PopTorch 2.6 `_poplar_executor.py`.
    """
    with pytest.raises(RuntimeError, match=text):
        infer(poptorch, output, torch.ones(2))


def test_a_trace_runs_python_on_host_tensors(poptorch):
    """The step sees CPU tensors, more than once, and branches freeze without a word."""
    devices = []

    def branch(x):
        devices.append(x.device.type)
        return x + 1 if x.sum() > 0 else x - 1

    assert torch.equal(infer(poptorch, branch, torch.ones(2)), torch.full((2,), 2.0))
    assert len(devices) > 1
    assert set(devices) == {"cpu"}


X = torch.ones(2)


@torch.jit.script
def _loop(x):
    for _ in range(3):
        if bool(x.sum() < 9):
            x = x + 1
    return x


NOT_TRACED = {
    "dict": (lambda d: d["a"], ({"a": X},), TypeError, "Dictionaries are not supported"),
    "number": (lambda x, n: x * n, (X, 2), TypeError, r"Got types: \[Tensor, int\]"),
    "nested number": (
        lambda x, pair: x * pair[1],
        (X, (X, 2)),
        TypeError,
        r"Lists and Tuples of Tensors \(Got types: \[Tensor, Tuple\[Tensor, int\]\]\)",
    ),
    "None": (lambda x, y: x, (X, None), Error, "may not be passed as explicit model arg"),
    "shape from a value": (torch.arange, (torch.tensor(3),), Error, "aten::item"),
    "scripted loop": (_loop, (X,), NotImplementedError, "prim::Loop in a traced model"),
}


@pytest.mark.parametrize("name", NOT_TRACED)
def test_what_cannot_be_traced(poptorch, name):
    """Arguments are tensors in tuples and lists; the rest is refused by name.

    PopTorch 2.6 `_args_parser.py`, `_poplar_executor.py`.
    """
    function, args, kind, text = NOT_TRACED[name]
    with pytest.raises(kind, match=text):
        infer(poptorch, function, *args)


def test_a_traced_model_without_outputs(poptorch):
    """It returns ``None``, and what it writes to buffers is written.

    PopTorch 2.6 `_poplar_executor.py`.
    """

    class Writes(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.zeros(1))

        def forward(self, x, scale=None):
            self.seen.add_(x.sum() if scale is None else scale * x.sum())

    model = Writes()
    options = poptorch.Options()
    options.Jit.traceModel(True)
    executor = poptorch.inferenceModel(model, options)
    assert executor(X) is None
    assert executor(X * 2) is None
    executor.copyWeightsToHost()
    assert torch.equal(model.seen, torch.tensor([6.0]))
    assert type(model) is Writes


def test_further_named_arguments_of_a_traced_model(poptorch):
    """`torch.jit.trace` takes positions alone: refused by name, not dropped."""

    class Scaled(torch.nn.Module):
        def forward(self, x, **named):
            return x * named["scale"]

    options = poptorch.Options()
    options.Jit.traceModel(True)
    with pytest.raises(NotImplementedError, match="named arguments in trace mode"):
        poptorch.inferenceModel(Scaled(), options)(X, scale=X)


def test_anchors_of_a_traced_training_model_have_a_prefix(poptorch):
    """Parameters are called ``model.…`` there.

    PopTorch 2.6 `debug_tensors_test.py`.
    """
    options = options_of(poptorch)
    options.anchorTensor("g", "Gradient___model.head.bias")
    model = poptorch.trainingModel(Net(), options)
    model(torch.randn(16, 1, 4, 4), torch.randint(0, 4, (16,)))
    assert model.getAnchoredTensor("g").shape == (16,)
    assert "Gradient___model.head.bias" in model.getTensorNames()


def test_tracing_leaves_buffers_alone(poptorch):
    """The host runs of a trace do not count as training."""
    model = Net()
    before = model.norm.running_mean.clone()
    options = poptorch.Options()
    options.Jit.traceModel(True)
    poptorch.inferenceModel(model, options).compile(torch.randn(2, 1, 4, 4), torch.tensor([0, 1]))
    assert torch.equal(model.norm.running_mean, before)
