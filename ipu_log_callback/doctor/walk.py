"""Which lines of the user's code a step runs, and which of them change Python state.

What a step changes in Python (a counter, a list on the module, a global) changes once, when the
step is compiled. The state is compared after every line, so that the line is known whatever does
the change: `append`, `setattr`, a function elsewhere.
"""

import collections
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType, FrameType, FunctionType, MethodType
from typing import Any, Callable, Dict, Iterator, List, Optional, Set, Tuple

import torch

from ipu_log_callback import _compat
from ipu_log_callback.doctor.user_code import UserCode
from ipu_log_callback.emulator.device_tensor import is_device_tensor
from ipu_log_callback.metrics import is_metric
from ipu_log_callback.record import CallSite

__all__ = ["Change", "RunFunction", "Walk", "device_tensors_in"]

_CONTAINERS = (list, dict, set, collections.deque)
_NUMBERS = (bool, int, float, str, type(None))
_DEEPEST = 3
_LONGEST = 256
_ABSENT = object()
#: Kept by Lightning on the module while a step logs or a trainer is attached.
_LIGHTNINGS_OWN = {"_metric_attributes", "_trainer", "trainer", "_current_fx_name", "_fabric"}


@dataclass(frozen=True)
class RunFunction:
    """A function of the user's that a step ran.

    Attributes:
        code: Its code.
        module_globals: The globals that its names resolve to.
        owner: What its first argument was, if that is a module or a plain object.
    """

    code: CodeType
    module_globals: Dict[str, Any]
    owner: Any


@dataclass(frozen=True)
class Change:
    """One change of Python state while a step ran.

    Attributes:
        site: The line that made it.
        what: What was changed, as a user would write it, e.g. `self.outputs`.
        attribute: Its name.
        kind: `"grown"` for a container, `"set"` for an attribute or global, `"buffer"`.
        before: The value before, if there was one.
        now: The value now; of a container, what is new in it.
    """

    site: Optional[CallSite]
    what: str
    attribute: str
    kind: str
    before: Any
    now: Any


class Walk:
    """Watches the user's code while the block of `watching` runs.

    Args:
        module: The LightningModule.
        user_code: Tells the user's code from that of libraries.
    """

    def __init__(self, module: Any, user_code: UserCode) -> None:
        self._module = module
        self._user_code = user_code
        self.lines: Set[Tuple[str, int]] = set()
        self.functions: Dict[CodeType, RunFunction] = {}
        self.changes: List[Change] = []
        self.returned: Dict[CodeType, CallSite] = {}
        self._line: Optional[CallSite] = None
        self._state: Dict[Tuple[str, str], Any] = {}
        self._globals: Dict[str, Dict[str, Any]] = {}
        self._ignored = set(vars(_compat.lightning_class_of(module)())) | _LIGHTNINGS_OWN
        self._owners = list(self._state_owners())
        self._others: Optional[Callable[..., Any]] = None

    def holder_of(self, tensor: Any) -> str:
        """The attribute that holds a tensor, as a user would write it, or `""`."""
        for prefix, owner in self._owners:
            for name, value in getattr(owner, "__dict__", {}).items():
                if name not in self._ignored and _any_in(value, lambda item: item is tensor):
                    return f"{prefix}.{name}"
        return ""

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch what runs in the block."""
        self._state = self._look()
        before = sys.gettrace()
        # A debugger, or coverage's tracer in Python, goes on in the code that is not the user's.
        # One in C would take this one's place as soon as it is called.
        self._others = before if isinstance(before, (FunctionType, MethodType)) else None
        sys.settrace(self._on_call)
        try:
            yield
        finally:
            sys.settrace(before)
            self._compare()

    # -- lines ------------------------------------------------------------------------------
    # no cover: Python traces nothing that runs in a trace function

    def _on_call(  # pragma: no cover
        self, frame: FrameType, event: str, arg: Any
    ) -> Optional[Callable[..., Any]]:
        if not self._user_code.owns_frame(frame):
            return None if self._others is None else self._others(frame, event, arg)
        code = frame.f_code
        if code not in self.functions:
            self.functions[code] = RunFunction(code, frame.f_globals, _owner_of(frame))
            name = frame.f_globals.get("__name__", "")
            if name not in self._globals:
                self._globals[name] = frame.f_globals
                self._state.update(self._globals_of(name))
        return self._on_line

    def _on_line(  # pragma: no cover
        self, frame: FrameType, event: str, _: Any
    ) -> Callable[..., Any]:
        self._compare()
        if event == "line":
            self._line = CallSite(frame.f_code.co_filename, frame.f_lineno)
            self.lines.add((self._line.file, self._line.line))
        elif event == "return":
            self.returned[frame.f_code] = CallSite(frame.f_code.co_filename, frame.f_lineno)
            caller = self._user_code.caller_of(frame)
            if caller is not None:
                self._line = CallSite(caller.f_code.co_filename, caller.f_lineno)
        return self._on_line

    # -- state ------------------------------------------------------------------------------

    def _state_owners(self) -> Iterator[Tuple[str, Any]]:
        """Objects of the user's own classes: modules, and what they hold in attributes."""
        for path, module in self._module.named_modules():
            if is_metric(module) or not self._is_users(type(module)):
                continue
            prefix = f"self.{path}" if path else "self"
            yield prefix, module
            for name, value in list(vars(module).items()):
                if not isinstance(value, (type, torch.nn.Module)) and self._is_users(type(value)):
                    yield f"{prefix}.{name}", value

    def _is_users(self, cls: type) -> bool:
        step = next((v for v in vars(cls).values() if hasattr(v, "__code__")), None)
        return step is not None and self._user_code.owns(step.__code__, cls.__module__)

    def _look(self) -> Dict[Tuple[str, str], Any]:
        state: Dict[Tuple[str, str], Any] = {}
        for prefix, owner in self._owners:
            for name, value in getattr(owner, "__dict__", {}).items():
                if name not in self._ignored:
                    state[prefix, name] = _outline(value)
            if isinstance(owner, torch.nn.Module):
                for table in (owner._buffers, owner._parameters):
                    for name, tensor in table.items():
                        state[prefix, f"buffer:{name}"] = getattr(tensor, "_slot", tensor)
        for name in self._globals:
            state.update(self._globals_of(name))
        return state

    def _globals_of(self, module_name: str) -> Dict[Tuple[str, str], Any]:  # pragma: no cover
        return {
            ("", name): _outline(value)
            for name, value in self._globals[module_name].items()
            if isinstance(value, (*_CONTAINERS, *_NUMBERS)) and not name.startswith("_")
        }

    def _compare(self) -> None:
        before, now = self._state, self._look()
        for key, value in now.items():
            old = before.get(key, _ABSENT)
            if not _same(old, value):
                self._note(key, old, value)
        self._state = now

    def _note(self, key: Tuple[str, str], old: Any, new: Any) -> None:  # pragma: no cover
        prefix, name = key
        if name.startswith("buffer:"):
            name = name[len("buffer:") :]
            if old is not _ABSENT:
                self.changes.append(
                    Change(self._line, f"{prefix}.{name}", name, "buffer", None, None)
                )
            return
        what = f"{prefix}.{name}" if prefix else name
        if isinstance(new, _Outline) and isinstance(old, _Outline):
            added = [item for item in new if not any(item is other for other in old)]
            self.changes.append(Change(self._line, what, name, "grown", None, added))
            return
        shown = None if old is _ABSENT else old
        self.changes.append(Change(self._line, what, name, "set", shown, new))


def _owner_of(frame: FrameType) -> Any:  # pragma: no cover - called in a trace function
    """What a method is called on, or `None` for a function."""
    code = frame.f_code
    first = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
    if isinstance(first, torch.Tensor):
        return None
    is_method = isinstance(first, torch.nn.Module) or code.co_varnames[:1] == ("self",)
    return first if is_method else None


class _Outline(tuple):  # type: ignore[type-arg]  # of anything
    """What a container held."""


def _outline(value: Any, depth: int = 0) -> Any:
    """What of a value tells whether it changed: itself, or an outline of what a container holds."""
    if not isinstance(value, _CONTAINERS) or depth == _DEEPEST:
        return value
    if len(value) > _LONGEST:
        return _Outline((len(value),))
    items = value.values() if isinstance(value, dict) else value
    return _Outline(_outline(item, depth + 1) for item in list(items))


def _same(old: Any, new: Any) -> bool:
    if isinstance(old, _Outline) and isinstance(new, _Outline):
        return len(old) == len(new) and all(map(_same, old, new))
    return old is new or (_is_plain(old) and _is_plain(new) and old == new)


def _is_plain(value: Any) -> bool:
    """Whether a value can be compared as a number can: a shape, a device, a tuple of numbers."""
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return isinstance(value, (*_NUMBERS, torch.dtype, torch.device))


def device_tensors_in(value: Any) -> bool:
    """Whether a value holds a device tensor, at any depth that counts."""
    return _any_in(value, is_device_tensor)


def _any_in(value: Any, test: Callable[[Any], bool], depth: int = 0) -> bool:
    if test(value):
        return True
    if depth > _DEEPEST or not isinstance(value, (tuple, *_CONTAINERS)):
        return False
    items = value.values() if isinstance(value, dict) else value
    return any(_any_in(item, test, depth + 1) for item in list(items)[-_LONGEST:])
