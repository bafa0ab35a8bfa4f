"""Points of failure: every hook of Lightning, and every point of this package's own path.

A point is where an exception is raised: at the first (or a later) call of a hook or function, or
when a line of this package is reached.
"""

import ast
import functools
import importlib
import inspect
import linecache
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, Iterator, List, Set, Tuple
from unittest import mock

import ipu_log_callback

from .runs import IPUStrategy, Net, pl

__all__ = ["Fuse", "LineFuse", "callback_hooks", "module_hooks", "own_points"]

KINDS = (ValueError, KeyboardInterrupt, SystemExit)
PACKAGE = Path(ipu_log_callback.__file__).parent


class Fuse:
    """Raises one exception, at its n-th call.

    Args:
        kind: Class of the exception.
        at: At which call, from 1.
    """

    def __init__(self, kind: type, at: int = 1) -> None:
        self.error = kind("raised on purpose")
        self._left = at
        self.blown = False

    def burn(self) -> None:
        """Count a call, and raise if it is the one."""
        self._left -= 1
        if self._left == 0:
            self.blown = True
            raise self.error


# -- hooks --------------------------------------------------------------------------------------


def callback_hooks() -> List[str]:
    """Names of Lightning's hooks for callbacks."""
    return sorted(
        name
        for name, value in vars(pl.Callback).items()
        # Lightning 1 has two that belong to the making of a trainer: there is no run yet
        if inspect.isfunction(value) and not name.startswith(("_", "on_init_"))
    )


def callback_with(hook: str, fuse: Fuse) -> Any:
    """A user's callback whose hook raises."""

    def raising_in_a_users_callback(self: Any, *args: Any, **kwargs: Any) -> Any:
        fuse.burn()
        return getattr(pl.Callback, hook)(self, *args, **kwargs)

    return type("UsersCallback", (pl.Callback,), {hook: raising_in_a_users_callback})()


def module_hooks() -> List[str]:
    """Names of Lightning's hooks for modules, steps included."""
    owners = (pl.core.hooks.ModelHooks, pl.core.hooks.DataHooks, pl.core.hooks.CheckpointHooks)
    names = {name for owner in owners for name in vars(owner)}
    others = ("step", "configure_", "optimizer_", "lr_scheduler_", "forward", "backward", "clip")
    names.update(
        name
        for name in {*vars(pl.LightningModule), *vars(Net)}
        if any(part in name for part in others)
    )
    return sorted(
        name
        for name in names
        if not name.startswith("_") and inspect.isfunction(getattr(Net, name, None))
    )


def module_with(hook: str, fuse: Fuse) -> Any:
    """A module whose hook raises."""

    def raising_in_a_users_module(self: Any, *args: Any, **kwargs: Any) -> Any:
        fuse.burn()
        return getattr(Net, hook)(self, *args, **kwargs)

    # Lightning decides by the signature what to pass
    raising_in_a_users_module.__signature__ = inspect.signature(getattr(Net, hook))  # type: ignore[attr-defined]
    return type("Net", (Net,), {hook: raising_in_a_users_module})()


# -- the callback's own path --------------------------------------------------------------------


@dataclass(frozen=True)
class Point:
    """A function of the path, raising before or after it did its work.

    Args:
        owner: The class or module that holds it, as `module:Class`.
        name: Its name.
        after: Whether its work is done when it raises.
        at: At which call.
    """

    owner: str
    name: str
    after: bool = False
    at: int = 1

    def __str__(self) -> str:
        when = "after" if self.after else "before"
        return f"{when} {self.owner.rpartition('.')[2]}.{self.name} #{self.at}"

    @contextmanager
    def armed(self, fuse: Fuse) -> Iterator[None]:
        """Have it raise while the block runs."""
        module, _, attribute = self.owner.partition(":")
        owner: Any = importlib.import_module(module)
        owner = getattr(owner, attribute) if attribute else owner
        plain = inspect.getattr_static(owner, self.name)

        @functools.wraps(plain)
        def raising_on_the_way(*args: Any, **kwargs: Any) -> Any:
            if not self.after:
                fuse.burn()
            result = plain(*args, **kwargs)
            if self.after:
                fuse.burn()
            return result

        with mock.patch.object(owner, self.name, raising_on_the_way):
            yield


def own_points() -> List[Point]:
    """The path of the issue: selection, capture, wire, compile, execution, unpack, replay."""
    package, emulated = "ipu_log_callback", "ipu_log_callback.emulator"
    path: List[Tuple[str, str, Tuple[int, ...]]] = [
        (f"{package}.selection:Selection", "selects", (1, 3)),
        (f"{package}.capture:Capture", "run", (1, 2)),
        (f"{package}.capture:Capture", "record_log", (1, 4)),
        (f"{package}.capture:Capture", "record_metric", (1, 2)),
        (f"{package}.capture:Capture", "finish", (1, 2)),
        (f"{package}.capture", "pack", (1, 2)),
        (f"{package}.wire:Wire", "unpack", (1, 2, 3)),
        (f"{package}.wire:Returned", "of", (1, 4)),
        (f"{package}.replay:Replay", "__init__", (1,)),
        (f"{package}.replay:Replay", "__call__", (1, 2, 3)),
        (f"{package}.replay:Replay", "_reduce", (1, 3)),
        (f"{package}.metric_replay:MetricReplay", "__call__", (1, 2)),
        (f"{package}.metric_replay", "_make", (1, 2, 5)),
        (f"{package}.run:Run", "begin", (1,)),
        (f"{package}.run:Run", "_setup_strategy", (1,)),
        (f"{package}.run:Run", "_executed", (1, 2)),
        (f"{package}.run:Run", "_compiled", (1, 2)),
        (f"{package}.run:Run", "_log", (1, 2, 5, 9)),
        (f"{package}.run:Run", "batch_over", (1, 3)),
        (f"{package}.run:Run", "tell", (1,)),
        (f"{package}.executors:ExecutorListener", "_prepare", (1, 2)),
        (f"{package}.executors:ExecutorListener", "received", (1, 3)),
        (f"{package}.inspection:Inspector", "prepare", (1,)),
        (f"{package}.inspection:Inspector", "declare", (1,)),
        (f"{package}.inspection:Inspector", "look", (1, 3)),
        (f"{package}.history:History", "begin", (1,)),
        (f"{package}.history:History", "keep_execution", (1, 3)),
        (f"{package}.callback:IPULogCallback", "setup", (1,)),
        (f"{package}.callback:IPULogCallback", "teardown", (1,)),
        (f"{package}.callback:IPULogCallback", "on_train_end", (1,)),
        (f"{package}.callback:IPULogCallback", "on_validation_end", (1,)),
        (f"{emulated}.executor:PoplarExecutor", "_compile", (1, 2)),
        (f"{emulated}.executor:PoplarExecutor", "destroy", (1, 2)),
        (f"{emulated}.executor", "compile_step", (1, 2)),
        (f"{emulated}.executable:Executable", "execute", (1, 2, 3)),
        (f"{emulated}.executable:Executable", "download", (1,)),
        (f"{emulated}.device_state:DeviceState", "attachToDevice", (1,)),
        (f"{emulated}.device_state:DeviceState", "detachFromDevice", (1,)),
        (f"{IPUStrategy.__module__}:IPUStrategy", "setup", (1,)),
        (f"{IPUStrategy.__module__}:IPUStrategy", "teardown", (1,)),
        (f"{IPUStrategy.__module__}:IPUStrategy", "training_step", (1, 2)),
        (f"{IPUStrategy.__module__}:IPUStrategy", "validation_step", (1, 3)),
        (f"{IPUStrategy.__module__}:IPUStrategy", "test_step", (1, 2)),
        (f"{pl.__name__}:LightningModule", "log", (1, 2, 7, 30)),
        (f"{pl.__name__}:LightningModule", "log_dict", (1, 2)),
        ("torchmetrics:MeanMetric", "compute", (1,)),
        ("torchmetrics:MaxMetric", "reset", (1,)),
    ]
    return [
        Point(owner, name, after, at)
        for owner, name, calls in path
        for at in calls
        for after in (False, True)
    ]


# -- lines --------------------------------------------------------------------------------------

Line = Tuple[str, int]

#: Functions that put things back: an interrupt in them is one in the handling of another.
_PUTTING_BACK = frozenset(
    ("abandon", "end", "_end", "on_exception", "show", "teardown", "stored_by", "_released")
)


class LineFuse(Fuse):
    """Raises when a line of this package is reached for the n-th time, as Ctrl-C does."""

    def __init__(self, kind: type, line: Line, at: int = 1) -> None:
        super().__init__(kind, at)
        self._line = line

    @contextmanager
    def armed(self) -> Iterator[None]:
        """Watch for the line while the block runs."""

        def raising_at_a_line(frame: Any, event: str, _: Any) -> Any:
            place = (frame.f_code.co_filename, frame.f_lineno)
            if event == "line" and place == self._line and not self.blown:
                self.burn()
            return raising_at_a_line if place[0] == self._line[0] else None

        before = sys.gettrace()
        sys.settrace(raising_at_a_line)
        try:
            yield
        finally:
            sys.settrace(before)


@contextmanager
def reached_lines(reached: Dict[Line, None]) -> Iterator[None]:
    """Note the lines of the callback's side of this package that the block executes."""

    def note(frame: Any, event: str, _: Any) -> Any:
        file = frame.f_code.co_filename
        if Path(file).parent != PACKAGE:
            return None
        if event == "line":
            reached[file, frame.f_lineno] = None
        return note

    before = sys.gettrace()
    sys.settrace(note)
    try:
        yield
    finally:
        sys.settrace(before)


def is_with(line: Line) -> bool:
    """Whether a `with` stands there: it is reached again when its block is left, undisturbed."""
    return linecache.getline(*line).lstrip().startswith("with ")


def interruptible(lines: Dict[Line, None]) -> List[Line]:
    """The lines where the program is on its way, not those that handle another exception."""
    handling: Dict[str, Set[int]] = {}
    for file in {file for file, _ in lines}:
        handling[file] = set()
        for node in ast.walk(ast.parse(Path(file).read_text())):
            parts: List[ast.stmt] = []
            if isinstance(node, ast.Try):
                handling[file].add(node.lineno)  # `try:` does nothing that could be interrupted
                parts = [*node.finalbody, *(line for h in node.handlers for line in h.body)]
            elif isinstance(node, ast.FunctionDef) and node.name in _PUTTING_BACK:
                parts = list(node.body)
            for part in parts:
                handling[file].update(range(part.lineno, (part.end_lineno or part.lineno) + 1))
    return [(file, line) for file, line in lines if line not in handling[file]]
