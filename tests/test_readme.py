"""The README's promises that can be run."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
README = (REPOSITORY / "README.md").read_text(encoding="utf-8")


def _has_built_in_strategy() -> bool:
    try:
        from pytorch_lightning.strategies import IPUStrategy  # noqa: F401  # only looked for
    except ImportError:
        return False
    return True


@pytest.mark.skipif(
    not _has_built_in_strategy(), reason="written for pytorch-lightning with its own IPU strategy"
)
def test_first_script_runs_as_it_stands_and_logs_what_it_says(tmp_path):
    """The program under "First script" can be pasted into a file and run."""
    section = README.split("## First script")[1].split("\n## ")[0]
    script = re.search(r"```python\n(.*?)```", section, re.DOTALL).group(1)
    (tmp_path / "first.py").write_text(script)
    run = subprocess.run(
        [sys.executable, "first.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    promised = re.search(r"callback_metrics\)  # (.*)", script).group(1).split(", ")
    assert sorted(re.findall(r"'(\w+)': tensor", run.stdout)) == sorted(promised)


def test_every_row_of_the_matrix_is_in_the_version_table():
    """The README's version table and the rows of `make matrix` are the same."""
    rows = {path.stem for path in (REPOSITORY / "requirements").glob("*.txt")}
    assert set(re.findall(r"`ROWS=([\w.-]+)`", README)) == rows


def test_every_extra_is_explained():
    """The README's table of extras has each extra of the package, and no other."""
    project = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
    section = project.split("[project.optional-dependencies]")[1].split("\n[")[0]
    extras = set(re.findall(r"^([\w-]+) = \[", section, re.MULTILINE))
    table = README.split("| extra |")[1].split("\n\n")[0]
    cells = re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
    assert set(re.findall(r"`([\w-]+)`", " ".join(cells))) == extras
