"""The source of what a step runs: names resolved to the objects that they stand for.

Knows where each function's syntax tree is, which object `self.net` or `np.random.rand` is, and
which other functions of the user's a function calls. Properties are never run.
"""

import ast
import builtins
import functools
import inspect
import linecache
import types
from dataclasses import dataclass, field
from typing import Any, Callable, Dict, Iterable, Iterator, List, Optional, Tuple

import torch

from ipu_log_callback.doctor.walk import RunFunction
from ipu_log_callback.record import CallSite

__all__ = [
    "UNKNOWN",
    "Scope",
    "attribute_of",
    "code_of",
    "definition_of",
    "function_node",
    "reachable",
    "scope_of",
    "scope_of_callable",
    "segment",
]

UNKNOWN = object()


@dataclass
class Scope:
    """One function of the user's, with what its names resolve to.

    Attributes:
        node: Its syntax tree.
        file: Its file.
        code: Its code.
        names: Global and enclosing names.
        owner: What its first argument is.
        aliases: Local names that stand for something resolvable.
    """

    node: Any
    file: str
    code: types.CodeType
    names: Dict[str, Any]
    owner: Any
    aliases: Dict[str, Any] = field(default_factory=dict)

    def resolve(self, expression: ast.AST) -> Any:
        """The object that an expression of names and attributes stands for, or `UNKNOWN`."""
        if isinstance(expression, ast.Name):
            return self._name(expression.id)
        if isinstance(expression, ast.Attribute):
            base = self.resolve(expression.value)
            return UNKNOWN if base is UNKNOWN else attribute_of(base, expression.attr)
        if isinstance(expression, ast.Constant):
            return expression.value
        return UNKNOWN

    def _name(self, name: str) -> Any:
        if name in self.aliases:
            return self.aliases[name]
        if name in self.code.co_varnames:
            first = self.code.co_varnames[0] if self.code.co_argcount else None
            return self.owner if name == first and self.owner is not None else UNKNOWN
        if name in self.names:
            return self.names[name]
        return getattr(builtins, name, UNKNOWN)

    def learn_aliases(self) -> None:
        """Note local names that are assigned once, from something resolvable."""
        assigned: Dict[str, List[ast.AST]] = {}
        for node in ast.walk(self.node):
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    if isinstance(target, ast.Name):
                        assigned.setdefault(target.id, []).append(node.value)
            elif isinstance(node, (ast.AugAssign, ast.For)) and isinstance(node.target, ast.Name):
                assigned.setdefault(node.target.id, []).extend([node, node])
        for name, values in assigned.items():
            found = self.resolve(values[0]) if len(values) == 1 else UNKNOWN
            if found is not UNKNOWN and not isinstance(found, (int, float, str, type(None))):
                self.aliases[name] = found

    def calls(self) -> Iterator["Scope"]:
        """The functions that this one calls by names that resolve."""
        for node in ast.walk(self.node):
            if isinstance(node, ast.Call):
                target = self.resolve(node.func)
                scope = None if target is UNKNOWN else scope_of_callable(target)
                if scope is not None:
                    yield scope


def attribute_of(base: Any, name: str) -> Any:
    """An attribute, found without running any of the object's code, or `UNKNOWN`."""
    if isinstance(base, torch.Tensor):
        return UNKNOWN
    if isinstance(base, torch.nn.Module):
        for table in (base._modules, base._buffers, base._parameters):
            if name in table:
                return table[name]
    own = getattr(base, "__dict__", {})
    if not isinstance(base, type) and name in own:
        return own[name]
    try:
        found = inspect.getattr_static(base, name)
    except AttributeError:
        return UNKNOWN
    if isinstance(found, (property, functools.cached_property)):
        return UNKNOWN
    if isinstance(found, (staticmethod, classmethod)):
        return found.__func__ if isinstance(found, staticmethod) else UNKNOWN
    if isinstance(found, types.FunctionType) and not isinstance(base, (type, types.ModuleType)):
        return types.MethodType(found, base)
    if isinstance(found, types.ClassMethodDescriptorType):
        return getattr(base, name)
    if isinstance(found, types.MemberDescriptorType):  # of `__slots__`
        return getattr(base, name, UNKNOWN)
    if isinstance(base, (types.ModuleType, type)) or not hasattr(type(found), "__get__"):
        return found
    return getattr(base, name, UNKNOWN) if inspect.isbuiltin(found) else _bound(base, name)


def _bound(base: Any, name: str) -> Any:
    # a method of an extension type, e.g. `list.append` or `Generator.random`: binding runs nothing
    found = getattr(type(base), name, None)
    return getattr(base, name, UNKNOWN) if inspect.ismethoddescriptor(found) else UNKNOWN


def scope_of_callable(target: Any) -> Optional[Scope]:
    """The scope of whatever runs when an object is called, if its source is to be had."""
    owner = None
    if isinstance(target, torch.nn.Module):
        target = types.MethodType(type(target).forward, target)
    if isinstance(target, functools.partial):
        target = target.func
    if isinstance(target, types.MethodType):
        owner, target = target.__self__, target.__func__
    target = inspect.unwrap(target) if callable(target) else target
    if not isinstance(target, types.FunctionType):
        return None
    names = dict(target.__globals__)
    names.update(inspect.getclosurevars(target).nonlocals)
    return scope_of(RunFunction(target.__code__, names, owner))


def scope_of(function: RunFunction) -> Optional[Scope]:
    """The scope of a function that ran, if its source is to be had."""
    node = function_node(function.code)
    if node is None:
        return None
    scope = Scope(
        node, function.code.co_filename, function.code, function.module_globals, function.owner
    )
    scope.learn_aliases()
    return scope


def reachable(start: Iterable[Scope], follows: Callable[[Scope], bool]) -> List[Scope]:
    """Functions, and those that they call by names that resolve, over any number of calls.

    Args:
        start: The functions to start with.
        follows: Whether a function counts.
    """
    scopes: Dict[types.CodeType, Scope] = {}
    waiting = list(start)
    while waiting:
        scope = waiting.pop()
        if scope.code not in scopes and follows(scope):
            scopes[scope.code] = scope
            waiting.extend(scope.calls())
    return list(scopes.values())


@functools.lru_cache(maxsize=None)
def _functions(lines: Tuple[str, ...]) -> Dict[Tuple[str, int], Any]:
    """Functions of a file by name and by every line that their code may give as the first."""
    found: Dict[Tuple[str, int], Any] = {}
    try:
        tree = ast.parse("".join(lines))
    except (SyntaxError, ValueError):
        return found
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            for line in [node.lineno, *(d.lineno for d in node.decorator_list)]:
                found[node.name, line] = node
    return found


def function_node(code: types.CodeType) -> Any:
    """The syntax tree of a function, or `None` (lambdas and comprehensions have none)."""
    lines = tuple(linecache.getlines(code.co_filename))
    return _functions(lines).get((code.co_name, code.co_firstlineno))


def code_of(function: Any) -> Optional[types.CodeType]:
    """The code of a function, whatever it is decorated with, or `None` for what has none."""
    return getattr(inspect.unwrap(function) if callable(function) else function, "__code__", None)


def definition_of(function: Any) -> Optional[CallSite]:
    """The first line of a function, or `None` for what has none."""
    code = code_of(function)
    return None if code is None else CallSite(code.co_filename, code.co_firstlineno)


def segment(file: str, node: Any) -> str:
    """The text of an expression, on one line."""
    # `ast.get_source_segment` splits the whole file anew for each expression
    lines = [line.encode() for line in linecache.getlines(file)[node.lineno - 1 : node.end_lineno]]
    if not lines:
        return ""
    lines[-1] = lines[-1][: node.end_col_offset]
    lines[0] = lines[0][node.col_offset :]
    return " ".join(b"".join(lines).decode(errors="replace").split())
