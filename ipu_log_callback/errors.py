"""What goes wrong, in words.

One class per *reaction*: a caller who can do something different about two faults finds two
classes, everybody else catches `IPULogError`. Every text has the same shape, built by `report`: a
headline that stands alone in a truncated log, then one aligned row per question a reader asks next.
"""

import warnings
from typing import TYPE_CHECKING, Any, Iterable, Optional

import torch

if TYPE_CHECKING:
    from .record import CallSite

__all__ = [
    "CallbackSetupError",
    "IPULogError",
    "IPULogWarning",
    "KeySelectionError",
    "MissingExtraError",
    "MissingStepRecordError",
    "OutputModeError",
    "ProcessMismatchError",
    "SecondLossError",
    "StepCaptureError",
    "UnknownKeyError",
    "UnknownTensorError",
    "bytes_text",
    "counted",
    "describe_value",
    "names_text",
    "report",
    "shortened",
    "warn",
]

LIGHTNING_ISSUE = "Lightning issue 7965"


class IPULogError(RuntimeError):
    """Root of every error that this package raises."""


class KeySelectionError(IPULogError, ValueError):
    """An argument cannot be what the user meant.

    Raised by the constructor of `IPULogCallback`, for globs that match nothing in the strategy's
    setup, and by `doctor.check`.
    """


class CallbackSetupError(IPULogError):
    """Trainer, strategy and callback do not fit together. Raised in `setup`."""


class StepCaptureError(IPULogError):
    """The step's Python does something that cannot be carried across compilation.

    Raised while the step is captured, before PopTorch starts its long compilation.
    """


class SecondLossError(StepCaptureError):
    """A logged torch loss would be a second independent loss for PopTorch."""


class OutputModeError(IPULogError):
    """The output mode that the user insists on cannot give what a logged call needs."""


class ProcessMismatchError(IPULogError):
    """The processes of a launch do not fit together: their number, or what they log."""


class UnknownTensorError(IPULogError):
    """The compiled step has no tensor of a name that was asked for. Raised by the compilation."""


class UnknownKeyError(IPULogError, KeyError):
    """The history or the record of a run has nothing under a name that was asked for."""

    # `KeyError` would show the text quoted, its line ends escaped
    __str__ = RuntimeError.__str__


class MissingExtraError(IPULogError, ImportError):
    """Something needs a package that only an extra of this one installs.

    Args:
        call: What needs it, as a user types it.
        package: The package.
        extra: The extra that installs it.
        **rows: Rows of the message, before what to type.
    """

    def __init__(self, call: str, package: str, extra: str, **rows: str) -> None:
        super().__init__(
            report(
                f"`{call}` needs {package}, which is not installed",
                **rows,
                fix=f"pip install 'ipu-log-callback[{extra}]'",
            )
        )


class MissingStepRecordError(IPULogError):
    """A compiled step was executed whose Python this callback never saw."""


class IPULogWarning(UserWarning):
    """Category of every warning of this package."""


def report(headline: str, **rows: str) -> str:
    """Lay out one message: a headline that stands alone, then one aligned row per question.

    Args:
        headline: The call as the user typed it, the step, received versus expected.
        **rows: Row name to text, in the order given; an empty text leaves its row out.

    Example:
        >>> print(report("`self.log(1)` failed", where="net.py:3", fix="log a name"))
        `self.log(1)` failed
            where  net.py:3
            fix    log a name
    """
    shown = {name: text for name, text in rows.items() if text}
    width = max(map(len, shown), default=0)
    lines = [headline]
    for name, text in shown.items():
        first, *others = text.splitlines()
        lines.append(f"    {name:<{width}}  {first}")
        lines.extend(" " * (width + 6) + other for other in others)
    return "\n".join(lines)


def warn(message: str, site: "Optional[CallSite]" = None) -> None:
    """Give a warning of this package.

    Args:
        message: Its text.
        site: The user's line that it points at; the one that is running by default.
    """
    if site is None:
        from .call_site import call_site

        site = call_site()
    warnings.warn_explicit(message, IPULogWarning, site.file, site.line)


def describe_value(value: Any) -> str:
    """A value in a few characters: dtype and shape of a tensor, never its contents."""
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).replace('torch.', '')}{list(value.shape)}"
    return f"{type(value).__name__} {shortened(repr(value), 60)}"


def shortened(text: str, width: int) -> str:
    """A text, cut to `width` characters."""
    return text if len(text) <= width else text[: width - 1] + "…"


def names_text(names: Iterable[str], limit: int = 8, width: int = 60) -> str:
    """Quote names for a message: at most `limit` of them, each cut to `width` characters."""
    names = list(names)
    text = ", ".join(f"'{shortened(name, width)}'" for name in names[:limit])
    return text + (f" and {len(names) - limit} more" if len(names) > limit else "")


def counted(count: int, noun: str) -> str:
    """Say how many there are of something, e.g. `1 key` or `2 keys`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def bytes_text(count: Optional[int]) -> str:
    """Say a number of bytes as a person would, e.g. `64 B` or `3.8 MB`."""
    if count is None:
        return "unknown"
    size = float(count)
    for unit in ("B", "kB", "MB"):
        if size < 999.5:  # three digits of more are "1e+03"
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} GB"
