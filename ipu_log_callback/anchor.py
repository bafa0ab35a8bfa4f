"""Tensors of a step that the user wants to see."""

from typing import TYPE_CHECKING, Any, Optional, Tuple
from weakref import WeakValueDictionary

import torch

from .current import current_capture
from .errors import StepCaptureError, describe_value, report
from .tensor_statistics import STATISTICS, histogram_of

if TYPE_CHECKING:
    from .callback import IPULogCallback

__all__ = ["anchor", "stored_by"]

#: Callbacks in a run, by the identity of their trainer: where values of eager steps are stored.
_CALLBACKS: "WeakValueDictionary[int, IPULogCallback]" = WeakValueDictionary()


def anchor(
    name: str,
    tensor: torch.Tensor,
    *,
    reduce: Optional[str] = None,
    bins: int = 32,
    range: Optional[Tuple[float, float]] = None,  # noqa: A002 - torch's and numpy's name for it
) -> torch.Tensor:
    """Make a tensor of the step come back, detached, in `IPULogCallback.anchored[name]`.

    Call it inside a step. In a compiled step every execution brings the tensor of each micro-batch
    to the host, as `[results, *tensor.shape]` in the order `[iterations, accumulation, replicas]`,
    replicas innermost; all micro-batches are results under `poptorch.OutputMode.All`, which
    `IPULogCallback` sets as soon as anything is selected there (`output_mode="all"` sets it in any
    case). When the step returns a dict, other callbacks find it in `outputs` as well, where its
    name is free. Anywhere else the value is simply stored, as it is now.

    Args:
        name: Where to store it. One name for one tensor in a step.
        tensor: Anything that the step computes. In training no result of a torch loss function
            other than the step's own loss: PopTorch would take it for a second loss.
        reduce: What travels instead of the tensor. `"stats"`: norm, mean, standard deviation,
            minimum, maximum, largest magnitude, and the fraction of NaN and infinities, 4 bytes
            each; stored as a dict of `[results]`, and logged as `anchored/<name>/<statistic>` for
            the statistics that the callback logs. `"histogram"`: counts in `bins` equal bins of
            `range`, summed over the execution; stored as `(counts, edges, below, above)`.
        bins: Number of bins; each is one more reduction on the device.
        range: Left and right end of the histogram. Fixed, because the device has no second look.

    Returns:
        `tensor`, unchanged.

    Raises:
        StepCaptureError: The name was used before in this step, `tensor` is not a tensor, `reduce`
            is unknown, or a histogram has no bins or no `range`.

    Example:
        >>> hidden = anchor("hidden", torch.zeros(2, 3))
        >>> hidden.shape
        torch.Size([2, 3])
    """
    # what captures is imported by the first run: this module comes with `import ipu_log_callback`
    from .anchor_calls import record_anchor, reduced

    _check(name, tensor, reduce, bins, range)
    capture = current_capture()
    if capture is not None:
        if capture.takes_anchors:
            value, how = reduced(tensor, reduce, STATISTICS, bins, range)
            record_anchor(capture, name, "anchored", value, how)
        return tensor
    stores = [callback for callback in _CALLBACKS.values() if callback.enabled]
    if stores:
        with torch.no_grad():
            value, how = reduced(tensor, reduce, STATISTICS, bins, range)
        if reduce == "stats":
            value = {name: number.reshape(1) for name, number in zip(STATISTICS, value)}
        elif reduce == "histogram":
            value = histogram_of(value, how["edges"])
        for callback in stores:
            callback.anchored[name] = value
    return tensor


def stored_by(trainer: Any, callback: "Optional[IPULogCallback]") -> None:
    """Store the values of a trainer's eager steps in a callback; nowhere if it is `None`."""
    if callback is None:
        _CALLBACKS.pop(id(trainer), None)
    else:
        _CALLBACKS[id(trainer)] = callback


def _check(name: str, tensor: Any, reduce: Optional[str], bins: Any, span: Any) -> None:
    if not isinstance(name, str) or not name:
        problem, fix = f"received {name!r} as name, expected a str", "anchor('hidden', tensor)"
    elif not isinstance(tensor, torch.Tensor):
        problem = f"received {describe_value(tensor)}, expected a tensor"
        fix = f"anchor('{name}', tensor), one call for each tensor"
    elif reduce not in (None, "stats", "histogram"):
        problem = f"received reduce={reduce!r}, expected None, 'stats' or 'histogram'"
        fix = f"anchor('{name}', tensor, reduce='stats')"
    elif reduce == "histogram" and not _is_span(span):
        problem = f"received range={span!r}, expected its two ends, the left one first"
        fix = f"anchor('{name}', tensor, reduce='histogram', range=(-4.0, 4.0))"
    elif reduce == "histogram" and not (isinstance(bins, int) and bins > 0):
        problem = f"received bins={bins!r}, expected a whole number of 1 or more"
        fix = f"anchor('{name}', tensor, reduce='histogram', bins=32, range={tuple(span)!r})"
    else:
        return
    raise StepCaptureError(report(f"`anchor({name!r}, ...)` {problem}", fix=fix))


def _is_span(span: Any) -> bool:
    return isinstance(span, (tuple, list)) and len(span) == 2 and span[0] < span[1]
