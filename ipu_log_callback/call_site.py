"""Where in the user's file something happens: calls, and the exceptions that end a step."""

import linecache
import sys
from types import TracebackType
from typing import Optional

from .record import CallSite

__all__ = ["call_site", "source_line", "user_frame_of"]

#: Packages whose frames stand between the user's code and this package.
_MACHINERY = frozenset(
    (
        "contextlib",
        "functools",
        "ipu_log_callback",
        "lightning",
        "lightning_fabric",
        "lightning_graphcore",
        "lightning_utilities",
        "poptorch",
        "pytorch_lightning",
        "torch",
        "torchmetrics",
    )
)


def _is_machinery(module_name: str) -> bool:
    return module_name.partition(".")[0] in _MACHINERY


def call_site() -> CallSite:
    """The innermost line of the user's code that led here."""
    frame = sys._getframe(1)
    while frame.f_back is not None and _is_machinery(frame.f_globals.get("__name__", "")):
        frame = frame.f_back
    return CallSite(frame.f_code.co_filename, frame.f_lineno)


def user_frame_of(traceback: Optional[TracebackType]) -> Optional[CallSite]:
    """The innermost line of the user's code in a traceback."""
    site = None
    while traceback is not None:
        frame = traceback.tb_frame
        if not _is_machinery(frame.f_globals.get("__name__", "")):
            site = CallSite(frame.f_code.co_filename, traceback.tb_lineno)
        traceback = traceback.tb_next
    return site


def source_line(site: CallSite) -> str:
    """The text of a line, or nothing where the source is not to be had."""
    return linecache.getline(site.file, site.line).strip()
