"""Run an unchanged IPU program on the emulator.

``python -m ipu_log_callback.emulator SCRIPT [ARG ...]`` does what ``python SCRIPT [ARG ...]`` does,
and ``python -m ipu_log_callback.emulator -m MODULE [ARG ...]`` what ``python -m MODULE [ARG ...]``
does, with the emulator installed: same `sys.argv`, `sys.path`, `__main__`, exit code and traceback.
"""

import os
import runpy
import sys
from importlib.machinery import SourceFileLoader
from types import ModuleType, TracebackType
from typing import List, Optional

from ipu_log_callback.emulator.installation import install

_USAGE = (
    "usage: python -m ipu_log_callback.emulator SCRIPT [ARG ...]\n"
    "       python -m ipu_log_callback.emulator -m MODULE [ARG ...]"
)


def main(argv: List[str]) -> int:
    """Run the program that `argv` names and return its exit code; `SystemExit` passes through."""
    by_module = argv[:1] == ["-m"]
    program = argv[1:] if by_module else argv
    if not program or (program[0].startswith("-") and not by_module):
        asked = program[:1] in (["-h"], ["--help"])
        (sys.stdout if asked else sys.stderr).write(f"{_USAGE}\n")
        return 0 if asked else 2
    if not by_module and not os.path.isfile(program[0]):
        sys.stderr.write(f"{sys.executable}: can't open file {program[0]!r}\n")
        return 2
    install()
    return run_program(program, by_module=by_module)


def run_program(program: List[str], *, by_module: bool) -> int:
    """Run a script or module as Python would and return its exit code.

    Args:
        program: The script's path or the module's name, then its arguments.
        by_module: Whether it is a module's name.
    """
    sys.argv = program
    try:
        if by_module:
            runpy.run_module(program[0], run_name="__main__", alter_sys=True)
        else:
            _run_script(program[0])
    except Exception as err:  # noqa: BLE001  # reported, then exit code 1
        err.__traceback__ = _without_runner(err.__traceback__)
        sys.excepthook(type(err), err, err.__traceback__)
        return 1
    return 0


def _run_script(script: str) -> None:
    # Not `runpy.run_path`: it would name the script by one string in `sys.argv` and `__file__`,
    # where Python has the path as typed in the one and (from 3.9 on) the absolute path in the
    # other.
    path = os.path.abspath(script) if sys.version_info >= (3, 9) else script
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.path.dirname(os.path.realpath(script))
    module = ModuleType("__main__")
    module.__file__ = path
    module.__loader__ = SourceFileLoader("__main__", path)
    module.__spec__ = None
    module.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = module
    with open(script, "rb") as source:
        code = compile(source.read(), path, "exec")
    exec(code, module.__dict__)  # noqa: S102  # running it is the point


def _without_runner(traceback: Optional[TracebackType]) -> Optional[TracebackType]:
    """Drop the frames of this module and of `runpy`, which plain Python would not show."""
    own = (__file__, runpy.__file__, "<frozen runpy>")
    while traceback is not None and traceback.tb_frame.f_code.co_filename in own:
        traceback = traceback.tb_next
    return traceback


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
