import os
import subprocess
import sys
from pathlib import Path

import pytest

from ipu_log_callback import emulator
from ipu_log_callback.emulator import __main__ as runner
from ipu_log_callback.emulator import installation

ROOT = Path(__file__).parents[2]

# Prints what a program can see of how it was started, then ends as its first argument says.
PROGRAM = """
import pickle
import sys

class Local:
    pass

report = {
    "name": __name__,
    "file": __file__,
    "argv": sys.argv,
    "path": sys.path[0],
    "is main": sys.modules["__main__"].__dict__ is globals(),
    "pickles its classes": type(pickle.loads(pickle.dumps(Local()))) is Local,
}
print(report)

def fail():
    raise ValueError("wrong on purpose")

if sys.argv[1] == "exit":
    sys.exit(3)
if sys.argv[1] == "fail":
    fail()
"""


def _run(*arguments, cwd):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def started_in(tmp_path, monkeypatch):
    """This process as ``python -m`` would start it in an empty directory; undone afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    monkeypatch.setattr(installation, "_said", True)
    yield tmp_path
    emulator.uninstall()


@pytest.mark.parametrize(
    "arguments",
    [
        ("sub/program.py", "exit", "--lr", "1"),
        ("sub/program.py", "fail"),
        ("-m", "sub.program", "exit"),
        ("-m", "sub.program", "fail"),
        ("sub/broken.py", ""),
    ],
)
def test_a_program_runs_as_under_plain_python(started_in, capsys, arguments):
    """Arguments, paths, main module, exit code and traceback are the same."""
    (started_in / "sub").mkdir()
    (started_in / "sub" / "program.py").write_text(PROGRAM)
    (started_in / "sub" / "broken.py").write_text("x = = 1")
    plain = _run(*arguments, cwd=started_in)
    try:
        code = runner.main(list(arguments))
    except SystemExit as end:
        code = end.code
    emulated = capsys.readouterr()
    assert code == plain.returncode != 0
    assert emulated.out == plain.stdout
    shown, expected = emulated.err.splitlines(), plain.stderr.splitlines()
    if arguments[0] == "-m" and shown:
        # Plain Python shows the frames of its `runpy` after the first line.
        del expected[1 : 1 + len(expected) - len(shown)]
    assert shown == expected


def test_an_unchanged_program_finds_poptorch(tmp_path, started_in, capsys):
    """A program that imports PopTorch runs a model, and its exit code is the interpreter's."""
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, poptorch, torch\n"
        "model = poptorch.inferenceModel(torch.nn.Identity())\n"
        "sys.exit(int(model(torch.tensor([3.0])).item()))\n"
    )
    done = _run("-m", "ipu_log_callback.emulator", "script.py", cwd=tmp_path)
    assert done.returncode == 3
    assert "emulated on the CPU" in done.stderr
    script.write_text("import poptorch\nprint(poptorch.ipuHardwareIsAvailable())\n")
    assert runner.main([str(script)]) == 0
    assert capsys.readouterr().out == "True\n"


def test_a_missing_program_is_named(capsys):
    """As with Python itself the exit code is 2."""
    assert runner.main(["no_such_program.py"]) == 2
    assert "can't open file 'no_such_program.py'" in capsys.readouterr().err


@pytest.mark.parametrize(("arguments", "code"), [([], 2), (["-m"], 2), (["--help"], 0)])
def test_usage_is_shown(capsys, arguments, code):
    """Without a program, and when asked."""
    assert runner.main(arguments) == code
    shown = capsys.readouterr()
    assert "python -m ipu_log_callback.emulator SCRIPT" in (shown.err if code else shown.out)
