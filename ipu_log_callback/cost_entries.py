"""The price of what joins a compiled step's outputs, and of the output mode that it needs."""

from typing import Any, Dict, Iterator, List

import torch

from .cost import CostEntry
from .geometry import Geometry
from .record import (
    AnchoredCall,
    AnchoredOutput,
    Event,
    LoggedCall,
    StepRecord,
    anchored_outputs,
)
from .wire import Wire

__all__ = ["anchored_entries", "dtype_text", "own_output_entry"]


def dtype_text(dtype: torch.dtype) -> str:
    """A dtype as the device has it."""
    on_device = {torch.int64: torch.int32, torch.float64: torch.float32}
    return str(on_device.get(dtype, dtype)).replace("torch.", "")


def anchored_entries(record: StepRecord, wire: Wire, results: int) -> List[CostEntry]:
    """The price of what joined a step's own outputs."""
    names: Dict[int, List[str]] = {}
    for event in record.events:
        for output, name in zip(anchored_outputs(event), _names_of(event)):
            if name not in names.setdefault(output.index, []):
                names[output.index].append(name)
    whole = {output.index for output in wire.whole}
    return [
        CostEntry(
            record.step,
            ", ".join(names[output.index]),
            output.shape,
            dtype_text(output.dtype),
            results * output.bytes,
            int(output.index in whole),
        )
        for output in record.anchored
    ]


def own_output_entry(record: StepRecord, wire: Wire, own: Geometry, fetched: Geometry) -> Any:
    """The price of getting every micro-batch of the step's own outputs, if that was not asked for.

    Returns:
        A `CostEntry`, or `None`.
    """
    more = (fetched.results - own.results) * wire.own_bytes
    if more <= 0:
        return None
    name = f"own outputs, {fetched.output_mode} instead of {own.output_mode}"
    return CostEntry(record.step, name, None, "", more, 0)


def _names_of(event: Event) -> Iterator[str]:
    """A name for each anchored output of an event, in their order."""
    name = event.name if isinstance(event, (AnchoredCall, LoggedCall)) else _path(event)
    if isinstance(event, AnchoredCall) and event.statistics:
        yield from (f"{name}/{statistic}" for statistic in event.statistics)
    outputs: List[AnchoredOutput] = list(anchored_outputs(event))
    yield from [name] * len(outputs)


def _path(event: Any) -> str:
    return str(getattr(event, "path", type(event).__name__))
