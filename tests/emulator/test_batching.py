import copy

import pytest
import torch
from torch.nn import functional as F


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(1, 3, 3)
        self.norm = torch.nn.BatchNorm2d(3)
        self.head = torch.nn.Linear(12, 4)

    def forward(self, x, y):
        logits = self.head(F.relu(self.norm(self.conv(x))).flatten(1))
        loss = F.cross_entropy(logits, y)
        return {"loss": loss, "logits": logits, "class": logits.argmax(1)}


def options_of(poptorch, iterations, accumulation, replicas, mode=None, period=None):
    """Options with this geometry, for models that update buffers."""
    options = poptorch.Options().deviceIterations(iterations).replicationFactor(replicas)
    options.broadcastBuffers(False).Training.gradientAccumulation(accumulation)
    return options if mode is None else options.outputMode(mode, period)


def share_weights(copies):
    """Let every copy use the first one's parameters, but buffers of its own."""
    for twin in copies[1:]:
        for (_, ours), (_, first) in zip(twin.named_modules(), copies[0].named_modules()):
            ours._parameters.update(first._parameters)


def train_plainly(model, optimizer, x, y, iterations, accumulation, replicas, mean=True):
    """The same micro-batches in plain PyTorch, a copy of the buffers for each replica."""
    copies = [model, *(copy.deepcopy(model) for _ in range(replicas - 1))]
    share_weights(copies)
    parts = zip(
        x.chunk(iterations * accumulation * replicas), y.chunk(iterations * accumulation * replicas)
    )
    losses, logits = [], []
    for _ in range(iterations):
        optimizer.zero_grad()
        for _ in range(accumulation):
            for twin in copies:
                out = twin(*next(parts))
                (out["loss"] / (accumulation * replicas if mean else 1)).backward()
                losses.append(out["loss"].detach())
                logits.append(out["logits"].detach())
        optimizer.step()
    return torch.stack(losses), torch.cat(logits)


GEOMETRIES = [(1, 1, 1), (3, 1, 1), (1, 2, 1), (1, 1, 2), (2, 3, 2)]


@pytest.mark.parametrize(("iterations", "accumulation", "replicas"), GEOMETRIES)
@pytest.mark.parametrize("optimizer_class", [torch.optim.SGD, torch.optim.Adam])
def test_training_equals_plain_pytorch(
    poptorch, iterations, accumulation, replicas, optimizer_class
):
    """Losses and weights are those of plain PyTorch on the same micro-batches.

    Their order is iterations, accumulation, replicas (PopTorch 3.4 user guide, "Efficient data
    batching").
    """
    torch.manual_seed(0)
    model = Net()
    plain = copy.deepcopy(model)
    options = options_of(poptorch, iterations, accumulation, replicas, poptorch.OutputMode.All)
    trained = poptorch.trainingModel(model, options, optimizer_class(model.parameters(), lr=0.05))
    optimizer = optimizer_class(plain.parameters(), lr=0.05)
    total = iterations * accumulation * replicas
    for _ in range(2):
        x, y = torch.randn(total * 4, 1, 4, 4), torch.randint(0, 4, (total * 4,))
        out = trained(x, y)
        losses, logits = train_plainly(plain, optimizer, x, y, iterations, accumulation, replicas)
        torch.testing.assert_close(out["loss"].reshape(-1), losses)
        torch.testing.assert_close(out["logits"], logits)
    expected = plain.state_dict()
    for name, value in model.state_dict().items():
        if not name.endswith("num_batches_tracked"):
            torch.testing.assert_close(value, expected[name])


def test_gradients_can_be_summed(poptorch):
    """With ``ReductionType.Sum`` the optimizer sees the sum over accumulation and replicas.

    PopTorch 3.4 `batching_test.py`, `test_gradient_accumulation_training`.
    """
    torch.manual_seed(0)
    model = Net()
    plain = copy.deepcopy(model)
    options = options_of(poptorch, 1, 2, 2)
    options.Training.accumulationAndReplicationReductionType(poptorch.ReductionType.Sum)
    x, y = torch.randn(16, 1, 4, 4), torch.randint(0, 4, (16,))
    trained = poptorch.trainingModel(model, options, torch.optim.SGD(model.parameters(), lr=0.1))
    trained(x, y)
    train_plainly(plain, torch.optim.SGD(plain.parameters(), lr=0.1), x, y, 1, 2, 2, mean=False)
    torch.testing.assert_close(model.head.weight.data, plain.head.weight.data)


class Marked(torch.nn.Module):
    """Returns its input and a number made of it, so that each micro-batch can be told."""

    def forward(self, x):
        return x * 1.0, x.sum()


@pytest.mark.parametrize("replicas", [1, 2])
def test_output_modes_pick_micro_batches(poptorch, replicas):
    """All, EveryN, Final and Sum return what `Compiler::popartBatchDimForAnchor`.

    (PopTorch 3.4) says, per replica.
    """
    x = torch.arange(4.0 * replicas * 2).reshape(-1, 1)
    parts = x.reshape(4, replicas, 2)
    expected = {
        "All": parts,
        "EveryN": parts[1::2],
        "Final": parts[3:],
        "Sum": parts.sum(0, keepdim=True),
    }
    for name, value in expected.items():
        mode = poptorch.OutputMode[name]
        options = options_of(poptorch, 4, 1, replicas, mode, 2 if name == "EveryN" else None)
        same, total = poptorch.inferenceModel(Marked(), options)(x)
        assert torch.equal(same, value.reshape(-1, 1))
        assert torch.equal(total.reshape(-1), value.sum(2).reshape(-1))


def test_scalars_get_a_dimension_only_when_several_come_back(poptorch):
    """A 0-d output is ``[n]`` for n > 1 results and stays 0-d for one.

    PopTorch 3.4 `PoplarExecutable.cpp`.
    """
    x = torch.ones(4, 3)
    mode = poptorch.OutputMode
    shapes = {}
    for name in ("All", "Final"):
        options = options_of(poptorch, 4, 1, 1, mode[name])
        shapes[name] = [tuple(out.shape) for out in poptorch.inferenceModel(Marked(), options)(x)]
    assert shapes == {"All": [(4, 3), (4,)], "Final": [(1, 3), ()]}


def test_default_modes(poptorch):
    """Training returns the last result, inference all.

    PopTorch 3.4 `_poplar_executor.py`.
    """
    x, y = torch.randn(8, 1, 4, 4), torch.randint(0, 4, (8,))
    model = Net()
    assert poptorch.inferenceModel(model, options_of(poptorch, 2, 1, 1))(x, y)["logits"].shape == (
        8,
        4,
    )
    trained = poptorch.trainingModel(model, options_of(poptorch, 2, 1, 1))
    assert trained(x, y)["logits"].shape == (4, 4)


def test_wrong_batch_size(poptorch):
    """Dimension 0 must be a multiple of the number of micro-batches.

    PopTorch 3.4 `_narrow_tensor`.
    """
    model = poptorch.inferenceModel(Marked(), options_of(poptorch, 3, 1, 1))
    with pytest.raises(AssertionError, match=r"Invalid batch dimension: .*must be a multiple of"):
        model(torch.ones(4, 2))


def test_accumulation_is_for_training_only(poptorch):
    """An inference model refuses gradient accumulation.

    PopTorch 3.4 `_poplar_executor.py`.
    """
    with pytest.raises(poptorch.Error, match="gradientAccumulation to 1"):
        poptorch.inferenceModel(Marked(), options_of(poptorch, 1, 2, 1))


def test_pipeline_needs_enough_micro_batches(poptorch):
    """Blocks on two IPUs make three training stages, which want as much accumulation.

    PopTorch 3.4 `Compiler.cpp`.
    """

    class Pipeline(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)

        def forward(self, x):
            with poptorch.Block("first", ipu_id=0):
                x = self.a(x)
            with poptorch.Block("second", ipu_id=1):
                return poptorch.identity_loss(self.b(x), reduction="mean")

    with pytest.raises(poptorch.Error, match=r"number of pipeline stages \(3\)"):
        poptorch.trainingModel(Pipeline(), options_of(poptorch, 1, 2, 1))(torch.ones(2, 2))
    assert (
        poptorch.trainingModel(Pipeline(), options_of(poptorch, 1, 3, 1))(torch.ones(3, 2)).dim()
        == 0
    )
