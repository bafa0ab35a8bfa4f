"""PopTorch's logger: name, levels and line format (PopTorch 3.4 `_logging.py`)."""

import logging
import os
import sys
import time
from typing import Union

__all__ = ["logger", "setLogLevel"]

logger = logging.getLogger("poptorch::python")

_LEVELS = {
    "TRACE": (0, logging.DEBUG),
    "TRACE_ALL": (0, logging.DEBUG),
    "DEBUG": (1, logging.DEBUG),
    "DEBUG_IR": (1, logging.DEBUG),
    "INFO": (2, logging.INFO),
    "WARN": (3, logging.WARNING),
    "ERR": (4, logging.ERROR),
    "OFF": (6, logging.CRITICAL),
}
_PUBLIC_LEVELS = ("DEBUG", "ERR", "INFO", "OFF", "TRACE", "WARN")


def setLogLevel(level: Union[str, int]) -> None:
    """Choose which of PopTorch's own messages are printed.

    Args:
        level: ``"TRACE"``, ``"DEBUG"``, ``"INFO"``, ``"WARN"``, ``"ERR"`` or ``"OFF"``; an integer
            is the older form.

    Raises:
        ValueError: If there is no such level.
    """
    if isinstance(level, int):
        names = [name for name, (number, _) in _LEVELS.items() if number == level]
        if not names:
            msg = "Invalid log level integer"
            raise ValueError(msg)
        level = names[0]
    if level not in _LEVELS:
        known = ", ".join(_PUBLIC_LEVELS[:-1]) + " and " + _PUBLIC_LEVELS[-1]
        msg = f"Unknown log level: {level}. Valid values are {known}"
        raise ValueError(msg)
    logger.setLevel(_LEVELS[level][1])


class _LineFormatter(logging.Formatter):
    """``[12:00:00.123] [poptorch::python] [warning] text``, coloured as a whole on a terminal."""

    _COLOURS = {
        logging.DEBUG: "\033[36m",
        logging.INFO: "\033[0m",
        logging.WARNING: "\033[1;33m",
        logging.ERROR: "\033[1;31m",
        logging.CRITICAL: "\033[1;31m",
    }

    def __init__(self, coloured: bool) -> None:
        super().__init__("[%(asctime)s] [%(name)s] [%(lowerlevel)s] %(message)s")
        self._coloured = coloured

    def formatTime(self, record: logging.LogRecord, datefmt: object = None) -> str:
        del datefmt
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        return f"{clock}.{int(record.msecs):03d}"

    def format(self, record: logging.LogRecord) -> str:
        record.lowerlevel = record.levelname.lower()
        line = super().format(record)
        if self._coloured:
            line = f"{self._COLOURS.get(record.levelno, '')}{line}\033[0m"
        return line


class _CurrentStderr(logging.StreamHandler):  # type: ignore[type-arg]  # generic only for checkers
    """Write to whatever `sys.stderr` is at that moment, so that redirections hold."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def _attach_console() -> None:
    handler = _CurrentStderr()
    on_terminal = bool(sys.stdout and sys.stdout.isatty() and sys.stderr and sys.stderr.isatty())
    handler.setFormatter(_LineFormatter(coloured=on_terminal))
    logger.addHandler(handler)
    setLogLevel(os.environ.get("POPTORCH_LOG_LEVEL", "WARN"))


_attach_console()
