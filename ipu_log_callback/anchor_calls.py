"""What `anchor`, and a submodule whose output is anchored, leave in the step record."""

from typing import Any, Dict, Optional, Tuple

import torch

from .call_site import call_site
from .capture import Capture
from .errors import StepCaptureError, report
from .tensor_statistics import bin_edges, counts_of, statistics_of

__all__ = ["record_anchor", "reduced"]


def record_anchor(capture: Capture, name: str, kind: str, value: Any, how: Dict[str, Any]) -> None:
    """Record what `reduced` returned, to come back under a name.

    Raises:
        StepCaptureError: The step has an anchor of that name, or `tensors` has one.
    """
    site, first = call_site(), capture.anchored_at.get(name)
    if first is not None:
        raise StepCaptureError(
            report(
                f"`anchor('{name}', ...)` in `{capture.name}` received a name used before, "
                "expected one name for one tensor",
                where=f"{site}, first in {first}",
                why="the tensors would take each other's place in `callback.anchored`",
                fix=f"anchor('{name}_2', ...)",
            )
        )
    capture.record_anchor(name, kind, value, site, **how)


def reduced(
    tensor: torch.Tensor,
    reduce: Optional[str],
    statistics: Tuple[str, ...],
    bins: int,
    span: Optional[Tuple[float, float]],
) -> Tuple[Any, Dict[str, Any]]:
    """What is anchored of a tensor, and the fields of `AnchoredCall` that say how to read it."""
    tensor = tensor.detach()
    if reduce == "stats":
        numbers = statistics_of(tensor.reshape(1, -1), statistics).reshape(-1)
        return tuple(numbers.unbind(0)), {"statistics": tuple(statistics)}
    if reduce == "histogram" and span is not None:
        edges = bin_edges(bins, *span)
        return counts_of(tensor, edges), {"edges": edges}
    # cloned: the step may go on to change it in place
    return tensor.clone(), {}
