"""Exceptions of PopTorch, with its hierarchy and its message shapes.

PopTorch has two shapes of message (PopTorch 3.4 `_impl.py` and
`poptorch_err/source/ExceptionHandling.cpp`):

* raised by its Python front end: ``'poptorch_py_error': <message>``
* raised by its C++ back end: ``In <file>:<line>: '<type>': <message>``, then ``Error raised in:``
  and a context

`python_error` and `backend_error` build them, the latter without line and context. What the
emulator cannot do is neither: it is a `NotEmulatedError`, which names the thing refused.
"""

from typing import Any, Tuple

__all__ = [
    "Error",
    "NotEmulatedError",
    "RecoverableError",
    "UnrecoverableError",
    "backend_error",
    "python_error",
]


class Error(Exception):
    """Any error that PopTorch raises on its own account.

    Attributes:
        message: The reason alone, without file and context.
        type: The part of the software that raised it, for instance ``"poptorch_cpp_error"``.
        location: The context in which it was raised; the emulator knows none and leaves ``""``.
    """

    message: str = ""
    type: str = ""
    location: str = ""

    # Users meet this class by its PopTorch name only, in tracebacks and in `except` clauses.
    __module__ = "poptorch.poptorch_core"


class RecoverableError(Error):
    """A hardware error after which a reset helps; the emulator never raises it."""

    recovery_action: str = ""
    __module__ = "poptorch.poptorch_core"


class UnrecoverableError(Error):
    """A hardware error that persists; the emulator never raises it."""

    __module__ = "poptorch.poptorch_core"


class NotEmulatedError(Error, NotImplementedError):
    """The emulator was asked for something that it cannot honour."""

    def __init__(self, what: str, why: str) -> None:
        """Name what is refused and say why.

        Args:
            what: What the user typed, as they typed it.
            why: Half a sentence: the reason, or what to do instead.
        """
        self.message = f"`{what}` is not emulated: {why}"
        self.type = "emulator"
        super().__init__(self.message)
        self.what = what
        self.why = why

    # Exceptions are rebuilt from `args` when they cross a process boundary.
    def __reduce__(self) -> Tuple[Any, ...]:
        return (type(self), (self.what, self.why))


def python_error(message: str) -> Error:
    """Return the error that PopTorch's Python front end raises for `message`."""
    error = Error(f"'poptorch_py_error': {message}")
    error.type = "poptorch_py_error"
    error.message = message
    return error


def backend_error(message: str, *, source: str, kind: str = "poptorch_cpp_error") -> Error:
    """Return the error that PopTorch's C++ back end raises for `message`.

    Args:
        message: The reason.
        source: File of the C++ source that raises it on hardware.
        kind: ``"poptorch_cpp_error"``, or the name of a PopART or Poplar error.
    """
    error = Error(f"In {source}: '{kind}': {message}")
    error.type = kind
    error.message = message
    return error
