"""`python -m ipu_log_callback.doctor train.py ARGS`."""

import json
import logging
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from ipu_log_callback import _compat
from ipu_log_callback.doctor.__main__ import main

SCRIPT = Path(__file__).with_name("script.py")
ROOT = Path(__file__).parents[2]
NAMESPACE = ["--lightning"] if _compat.NAMESPACE == "lightning" else []


@pytest.fixture
def doctor(monkeypatch, capsys):
    """Run the command in this process; returns exit code, stdout and stderr."""

    def run(*args):
        monkeypatch.setattr(sys, "argv", list(sys.argv))
        monkeypatch.setattr(sys, "path", list(sys.path))
        monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
        logger = logging.getLogger("poptorch::python")
        level = logger.level
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                code = main(list(map(str, args)))
        finally:
            logger.setLevel(level)
        return (code, *capsys.readouterr())

    return run


def test_the_module_is_a_command():
    """`python -m` runs the script as its own, and the exit code is the diagnosis'."""
    command = [sys.executable, "-W", "ignore", "-m", "ipu_log_callback.doctor", SCRIPT, *NAMESPACE]
    done = subprocess.run(
        [*map(str, command), "--loaders", "2"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 1
    assert "builds a key from a tensor" in done.stdout


def test_a_clean_script_gives_one_line_and_exit_code_zero(doctor):
    """One loader: the index never reaches the step, nothing is found, and nothing is trained."""
    code, out, err = doctor(SCRIPT, *NAMESPACE)
    assert code == 0
    assert out == (
        "Net: nothing found that behaves differently once compiled, "
        "in training_step, validation_step\n"
    )
    assert "arguments: 1" in err
    assert "trained" not in err


def test_arguments_reach_the_script_and_every_loader_is_tried(doctor):
    """With two loaders the step is told the index, and the key made of it is found."""
    code, out, err = doctor(SCRIPT, "--loaders", "2", *NAMESPACE)
    assert code == 1
    assert "arguments: 2" in err
    headline, where, *_ = out.splitlines()
    assert headline == (
        'fails: `self.log(f"val_{dataloader_idx}", loss)` in `Net.validation_step` '
        "builds a key from a tensor"
    )
    assert where.split() == ["where", "script.py:26"]


def test_json_is_the_only_thing_on_stdout(doctor):
    """`--json` gives findings as data; what the script prints goes to stderr."""
    code, out, err = doctor("--json", SCRIPT, "--stage", "test", "--clip", "0.5", *NAMESPACE)
    diagnosis = json.loads(out)
    assert code == diagnosis["exit_code"] == 1
    assert diagnosis["steps"] == ["test_step"]
    setting, printed = diagnosis["findings"]
    assert setting["headline"].startswith("`Trainer(gradient_clip_val=0.5)` is refused")
    assert (printed["kind"], printed["fails"]) == ("print", False)
    assert (printed["file"], printed["line"]) == (str(SCRIPT), 29)
    assert "arguments" in err


def test_a_trainer_for_absent_hardware_is_no_obstacle(doctor):
    """A script that still asks for a GPU is diagnosed on a machine without one."""
    code, out, _ = doctor(SCRIPT, "--accelerator", "gpu", *NAMESPACE)
    assert (code, out.count("\n")) == (0, 1)


def test_a_script_that_never_trains_is_said_so(doctor):
    """Exit code 2, and a sentence that says what was waited for."""
    code, out, err = doctor(SCRIPT, "--stage", "none", *NAMESPACE)
    assert (code, out) == (2, "")
    assert "without a call of Trainer.fit" in err


def test_a_script_that_fails_shows_its_own_traceback(doctor, tmp_path):
    """An error in the script before it trains is the script's, with its traceback."""
    script = tmp_path / "broken.py"
    script.write_text("def run():\n    return 1 / 0\n\n\nrun()\n", encoding="utf-8")
    code, out, err = doctor(script)
    assert (code, out) == (1, "")
    assert "ZeroDivisionError" in err
    assert f'File "{script}", line 2, in run' in err


@pytest.mark.parametrize(("args", "code"), [(["--help"], 0), ([], 2), (["absent.py"], 2)])
def test_usage(doctor, args, code):
    """Help is asked for and given on stdout; mistakes are told on stderr."""
    given, out, err = doctor(*args)
    assert given == code
    assert ("usage: python -m ipu_log_callback.doctor" in out) == (code == 0)
    assert bool(err.strip()) == (code == 2)


#: What a script is made of before it trains; `{step}` takes a batch apart.
NET = """
import torch
import {pl} as pl

ROWS = torch.utils.data.TensorDataset(torch.randn(12, 4), torch.randint(2, (12,)))


def loader():
    return torch.utils.data.DataLoader(ROWS, batch_size=2)


class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)

    def training_step(self, batch, batch_idx):
        x, y = {batch}
        assert x.shape == (2, 4)
        return torch.nn.functional.cross_entropy(self.layer(x), y)

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.training_step(batch, batch_idx)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Data(pl.LightningDataModule):
    def setup(self, stage=None):
        self.loader = loader

    def train_dataloader(self):
        return self.loader()


trainer = pl.Trainer(max_epochs=1, logger=False, enable_checkpointing=False)
"""
OWN_LOADER = """
class Own(Net):
    def prepare_data(self):
        self.prepared = True

    def train_dataloader(self):
        assert self.prepared
        return loader()

    def on_before_batch_transfer(self, batch, dataloader_idx):
        return {"pair": batch}

trainer.fit(Own())
"""
COMBINED_LOADER = """
try:
    from {pl}.utilities.combined_loader import CombinedLoader
except ImportError:  # Lightning 1
    from {pl}.trainer.supporters import CombinedLoader
trainer.fit(Net(), CombinedLoader([loader(), loader()]))
"""
POPTORCH_LOADER = """
import poptorch
options = poptorch.Options().deviceIterations(3)
trainer.fit(Net(), poptorch.DataLoader(options, ROWS, batch_size=2))
"""
ENDLESS_LOADER = """
class Endless(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(ROWS)

trainer.fit(Net(), torch.utils.data.DataLoader(Endless(), batch_size=2))
"""
CALLS = {
    "a loader": ("batch", "trainer.fit(Net(), loader())"),
    "several loaders by name": ("batch['b']", "trainer.fit(Net(), {'a': loader(), 'b': loader()})"),
    "several loaders in a list": ("batch[1]", "trainer.fit(Net(), [loader(), loader()])"),
    "a combined loader": ("batch[1]", COMBINED_LOADER),
    "a loader of unknown length": ("batch", ENDLESS_LOADER),
    "a loader of PopTorch's": ("batch", POPTORCH_LOADER),
    "a data module in the loader's place": ("batch", "trainer.fit(Net(), Data())"),
    "a data module": ("batch", "trainer.fit(Net(), datamodule=Data())"),
    "the module's own loader and transfer": ("batch['pair']", OWN_LOADER),
    "validation loaders by name": ("batch", "trainer.validate(Net(), {'a': loader()})"),
    "validation loaders": ("batch", "trainer.fit(Net(), loader(), [loader(), loader()])"),
}


@pytest.mark.parametrize("call", CALLS)
def test_steps_get_a_batch_as_the_trainer_would_give_it(doctor, call, tmp_path):
    """Whatever the loaders come in, the step runs with one micro-batch of them."""
    taken, source = CALLS[call]
    name = "lightning.pytorch" if NAMESPACE else "pytorch_lightning"
    script = tmp_path / "train.py"
    script.write_text((NET.replace("{batch}", taken) + source).replace("{pl}", name))
    code, out, _ = doctor(script)
    assert "nothing found" in out
    assert code == 0
