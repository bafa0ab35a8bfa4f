import warnings

import pytest
import torch

X = torch.tensor([[1.0, -2.0, 3.0, 4.0], [5.0, 6.0, -7.0, 8.0]])


class Apply(torch.nn.Module):
    """A model that applies a function."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *inputs):
        return self.function(*inputs)


@pytest.mark.parametrize(
    ("reduction", "expected"),
    [("sum", torch.sum), ("mean", torch.mean), ("none", torch.clone)],
)
def test_identity_loss_reduces_like_pytorch(poptorch, reduction, expected):
    """On the host it is the reduction that it names, with its gradient."""
    x = X.clone().requires_grad_()
    loss = poptorch.identity_loss(x, reduction=reduction)
    assert torch.equal(loss, expected(X))
    (gradient,) = torch.autograd.grad(loss.sum(), x)
    reference = X.clone().requires_grad_()
    assert torch.equal(gradient, torch.autograd.grad(expected(reference).sum(), reference)[0])


def test_identity_loss_knows_three_reductions(poptorch):
    """Any other reduction is a mistake."""
    with pytest.raises(AssertionError, match="Unsupported reduction type!"):
        poptorch.identity_loss(X, reduction="max")


def test_a_model_trains_from_an_identity_loss(poptorch):
    """A loss made by arithmetic and marked as such gives the step that PyTorch gives."""

    class Marked(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(4))

        def forward(self, x):
            return poptorch.identity_loss((self.weight * x) ** 2, reduction="mean")

    module, reference = Marked(), Marked()
    model = poptorch.trainingModel(module, optimizer=torch.optim.SGD(module.parameters(), lr=0.1))
    model(X)
    reference(X).backward()
    with torch.no_grad():
        reference.weight -= 0.1 * reference.weight.grad
    torch.testing.assert_close(module.weight.detach(), reference.weight.detach())


def test_identity_loss_stays_visible_in_a_jit_trace(poptorch):
    """The trace front end finds the mark as one node of the graph."""
    with warnings.catch_warnings():
        # PyTorch deprecates `torch.jit.trace` from 2.9 on.
        warnings.simplefilter("ignore", DeprecationWarning)
        traced = torch.jit.trace(lambda x: poptorch.identity_loss(x * 2, "mean") * 3, (X,))
    assert "poptorch::identity_loss" in str(traced.graph)
    assert torch.equal(traced(X + 1), (X + 1).mul(2).mean() * 3)


def _double(poptorch, x):
    return poptorch.for_loop(3, lambda y: y * 2, [x])[0]


def _swap(poptorch, x):
    return torch.cat(poptorch.for_loop(3, lambda a, b: (b, a + 1), [x, x * 2]))


def _choose(poptorch, x):
    return poptorch.cond(x[0, 0] > 0, lambda y: y + 1, [x], lambda y: y - 1, [x])[0]


def _part(poptorch, x):
    return poptorch.dynamic_slice(x, 1, x[0, 0].abs().to(torch.int32), 3, 2)


def _patched(poptorch, x):
    start = x[0, 0].abs().to(torch.int32)
    return poptorch.dynamic_update(x, torch.zeros(2, 2), 1, start, 2)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (_double, lambda x: x * 8),
        (_swap, lambda x: torch.cat([x * 2 + 1, x + 2])),
        (_choose, lambda x: x + 1 if x[0, 0] > 0 else x - 1),
        (_part, lambda x: x[:, [1, 3]]),
        (_patched, lambda x: torch.stack([x[:, 0], 0 * x[:, 0], 0 * x[:, 0], x[:, 3]], 1)),
    ],
)
def test_control_flow_is_the_same_on_the_device_and_on_the_host(poptorch, function, expected):
    """Loops, branches and slices give the plain PyTorch result, with values that come later too."""
    model = poptorch.inferenceModel(Apply(lambda x: function(poptorch, x)))
    for x in (X, X * torch.tensor([-1.0, 1.0, 1.0, 1.0]) + 0.0):
        assert torch.equal(function(poptorch, x), expected(x))
        assert torch.equal(model(x), expected(x))


def test_a_branch_on_the_host_runs_alone(poptorch):
    """Outside a model only the chosen body is called."""
    called = []
    poptorch.cond(torch.tensor(True), lambda: called.append("then"), [], called.append, [])
    assert called == ["then"]


def test_a_loop_takes_a_list_of_tensors(poptorch):
    """Anything else is named in the error."""
    with pytest.raises(ValueError, match="Object is not list"):
        poptorch.for_loop(1, lambda x: x, X)
    with pytest.raises(ValueError, match=r"at index 1 is not torch\.tensor"):
        poptorch.for_loop(1, lambda x, y: (x, y), [X, 2])


def test_an_update_must_fit(poptorch):
    """Both tensors need the same number of dimensions and the same type."""
    start = torch.tensor(0)
    with pytest.raises(poptorch.Error, match="must have same dimensionality"):
        poptorch.dynamic_update(X, X[0], 0, start, 1)
    with pytest.raises(poptorch.Error, match="must have same dtype"):
        poptorch.dynamic_update(X, X.to(torch.int32), 0, start, 1)


def test_a_tensor_is_printed_by_every_execution_that_uses_it(poptorch, capfd):
    """A value is printed when the device computes it, and not if nobody uses it."""

    def forward(x):
        poptorch.ipu_print_tensor(x + 1, "unused")
        return poptorch.ipu_print_tensor(x * 2, "doubled")

    model = poptorch.inferenceModel(Apply(forward))
    model.compile(torch.ones(1))
    assert "doubled" not in capfd.readouterr().err
    for value in (1.0, 2.0):
        assert model(torch.tensor([value])) == 2 * value
    printed = capfd.readouterr().err
    assert "unused" not in printed
    assert printed.index("doubled: tensor([2.])") < printed.index("doubled: tensor([4.])")


def test_the_gradient_of_a_printed_tensor_is_printed(poptorch, capfd):
    """In training it follows the value.

    PopTorch 3.4 `ops.py`.
    """
    model = Apply(
        lambda x: poptorch.identity_loss(
            3 * poptorch.ipu_print_tensor(model.weight * x, "product"), "sum"
        )
    )
    model.weight = torch.nn.Parameter(torch.ones(1))
    poptorch.trainingModel(model)(torch.tensor([2.0]))
    printed = capfd.readouterr().err
    value = printed.index("product: tensor([2.")
    assert value < printed.index("product_gradient: tensor([3.])")


def _tuned(poptorch, x):
    x = poptorch.set_overlap_for_input(x, poptorch.OverlapMode.OverlapAccumulationLoop)
    with poptorch.NameScope("scope"), poptorch.Attribute(__schedule_priority={"p": "1"}):
        y = poptorch.serializedMatMul(x, x.T, poptorch.MatMulSerializationMode.ReducingDim, 2)
    convolutions = poptorch.MultiConv().availableMemoryProportions(0.2).partialsTypes(torch.float)
    convolutions.enableConvDithering(True).perConvReservedTiles(4)
    with convolutions.planType(poptorch.MultiConvPlanType.Serial).cycleBackOff(0.1):
        y = poptorch.set_available_memory(y + 1, 0.2)
    first, second = poptorch.recomputationCheckpoint([poptorch.nop(y), x.sum()])
    first, second = poptorch.recomputationCheckpoint(first, second)
    return poptorch.set_overlap_for_output(first * second, poptorch.OverlapMode.NoOverlap)


def test_what_tunes_the_hardware_changes_no_result(poptorch):
    """Memory, overlap, names and the like are accepted, on the device and on the host."""
    expected = (X @ X.T + 1) * X.sum()
    assert torch.equal(_tuned(poptorch, X), expected)
    assert torch.equal(poptorch.inferenceModel(Apply(lambda x: _tuned(poptorch, x)))(X), expected)


def test_functions_of_tensors_take_tensors(poptorch):
    """A list where a tensor belongs is refused, with its type."""
    with pytest.raises(poptorch.Error, match=r"nop must take a torch\.tensor argument.*list"):
        poptorch.nop([X])
    with pytest.raises(poptorch.Error, match=r"only set available memory.*int"):
        poptorch.set_available_memory(3, 0.2)
    with pytest.raises(ValueError, match="All inputs must be tensors"):
        poptorch.recomputationCheckpoint(X, 3)
    with pytest.raises(ValueError, match="tensors to be a list of tensors"):
        poptorch.cond(X.sum() > 0, lambda y: y, X, lambda y: y, [X])


@pytest.mark.parametrize("name", ["custom_op", "ctc_beam_search_decoder", "fps", "nearest", "CPU"])
def test_what_only_the_hardware_has_is_refused_by_name(poptorch, name):
    """Compiled operators and calls back to the host raise, and say which one it was."""
    with pytest.raises(NotImplementedError, match=f"poptorch.{name}"):
        getattr(poptorch, name)(X)


def test_a_module_begins_one_block(poptorch):
    """Marking a module twice is an error, unless its mark was removed."""
    layer = torch.nn.Linear(4, 4)
    assert poptorch.BeginBlock(layer, "A") is layer
    with pytest.raises(poptorch.Error, match="already been assigned to a block"):
        poptorch.BeginBlock(layer, "B")
    poptorch.removeBlocks(torch.nn.Sequential(layer))
    poptorch.BeginBlock(layer, "B")


def test_functions_can_begin_blocks(poptorch):
    """A function can be marked or decorated, keeps its name and its result."""

    def half(x):
        return x / 2

    for marked in (poptorch.BeginBlock(half, "A"), poptorch.BlockFunction("A", ipu_id=0)(half)):
        assert torch.equal(marked(X), X / 2)
        assert marked.__name__ == "half"
    with pytest.raises(poptorch.Error, match=r"not an instance of torch\.nn\.Module or function"):
        poptorch.BeginBlock(3)


def test_blocks_without_names_are_numbered(poptorch):
    """The first block without a name is "0", and `useAutoId` starts again from there."""

    def forward(x):
        poptorch.Block.useAutoId()
        with poptorch.Block(ipu_id=0):
            x = x + 1
        with poptorch.Block(ipu_id=0):
            return x + 1

    for stages, fits in ((["0", "1"], True), (["0"], False)):
        options = poptorch.Options().setExecutionStrategy(poptorch.ShardedExecution(*stages))
        model = poptorch.inferenceModel(Apply(forward), options)
        if fits:
            assert torch.equal(model(X), X + 2)
        else:
            with pytest.raises(AssertionError, match="Unknown Block '1'"):
                model(X)


@pytest.mark.parametrize("name", ["for_loop", "cond"])
def test_control_flow_is_for_inference_only(poptorch, name):
    """A training model refuses loops and branches on the device."""

    def forward(x):
        if name == "for_loop":
            (y,) = poptorch.for_loop(2, lambda z: z * 2, [x])
        else:
            (y,) = poptorch.cond(x.sum() > 0, lambda z: z, [x], lambda z: -z, [x])
        return poptorch.identity_loss(y, "sum")

    model = Apply(forward)
    model.weight = torch.nn.Parameter(torch.ones(1))
    with pytest.raises(
        poptorch.Error, match=rf"poptorch\.{name}\(\) is only supported in inference"
    ):
        poptorch.trainingModel(model)(X)
