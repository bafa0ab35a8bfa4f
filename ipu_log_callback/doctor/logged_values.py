"""Numbers that a step logs: which of them would change on a CPU, and what to type for those."""

import ast
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

from ipu_log_callback.doctor.source import UNKNOWN, Scope, segment
from ipu_log_callback.record import CallSite

__all__ = ["LoggedNumber", "logged_number"]

_OF_SHAPES = {"shape", "ndim", "size", "numel", "dim", "nelement"}
_ARITHMETIC = {"abs", "float", "int", "len", "max", "min", "round", "sum"}
_PLAIN = (bool, int, float, str)


class LoggedNumber(NamedTuple):
    """The value in the `self.log(name, value)` of a line.

    Attributes:
        is_fixed: Whether it is the same in every step of a CPU run: a constant, a size, an
            attribute that nothing changes.
        fix: What to type for it.
    """

    is_fixed: bool
    fix: str


def logged_number(
    scopes: Sequence[Scope], site: CallSite, changing: Dict[Tuple[int, str], str]
) -> LoggedNumber:
    """What is known of the number that a line logs.

    Args:
        scopes: The functions that ran.
        site: The line.
        changing: Attributes that hooks change, by identity of their owner and name.
    """
    for scope, values in _values_at(scopes, site):
        fixed = all(_is_fixed(value, scope, changing) for value in values)
        return LoggedNumber(fixed, _fix(scope, values))
    return LoggedNumber(False, _live("..."))


def _values_at(scopes: Sequence[Scope], site: CallSite) -> Iterator[Tuple[Scope, List[ast.expr]]]:
    for scope in scopes:
        for node in ast.walk(scope.node) if scope.file == site.file else ():
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            last = getattr(node, "end_lineno", None) or node.lineno
            if not node.lineno <= site.line <= last:
                continue
            values: List[ast.expr] = []
            if node.func.attr == "log":
                values = node.args[1:2] or [k.value for k in node.keywords if k.arg == "value"]
            elif node.func.attr == "log_dict" and node.args:
                given = node.args[0]
                values = list(given.values) if isinstance(given, ast.Dict) else [given]
            if values:
                yield scope, values


def _fix(scope: Scope, values: List[ast.expr]) -> str:
    if len(values) > 1:
        return _live("...")
    first = scope.code.co_varnames[:1]
    mine = {name for name in scope.code.co_varnames if name not in first}
    if any(isinstance(part, ast.Name) and part.id in mine for part in ast.walk(values[0])):
        return "log it in `on_train_batch_end` and the like, where it is computed every time"
    return _live(segment(scope.file, values[0]))


def _live(value: str) -> str:
    return f"live(lambda: {value}) in place of the value (from ipu_log_callback import live)"


def _is_fixed(
    node: Any, scope: Scope, changing: Dict[Tuple[int, str], str], depth: int = 0
) -> bool:
    """Whether an expression has one value for a whole run, as far as its text tells."""

    def fixed(*parts: Any) -> bool:
        return depth < 8 and all(_is_fixed(part, scope, changing, depth + 1) for part in parts)

    if isinstance(node, ast.Constant):
        return True
    if isinstance(node, ast.BinOp):
        return fixed(node.left, node.right)
    if isinstance(node, ast.UnaryOp):
        return fixed(node.operand)
    if isinstance(node, ast.Subscript):
        return fixed(node.value)
    if isinstance(node, ast.Call):
        if isinstance(node.func, ast.Attribute):
            return node.func.attr in _OF_SHAPES
        called = getattr(node.func, "id", "")
        return called == "len" or (called in _ARITHMETIC and fixed(*node.args))
    if isinstance(node, ast.Name):
        assigned = _assigned(scope.node, node.id)
        if node.id in scope.code.co_varnames:
            return assigned is not None and fixed(assigned)
        return isinstance(scope.resolve(node), _PLAIN)
    if isinstance(node, ast.Attribute):
        if node.attr in _OF_SHAPES:
            return True
        owner = scope.resolve(node.value)
        known = owner is not UNKNOWN and isinstance(scope.resolve(node), _PLAIN)
        return known and (id(owner), node.attr) not in changing
    return False


def _assigned(function: ast.AST, name: str) -> Optional[ast.expr]:
    """What a local name is assigned, if that happens once and in no other way."""
    nodes = list(ast.walk(function))
    stores = [n for n in nodes if isinstance(n, ast.Name) and n.id == name and _is_stored(n)]
    for node in nodes:
        if isinstance(node, ast.Assign) and node.targets == stores:
            return node.value
    return None


def _is_stored(node: ast.Name) -> bool:
    return isinstance(node.ctx, ast.Store)
