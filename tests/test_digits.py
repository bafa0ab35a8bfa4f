"""The main example, small, against its own CPU run."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ipu_log_callback import emulator

SCRIPT = Path(__file__).parents[1] / "examples" / "digits.py"


def _load():
    spec = importlib.util.spec_from_file_location("digits", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except ImportError:  # Lightning without an IPU strategy of its own
        return None
    return module


digits = _load()
pytestmark = pytest.mark.skipif(
    digits is None, reason="written for pytorch-lightning with its own IPU strategy"
)


@pytest.fixture
def run(tmp_path):
    """Run the example with these arguments and return what it measured."""
    mine = not emulator.is_installed()
    yield lambda *argv: digits.main([*argv, "--epochs=2", f"--log-dir={tmp_path}"])
    if mine:
        emulator.uninstall()


@pytest.mark.parametrize(
    ("iterations", "accumulation", "replicas", "micro_batch"),
    [(1, 1, 1, 32), (4, 1, 1, 16), (1, 4, 1, 16), (1, 1, 4, 16), (4, 2, 2, 8), (2, 3, 2, 10)],
)
def test_ipu_and_cpu_runs_log_the_same(run, iterations, accumulation, replicas, micro_batch):
    """Key by key, epoch by epoch; a step's value is the mean over its execution's micro-batches."""
    geometry = (
        f"--iterations={iterations}",
        f"--accumulation={accumulation}",
        f"--replicas={replicas}",
        f"--micro-batch={micro_batch}",
    )
    ipu, cpu = run(*geometry), run(*geometry, "--cpu")
    assert [set(epoch) for epoch in ipu.epochs] == [set(epoch) for epoch in cpu.epochs]
    for on_ipu, on_cpu in zip(ipu.epochs, cpu.epochs):
        assert on_ipu == pytest.approx(on_cpu, abs=1e-4)
    count = ipu.micro_batches
    assert count == iterations * accumulation * replicas
    executions = [cpu.steps[start : start + count] for start in range(0, len(cpu.steps), count)]
    assert ipu.steps == pytest.approx([sum(values) / count for values in executions], abs=1e-4)
    assert ipu.best_accuracy == pytest.approx(cpu.best_accuracy, abs=1e-4)


def test_every_promised_key_is_logged_in_every_epoch(run):
    """Plain tensors, a dict and a torchmetrics object all reach the CSV log."""
    keys = {"train_loss_epoch", "train_accuracy", "train_confidence", "val_loss", "val_accuracy"}
    assert [set(epoch) for epoch in run().epochs] == [keys, keys]


def test_logs_and_checkpoint_lie_where_the_example_says(run):
    """CSV, TensorBoard and the checkpoint that `val_accuracy` chose share a directory."""
    log_dir = run().log_dir
    for pattern in ("metrics.csv", "events.out.tfevents.*", "checkpoints/*.ckpt"):
        assert list(log_dir.glob(pattern)), pattern


def test_an_execution_larger_than_the_data_is_refused(run):
    """The message says how many samples an execution would hold."""
    with pytest.raises(SystemExit, match="would hold 32000 samples in training"):
        run("--iterations=1000")


def test_too_few_epochs_are_not_good_enough(run):
    """The example judges itself: two epochs do not reach the accuracy that it promises."""
    measured = run("--micro-batch=16")
    assert measured.best_accuracy < 0.95
    assert not measured.good_enough


def test_program_learns_digits_and_shows_what_it_logged(tmp_path):
    """Run as a newcomer does: above an accuracy of 0.95 it exits with 0, with the table printed."""
    epochs = 6
    run = subprocess.run(
        [sys.executable, SCRIPT, f"--epochs={epochs}", "--log-dir=runs"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(SCRIPT.parents[1])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    first_cells = [line.split()[0] for line in run.stdout.splitlines() if line.strip()]
    shown = first_cells[first_cells.index("epoch") :]
    assert shown[1 : epochs + 1] == [str(number) for number in range(epochs)]
    assert "runs/digits/version_0/metrics.csv" in run.stdout
