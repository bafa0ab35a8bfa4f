"""Hooks that change weights on the host, where the change is lost.

While a model trains its weights live on the device. What a hook between executions writes to them
(a moving average, a clipping, `load_state_dict`) stays on the host, and the next copy from the
device overwrites it.
"""

import ast
import types
from typing import Any, Dict, Iterator, List, Sequence

from ipu_log_callback.doctor.findings import Finding, finding
from ipu_log_callback.doctor.source import Scope, scope_of
from ipu_log_callback.doctor.static import host_methods
from ipu_log_callback.doctor.user_code import UserCode
from ipu_log_callback.doctor.walk import RunFunction
from ipu_log_callback.record import CallSite

__all__ = ["weight_findings"]

#: Hooks that run between executions of a training.
_BETWEEN = {
    "on_train_batch_start",
    "on_train_batch_end",
    "on_before_zero_grad",
    "on_train_epoch_start",
    "on_train_epoch_end",
    "on_validation_epoch_start",
    "on_validation_epoch_end",
    "training_step_end",
    "training_epoch_end",
    "optimizer_step",
}
_LISTS = {"parameters", "named_parameters", "state_dict"}
_WRITES = {"copy_", "mul_", "add_", "sub_", "div_", "lerp_", "clamp_", "fill_", "zero_", "normal_"}
#: Calls that write to weights whatever is around them.
_ALWAYS = {"load_state_dict", "update_parameters"}


def weight_findings(
    module: Any, callbacks: Sequence[Any], user_code: UserCode
) -> Iterator[Finding]:
    """Findings about hooks that write to weights.

    Args:
        module: The LightningModule.
        callbacks: The callbacks of its trainer.
        user_code: Tells the user's code from that of libraries.
    """
    for owner in (module, *callbacks):
        for name, _ in host_methods(owner, {}):
            function = getattr(type(owner), name, None)
            if name not in _BETWEEN or not isinstance(function, types.FunctionType):
                continue
            start = RunFunction(function.__code__, function.__globals__, owner)
            for site in _writes(scope_of(start), user_code):
                yield finding("host-weights", type(owner).__name__, name, site)


def _writes(start: Any, user_code: UserCode) -> List[CallSite]:
    """Lines that write to weights in a function and in what it calls."""
    found: List[CallSite] = []
    seen: Dict[Any, Scope] = {}
    waiting = [start] if start is not None else []
    while waiting:
        scope = waiting.pop()
        if scope.code in seen or not user_code.owns(scope.code, scope.names.get("__name__", "")):
            continue
        seen[scope.code] = scope
        found.extend(CallSite(scope.file, line) for line in _lines(scope.node))
        waiting.extend(scope.calls())
    return found


def _lines(function: ast.AST) -> List[int]:
    """The first line of a function that writes to weights, if one does."""
    nodes: List[Any] = list(ast.walk(function))
    lists = not _LISTS.isdisjoint(n.func.attr for n in nodes if _is_method_call(n))
    writes = _ALWAYS | (_WRITES if lists else set())
    lines = [node.lineno for node in nodes if _is_method_call(node) and node.func.attr in writes]
    for node in nodes if lists else ():
        targets = node.targets if isinstance(node, ast.Assign) else []
        lines.extend(node.lineno for t in targets if getattr(t, "attr", "") == "data")
    return sorted(lines)[:1]


def _is_method_call(node: Any) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
