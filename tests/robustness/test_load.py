"""Much of everything: right, and neither slower nor larger with time."""

import gc
import logging
import sys
import time
import tracemalloc

import pytest
import torch
import torchmetrics

from ipu_log_callback import IPULogCallback

from .runs import FULL, loader, numbers_of, pl, run, trainer

LOG = logging.getLogger(__name__)  # figures: pytest --log-cli-level=INFO

EXECUTIONS = 20_000 if FULL else 1_000


class Small(pl.LightningModule):
    """Tests with one function of a micro-batch."""

    def __init__(self, logs, **parts):
        super().__init__()
        self.logs = logs
        for name, part in parts.items():
            setattr(self, name, part)

    def test_step(self, batch, batch_idx, dataloader_idx=0):
        self.logs(self, batch[0])


def test_500_keys():
    """They arrive, each with its own value, in two tensors."""

    def logs(module, x):
        for number in range(250):
            module.log(f"float/{number}", x.mean() * 0 + number)
            module.log(f"int/{number}", (x.amax() * 0).int() + number, reduce_fx="max")

    callback = IPULogCallback("*")
    made = trainer([callback])
    run(made, "test", Small(logs), loader(2, 2))
    expected = {f"{kind}/{n}": float(n) for kind in ("float", "int") for n in range(250)}
    assert numbers_of(made) == expected
    assert callback.captured["test_step"].outputs == 2


def test_an_anchored_tensor_of_a_million_elements():
    """A metric's argument of that size comes back whole, micro-batch by micro-batch."""
    module = Small(
        lambda module, x: module.total.update(x.sum() * 0 + torch.ones(1_000_000)),
        total=torchmetrics.SumMetric(),
    )
    seen = []
    module.on_test_batch_end = lambda *_: seen.append(float(module.total.compute()))
    made = trainer([IPULogCallback("*", cost_warning=None)])
    run(made, "test", module, loader(2, 2))
    assert seen == [2e6, 4e6]


def growth_and_slowdown(callback, executions):
    """Bytes that the last half of many executions left behind, and how much slower it was."""
    marks = []

    class Marks(pl.Callback):
        def on_test_batch_end(self, trainer, module, outputs, batch, batch_idx, *_):
            if batch_idx in (executions // 4, executions // 2, executions - 1):
                gc.collect()
                marks.append((tracemalloc.get_traced_memory()[0], time.process_time()))

    def logs(module, x):
        module.log("x", x.mean(), on_step=True, on_epoch=True)
        module.log("n", (x > 0).sum(), reduce_fx="sum")
        module.metric.update(x)
        module.log("metric", module.metric)

    module = Small(logs, metric=torchmetrics.MeanMetric())
    data = torch.utils.data.TensorDataset(torch.ones(executions, 1))
    made = trainer([callback, Marks()], iterations=1)
    tracemalloc.start()
    try:
        run(made, "test", module, torch.utils.data.DataLoader(data))
    finally:
        tracemalloc.stop()
    assert numbers_of(made)["metric"] == 1.0
    (_, start), (half, middle), (whole, end) = marks
    return whole - half, (end - middle) / 2 / (middle - start)


def test_many_executions_do_not_grow():
    """Without a history nothing is kept of an execution, nor does it get slower."""
    grown, slower = growth_and_slowdown(IPULogCallback("*"), EXECUTIONS)
    LOG.info(
        "%d executions: %d bytes more in the last half, %.2f x the time", EXECUTIONS, grown, slower
    )
    assert grown < 20_000
    assert slower < 3


def test_a_full_history_does_not_grow():
    """It keeps as many executions as it was told."""
    executions = EXECUTIONS // 4
    callback = IPULogCallback("*", history=executions // 5)
    grown, slower = growth_and_slowdown(callback, executions)
    LOG.info(
        "%d executions: %d bytes more in the last half, %.2f x the time", executions, grown, slower
    )
    assert grown < 50_000
    assert slower < 3


def test_64_iterations_by_8_replicas():
    """512 micro-batches in an execution, each counted once."""
    callback = IPULogCallback("*", history=True)
    made = trainer([callback], iterations=64, replicas=8)
    data = torch.utils.data.TensorDataset(torch.arange(1024.0).reshape(-1, 1))
    module = Small(
        lambda module, x: [
            module.log("mean", x.mean()),
            module.log("count", (x >= 0).sum(), reduce_fx="sum"),
        ]
    )
    run(made, "test", module, torch.utils.data.DataLoader(data, batch_size=1))
    assert numbers_of(made) == {"mean": 511.5, "count": 1024.0}
    first = callback.history["mean"][0].micro_batches
    assert sorted(first.tolist()) == list(range(512))


def test_50_loaders():
    """Each loader has its own row, compiled once for all."""
    made = trainer([IPULogCallback("*")])
    loaders = [
        torch.utils.data.DataLoader(
            torch.utils.data.TensorDataset(torch.full((2, 1), float(number))), batch_size=1
        )
        for number in range(50)
    ]
    module = Small(lambda module, x: module.log("x", x.mean()))
    run(made, "test", module, loaders)
    assert numbers_of(made) == {f"x/dataloader_idx_{n}": float(n) for n in range(50)}


@pytest.mark.filterwarnings("ignore:Metric .* will save all targets")
def test_a_metric_with_list_states_over_an_epoch():
    """It holds the epoch's data, one entry a micro-batch, and computes what it does on the CPU."""
    count = 200
    x = torch.arange(float(count)).reshape(-1, 1)
    module = Small(
        lambda module, x: [
            module.metric.update(x.squeeze(-1), x.squeeze(-1) * 2),
            module.log("spearman", module.metric),
        ],
        metric=torchmetrics.SpearmanCorrCoef(),
    )
    lengths = []
    module.on_test_batch_end = lambda *_: lengths.append(len(module.metric.preds))
    made = trainer([IPULogCallback("*")], iterations=4)
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x), batch_size=2)
    run(made, "test", module, data)
    assert lengths == list(range(4, count // 2 + 1, 4))
    assert numbers_of(made) == pytest.approx({"spearman": 1.0})


def test_1000_submodules():
    """A deep and a wide tree: no recursion limit, and an execution costs no more for it."""
    deep = inner = torch.nn.Module()
    for _ in range(200):
        inner.child = torch.nn.Module()
        inner = inner.child
    inner.metric = torchmetrics.MeanMetric()
    wide = torch.nn.ModuleList(torch.nn.Identity() for _ in range(800))

    def logs(module, x):
        inner.metric.update(x)
        module.log("deep", inner.metric)
        for part in module.wide:
            x = part(x)
        module.log("x", x.mean())

    module = Small(logs, deep=deep, wide=wide)
    made = trainer([IPULogCallback("*")])
    limit = sys.getrecursionlimit()
    run(made, "test", module, loader(2, 2))
    found = numbers_of(made)
    assert found["deep"] == pytest.approx(found["x"])
    assert sys.getrecursionlimit() == limit
