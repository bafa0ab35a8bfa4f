"""A step record, described: what `callback.captured` keeps of it."""

import inspect
from typing import Any, List, Mapping, Set

import torch

from .capture import LOG_SIGNATURE
from .captured import CapturedCall, CapturedStep
from .errors import shortened
from .metrics import is_metric
from .record import (
    AnchoredCall,
    AnchoredOutput,
    Event,
    LiveValue,
    LoggedCall,
    LoggedCollection,
    LoggedResults,
    MetricCall,
    MetricResult,
    StepRecord,
    anchored_outputs,
)

__all__ = ["captured_step"]

_DEFAULTS = {name: parameter.default for name, parameter in LOG_SIGNATURE.parameters.items()}


def captured_step(record: StepRecord, results: int, outputs: int) -> CapturedStep:
    """Describe a compiled step.

    Args:
        record: What was captured.
        results: Results of each tensor that one execution brings to the host.
        outputs: Output tensors that anchoring added to the step.
    """
    seen: Set[int] = set()
    calls: List[CapturedCall] = []
    for event in record.events:
        fresh = {a.index: a for a in anchored_outputs(event) if a.index not in seen}
        seen.update(fresh)
        size = results * sum(output.bytes for output in fresh.values())
        calls.append(_described(event, size))
    dropped = tuple(drop.name for drop in record.dropped)
    return CapturedStep(record.owner, record.step, tuple(calls), dropped, results, outputs)


def _described(event: Event, size: int) -> CapturedCall:
    if isinstance(event, LoggedCall):
        value, options = _value_text(event.value), _options_text(event.options)
        return CapturedCall(event.name, "self.log", value, options, size, event.site)
    if isinstance(event, LoggedCollection):
        value, options = type(event.collection).__name__, _options_text(event.options)
        keys = ", ".join(event.names)
        return CapturedCall(keys, "self.log_dict", value, options, size, event.site)
    if isinstance(event, LoggedResults):
        options = _options_text(event.options)
        return CapturedCall("*", "self.log_dict", "a metric's dict", options, size, event.site)
    if isinstance(event, MetricCall):
        call = f"self.{event.path}" + ("" if event.method == "forward" else f".{event.method}")
        given = ", ".join(map(_value_text, (*event.args, *event.kwargs.values())))
        return CapturedCall(event.path, call, given, "", size, event.site)
    return _described_anchor(event, size)


def _described_anchor(event: AnchoredCall, size: int) -> CapturedCall:
    call = "anchor" if event.kind == "anchored" else event.kind
    value, options = _value_text(event.value), ", ".join(event.statistics)
    if len(event.statistics) > 1:
        value = f"{len(event.statistics)} of {_value_text(event.value[0])}"
    elif event.edges:
        options = f"{len(event.edges) - 1} bins"
    return CapturedCall(event.name, call, value, options, size, event.site)


def _value_text(value: Any) -> str:
    """What a call was given, without keeping it."""
    if isinstance(value, (AnchoredOutput, torch.Tensor)):
        frozen = "" if isinstance(value, AnchoredOutput) else " (frozen)"
        return f"{str(value.dtype).replace('torch.', '')} {list(value.shape)}{frozen}"
    if isinstance(value, LiveValue):
        return "live"
    if isinstance(value, MetricResult):
        return "a metric's value"
    if is_metric(value):
        return type(value).__name__
    if isinstance(value, Mapping):
        return f"dict of {len(value)}"
    if isinstance(value, (tuple, list)):
        return ", ".join(map(_value_text, value))
    return f"{shortened(repr(value), 30)} (frozen)"


def _options_text(options: Mapping[str, Any]) -> str:
    """The options as typed; Lightning's own `log_dict` hands on all that it has, defaults too."""

    def text(value: Any) -> str:
        if isinstance(value, AnchoredOutput):
            return "tensor"
        return getattr(value, "__name__", None) or shortened(repr(value), 30)

    def is_default(name: str, value: Any) -> bool:
        default = _DEFAULTS.get(name, inspect.Parameter.empty)
        return type(value) is type(default) and bool(value == default)

    return ", ".join(
        f"{name}={text(value)}" for name, value in options.items() if not is_default(name, value)
    )
