"""Hooks that change weights on the host, where the change is lost.

While a model trains its weights live on the device. What a hook between executions writes to them
(a moving average, a clipping, `load_state_dict`) stays on the host, and the next copy from the
device overwrites it.
"""

import ast
from typing import Any, Iterator, List, Optional, Sequence

from ipu_log_callback.doctor.findings import Finding, finding
from ipu_log_callback.doctor.source import Scope, attribute_of, reachable, scope_of_callable
from ipu_log_callback.doctor.static import assigned_attributes, host_methods
from ipu_log_callback.doctor.user_code import UserCode
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
        own = {method.name for method in host_methods(owner, {})}
        for name in sorted(own & _BETWEEN):
            for site in _writes(attribute_of(owner, name), user_code):
                yield finding("host-weights", type(owner).__name__, name, site)


def _writes(method: Any, user_code: UserCode) -> Iterator[CallSite]:
    """Lines that write to weights in a method and in what it calls, one of each function."""

    def is_users(scope: Scope) -> bool:
        return user_code.owns(scope.code, scope.names.get("__name__", ""))

    start = scope_of_callable(method)
    for scope in reachable(() if start is None else (start,), is_users):
        line = _first_write(scope.node)
        if line is not None:
            yield CallSite(scope.file, line)


def _first_write(function: ast.AST) -> Optional[int]:
    """The first line of a function that writes to weights, if one does."""
    calls: List[Any] = [node for node in ast.walk(function) if _is_method_call(node)]
    lists = any(call.func.attr in _LISTS for call in calls)
    writes = _ALWAYS | (_WRITES if lists else set())
    lines = [call.lineno for call in calls if call.func.attr in writes]
    if lists:
        lines += [made.lineno for made in assigned_attributes(function) if made.attr == "data"]
    return min(lines, default=None)


def _is_method_call(node: Any) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
