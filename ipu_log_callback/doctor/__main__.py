"""Diagnose the module that a training script trains, in place of training it.

``python -m ipu_log_callback.doctor [--json] SCRIPT [ARG ...]`` runs the script as ``python SCRIPT
[ARG ...]`` would, on the emulator, up to its first `Trainer.fit`, `validate`, `test` or `predict`.
There the module and one batch of each of its loaders are diagnosed, and the script ends.

Exit code: 1 if something would fail, 0 if nothing would, 2 if there was nothing to diagnose.
"""

import functools
import importlib
import importlib.util
import logging
import os
import sys
from contextlib import redirect_stdout
from typing import Any, Callable, List, NoReturn, Optional, Tuple

from ipu_log_callback import emulator
from ipu_log_callback.doctor.diagnosis import Diagnosis, diagnose
from ipu_log_callback.doctor.loaders import METHODS, batches_of_call
from ipu_log_callback.emulator.__main__ import run_program

__all__ = ["main"]

_USAGE = """\
usage: python -m ipu_log_callback.doctor [--json] SCRIPT [ARG ...]
       python -m ipu_log_callback.doctor [--json] -m MODULE [ARG ...]

Runs the script up to its first Trainer.fit, validate, test or predict, on the emulator and without
training, and says what its steps will do differently once they are compiled for an IPU.

  --json  write the diagnosis as JSON to stdout; what the script writes goes to stderr

exit code: 1 if something would fail, 0 if nothing would, 2 if there was nothing to diagnose"""

_NAMESPACES = ("pytorch_lightning", "lightning.pytorch")


class _Diagnosed(BaseException):
    """Ends the script: `except Exception` in it must not catch this."""

    def __init__(self, diagnosis: Diagnosis) -> None:
        super().__init__()
        self.diagnosis = diagnosis


def main(argv: List[str]) -> int:
    """Diagnose the program that `argv` names and return the exit code."""
    as_json = argv[:1] == ["--json"]
    program = argv[1:] if as_json else argv
    by_module = program[:1] == ["-m"]
    program = program[1:] if by_module else program
    if not program or program[0] in ("-h", "--help"):
        out = sys.stdout if program else sys.stderr
        out.write(f"{_USAGE}\n")
        return 0 if program else 2
    if not by_module and not os.path.isfile(program[0]):
        sys.stderr.write(f"{sys.executable}: can't open file {program[0]!r}\n")
        return 2
    logging.getLogger("poptorch::python").setLevel(logging.ERROR)
    emulator.install(force=True)
    for namespace in _NAMESPACES:
        _intercept(namespace)
    diagnosis, code = _run(program, by_module)
    if diagnosis is None:
        sys.stderr.write(
            f"{program[0]} ended with {code} and never called Trainer.{', Trainer.'.join(METHODS)}: "
            "nothing to diagnose\n"
        )
        return code or 2
    sys.stdout.write(f"{diagnosis.to_json() if as_json else diagnosis}\n")
    return diagnosis.exit_code


def _run(program: List[str], by_module: bool) -> Tuple[Optional[Diagnosis], int]:
    """Run the program to its first call of a trainer, or to its end."""
    try:
        with redirect_stdout(sys.stderr):
            return None, run_program(program, by_module=by_module)
    except _Diagnosed as stop:
        return stop.diagnosis, 0
    except SystemExit as stop:
        return None, stop.code if isinstance(stop.code, int) else int(stop.code is not None)


def _intercept(namespace: str) -> None:
    """Have the trainer of one of Lightning's two class trees diagnose instead of running."""
    if importlib.util.find_spec(namespace.split(".", maxsplit=1)[0]) is None:
        return
    try:
        trainer_class = importlib.import_module(namespace).Trainer
    except ImportError:
        return
    for method in METHODS:
        original = getattr(trainer_class, method)
        setattr(trainer_class, method, _diagnosing(method, original))
    trainer_class.__init__ = _on_any_machine(trainer_class.__init__)


def _diagnosing(method: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def diagnosing(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
        module, batches = batches_of_call(self, method, original, args, kwargs)
        raise _Diagnosed(diagnose(module, batches))

    return diagnosing


def _on_any_machine(original: Callable[..., None]) -> Callable[..., None]:
    """A trainer for an accelerator that is not here becomes one for the CPU: it never runs."""

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            original(self, *args, **kwargs)
        except Exception as error:
            kept = {k: v for k, v in kwargs.items() if k not in _OF_THE_MACHINE}
            if type(error).__name__ != "MisconfigurationException" or kept == kwargs:
                raise
            original(self, *args, **kept, accelerator="cpu", devices=1)

    return init


#: Arguments of `Trainer` that name hardware.
_OF_THE_MACHINE = (
    "accelerator devices num_nodes strategy precision plugins sync_batchnorm gpus tpu_cores ipus "
    "num_processes auto_select_gpus"
).split()

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
