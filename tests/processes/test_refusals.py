"""What a launch cannot synchronise is refused before it is compiled; what needs nothing, is not."""

import builtins
import sys
import types
import warnings
from typing import Any, List, Optional

import pytest
import torch
import torchmetrics
from lightning_in_use import QUIET, IPUStrategy, pl
from torch.utils.data import DataLoader, TensorDataset

from ipu_log_callback import IPULogCallback, IPULogError, IPULogWarning, emulator
from ipu_log_callback.processes import Processes, SharedReplay


class Net(pl.LightningModule):
    """Logs a mean in its validation step, and an error where it is told to."""

    def __init__(self, sync_dist: bool, metric: bool = False) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        self.sync_dist = sync_dist
        self.error = torchmetrics.MeanSquaredError() if metric else None

    def validation_step(self, batch: Any, batch_idx: Any) -> None:
        prediction = self.layer(batch[0])
        self.log("val_loss", prediction.mean(), sync_dist=self.sync_dist)
        if self.error is not None:
            self.error.update(prediction, prediction + 1)
            self.log("val_error", self.error)


def validate(net: Any, keys: str = "*", count: int = 2) -> Any:
    """Validate as process 0 of `count`; returns what was logged."""
    import poptorch

    options = poptorch.Options()
    options.Distributed.configureProcessId(0, count)
    trainer = pl.Trainer(
        accelerator="ipu",
        devices=1,
        strategy=IPUStrategy(inference_opts=options),
        callbacks=[IPULogCallback(keys)],
        max_epochs=1,
        logger=False,
        **QUIET,
    )
    loader = DataLoader(TensorDataset(torch.randn(8, 2)), batch_size=2)
    return trainer.validate(net, loader, verbose=False)[0]


def fake_mpi(
    monkeypatch: pytest.MonkeyPatch, size: int, others: Optional[List[Any]] = None
) -> None:
    """An mpi4py whose other processes contribute `others` to an exchange."""
    world = types.SimpleNamespace(
        Get_size=lambda: size, allgather=lambda value: [value, *(others or ())]
    )
    package = types.ModuleType("mpi4py")
    package.MPI = types.SimpleNamespace(COMM_WORLD=world)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mpi4py", package)


@pytest.fixture
def no_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without the extra, as this package sees it; Lightning looks for it on its own."""
    imported = builtins.__import__

    def importing(name: str, scope: Any = None, *args: Any) -> Any:
        if name == "mpi4py" and str((scope or {}).get("__name__")).startswith("ipu_log_callback"):
            raise ModuleNotFoundError("No module named 'mpi4py'")
        return imported(name, scope, *args)

    monkeypatch.setattr(builtins, "__import__", importing)


@pytest.mark.usefixtures("no_mpi")
def test_sync_dist_without_the_extra() -> None:
    """The error names the call, its line, the step and what to install; nothing was compiled."""
    before = emulator.counters.compiles
    with pytest.raises(IPULogError) as caught:
        validate(Net(sync_dist=True))
    assert emulator.counters.compiles == before
    text = str(caught.value)
    assert "`self.log('val_loss', ..., sync_dist=True)` needs mpi4py" in text
    assert "test_refusals.py:" in text
    assert "Net.validation_step" in text
    assert "a launch of 2 processes" in text
    assert "pip install 'ipu-log-callback[mpi]'" in text


@pytest.mark.usefixtures("no_mpi")
@pytest.mark.parametrize(
    ("sync_dist", "keys", "count"), [(False, "*", 2), (True, "other_*", 2), (True, "*", 1)]
)
def test_what_is_not_synchronised_needs_no_extra(sync_dist: bool, keys: str, count: int) -> None:
    """Nor does a key that is not selected, or a launch that the options know nothing of."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", IPULogWarning)  # of the key that is not selected
        logged = validate(Net(sync_dist), keys, count)
    assert set(logged) == (set() if keys == "other_*" else {"val_loss"})


@pytest.mark.usefixtures("no_mpi")
def test_metrics_without_the_extra() -> None:
    """A metric then computes over its own process's data only, which a warning says."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        logged = validate(Net(sync_dist=False, metric=True))
    [text] = [str(one.message) for one in caught if one.category is IPULogWarning]
    assert "hold this process's own share, 1 of 2" in text
    assert "pip install 'ipu-log-callback[mpi]'" in text
    assert logged["val_error"] == pytest.approx(1.0)


def test_another_mpi_than_the_launch_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """An MPI that knows of one process, where the options know of two, is refused."""
    fake_mpi(monkeypatch, size=1)
    with pytest.raises(IPULogError, match="needs the 2 processes of the launch, MPI knows of 1"):
        validate(Net(sync_dist=True))


def test_processes_that_log_different_things(monkeypatch: pytest.MonkeyPatch) -> None:
    """What each process was about to log is in the error, not a mean of two different things."""
    fake_mpi(
        monkeypatch, size=2, others=[("validation_step in epoch 1: val_loss", [([1.0], None)])]
    )
    logged: List[Any] = []
    replay = SharedReplay("validation_step in epoch 0", logged.append, logged.append, None)
    replay.log("val_loss", torch.tensor(1.0), sync_dist=True)
    with pytest.raises(IPULogError, match=r"process 0: .* epoch 0(.|\n)*process 1: .* epoch 1"):
        replay.finish()
    assert not logged


@pytest.mark.parametrize(
    ("mine", "other", "options", "expected"),
    [
        (1.0, 4.0, {}, 2.5),
        (1, 4, {"reduce_fx": "mean"}, 2.5),
        (1, 4, {"reduce_fx": "sum"}, 5),
        (1.0, float("nan"), {"reduce_fx": max}, 1.0),
        (2.0, float("nan"), {"reduce_fx": torch.max}, float("nan")),
        (2.0, float("inf"), {"reduce_fx": "min"}, 2.0),
        ({"a": 1.0, "b": 2.0}, {"a": 3.0, "b": 6.0}, {}, {"a": 2.0, "b": 4.0}),
        (1.0, 4.0, {"sync_dist": False}, 1.0),
        (1.0, 4.0, {"rank_zero_only": True}, 1.0),
    ],
)
def test_a_value_over_two_processes(
    monkeypatch: pytest.MonkeyPatch, mine: Any, other: Any, options: Any, expected: Any
) -> None:
    """Each call's own `reduce_fx`, and Lightning's rule of which calls are synchronised."""
    numbers = list(other.values()) if isinstance(other, dict) else [other]
    fake_mpi(monkeypatch, size=2, others=[("now: key", [(numbers, None)])])
    logged: List[Any] = []
    replay = SharedReplay(
        "now", lambda name, value, **_: logged.append((name, value)), logged.append, None
    )
    replay.log("key", mine, **{"sync_dist": True, **options})
    replay.finish()
    [(name, value)] = logged
    assert name == "key"
    if isinstance(expected, dict):
        value = {key: float(item) for key, item in value.items()}
    else:
        value = float(value)
    assert value == pytest.approx(expected, nan_ok=True)


def test_a_mean_weighs_by_batch_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The value counts in the epoch's mean for the samples of all processes."""
    fake_mpi(monkeypatch, size=2, others=[("now: key", [([5.0], 6)])])
    logged: List[Any] = []
    replay = SharedReplay(
        "now",
        lambda name, value, **options: logged.append((float(value), options["batch_size"])),
        logged.append,
        None,
    )
    replay.log("key", torch.tensor(1.0), sync_dist=True, batch_size=2)
    replay.finish()
    assert logged == [(4.0, 8)]


@pytest.mark.parametrize("all_of_them", [True, False])
def test_a_decision(monkeypatch: pytest.MonkeyPatch, all_of_them: bool) -> None:
    """`reduce_boolean_decision` asks whether all agree, or whether any does."""
    fake_mpi(monkeypatch, size=2, others=[("a decision", False)])
    assert Processes.decide(torch.tensor(True), all=all_of_them) is not all_of_them
