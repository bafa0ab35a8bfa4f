"""Which capture is under way in this thread: what `anchor`, `live` and `self.log` ask first."""

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Iterator, Optional

if TYPE_CHECKING:
    from .capture import Capture

__all__ = ["current_capture", "made_current"]

_THREAD = threading.local()


def current_capture() -> "Optional[Capture]":
    """The capture that is under way in this thread, if any."""
    return getattr(_THREAD, "capture", None)


@contextmanager
def made_current(capture: "Optional[Capture]") -> Iterator[None]:
    """Let a capture be the current one while the block runs; `None` for no capture."""
    before = current_capture()
    try:
        _THREAD.capture = capture
        yield
    finally:
        _THREAD.capture = before
