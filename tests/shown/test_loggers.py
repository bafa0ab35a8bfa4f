import csv
import os
from pathlib import Path

import pytest
import torch

from ipu_log_callback import IPULogCallback

from . import wandb_file
from .runs import fit, loader, pl, quiet

# What a logger was given: key to (step, value), in order.

LOGGERS = pl.loggers


class Kind:
    """One kind of logger: how it is made and how what it wrote is read back."""

    def __init__(self, folder):
        self.folder = str(folder)

    def make(self):
        raise NotImplementedError

    def read(self, logger):
        raise NotImplementedError


class Csv(Kind):
    def make(self):
        return LOGGERS.CSVLogger(self.folder)

    def read(self, logger):
        found = {}
        with (Path(logger.log_dir) / "metrics.csv").open(newline="") as file:
            for row in csv.DictReader(file):
                for key, text in row.items():
                    if text and key != "step":
                        found.setdefault(key, []).append((int(row["step"]), float(text)))
        return found


class TensorBoard(Kind):
    def make(self):
        pytest.importorskip("tensorboard", reason="TensorBoardLogger needs it")
        return LOGGERS.TensorBoardLogger(self.folder, default_hp_metric=False)

    def read(self, logger):
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        read = EventAccumulator(logger.log_dir)
        read.Reload()
        return {
            key: [(event.step, event.value) for event in read.Scalars(key)]
            for key in read.Tags()["scalars"]
        }


class WeightsAndBiases(Kind):
    def make(self):
        wandb = pytest.importorskip("wandb", reason="WandbLogger needs it")
        settings = wandb.Settings(silent=True, console="off")
        return LOGGERS.WandbLogger(save_dir=self.folder, offline=True, settings=settings)

    def read(self, logger):
        import wandb

        wandb.finish()
        (path,) = Path(self.folder).glob("wandb/offline-run-*/*.wandb")
        found = {}
        for row in wandb_file.rows(path):
            step = row.pop("trainer/global_step")
            for key, value in row.items():
                if not key.startswith("_"):
                    found.setdefault(key, []).append((step, value))
        return found


class MlFlow(Kind):
    def make(self):
        pytest.importorskip("mlflow", reason="MLFlowLogger needs it")
        # its file store is in maintenance mode and wants to be asked for
        os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
        return LOGGERS.MLFlowLogger(tracking_uri=f"file:{self.folder}")

    def read(self, logger):
        client, run = logger.experiment, logger.run_id
        return {
            key: [(m.step, m.value) for m in client.get_metric_history(run, key)]
            for key in client.get_run(run).data.metrics
        }


KINDS = [Csv, TensorBoard, WeightsAndBiases, MlFlow]


@pytest.fixture
def written(tmp_path):
    """What a run wrote into loggers of some kinds: `written(callback, kinds, ...)`."""

    def run(callback, kinds, **options):
        side = tmp_path / ("cpu" if callback is None else "ipu")
        with quiet():
            made = [kind(side / kind.__name__) for kind in kinds]
            loggers = [kind.make() for kind in made]
        ran = fit(callback, logger=loggers, **options)
        with quiet():
            ran.test(ran.lightning_module, loader(2, options.get("iterations", 1)), verbose=False)
            return [kind.read(logger) for kind, logger in zip(made, loggers)]

    return run


def assert_same(one, other):
    """The same keys at the same steps, with values equal to float tolerance."""
    assert sorted(one) == sorted(other)
    for key in one:
        assert [step for step, _ in one[key]] == [step for step, _ in other[key]], key
        values = [torch.tensor([value for _, value in rows[key]]) for rows in (one, other)]
        torch.testing.assert_close(*values, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_logger_gets_what_a_cpu_run_gives_it(kind, written):
    """Keys, steps and values that a logger wrote, read back, are those of the CPU run."""
    (ipu,), (cpu,) = written(IPULogCallback("*"), [kind]), written(None, [kind])
    assert {"train_loss_step", "train_loss_epoch", "val_accuracy", "test_loss"} <= set(ipu)
    assert_same(ipu, cpu)


@pytest.mark.parametrize("kind", [Csv, TensorBoard])
def test_an_execution_of_several_micro_batches_is_a_step(kind, written):
    """With accumulation, steps and epoch values are the CPU's; `on_step` is the execution's."""
    callback = IPULogCallback("*", history=True)
    (ipu,) = written(callback, [kind], accumulation=2)
    (cpu,) = written(None, [kind], accumulation=2)
    assert sorted(ipu) == sorted(cpu)
    for key in set(ipu) - {"train_loss_step", "train_peak"}:
        assert_same({key: ipu[key]}, {key: cpu[key]})
    single = [e for e in callback.history["train_loss"] if not e.is_epoch]
    assert [step for step, _ in ipu["train_loss_step"]] == [s for s, _ in cpu["train_loss_step"]]
    assert [v for _, v in ipu["train_loss_step"]] == pytest.approx([e.value for e in single])


def test_two_loggers_at_once_get_the_same(written):
    """Each of two loggers has everything."""
    first, second = written(IPULogCallback("*"), [Csv, TensorBoard])
    assert_same(first, second)


def test_no_logger_is_no_difference():
    """Without a logger, `callback_metrics` and EarlyStopping see the CPU run's values."""
    seen = []
    for callback in (IPULogCallback("*"), None):
        stop = pl.callbacks.EarlyStopping("val_loss", min_delta=10.0, patience=1)
        ran = fit(callback, logger=False, callbacks=[stop], max_epochs=5)
        seen.append((ran.current_epoch, {k: float(v) for k, v in ran.callback_metrics.items()}))
    (ipu_epochs, ipu), (cpu_epochs, cpu) = seen
    assert ipu_epochs == cpu_epochs == 2
    assert ipu == pytest.approx(cpu, rel=1e-4)


def test_log_every_n_steps_is_kept(written):
    """A logger is asked as often as the trainer says."""
    (ipu,) = written(IPULogCallback("*"), [Csv], log_every_n_steps=2)
    (cpu,) = written(None, [Csv], log_every_n_steps=2)
    assert_same(ipu, cpu)
    assert [step for step, _ in ipu["train_loss_step"]] == [1, 3, 5]
