"""Histograms in the loggers that take them."""

import sys
import types
import warnings

import pytest
import torch

from ipu_log_callback import IPULogCallback, IPULogWarning, anchor

from .bench import Counts, Net, fit, fit_quietly, options_of, pl, trainer_of


class Counted(Net):
    """Counts its hidden values on the device."""

    def training_step(self, batch, batch_idx):
        anchor("counted", self.encoder(batch[0]), reduce="histogram", bins=4, range=(-1.0, 1.0))
        return self.loss(batch)


def run(logger, executions=2):
    """Train with histograms; returns the callback."""
    callback = IPULogCallback(gradients="head.weight", activations="encoder", histograms=True)
    counts = Counts(2, 1, 1)
    trainer = trainer_of([callback], options_of(counts), logger)
    fit_quietly(trainer, Counted(), counts, executions)
    return callback


def test_tensorboard_gets_histograms(tmp_path):
    """Raw tensors and counts made on the device, with every element in them, at every execution."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        accumulator = pytest.importorskip(
            "tensorboard.backend.event_processing.event_accumulator"
        ).EventAccumulator
        callback = run(pl.loggers.TensorBoardLogger(str(tmp_path), name="", version=""))
        events = accumulator(str(tmp_path), size_guidance={"histograms": 0})
        events.Reload()
    tags = events.Tags()["histograms"]
    assert set(tags) == {"grad/head.weight", "activation/encoder", "anchored/counted"}
    for tag, name in (("grad/head.weight", "grad/head.weight"), ("activation/encoder", "encoder")):
        found = events.Histograms(tag)
        values = callback.anchored[name]
        assert len(found) == 2
        assert found[-1].histogram_value.num == values.numel()
        assert found[-1].histogram_value.max == pytest.approx(float(values.max()))
    counts = events.Histograms("anchored/counted")[-1].histogram_value
    assert counts.num == int(callback.anchored["counted"].counts.sum())


def test_wandb_gets_histograms(monkeypatch, tmp_path):
    """The logger gets `wandb.Histogram`s, of elements and of counts, at the trainer's step."""

    class Histogram:
        def __init__(self, sequence=None, np_histogram=None):
            self.elements = len(sequence) if np_histogram is None else int(np_histogram[0].sum())

    logged = []

    class WandbLogger(pl.loggers.CSVLogger):
        def __init__(self):
            super().__init__(tmp_path)

        def log_metrics(self, metrics, step=None):
            logged.extend(
                (name, value.elements)
                for name, value in metrics.items()
                if isinstance(value, Histogram)
            )

        def save(self):
            pass

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(Histogram=Histogram))
    callback = run(WandbLogger(), executions=1)
    assert dict(logged) == {
        "grad/head.weight": callback.anchored["grad/head.weight"].numel(),
        "activation/encoder": callback.anchored["encoder"].numel(),
        "anchored/counted": int(callback.anchored["counted"].counts.sum()),
    }


def test_the_real_wandb_takes_them_offline(tmp_path, monkeypatch):
    """W&B in offline mode writes its run without a network."""
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logger = pl.loggers.WandbLogger(save_dir=str(tmp_path), offline=True)
        run(logger, executions=1)
        logger.experiment.finish()
    assert list(tmp_path.rglob("*.wandb"))


def test_a_trainer_without_such_a_logger_is_told():
    """Asked for histograms in vain: one warning, and the rest goes on."""
    with pytest.warns(IPULogWarning, match="found no logger that takes histograms") as caught:
        rows = fit(Net(), IPULogCallback(weights="head.bias", histograms=True))
    assert len(caught) == 1
    assert "weight/head.bias/norm" in rows[-1]


def test_values_that_are_not_finite_are_left_out(tmp_path):
    """A histogram of NaN is none; the `nonfinite` statistic has them."""

    class Broken(Net):
        def training_step(self, batch, batch_idx):
            anchor("nan", batch[0] * float("nan"))
            return self.loss(batch)

    callback = IPULogCallback(histograms=True, output_mode="all")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logger = pl.loggers.TensorBoardLogger(str(tmp_path), name="", version="")
        fit_quietly(trainer_of([callback], options_of(Counts()), logger), Broken())
    assert torch.isnan(callback.anchored["nan"]).all()
