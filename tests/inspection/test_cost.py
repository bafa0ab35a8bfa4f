"""What looking costs, before and after, against the emulator's own counters."""

import logging
import warnings

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from ipu_log_callback import IPULogCallback, IPULogWarning, anchor

from .bench import GRID, LEARNING_RATE, ONE, SAMPLES, Counts, Net, data, fit


class Busy(Net):
    """Logs scalars of every dtype, anchors a tensor, and returns more than a loss."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        hidden = self.encoder(x)
        anchor("hidden", hidden)
        anchor("hist", hidden, reduce="histogram", bins=5, range=(-1.0, 1.0))
        loss = torch.nn.functional.cross_entropy(self.head(hidden), y)
        self.log("loss", loss)
        self.log("ones", y.sum(), reduce_fx="sum")
        return {"loss": loss, "hidden_too": hidden, "classes": y}


class LogsItsLoss(Net):
    """Logs what it returns."""

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss


def counted(callback, counts=ONE, edit=None, net=Busy):
    """Bytes and output tensors of an execution, by the emulator."""
    from ipu_log_callback import emulator

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", IPULogWarning)
        fit(net(lambda ps: torch.optim.Adam(ps, lr=LEARNING_RATE)), callback, counts, edit=edit)
    return emulator.counters.last_output_bytes, emulator.counters.last_output_tensors


WATCHED = [
    {"keys": "*"},
    {"keys": "loss", "gradients": "*"},
    {"weights": "head.*", "optimizer_state": "head.bias"},
    {"activations": "encoder.*"},
    {"activations": "*", "reduce_activations": "stats", "statistics": ["min", "max"]},
    {"tensors": {"x": "input", "loss's": "loss"}},
]


def arguments_text(arguments):
    """The names of the arguments, to call a test by."""
    return "-".join(arguments)


@pytest.mark.parametrize("counts", [GRID[1], GRID[-1]], ids=str)
@pytest.mark.parametrize("arguments", WATCHED, ids=arguments_text)
def test_bytes_and_streams_are_those_that_the_emulator_counts(arguments, counts):
    """Equal, not close: the difference to the same run with `enabled=False`, to the byte."""
    callback = IPULogCallback(**arguments)
    size, tensors = counted(callback, counts)
    size_without, tensors_without = counted(IPULogCallback(enabled=False), counts)
    assert callback.cost.bytes_per_execution("training_step") == size - size_without
    assert callback.cost.extra_streams() == tensors - tensors_without
    assert sum(entry.bytes for entry in callback.cost) == size - size_without


def test_the_modes_price_is_an_entry_of_its_own():
    """Fetching every micro-batch of the step's own outputs is part of the bill."""
    counts = Counts(3, 1, 1)
    callback = IPULogCallback("loss")
    counted(callback, counts)
    (own,) = [entry for entry in callback.cost if entry.name.startswith("own outputs")]
    assert own.name == "own outputs, All instead of Final"
    floats, classes = 1 + SAMPLES * 3, SAMPLES
    assert own.bytes == (counts.total - 1) * 4 * (floats + classes)


def test_shares_add_up_to_one():
    """Shares are of the step's total."""
    callback = IPULogCallback("*", gradients="*")
    counted(callback)
    assert sum(map(callback.cost.share, callback.cost)) == pytest.approx(1.0)
    assert callback.cost.largest().name == "grad/encoder.0.weight"


def test_the_table_names_everything():
    """`print` and a notebook show a row for each anchored thing, largest first, and the total."""
    callback = IPULogCallback("*", gradients="head.weight")
    counted(callback, Counts(2, 1, 1))
    text, page = str(callback.cost), callback.cost._repr_html_()
    lines = text.splitlines()
    for title in ("step", "anchored", "shape", "dtype", "bytes per execution", "share", "streams"):
        assert title in lines[1]
        assert f">{title}</th>" in page
    names = ["grad/head.weight", "hidden", "hist", "loss", "ones"]
    assert all(any(name in line for line in lines[2:]) for name in names)
    assert "training_step: " in lines[-1]
    assert "extra output streams" in lines[-1]
    assert all(f">{name}</td>" in page for name in names)


def test_own_outputs_add_bytes_and_no_stream():
    """Every micro-batch of the step's own outputs has a price, and no stream of its own."""
    callback = IPULogCallback("loss")
    counted(callback, Counts(2, 1, 1), net=LogsItsLoss)
    (row,) = [line for line in str(callback.cost).splitlines() if "own outputs" in line]
    name = "own outputs, All instead of Final"
    assert row.split(name)[1].split() == ["-", "-", "4", "33.3%", "0"]
    assert str(callback.cost).endswith("12 bytes per execution, 1 extra output stream")


def test_an_uncompiled_callback_costs_nothing():
    """Before a compile there is nothing to tell."""
    cost = IPULogCallback("*", gradients="*").cost
    assert str(cost) == "nothing is anchored"
    assert cost._repr_html_() == "<p>nothing is anchored</p>"
    assert cost.bytes_per_execution() == 0


def test_a_log_line_tells_after_the_compile(caplog):
    """Once a compile, at level INFO, with the total and the largest."""
    caplog.set_level(logging.INFO, "ipu_log_callback")
    callback = IPULogCallback("loss", gradients="head.weight")
    counted(callback, net=Busy)
    lines = [r.getMessage() for r in caplog.records if r.name == "ipu_log_callback"]
    assert len(lines) == 1
    assert lines[0].startswith("training_step: ")
    assert f"'{callback.cost.largest().name}'" in lines[0]
    assert f" {callback.cost.bytes_per_execution()} B " in lines[0]


def test_a_high_price_is_warned_of():
    """Above the threshold, with the largest and its share; `None` says nothing."""
    with pytest.warns(IPULogWarning, match=r"more than 50 B") as caught:
        fit(Net(), IPULogCallback(gradients="*", cost_warning=50))
    (warning,) = caught
    assert "largest  'grad/encoder.0.weight': 48 B" in str(warning.message)
    fit(Net(), IPULogCallback(gradients="*", cost_warning=None))
    fit(Net(), IPULogCallback(gradients="*", cost_warning=10_000))


def test_times_are_logged_and_summarised(caplog):
    """Host and execution seconds under `ipu_log/`; the device's own only where it counts them."""
    caplog.set_level(logging.INFO, "ipu_log_callback")
    callback = IPULogCallback(weights="head.bias", measure_cost=True)
    rows = fit(Net(), callback, executions=3)
    assert all(row["ipu_log/host_seconds"] > 0 for row in rows)
    assert rows[-1]["ipu_log/execution_seconds"] > 0
    assert "ipu_log/round_trip_seconds" not in rows[-1]  # the emulator measures no time
    callback.weights = ()
    fit(Net(), callback, executions=3)
    summary = caplog.records[-1].getMessage()
    assert "with anchors (2 seen)" in summary
    assert "without anchors (2 seen)" in summary


def test_the_devices_own_counters_are_logged_where_it_has_them(monkeypatch):
    """The average of PopTorch's latencies, in seconds."""
    import poptorch

    monkeypatch.setattr(poptorch.PoplarExecutor, "getLatency", lambda self: (1.0, 3.0, 2.0))
    monkeypatch.setattr(poptorch.PoplarExecutor, "getIpuHostLatency", lambda self: (0.1, 0.3, 0.2))
    rows = fit(Net(), IPULogCallback(measure_cost=True))
    assert rows[-1]["ipu_log/round_trip_seconds"] == 2.0
    assert rows[-1]["ipu_log/ipu_to_host_seconds"] == pytest.approx(0.2)


def test_costs_of_all_steps_are_kept_apart():
    """Each compiled step has its own total."""

    class Validated(Busy):
        def validation_step(self, batch, batch_idx):
            self.log("val_loss", self.loss(batch))

        def val_dataloader(self):
            return DataLoader(TensorDataset(*data(ONE, 2)), batch_size=SAMPLES)

    callback = IPULogCallback("*")
    fit(Validated(), callback)
    assert set(callback.cost.steps) == {"training_step", "validation_step"}
    assert callback.cost.bytes_per_execution("validation_step") == 4
    total = sum(map(callback.cost.bytes_per_execution, callback.cost.steps))
    assert callback.cost.bytes_per_execution() == total
