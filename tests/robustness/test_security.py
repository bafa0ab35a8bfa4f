"""Nothing is unpickled, evaluated or downloaded; what is shown is escaped; a runner only runs."""

import ast
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

import ipu_log_callback
from ipu_log_callback import IPULogCallback, IPULogWarning

from .runs import Net, loader, trainer

PACKAGE = Path(ipu_log_callback.__file__).parent
ROOT = PACKAGE.parent

#: Calls that give somebody else's data the power of code, and the one place for each.
DANGEROUS = {
    "eval": (),
    # to run the user's script; the emulator's own text; PopTorch's format for files of options
    "exec": ("emulator/__main__.py", "emulator/program.py", "emulator/options.py"),
    "__import__": (),
    "os.system": (),
    "os.popen": (),
    "subprocess.run": (),
    "subprocess.Popen": (),
    "request.urlopen": (),
    "pickle.load": (),
    "pickle.loads": ("emulator/persistence.py",),  # an executable that the user names
    "marshal.loads": (),
    "torch.load": (),
}

AUDITED = """
import json, sys, traceback, warnings
warnings.simplefilter("ignore")
sys.path[:0] = [{root!r}, {tests!r}]
from ipu_log_callback import emulator
emulator.install()
from tests.robustness.runs import IPULogCallback, Net, run, trainer
run(trainer([IPULogCallback("*")]), "fit", Net())  # what is imported on the way is imported now
found = []

def hook(event, args):
    if event.startswith(("pickle.", "socket.", "urllib.", "subprocess.", "os.system", "os.exec",
                         "shutil.", "ftplib.", "ctypes.dlopen", "os.remove", "os.rename")):
        frames = traceback.extract_stack()
        if any({package!r} in frame.filename for frame in frames):
            found.append([event, repr(args)[:200]])
    if event == "open" and isinstance(args[1], str) and set(args[1]) & set("wax+"):
        found.append([event, repr(args)[:200]])

sys.addaudithook(hook)
for program in ("fit", "validate", "test"):
    callback = IPULogCallback("*", history=True, gradients="*", weights="*", measure_cost=True)
    run(trainer([callback]), program, Net())
    repr(callback), str(callback.captured), str(callback.history), callback._repr_html_()
print("FOUND", json.dumps(found))
"""


def dotted(function):
    """A function as it is called: its name, or its owner's last name and its own."""
    if isinstance(function, ast.Attribute):
        owner = getattr(function.value, "attr", getattr(function.value, "id", ""))
        return f"{owner}.{function.attr}"
    return getattr(function, "id", "")


def test_the_source_has_no_dangerous_calls():
    """But for the runner, which executes the user's script, and the emulator's own files."""
    for path in PACKAGE.rglob("*.py"):
        place = path.relative_to(PACKAGE).as_posix()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                name = dotted(node.func)
                allowed = DANGEROUS.get(name)
                assert allowed is None or place.startswith(allowed), (place, node.lineno, name)


def test_a_run_opens_no_door():
    """No unpickling, connection, program or written file comes from a run with the callback."""
    script = AUDITED.format(
        root=str(ROOT), tests=str(ROOT / "tests"), package=str(PACKAGE) + os.sep
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("FOUND")]
    assert json.loads(line[6:]) == []


HOSTILE = "<img src=x onerror=alert(1)>&\"'"


def test_everything_shown_as_html_is_escaped():
    """Keys, class names, options and dropped keys are text, whatever they contain."""

    class Hostile(Net):
        def test_step(self, batch, batch_idx):
            self.log(HOSTILE, batch[0].mean(), metric_attribute=None)
            self.log("dropped" + HOSTILE, batch[0].mean())

    Hostile.__name__ = Hostile.__qualname__ = HOSTILE
    callback = IPULogCallback([HOSTILE], history=True)
    made = trainer([callback])
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        made.test(Hostile(), loader(2, 2), verbose=False)
    assert any(w.category is IPULogWarning and "dropped" in str(w.message) for w in told)
    shown = "".join(part._repr_html_() for part in (callback, callback.captured, callback.history))
    assert "<img" not in shown
    assert "&lt;img" in shown


@pytest.mark.parametrize(
    "arguments",
    [
        ["a b", "", "*", "$(touch made)", "`touch made`", "; touch made"],
        ["--help", "-m", "x", "-c", "1/0"],
    ],
)
def test_a_script_gets_its_arguments_as_given(tmp_path, arguments):
    """Nothing is expanded, interpreted or taken for an option of the runner."""
    script = tmp_path / "script with spaces.py"
    script.write_text("import json, sys; print(json.dumps(sys.argv[1:])); sys.exit(len(sys.argv))")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, "-m", "ipu_log_callback.emulator", script.name, *arguments],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert json.loads(done.stdout.splitlines()[-1]) == arguments
    assert done.returncode == len(arguments) + 1
    assert sorted(path.name for path in tmp_path.iterdir()) == [script.name]
