import copy

import pytest
import torch
from torch.nn import functional as F

#: Four replicas: how they are arranged, and the group of each.
ARRANGEMENTS = {
    "Consecutive": (2, [0, 0, 1, 1]),
    "Orthogonal": (2, [0, 1, 0, 1]),
    "NoGrouping": (0, [0, 1, 2, 3]),
    "All": (2, [0, 0, 0, 0]),
}
REPLICAS = 4


class Net(torch.nn.Module):
    """A weight to be grouped beside one that is not."""

    def __init__(self, groups):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        shape = (3, 2) if groups == 1 else (groups, 3, 2)
        self.grouped = torch.nn.Parameter(torch.randn(shape, generator=generator))
        self.shared = torch.nn.Parameter(torch.randn(2, generator=generator))

    def forward(self, x):
        y = x @ self.grouped + self.shared
        return y, F.mse_loss(y, torch.zeros_like(y))


OPTIMIZERS = {
    "SGD": lambda p, params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "AdamW": lambda p, params: p.optim.AdamW(params, lr=0.1),
    "LAMB": lambda p, params: p.optim.LAMB(params, lr=0.1),
}


def training(poptorch, kind, make=OPTIMIZERS["SGD"], mode="OnePerGroup", **geometry):
    """A module whose weight is grouped, and its executor."""
    size, groups = ARRANGEMENTS[kind]
    model = Net(max(groups) + 1)
    options = poptorch.Options().replicationFactor(REPLICAS)
    options.deviceIterations(geometry.get("iterations", 1))
    options.Training.gradientAccumulation(geometry.get("accumulation", 1))
    optimizer = make(poptorch, model.parameters())
    executor = poptorch.trainingModel(model, options, optimizer)
    mode = getattr(poptorch.VariableRetrievalMode, mode)
    executor.grouped.replicaGrouping(getattr(poptorch.CommGroupType, kind), size, mode)
    return model, executor


def a_value_for_each_replica(poptorch, executor):
    """Group a weight so that every replica is a group of its own."""
    executor.grouped.replicaGrouping(
        poptorch.CommGroupType.NoGrouping, 0, poptorch.VariableRetrievalMode.OnePerGroup
    )


def reference(poptorch, kind, make, batches, accumulation):
    """The same in plain PyTorch: a weight tensor for each group, trained side by side."""
    groups = ARRANGEMENTS[kind][1]
    net = Net(max(groups) + 1)
    host = net.grouped.detach()
    parts = list(host.unbind(0)) if max(groups) else [host]
    weights = [torch.nn.Parameter(part.clone()) for part in parts]
    optimizer = make(poptorch, [*weights, net.shared])
    for x in batches:
        for micro_batches in x.view(-1, accumulation, REPLICAS, 2, 3):
            optimizer.zero_grad()
            for step in micro_batches:
                for replica, part in enumerate(step):
                    y = part @ weights[groups[replica]] + net.shared
                    (y.pow(2).mean() / (accumulation * REPLICAS)).backward()
            optimizer.step()
    return torch.stack(list(weights)) if max(groups) else weights[0], net.shared


@pytest.mark.parametrize("kind", ARRANGEMENTS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_groups_train_as_so_many_separate_tensors(poptorch, kind, name):
    """Gradients add up within a group, those of an ungrouped weight over all replicas."""
    model, executor = training(poptorch, kind, OPTIMIZERS[name], iterations=2, accumulation=2)
    batches = torch.randn(3, 2 * 2 * REPLICAS * 2, 3)
    for x in batches:
        executor(x)
    weight, shared = reference(poptorch, kind, OPTIMIZERS[name], batches, accumulation=2)
    torch.testing.assert_close(model.grouped.data, weight.data)
    torch.testing.assert_close(model.shared.data, shared.data)


def test_optimizer_state_has_a_part_for_each_group(poptorch):
    """It comes back as ``[groups, ...]``, and a run resumed from it goes on as the first did."""
    model, executor = training(poptorch, "Orthogonal", OPTIMIZERS["AdamW"])
    batches = torch.randn(4, REPLICAS * 2, 3)
    for x in batches[:2]:
        executor(x)
    weights = copy.deepcopy(model.state_dict())
    state = copy.deepcopy(executor._optimizer.state_dict())
    shapes = {name: list(value.shape) for name, value in state["ipu_state"].items()}
    assert shapes["Accl1___grouped"] == shapes["Accl2___grouped"] == [2, 3, 2]
    assert shapes["Accl1___shared"] == [2]

    resumed, other = training(poptorch, "Orthogonal", OPTIMIZERS["AdamW"])
    other.load_state_dict(weights)
    other._optimizer.load_state_dict(state)
    for x in batches[2:]:
        executor(x)
        other(x)
    torch.testing.assert_close(resumed.grouped.data, model.grouped.data)
    assert not torch.equal(model.grouped.data, weights["grouped"])


@pytest.mark.parametrize("mode", ["OnePerGroup", "AllReplicas"])
def test_each_replica_in_a_group_of_its_own_returns_its_value(poptorch, mode):
    """Both retrieval modes are then the same: ``[replicas, ...]``."""
    model, executor = training(poptorch, "NoGrouping", mode=mode)
    before = model.grouped.detach().clone()
    x = torch.zeros(REPLICAS * 2, 3)
    x[:2] = 1.0
    executor(x)
    changed = [not torch.equal(*pair) for pair in zip(before, model.grouped.detach())]
    assert changed == [True, False, False, False]


def test_what_does_not_fit_is_a_mistake(poptorch):
    """The number of groups is the weight's dimension 0, with PopART's and PopTorch's words."""
    x = torch.ones(REPLICAS * 2, 3)
    model, executor = training(poptorch, "Consecutive")
    a_value_for_each_replica(poptorch, executor)
    with pytest.raises(poptorch.Error, match=r'\(2\) of Tensor: "grouped". should match.*: 4'):
        executor(x)
    assert list(model.grouped.shape) == [2, 3, 2]
    one = poptorch.VariableRetrievalMode.OnePerGroup
    for size, words in {3: "must be divisible", 0: "VariableSettings had 1 errors"}.items():
        executor.grouped.replicaGrouping(poptorch.CommGroupType.Orthogonal, size, one)
        with pytest.raises(poptorch.Error, match=words):
            executor(x)
    with pytest.raises(poptorch.Error, match=r"\[4, 3, 2\] != MutableVoidData \(3\): \[2, 3, 2\]"):
        training(poptorch, "Consecutive", mode="AllReplicas")[1](x)


def test_scalars_and_views_cannot_be_grouped(poptorch):
    """There must be a dimension to divide, in a tensor that PopTorch can copy from."""
    x = torch.ones(REPLICAS * 2, 3)
    for value, words in {
        torch.ones(()): "Scalars cannot be passed as per-replica weight tensor values",
        torch.ones(3, 2, 4).permute(2, 0, 1): r"Data source must be contiguous: tensor\(",
    }.items():
        model = Net(1)
        model.grouped = torch.nn.Parameter(value)
        executor = poptorch.inferenceModel(model, poptorch.Options().replicationFactor(REPLICAS))
        a_value_for_each_replica(poptorch, executor)
        with pytest.raises(poptorch.Error, match=words):
            executor(x)


REFUSED = {"use_combined_accum": ("SGD", True), "max_grad_norm": ("AdamW", 1.0)}


@pytest.mark.parametrize("name", REFUSED)
def test_optimizers_that_mix_groups_are_refused(poptorch, name):
    """At the first execution, and when the optimizer is changed later."""
    kind, value = REFUSED[name]

    def plain(poptorch, params):
        return getattr(poptorch.optim, kind)(params, lr=0.1)

    def mixing(poptorch, params):
        return getattr(poptorch.optim, kind)(params, lr=0.1, **{name: value})

    x = torch.ones(REPLICAS * 2, 3)
    _, executor = training(poptorch, "Consecutive", mixing)
    for _ in range(2):
        with pytest.raises(NotImplementedError, match=name):
            executor(x)
    model, executor = training(poptorch, "Consecutive", plain)
    executor(x)
    with pytest.raises(NotImplementedError, match=name):
        executor.setOptimizer(mixing(poptorch, model.parameters()))


def test_what_cannot_be_grouped_is_refused(poptorch):
    """Trace mode has no groups, and integer weights are constants."""
    options = poptorch.Options().replicationFactor(REPLICAS)
    options.Jit.traceModel(True)
    executor = poptorch.inferenceModel(Net(4), options)
    a_value_for_each_replica(poptorch, executor)
    with pytest.raises(NotImplementedError, match="trace mode"):
        executor(torch.ones(REPLICAS * 2, 3))

    model = Net(1)
    model.grouped = torch.nn.Parameter(torch.ones(4, 2, dtype=torch.int32), requires_grad=False)
    executor = poptorch.inferenceModel(model, poptorch.Options().replicationFactor(REPLICAS))
    a_value_for_each_replica(poptorch, executor)
    with pytest.raises(NotImplementedError, match="integers"):
        executor(torch.ones(REPLICAS * 2, 2, dtype=torch.int32))


def test_a_grouping_is_the_executor_s_own(poptorch):
    """Two executors may share a module; what they show of its weights is not a tensor.

    PopTorch 3.4 `_poplar_executor.py`, `__getattr__`.
    """
    model = Net(4)
    options = poptorch.Options().replicationFactor(REPLICAS)
    executor, other = (poptorch.inferenceModel(model, options) for _ in range(2))
    assert not isinstance(executor.grouped, torch.Tensor)
    assert executor.grouped.shape == model.grouped.shape
    assert not hasattr(model.grouped, "replicaGrouping")
    a_value_for_each_replica(poptorch, executor)
    x = torch.randn(REPLICAS * 2, 3)
    y, _ = executor(x)
    expected = x.view(REPLICAS, 2, 3) @ model.grouped + model.shared
    torch.testing.assert_close(y, expected.view(-1, 2))
    # The other one's step sees the whole weight: four products for each micro-batch.
    assert list(other(x)[0].shape) == [REPLICAS * 4, 2, 2]


def test_a_tied_weight_inside_a_module_can_be_grouped_by_name(poptorch):
    """``per_replica_params`` takes dotted names; wherever the weight is used it is the same one."""

    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first = torch.nn.Linear(2, 2, bias=False)
            self.first.weight = torch.nn.Parameter(torch.arange(8.0).view(2, 2, 2))
            self.second = torch.nn.Linear(2, 2, bias=False)
            self.second.weight = self.first.weight

        def forward(self, x):
            return self.second(self.first(x))

    model = Tied()
    executor = poptorch.inferenceModel(model, poptorch.Options().replicationFactor(2))
    executor.per_replica_params["first.weight"] = (
        poptorch.CommGroupType.NoGrouping,
        0,
        poptorch.VariableRetrievalMode.OnePerGroup,
    )
    x = torch.randn(2, 2)
    y = executor(x)
    weight = model.first.weight.detach()
    torch.testing.assert_close(y, torch.stack([part @ w.T @ w.T for part, w in zip(x, weight)]))
    assert model.second.weight is model.first.weight


def test_anchors_of_a_grouped_weight_are_each_replica_s(poptorch):
    """The weight, its gradient, its update and its optimizer state, for each replica's group."""
    groups = ARRANGEMENTS["Orthogonal"][1]
    model = Net(2)
    options = poptorch.Options().replicationFactor(REPLICAS)
    for name in ("grouped", "Gradient___grouped", "UpdatedVar___grouped", "Accl1___grouped"):
        options.anchorTensor(name, name)
    executor = poptorch.trainingModel(
        model, options, OPTIMIZERS["SGD"](poptorch, model.parameters())
    )
    executor.grouped.replicaGrouping(
        poptorch.CommGroupType.Orthogonal, 2, poptorch.VariableRetrievalMode.OnePerGroup
    )
    before = model.grouped.detach().clone()
    executor(torch.randn(REPLICAS * 2, 3))
    seen = {
        name: executor.getAnchoredTensor(name).view(REPLICAS, 3, 2)
        for name in options.anchored_tensors
    }
    after = model.grouped.detach()
    gradient = seen["Gradient___grouped"].view(2, 2, 3, 2).sum(0) / REPLICAS
    for replica, group in enumerate(groups):
        torch.testing.assert_close(seen["grouped"][replica], before[group])
        torch.testing.assert_close(seen["UpdatedVar___grouped"][replica], after[group])
        torch.testing.assert_close(seen["Accl1___grouped"][replica], gradient[group])


class Double(torch.nn.Module):
    def forward(self, x):
        return 2 * x


@pytest.mark.parametrize(
    ("kind", "size", "expected"),
    [
        ("Consecutive", 2, [0, 0, 1, 1]),
        ("Orthogonal", 2, [0, 1, 0, 1]),
        ("Consecutive", 4, [0, 0, 0, 0]),
        ("NoGrouping", 2, [0, 1, 2, 3]),
    ],
)
def test_replicas_of_an_input_group_see_the_same_micro_batch(poptorch, kind, size, expected):
    """An execution takes one micro-batch for each group and returns a result for each replica."""
    options = poptorch.Options().replicationFactor(REPLICAS)
    options.inputReplicaGrouping(size, getattr(poptorch.CommGroupType, kind))
    parts = torch.arange(2.0 * (max(expected) + 1)).view(-1, 2)
    result = poptorch.inferenceModel(Double(), options)(parts.flatten())
    assert torch.equal(result, 2 * parts[expected].flatten())


def test_shared_inputs_are_counted_once(poptorch):
    """By the data loader, and by the check of an input's dimension 0."""
    options = poptorch.Options().replicationFactor(REPLICAS)
    options.inputReplicaGrouping(2, poptorch.CommGroupType.Consecutive)
    loader = poptorch.DataLoader(options, list(torch.arange(12.0)), batch_size=3)
    assert [len(batch) for batch in loader] == [6, 6]
    executor = poptorch.inferenceModel(Double(), options)
    with pytest.raises(AssertionError, match=r"\(4\) / \S+input_group_size\(2\)\).* = 2 because"):
        executor(torch.ones(3))


def test_buffers_may_change_where_all_replicas_share_inputs(poptorch):
    """They cannot get out of step then (PopTorch 3.4 `SessionOptions::hasInputReplication`)."""

    class Counting(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.zeros(1))

        def forward(self, x):
            self.seen += x.sum()
            return x + self.seen

    for size in (2, REPLICAS):
        options = poptorch.Options().replicationFactor(REPLICAS)
        options.inputReplicaGrouping(size, poptorch.CommGroupType.Consecutive)
        executor = poptorch.inferenceModel(Counting(), options)
        if size == REPLICAS:
            assert executor(torch.ones(1)).tolist() == [2.0] * REPLICAS
        else:
            with pytest.raises(poptorch.Error, match="does not support broadcasting buffers"):
                executor(torch.ones(2))


def test_what_cannot_share_inputs_is_refused(poptorch):
    """Several micro-batches for each replica, and a step that writes to its input."""

    class Writing(torch.nn.Module):
        def forward(self, x):
            x += 1
            return x

    options = poptorch.Options().replicationFactor(REPLICAS)
    options.inputReplicaGrouping(2, poptorch.CommGroupType.Consecutive)
    with pytest.raises(NotImplementedError, match=r"inputReplicaGrouping.*writes"):
        poptorch.inferenceModel(Writing(), options)(torch.ones(2))
    several = options.clone().deviceIterations(2)
    with pytest.raises(NotImplementedError, match=r"inputReplicaGrouping\(2, \.\.\.\).*StepIO"):
        poptorch.inferenceModel(Double(), several)(torch.ones(4))
