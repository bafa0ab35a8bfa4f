import collections
import copy
import warnings

import pytest
import torch
from torch.nn import functional as F

from ipu_log_callback.emulator.device_tensor import DeviceTensor


class Apply(torch.nn.Module):
    """A model that applies a function."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *inputs):
        return self.function(*inputs)


def infer(poptorch, function, *inputs):
    """What an inference model of `function` returns."""
    return poptorch.inferenceModel(Apply(function))(*inputs)


X = torch.tensor([[1.0, -2.0, 3.0], [4.0, 5.0, -6.0]])
HOST, ORDER = torch.ones(3), torch.tensor([1, 0])

FUNCTIONS = {
    "indexing": lambda x: x[:, 1:].contiguous(),
    "index with a tensor": lambda x: x[torch.tensor([1, 0])],
    "concatenation": lambda x: torch.cat([x, x * 2]),
    "several results": lambda x: torch.max(x, dim=1),
    "iteration": lambda x: sum(row for row in x),
    "in place": lambda x: x.clone().add_(1).mul_(x),
    "in place on a view": lambda x: _negate_first_row(x.clone()),
    "item assignment": lambda x: _zero_first_column(x.clone()),
    "einsum": lambda x: torch.einsum("ij,kj->ik", x, x),
    "softmax": lambda x: F.softmax(x, dim=1),
    "where": lambda x: torch.where(x > 0, x, torch.zeros_like(x)),
    "factories": lambda x: x + torch.arange(3) + torch.ones(3) + torch.tensor(0.5),
    "gather": lambda x: x.gather(1, torch.argmax(x, dim=1, keepdim=True)),
    "one hot": lambda x: F.one_hot(x.argmax(1), 3),
    "new": lambda x: x.new_ones(2, 3) + x,
    "sort": lambda x: x.sort(dim=1).values,
    "matmul": lambda x: x @ x.T,
    "bool": lambda x: x > 0,
    "half": lambda x: x.half() * 2,
    "index with a host tensor": lambda x: x[ORDER],
    "copy from a host tensor": lambda x: x.clone().copy_(HOST),
    "item assignment of a host tensor": lambda x: _replace_first_row(x.clone()),
    "a shape": lambda x: x.new_zeros(x.shape) + x.T.reshape(x.shape),
    "one hot of known width": lambda x: F.one_hot(x.argmax(1), num_classes=4),
    "repetitions of known length": lambda x: x.repeat_interleave(
        torch.tensor([1, 2]), 0, output_size=3
    ),
    "normal around a tensor": lambda x: torch.normal(x, 0.0),
    "slice from a host tensor": lambda x: x[:, ORDER[0] :] + x[ORDER[1], 1:],
    "put": lambda x: x.index_put((torch.tensor([0]), torch.tensor([1])), x.sum()),
    "its own device": lambda x: x.to(x.device) * 2,
    "a copy": lambda x: copy.deepcopy(x).add_(1) + x,
    "a tensor that wants gradients": lambda x: _wanting_gradients(x).detach() * 2,
}


def _negate_first_row(x):
    x[0].neg_()
    return x


def _zero_first_column(x):
    x[:, 0] = 0
    return x


def _replace_first_row(x):
    x[0] = HOST
    return x


def _wanting_gradients(x):
    leaf = x.detach()
    leaf.requires_grad = True
    assert leaf.requires_grad
    return leaf * 1


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_step_computes_what_pytorch_computes(poptorch, name):
    """A recorded step gives PyTorch's values; 64-bit integers come back as 32-bit.

    PopTorch 3.4 `Tensor.cpp`.
    """
    function = FUNCTIONS[name]
    expected = function(X)
    actual = infer(poptorch, function, X)
    if isinstance(expected, torch.Tensor):
        expected, actual = [expected], [actual]
    for want, got in zip(expected, actual):
        assert got.dtype == {torch.int64: torch.int32}.get(want.dtype, want.dtype)
        torch.testing.assert_close(got, want, check_dtype=False)


def test_recurrent_attention_and_scripted_layers(poptorch):
    """Layers that call C++ directly are recorded as well."""
    torch.manual_seed(0)
    lstm = torch.nn.LSTM(3, 4, batch_first=True)
    attention = torch.nn.TransformerEncoderLayer(4, 2, dim_feedforward=8, batch_first=True).eval()

    @torch.jit.script
    def scripted(a):
        return a * 2 + 1

    class Layers(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm, self.attention = lstm, attention

        def forward(self, x):
            return scripted(self.attention(self.lstm(x)[0]))

    model = Layers()
    x = torch.randn(2, 5, 3)
    expected = model(x)
    torch.testing.assert_close(poptorch.inferenceModel(model)(x), expected.detach())
    torch.testing.assert_close(model(x), expected)


def test_halves_where_the_cpu_has_none(poptorch):
    """What PyTorch has not got for halves on a CPU runs in 32 bits and returns halves."""
    out = infer(poptorch, lambda x: F.pdist(x.half()), X)
    assert torch.equal(out, F.pdist(X).half())


def test_no_gradient_where_the_step_wants_none(poptorch):
    """`torch.no_grad()` in a step holds for the calls inside it, as in PyTorch."""

    class Partly(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)

        def forward(self, x):
            with torch.no_grad():
                x = self.first(x)
            loss = F.mse_loss(self.last(x), torch.zeros_like(x))
            with torch.no_grad():
                return loss, loss * 2

    torch.manual_seed(0)
    model = Partly()
    plain = copy.deepcopy(model)
    executor = poptorch.trainingModel(model, optimizer=torch.optim.SGD(model.parameters(), 0.1))
    loss, double = executor(X)
    plain(X)[0].backward()
    torch.optim.SGD(plain.parameters(), 0.1).step()
    for ours, theirs in zip(model.parameters(), plain.parameters()):
        torch.testing.assert_close(ours.data, theirs.data)
    assert torch.equal(double, loss * 2)


def test_the_step_runs_once(poptorch):
    """Python runs at compile time only.

    PopTorch 3.4 `_compileWithDispatch`.
    """
    runs = []
    model = poptorch.inferenceModel(Apply(lambda x: runs.append(1) or x + 1))
    assert torch.equal(model(X), X + 1)
    assert torch.equal(model(X * 2), X * 2 + 1)
    assert runs == [1]


def test_what_a_step_sees(poptorch):
    """Inside a step tensors say ``ipu:0``, know shape and type.

    Print no values and have 32 bits at most.

    PopTorch 3.4 `__init__.py`, `_tensor_str`; `RegisterAtenOverloads.cpp`, `downCastIfNeeded`.
    """
    seen = {}

    def look(x, y):
        seen.update(device=str(x.device), shape=x.shape, size=len(x), dtype=y.dtype, text=repr(x))
        seen.update(
            grad=x.requires_grad, double=x.double().dtype, running=poptorch.isRunningOnIpu()
        )
        seen.update(half=repr(x.half()), place=(x.is_ipu, x.is_cpu, x.get_device()), none=x.grad)
        return x + y

    infer(poptorch, look, X, torch.ones(3, dtype=torch.int64))
    assert seen["device"] == "ipu:0"
    assert seen["shape"] == X.shape
    assert seen["size"] == 2
    assert seen["dtype"] == torch.int32
    assert seen["double"] == torch.float32
    assert "<unavailable>" in seen["text"]
    assert "dtype=torch.float16" in seen["half"]
    assert seen["place"] == (True, False, 0)
    assert seen["none"] is None
    assert seen["grad"] is False
    assert seen["running"]
    assert not poptorch.isRunningOnIpu()


def test_what_a_step_sees_of_a_weight(poptorch):
    """That it wants gradients, and none of its values."""
    seen = []

    class Looks(torch.nn.Linear):
        def forward(self, x):
            seen.append(repr(self.weight))
            return F.mse_loss(super().forward(x), torch.zeros(2, 2))

    model = Looks(3, 2)
    poptorch.trainingModel(model).compile(X)
    assert "<unavailable>" in seen[0]
    assert "requires_grad=True" in seen[0]


ITEM = "aten::item is only supported in eager mode"
MOVE = r"Illegal move to CPU \(via `.to\(\"cpu\"\)`\)"
DYNAMIC = "Type inference failed for aten::"
REFUSED = {
    "item": (lambda x: x * x.sum().item(), ITEM),
    "float": (lambda x: x * float(x.sum()), ITEM),
    "int": (lambda x: x * int(x.sum()), ITEM),
    "if": (lambda x: x if x.sum() > 0 else -x, ITEM),
    "format": (lambda x: (f"{x.sum():.2f}", x)[1], ITEM),
    "allclose": (lambda x: (torch.allclose(x, x), x)[1], ITEM),
    "in": (lambda x: (1.0 in x, x)[1], ITEM),
    "nested": (lambda x: torch.tensor([x.sum(), 1.0]), ITEM),
    "cpu": (lambda x: x.cpu(), MOVE),
    "to": (lambda x: x.to("cpu"), MOVE),
    "tolist": (lambda x: (x.tolist(), x)[1], MOVE),
    "nonzero": (lambda x: x.nonzero(), DYNAMIC + "nonzero"),
    "mask": (lambda x: x[x > 0], DYNAMIC + "nonzero"),
    "masked_select": (lambda x: x.masked_select(x > 0), DYNAMIC + "masked_select"),
    "unique": (torch.unique, DYNAMIC + "_unique2"),
    "position": (lambda x: x[x.sum().int()], ITEM),
    "position in a list": (lambda x: x[[0, x.sum().int()]], ITEM),
    "slice": (lambda x: x[:, x.sum().int() :], ITEM),
    "assigned slice": (lambda x: x.clone().__setitem__(slice(x.sum().int()), 0), ITEM),
    "one hot": (lambda x: F.one_hot(x.argmax(1)), ITEM),
    "where": (lambda x: torch.where(x > 0), DYNAMIC + "nonzero"),
    "repetitions": (
        lambda x: x.repeat_interleave(torch.tensor([1, 2]), 0),
        DYNAMIC + "repeat_interleave",
    ),
    "huber": (lambda x: F.huber_loss(x, x), "Unsupported ops found in compiled model"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_values_stay_on_the_device(poptorch, name):
    """Reading values, moving to the host and value-dependent shapes are PopTorch's errors.

    PopTorch 3.4 `RegisterAtenOverloads.cpp`, `TypeInferenceHandler.cpp`.
    """
    function, text = REFUSED[name]
    with pytest.raises(poptorch.Error, match=text):
        infer(poptorch, function, X)


@torch.jit.script
def _scripted_move(x):
    return x.to("cpu")


OWN_ERRORS = {
    "numpy": (lambda x: x.numpy(), TypeError, "can't convert ipu:0 device type tensor to numpy"),
    "memory": (lambda x: x.data_ptr(), RuntimeError, "Cannot access data pointer of Tensor"),
    "shapes": (lambda x: x @ x, RuntimeError, "shapes cannot be multiplied"),
    "shapes of integers": (lambda x: x.int() @ x.int(), RuntimeError, "cannot be multiplied"),
    "index": (lambda x: x[torch.tensor([9]), 1:], IndexError, "index 9 is out of bounds"),
    "a copy of a result": (
        lambda x: copy.deepcopy(_wanting_gradients(x)),
        RuntimeError,
        "support the deepcopy protocol",
    ),
    "scripted move": (_scripted_move, RuntimeError, r"return x\.to\(\"cpu\"\)"),
}


@pytest.mark.parametrize("name", OWN_ERRORS)
def test_errors_of_pytorch_itself(poptorch, name):
    """What PyTorch refuses, it refuses in its own words; TorchScript shows the line.

    PopTorch 3.4 `RegisterAtenOverloads.cpp`.
    """
    function, kind, text = OWN_ERRORS[name]
    with pytest.raises(kind, match=text):
        infer(poptorch, function, X)


def test_host_tensors_must_be_moved(poptorch):
    """A host tensor does not mix with device tensors; moved explicitly it is a constant.

    PopTorch 3.4 `TypeInferenceHandler.cpp`.
    """
    host = torch.ones(3)
    with pytest.raises(
        poptorch.Error, match=r"Expected an IPU tensor but got tensor\(device=cpu, shape=\[3\]"
    ):
        infer(poptorch, lambda x: x + host, X)
    assert torch.equal(infer(poptorch, lambda x: x + host.to(x.device), X), X + 1)
    assert torch.equal(infer(poptorch, lambda x: x + host.to(x), X), X + 1)
    assert torch.equal(infer(poptorch, lambda x: x + host.to(device=x.device), X), X + 1)
    assert torch.equal(infer(poptorch, lambda x: x + host.to("cpu").to("ipu"), X), X + 1)


def test_a_tensor_made_for_the_host_is_the_hosts(poptorch):
    """A factory that names the CPU makes a host tensor, as the step can tell."""
    made = []
    infer(poptorch, lambda x: made.append(torch.ones_like(x, device="cpu")) or x * 1, X)
    assert made[0].device.type == "cpu"
    assert torch.equal(made[0], torch.ones(2, 3))


def test_device_tensors_die_with_their_compilation(poptorch):
    """What a step leaves behind knows its shape, and nothing can be done with it.

    PopTorch 3.4 `RegisterAtenOverloads.cpp`, `activeDispatch`.
    """
    kept = []
    infer(poptorch, lambda x: kept.append(x * 2) or x + 1, X)
    (dead,) = kept
    assert isinstance(dead, DeviceTensor)
    assert dead.shape == X.shape
    assert dead.device.type == "ipu"
    assert repr(dead) == "tensor(<unavailable>, device='ipu:0', size=(2, 3))"
    for use in (
        lambda: dead + 1,
        dead.cpu,
        dead.item,
        lambda: X.to(dead.device),
        lambda: infer(poptorch, lambda x: x + dead, X),
        lambda: infer(poptorch, lambda x: torch.cat([dead, x]), X),
    ):
        with pytest.raises(poptorch.Error, match="There is no active dispatch"):
            use()


def test_inputs_must_not_require_gradients(poptorch):
    """They are detached with a warning when given.

    PopTorch 3.4 `_preprocessGraph`.
    """
    x = X.clone().requires_grad_()
    assert torch.equal(infer(poptorch, lambda x: x + 1, x), X + 1)


def test_factories_are_forced_onto_the_device(poptorch, caplog):
    """`torch.zeros()` without a device warns and makes a device tensor.

    Is itself again afterwards.

    PopTorch 3.4 `_SetDefaultDeviceType`.
    """
    before = torch.zeros
    infer(poptorch, lambda x: x + torch.zeros(3), X)
    assert "No device set in torch.zeros(): forcing to IPU" in caplog.text
    assert torch.zeros is before


def test_an_output_of_constants_comes_back_once(poptorch):
    """An output made of constants alone is not batched.

    PopTorch 3.4 `isHostSideConstant`.
    """
    options = poptorch.Options().deviceIterations(2)
    model = poptorch.inferenceModel(Apply(lambda x: (x, torch.tensor([1.0, 2.0]) * 2)), options)
    x, constant = model(torch.ones(4, 3))
    assert x.shape == (4, 3)
    assert torch.equal(constant, torch.tensor([2.0, 4.0]))


def test_a_host_tensor_is_returned_as_it_was(poptorch):
    """An output that never touched the device is a constant, with a warning.

    PopTorch 3.4 `_compileWithDispatch`.
    """
    host = torch.tensor([3.0])
    model = poptorch.inferenceModel(Apply(lambda x: {"x": x + 1, "host": host, "text": "a"}))
    with pytest.warns(UserWarning, match="Output expected to be on the IPU but is on cpu"):
        out = model(X)
    assert out["host"] is host
    assert out["text"] == "a"


def test_outputs_keep_their_structure(poptorch):
    """Tuples, lists, dicts, NamedTuples and plain values nest.

    PopTorch 3.4 `_utils.py`.
    """
    Pair = collections.namedtuple("Pair", "a b")
    out = infer(poptorch, lambda x: {"p": Pair(x, [x + 1, (x + 2, None)]), "n": 3}, X)
    assert isinstance(out["p"], Pair)
    assert out["n"] == 3
    assert torch.equal(out["p"].b[1][0], X + 2)
    assert out["p"].b[1][1] is None


def test_compiling_consumes_no_random_numbers(poptorch):
    """The device draws its own random numbers.

    The host's sequence goes on as if nothing had happened.
    """
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    out = poptorch.inferenceModel(Apply(lambda x: F.dropout(x, 0.5) + torch.rand(3)))
    first, second = out(X), out(X)
    assert torch.equal(torch.rand(4), expected)
    assert not torch.equal(first, second)


def test_a_seed_makes_the_device_repeat_itself(poptorch):
    """``Options.randomSeed`` and ``rng_state`` fix the device's random numbers.

    PopTorch 3.4 `_poplar_executor.py`.
    """

    def draw():
        options = poptorch.Options().randomSeed(7)
        return poptorch.inferenceModel(Apply(lambda x: x + torch.randn(3)), options)

    one, two = draw(), draw()
    assert torch.equal(one(X), two(X))
    state = one.rng_state
    after = one(X)
    one.rng_state = state
    assert torch.equal(one(X), after)


def test_int_arithmetic_has_32_bits(poptorch):
    """Integers overflow at 32 bits, as on the device."""
    big = torch.tensor([2**30])
    assert infer(poptorch, lambda x: x * 4, big).item() == 0


def test_everything_is_itself_again(poptorch):
    """A failed compilation leaves `torch`, the module's parameters and its class as they were."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), Apply(lambda x: x.item()))
    weight, before = model[0].weight, copy.copy(vars(torch))
    executor = poptorch.inferenceModel(model)
    with pytest.raises(poptorch.Error, match=ITEM):
        executor(X)
    assert model[0].weight is weight
    assert type(weight) is torch.nn.Parameter
    assert all(getattr(torch, name) is value for name, value in before.items())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.zeros(1).device.type == "cpu"


def test_outputs_do_not_share_memory(poptorch):
    """Each output comes back in memory of its own (PopTorch 3.4 `PoplarExecutable.cpp`)."""
    same, view, weight = infer(poptorch, lambda x: (x, x.view(-1), x * 1), X)
    twice = infer(poptorch, lambda x: (x * 2,) * 2, X)
    same.zero_(), twice[0].zero_()
    assert torch.equal(view, X.view(-1))
    assert torch.equal(weight, X)
    assert torch.equal(twice[1], X * 2)


def test_data_changed_in_place_is_changed(poptorch):
    """`tensor.data *= ...` works in place; another tensor in its place is refused by name."""

    def masks(x):
        x = x * 1
        x.data *= 0.5
        return x

    def replaces(x):
        x = x * 1
        x.data = x * 0.5
        return x

    assert torch.equal(infer(poptorch, masks, X), X / 2)
    with pytest.raises(Exception, match=r"`tensor.data = \.\.\.` is not emulated"):
        infer(poptorch, replaces, X)
