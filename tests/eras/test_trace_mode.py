"""`opts.Jit.traceModel(True)`, PopTorch's only way up to SDK 2.6.

`torch.jit.trace` runs a step several times on CPU tensors and takes nothing but tensors in tuples
out of it. The parity suite's core runs in this mode as well; here is what the mode alone has.
"""

import re
from typing import NamedTuple

import pytest
import torch
import torchmetrics
from parity import bench
from parity.bench import Net, Setting, check_parity, observe

from ipu_log_callback import IPULogCallback
from ipu_log_callback.errors import SecondLossError

CUT = Setting()
GEOMETRIES = [(1, 1, 1), (3, 2, 1), (2, 2, 2)]


@pytest.fixture(autouse=True)
def _traced(monkeypatch):
    monkeypatch.setattr(bench, "TRACED", True)


class Pair(NamedTuple):
    loss: torch.Tensor
    out: torch.Tensor


class Returns(Net):
    """Returns a structure, logs, and keeps what arrives in the batch-end hook."""

    def __init__(self, make, keys=True):
        super().__init__()
        self.make, self.keys, self.received = make, keys, []

    def validation_step(self, batch, batch_idx):
        loss, out = self.loss(batch), self(batch[0])
        if self.keys:
            self.log("val_loss", loss)
        return self.make(loss, out)

    def on_validation_batch_end(self, outputs, *_):
        self.received.append(outputs)


RETURNS = {
    "dict": lambda loss, out: {"loss": loss, "out": out},
    "tuple": lambda loss, out: (loss, out),
    "NamedTuple": Pair,
    "None": lambda loss, out: None,
    "nested": lambda loss, out: {"a": [loss, (out, {"b": out})], "c": Pair(loss, out), "text": "x"},
}


def shapes(structure):
    """A structure with shapes for tensors."""
    if isinstance(structure, torch.Tensor):
        return tuple(structure.shape)
    if isinstance(structure, dict):
        return {key: shapes(item) for key, item in structure.items()}
    if isinstance(structure, (list, tuple)):
        return (type(structure), *map(shapes, structure))
    return structure


def validate(module, callbacks, setting=CUT):
    """One validation on the IPU strategy, with these callbacks and no other of ours."""
    run = bench.Run(True, setting, module, list)
    trainer = run.trainer()
    trainer.callbacks = [c for c in trainer.callbacks if not isinstance(c, IPULogCallback)]
    trainer.callbacks += callbacks
    trainer.validate(module, run.loader(), verbose=False)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
@pytest.mark.parametrize("kind", RETURNS)
def test_the_structure_is_rebuilt_on_the_host(kind, geometry, monkeypatch):
    """Hooks get the types, numbers and shapes that the dispatcher gives them."""
    received = {}
    for traced in (False, True):
        monkeypatch.setattr(bench, "TRACED", traced)
        torch.manual_seed(0)
        module = Returns(RETURNS[kind])
        validate(module, [IPULogCallback("*")], Setting(*geometry))
        received[traced] = module.received
    assert shapes(received[True]) == shapes(received[False])
    bench.assert_alike(received[True], received[False], kind)


@pytest.mark.filterwarnings("ignore")
def test_without_the_callback_the_tracer_refuses_a_dict():
    """`torch.jit`'s own error; with the callback no strategy of one's own is needed for dicts."""
    with pytest.raises(RuntimeError, match="Encountering a dict at the output of the tracer"):
        validate(Returns(RETURNS["dict"], keys=False), [])
    module = Returns(RETURNS["dict"], keys=False)
    validate(module, [IPULogCallback()])
    assert [list(output) for output in module.received] == [["loss", "out"]] * 4


class DictSteps(Net):
    """A dict out of every step, metrics of every kind, every reduction."""

    def __init__(self):
        super().__init__()
        self.mean = torchmetrics.MeanMetric()
        self.errors = torchmetrics.MetricCollection(
            {"mae": torchmetrics.MeanAbsoluteError(), "mse": torchmetrics.MeanSquaredError()}
        )

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        self.log("train_max", batch[0].amax(), reduce_fx="max", on_epoch=True)
        self.mean.update(batch[0])
        self.log("train_mean", self.mean, on_step=False, on_epoch=True)
        return {"loss": loss, "out": self(batch[0]).detach()}

    def validation_step(self, batch, batch_idx):
        out = self(batch[0]).squeeze(-1)
        self.log("val_count", (out > 0).sum(), reduce_fx="sum")
        self.log_dict(self.errors(out, batch[1]), on_step=True, on_epoch=True)
        return {"out": out, "batch": batch}


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_dict_returning_steps_with_metrics_log_what_the_cpu_run_logs(geometry):
    """Rows, metrics' states and weights, for several geometries."""
    check_parity(DictSteps, setting=Setting(*geometry), tolerance=1e-4)


def test_a_second_loss_is_told_by_its_key():
    """Of all that is logged only the loss that is not returned is named."""

    def logs(self, stage, x, loss):
        self.log("total", loss)
        self.log("mae", torch.nn.functional.l1_loss(self(x), x[:, :1]))
        self.log("largest", x.amax())

    with pytest.raises(SecondLossError, match=r"^`self\.log\('mae', \.\.\.\)`"):
        observe(True, lambda: Net(logs))


def test_both_front_ends_log_the_same(monkeypatch):
    """The same rows, value by value."""
    traced = observe(True, DictSteps)
    monkeypatch.setattr(bench, "TRACED", False)
    dispatched = observe(True, DictSteps)
    bench.assert_alike(
        [row.metrics for row in traced.rows], [row.metrics for row in dispatched.rows], "rows"
    )


def test_the_several_runs_of_a_trace_are_one_capture():
    """Each warning comes once, each logged call is replayed once, each metric updated once."""

    class Frozen(Net):
        def __init__(self):
            super().__init__()
            self.seen = torchmetrics.SumMetric()
            self.runs = 0

        def validation_step(self, batch, batch_idx):
            self.runs += 1
            self.log("frozen", 0.5)
            self.seen.update(torch.ones_like(batch[1]))
            self.log("seen", self.seen)

    seen = observe(True, Frozen, bench.validate_only)
    assert seen.run.module.runs > 1
    assert [bool(re.search("frozen", text)) for text in seen.warnings] == [True]
    assert seen.results == [{"frozen": 0.5, "seen": seen.run.setting.samples}]
