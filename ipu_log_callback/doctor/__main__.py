"""Diagnose the module that a training script trains, in place of training it.

``python -m ipu_log_callback.doctor [--json] SCRIPT [ARG ...]`` runs the script as ``python SCRIPT
[ARG ...]`` would, on the emulator, up to its first `Trainer.fit`, `validate`, `test` or `predict`.
There the module and one batch of each of its loaders are diagnosed, and the script ends.

Exit code: 1 if something would fail, 0 if nothing would; where the script ended before there was
anything to diagnose, 2, or the script's own code if that is not 0.
"""

import functools
import importlib
import importlib.util
import logging
import os
import sys
from contextlib import ExitStack, contextmanager, redirect_stdout
from typing import Any, Callable, Iterator, List, NoReturn, Optional, Tuple

from ipu_log_callback import emulator
from ipu_log_callback.doctor.diagnosis import Diagnosis, diagnose
from ipu_log_callback.doctor.loaders import METHODS, batches_of_call
from ipu_log_callback.doctor.module_state import swapped
from ipu_log_callback.emulator.__main__ import run_program

__all__ = ["main"]

_USAGE = """\
usage: python -m ipu_log_callback.doctor [--json] SCRIPT [ARG ...]
       python -m ipu_log_callback.doctor [--json] -m MODULE [ARG ...]

Runs the script up to its first Trainer.fit, validate, test or predict, on the emulator and without
training, and says what its steps will do differently once they are compiled for an IPU.

  --json  write the diagnosis as JSON to stdout; what the script writes goes to stderr

exit code: 1 if something would fail, 0 if nothing would; 2, or the script's own if that is not 0,
if the script ended before there was anything to diagnose"""

#: Arguments of `Trainer` that name hardware, in any version.
_OF_THE_MACHINE = frozenset(
    (
        "accelerator",
        "auto_select_gpus",
        "devices",
        "gpus",
        "ipus",
        "num_nodes",
        "num_processes",
        "plugins",
        "precision",
        "strategy",
        "sync_batchnorm",
        "tpu_cores",
    )
)
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
    with ExitStack() as stack:
        for namespace in _NAMESPACES:
            stack.enter_context(_intercepted(namespace))
        diagnosis, code = _run(program, by_module)
    if diagnosis is None:
        called = ", ".join(f"Trainer.{method}" for method in METHODS)
        sys.stderr.write(
            f"{program[0]} ended with {code} without a call of {called}: nothing to diagnose\n"
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


@contextmanager
def _intercepted(namespace: str) -> Iterator[None]:
    """Have the trainer of one of Lightning's two class trees diagnose instead of running."""
    trainer_class = _trainer_class(namespace)
    with ExitStack() as stack:
        for method in METHODS if trainer_class is not None else ():
            changed = _diagnosing(method, getattr(trainer_class, method))
            stack.enter_context(swapped(trainer_class, method, changed))
        if trainer_class is not None:
            changed = _on_any_machine(trainer_class.__init__)
            stack.enter_context(swapped(trainer_class, "__init__", changed))
        yield


def _trainer_class(namespace: str) -> Any:
    if importlib.util.find_spec(namespace.split(".", maxsplit=1)[0]) is None:
        return None
    try:
        return importlib.import_module(namespace).Trainer
    except ImportError:
        return None


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
            # which of the two depends on Lightning's version
            known = isinstance(error, ValueError) or "Misconfiguration" in type(error).__name__
            if not known or kept == kwargs:
                raise
            original(self, *args, **kept, accelerator="cpu", devices=1)

    return init


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
