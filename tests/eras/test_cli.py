"""LightningCLI builds the callback from YAML, from the command line, and from a saved config."""

import importlib
import json
import sys
import warnings

import pytest
import torch
from lightning_in_use import IPUStrategy, pl
from parity.bench import FEATURES, MICRO_BATCH, Net

from ipu_log_callback import IPULogCallback

pytest.importorskip("jsonargparse", reason="LightningCLI needs it")

# What Lightning and jsonargparse have to say of each other differs from version to version.
pytestmark = pytest.mark.filterwarnings("ignore")


def lightning_cli():
    """`LightningCLI`, wherever this Lightning keeps it."""
    try:
        return importlib.import_module(f"{pl.__name__}.cli").LightningCLI
    except ImportError:  # before 1.7
        return importlib.import_module(f"{pl.__name__}.utilities.cli").LightningCLI


class Model(Net):
    """A module for the command line: its one argument has a default."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale

    def logs(self, stage, x, loss):
        self.log(f"{stage}_loss", loss * self.scale, on_epoch=True)
        self.log(f"{stage}_other", loss)


class Data(pl.LightningDataModule):
    """Four executions of two micro-batches."""

    def __init__(self, executions: int = 4) -> None:
        super().__init__()
        self.executions = executions

    def _loader(self):
        x = torch.ones(self.executions * 2 * MICRO_BATCH, FEATURES)
        return torch.utils.data.DataLoader(
            torch.utils.data.TensorDataset(x, x.sum(1)), batch_size=MICRO_BATCH
        )

    def train_dataloader(self):
        return self._loader()

    def val_dataloader(self):
        return self._loader()


STRATEGY = f"{IPUStrategy.__module__}.IPUStrategy"
TRAINER = f"""
trainer:
  accelerator: ipu
  devices: 1
  strategy:
    class_path: {STRATEGY}
    init_args:
      device_iterations: 2
  max_epochs: 1
  enable_progress_bar: false
  enable_model_summary: false
  enable_checkpointing: false
  logger: false
"""


@pytest.fixture
def cli(tmp_path, monkeypatch):
    """Run LightningCLI with a trainer's config file and these arguments; returns the CLI."""
    monkeypatch.chdir(tmp_path)

    def run(*args, callbacks=""):
        (tmp_path / "given.yaml").write_text(TRAINER + callbacks)
        monkeypatch.setattr(
            sys, "argv", ["train.py", "fit", "--config", "given.yaml", *map(str, args)]
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return lightning_cli()(Model, Data)

    return run


def callback_of(cli):
    """The callback among the trainer's callbacks."""
    (callback,) = (c for c in cli.trainer.callbacks if isinstance(c, IPULogCallback))
    return callback


IN_YAML = """
  callbacks:
    - class_path: ipu_log_callback.IPULogCallback
      init_args:
        keys: [train_loss, val_*]
        output_mode: keep
        history: true
        gradients: layer.*
        every_n_executions: 3
"""


def test_from_yaml(cli):
    """`class_path` and `init_args`: each argument arrives, the others keep their defaults."""
    made = cli(callbacks=IN_YAML)
    callback = callback_of(made)
    assert callback.keys == ["train_loss", "val_*"]
    assert callback.output_mode == "keep"
    assert callback.history.keep > 0
    assert callback.gradients == "layer.*"
    assert callback.every_n_executions == 3
    assert callback.enabled is True
    assert callback.cost_warning == 1_000_000
    assert {"train_loss_epoch", "val_loss"} <= set(made.trainer.callback_metrics)
    assert "train_other" not in made.trainer.callback_metrics


def test_from_yaml_with_one_key_as_a_string(cli):
    """`keys: "val_*"` is a glob, not a sequence of letters."""
    text = IN_YAML.replace("[train_loss, val_*]", '"val_*"')
    made = cli(callbacks=text)
    assert callback_of(made).keys == "val_*"
    assert {"val_loss", "val_other"} <= set(made.trainer.callback_metrics)


@pytest.mark.parametrize("form", ["by name", "whole"])
def test_from_the_command_line(form, cli, monkeypatch):
    """The class by its name with its arguments one by one, or all of it as one value."""
    given = {"keys": ["train_loss"], "output_mode": "all"}
    if form == "whole":
        whole = [{"class_path": "ipu_log_callback.IPULogCallback", "init_args": given}]
        made = cli(f"--trainer.callbacks={json.dumps(whole)}")
    else:
        name = "ipu_log_callback.IPULogCallback"
        registry = getattr(sys.modules[lightning_cli().__module__], "CALLBACK_REGISTRY", None)
        if registry is not None:
            # Lightning 1.6 knows registered classes only, by their last name
            monkeypatch.setitem(registry, "IPULogCallback", IPULogCallback)
            name = "IPULogCallback"
        made = cli(
            f"--trainer.callbacks={name}",
            "--trainer.callbacks.keys=train_loss",
            "--trainer.callbacks.output_mode=all",
        )
    callback = callback_of(made)
    assert callback.keys == (["train_loss"] if form == "whole" else "train_loss")
    assert callback.output_mode == "all"
    assert "train_loss_epoch" in made.trainer.callback_metrics
    assert "val_loss" not in made.trainer.callback_metrics


def test_a_saved_config_makes_the_same_callback(cli, tmp_path):
    """What LightningCLI writes beside the logs can be given to it again."""
    first = cli(callbacks=IN_YAML)
    saved = tmp_path / "config.yaml"
    saved.rename(tmp_path / "saved.yaml")
    again = cli("--config", tmp_path / "saved.yaml")
    assert repr(callback_of(again)) == repr(callback_of(first))
    for name, value in first.trainer.callback_metrics.items():
        if name.endswith("loss"):
            assert again.trainer.callback_metrics[name].shape == value.shape


def test_a_wrong_argument_is_refused_by_name(cli, capsys):
    """A misspelt argument ends in the parser's own error."""
    with pytest.raises(SystemExit):
        cli(callbacks=IN_YAML.replace("output_mode", "output_mood"))
    assert "output_mood" in capsys.readouterr().err
