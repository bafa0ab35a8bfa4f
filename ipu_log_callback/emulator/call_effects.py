"""What a recorded call does to its arguments, and what it wants of them."""

from typing import Any, Callable, Iterator

import torch

from ipu_log_callback.emulator._torch_private import version_of

__all__ = ["Widened", "tensors_in", "unchanged_test"]


def tensors_in(value: Any) -> Iterator[Any]:
    """Yield the tensors among a call's arguments, through tuples, lists, dicts and slices."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, slice):
        yield from tensors_in((value.start, value.stop, value.step))


def unchanged_test(name: str, tensor: torch.Tensor) -> Callable[[torch.Tensor], bool]:
    """Return a test whether a call left `tensor` as it is now."""
    version = version_of(tensor)
    if "norm" not in name or not tensor.is_floating_point():
        return lambda now: version_of(now) == version
    # Normalisation layers update their running statistics without telling autograd.
    values = tensor.detach().clone()
    return lambda now: version_of(now) == version and torch.equal(values, now.detach())


class Widened:
    """A function that gets its 32-bit integers widened: on a CPU indices have 64 bits."""

    def __init__(self, func: Any, keep_first: bool) -> None:
        self._func = func
        self._keep_first = keep_first

    def helps(self, args: Any, kwargs: Any) -> bool:
        """Whether there is something to widen."""
        return any(
            tensor.dtype == torch.int32 for tensor in tensors_in((args[self._keep_first :], kwargs))
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        start = int(self._keep_first)
        wide = [*args[:start], *(_widen(arg) for arg in args[start:])]
        return self._func(*wide, **{key: _widen(value) for key, value in kwargs.items()})


def _widen(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(torch.int64) if value.dtype == torch.int32 else value
    if type(value) in (list, tuple):
        return type(value)(_widen(item) for item in value)
    return value
