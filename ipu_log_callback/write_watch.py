"""Notes that a step changes a tensor in place.

A tensor that is given to two calls of `self.log` or of a metric travels once, unless it may have
been changed between them. Which tensors share the storage that is written to cannot be asked on
the device, so any write counts for all.
"""

from typing import Any, Callable, Dict, Optional

from torch.overrides import TorchFunctionMode

__all__ = ["WriteWatch"]

_READING = frozenset(("__index__", "__int__", "__invert__", "__iter__"))


def _writes(name: str, kwargs: Dict[str, Any]) -> bool:
    if kwargs.get("inplace") or kwargs.get("out") is not None:
        return True
    if not name.endswith("__"):
        return name.endswith("_")  # add_, copy_, ...
    # x += 1, x[0] = 1, x.data = y
    return name in ("__setitem__", "__set__") or (name.startswith("__i") and name not in _READING)


class WriteWatch(TorchFunctionMode):
    """While active, tells of torch's functions that write to a tensor.

    Args:
        written: Called after each.
    """

    def __init__(self, written: Callable[[], None]) -> None:
        super().__init__()
        self._written = written

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Optional[Dict[str, Any]] = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if _writes(getattr(func, "__name__", ""), kwargs or {}):
            self._written()
        return result
