"""What the source of a step tells that one run of it does not.

Values that freeze (`self.current_epoch`, `random.random()`, an attribute that a hook changes) look
like any other Python value while the step runs, and code behind a branch that was not taken does
not run at all.
"""

import ast
import datetime
import logging
import random
import time
import types
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Sequence, Set, Tuple

import torch

from ipu_log_callback.doctor.source import (
    UNKNOWN,
    Scope,
    attribute_of,
    code_of,
    function_node,
    segment,
)
from ipu_log_callback.doctor.walk import RunFunction
from ipu_log_callback.live import live
from ipu_log_callback.record import CallSite

__all__ = [
    "HostMethod",
    "Remark",
    "assigned_attributes",
    "changing_attributes",
    "host_methods",
    "mentions",
    "remarks",
]

#: Attributes of a LightningModule and its trainer that change while a run lasts.
_CHANGING = {
    "current_epoch",
    "global_step",
    "callback_metrics",
    "logged_metrics",
    "progress_bar_metrics",
    "sanity_checking",
    "is_last_batch",
    "estimated_stepping_batches_done",
}
_CHANGING_CALLS = {"optimizers", "lr_schedulers"}
_READS = {"item", "tolist", "cpu", "numpy"}
_GROWS = {"append", "extend", "insert", "add", "appendleft", "setdefault"}
_NUMPY_QUIET = {"seed", "get_state", "set_state", "default_rng"}
#: Hooks that run before the first step is compiled.
_BEFORE = {"on_fit_start", "on_load_checkpoint", "on_save_checkpoint", "on_sanity_check_start"}
_PLAIN = (bool, int, float, str, type(None))


class Remark(NamedTuple):
    """Something in the source: a kind of finding, what it is about, where, and whether it ran."""

    kind: str
    what: str
    site: CallSite
    reached: bool
    received: str = ""


def remarks(
    scope: Scope,
    module: Any,
    lines: Set[Tuple[str, int]],
    changing: Dict[Tuple[int, str], str],
) -> Iterator[Remark]:
    """What the source of one function tells.

    Args:
        scope: The function.
        module: The LightningModule.
        lines: The lines that ran.
        changing: Attributes that hooks change, by identity of their owner and name, with the
            hook's name.
    """
    yield from _Reader(scope, module, lines, changing).read()


class _Reader:
    def __init__(
        self,
        scope: Scope,
        module: Any,
        lines: Set[Tuple[str, int]],
        changing: Dict[Tuple[int, str], str],
    ) -> None:
        self._scope = scope
        self._module = module
        self._lines = lines
        self._changing = changing
        self._found: List[Remark] = []
        self._statement: Optional[ast.stmt] = None

    def read(self) -> List[Remark]:
        for statement in self._scope.node.body:
            self._visit(statement)
        return self._found

    # -- walking ----------------------------------------------------------------------------

    def _visit(self, node: ast.AST) -> None:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            return  # has a scope of its own when it is called
        if isinstance(node, ast.stmt):
            self._statement = node
        if isinstance(node, ast.Call):
            if self._scope.resolve(node.func) is live:
                return
            self._call(node)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            self._attribute(node)
        for child in ast.iter_child_nodes(node):
            self._visit(child)

    def _add(self, kind: str, what: str, node: Any, received: str = "") -> None:
        site = CallSite(self._scope.file, node.lineno)
        self._found.append(Remark(kind, what, site, self._ran(node), received))

    def _ran(self, node: Any) -> bool:
        last = getattr(node, "end_lineno", None) or node.lineno
        first = min(node.lineno, getattr(self._statement, "lineno", node.lineno))
        if isinstance(self._statement, (ast.If, ast.While, ast.For, ast.With, ast.Try)):
            first = node.lineno
        return any((self._scope.file, line) in self._lines for line in range(first, last + 1))

    # -- calls ------------------------------------------------------------------------------

    def _call(self, node: ast.Call) -> None:
        target = self._scope.resolve(node.func)
        text = segment(self._scope.file, node.func)
        if target is not UNKNOWN and self._draws(target, text, node):
            return
        ran = self._ran(node)
        name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        by_hand = not self._module.automatic_optimization
        if name in _CHANGING_CALLS and not by_hand and self._is_own(node.func):
            self._add("frozen-value", f"{text}()", node)
        elif self._writes(target) and not (ran and self._is_watched(target)):
            self._add("print", "", node)
        elif not ran:
            self._not_run(node, name, text)

    def _draws(self, target: Any, text: str, node: ast.Call) -> bool:
        owner = getattr(target, "__self__", None)
        name = getattr(target, "__name__", "")
        drawn = isinstance(owner, random.Random) and name != "seed"
        kind = type(owner)
        if kind.__module__.startswith("numpy.random") and name not in _NUMPY_QUIET:
            drawn = True
        if drawn:
            self._add("frozen-random", f"{text}()", node)
            return True
        is_time = getattr(target, "__module__", "") == time.__name__ and name != "sleep"
        is_date = owner in (datetime.datetime, datetime.date) and name in ("now", "today", "utcnow")
        if is_time or is_date:
            self._add("frozen-value", f"{text}()", node)
            return True
        return False

    def _writes(self, target: Any) -> bool:
        if target is UNKNOWN:
            return False
        owner = getattr(target, "__self__", None)
        name = getattr(target, "__name__", "")
        if isinstance(owner, logging.Logger):
            return name in ("debug", "info", "warning", "error", "critical", "log", "exception")
        if owner is self._module:
            return name == "print"
        if getattr(target, "__module__", "") == "logging":
            return name in ("debug", "info", "warning", "error", "critical", "log")
        return target is print or name in ("rank_zero_info", "rank_zero_warn", "pprint", "pp")

    @staticmethod
    def _is_watched(target: Any) -> bool:
        """Whether the run itself notices it."""
        return target is print or isinstance(getattr(target, "__self__", None), logging.Logger)

    def _not_run(self, node: ast.Call, name: str, text: str) -> None:
        """Calls in code that did not run: by name only, so never more than a remark."""
        if ".logger." in f"{text}." and self._is_own(node.func):
            self._add("logger-call", "", node)
        elif name in _READS and not node.args:
            kind = "value-read" if name == "item" else "host-move"
            self._add(kind, name, node)
        elif name in _GROWS and isinstance(node.func, ast.Attribute):
            owner = self._scope.resolve(node.func.value)
            if isinstance(owner, (list, set, dict)):
                self._add("side-effect", segment(self._scope.file, node.func.value), node)

    # -- attributes -------------------------------------------------------------------------

    def _is_own(self, expression: ast.AST) -> bool:
        """Whether an expression starts at the module: `self.trainer.logger`."""
        while isinstance(expression, (ast.Attribute, ast.Call)):
            expression = (
                expression.value if isinstance(expression, ast.Attribute) else expression.func
            )
        return self._scope.resolve(expression) is self._module

    def _attribute(self, node: ast.Attribute) -> None:
        text = segment(self._scope.file, node)
        if node.attr in _CHANGING and self._is_own(node):
            if not isinstance(vars(self._module).get(node.attr), torch.Tensor):
                self._add("frozen-value", text, node)
            return
        owner = self._scope.resolve(node.value)
        hook = self._changing.get((id(owner), node.attr))
        if hook is not None and isinstance(attribute_of(owner, node.attr), _PLAIN):
            self._add("frozen-value", text, node, f"`{hook}` changes it")


class HostMethod(NamedTuple):
    """A method of the user's that no step ran: its name, its code, its syntax tree."""

    name: str
    code: types.CodeType
    node: Any


def host_methods(module: Any, run: Dict[types.CodeType, RunFunction]) -> Iterator[HostMethod]:
    """Every method of the user's that no step ran."""
    for base in type(module).__mro__:
        if base.__module__.split(".")[0] in ("torch", "pytorch_lightning", "lightning", "builtins"):
            continue
        for name, member in vars(base).items():
            code = code_of(member)
            if code is not None and code not in run:
                node = function_node(code)
                if node is not None:
                    yield HostMethod(name, code, node)


def changing_attributes(
    module: Any, run: Dict[types.CodeType, RunFunction], callbacks: Sequence[Any]
) -> Dict[Tuple[int, str], str]:
    """Attributes that a hook which runs between executions assigns to.

    Args:
        module: The LightningModule.
        run: The functions that its steps ran.
        callbacks: The callbacks of its trainer.

    Returns:
        The hook's name, by identity of the attribute's owner (the module, or what it holds) and
        name.
    """
    found: Dict[Tuple[int, str], str] = {}
    hooks = [(name, name, node, 0) for name, _, node in host_methods(module, run)]
    for callback in callbacks:
        for name, _, node in host_methods(callback, run):
            hooks.append((name, f"{type(callback).__name__}.{name}", node, 2))
    for name, shown, node, position in hooks:
        arguments = node.args.args
        if not name.startswith("on_") or name in _BEFORE or len(arguments) <= position:
            continue
        for target in assigned_attributes(node):
            owner = _reached(target.value, arguments[position].arg, module)
            if owner is not UNKNOWN:
                found.setdefault((id(owner), target.attr), shown)
    return found


def assigned_attributes(function: ast.AST) -> Iterator[ast.Attribute]:
    """The attributes that a function assigns to."""
    for part in ast.walk(function):
        targets: List[Any] = []
        if isinstance(part, ast.Assign):
            targets = part.targets
        elif isinstance(part, (ast.AugAssign, ast.AnnAssign)):
            targets = [part.target]
        yield from (target for target in targets if isinstance(target, ast.Attribute))


def _reached(expression: ast.AST, name: str, module: Any) -> Any:
    """What an expression like `self.loss` stands for, given that `self` is the module."""
    if isinstance(expression, ast.Name):
        return module if expression.id == name else UNKNOWN
    if not isinstance(expression, ast.Attribute):
        return UNKNOWN
    base = _reached(expression.value, name, module)
    return UNKNOWN if base is UNKNOWN else attribute_of(base, expression.attr)


def mentions(module: Any, run: Dict[types.CodeType, RunFunction], attribute: str) -> bool:
    """Whether a method that no step ran, other than `__init__`, mentions an attribute."""
    return any(
        isinstance(part, ast.Attribute)
        and part.attr == attribute
        and isinstance(part.ctx, ast.Load)
        for name, _, node in host_methods(module, run)
        if name not in ("__init__", "setup")
        for part in ast.walk(node)
    )
