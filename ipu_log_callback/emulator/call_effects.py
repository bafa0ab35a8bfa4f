"""What a recorded call does to its arguments, and what it wants of them."""

import warnings
from typing import Any, Callable, Iterator

import torch

from ipu_log_callback.emulator._torch_private import version_of
from ipu_log_callback.emulator.structures import map_tensors

__all__ = ["HALVES_HAVE_GRADIENTS", "Widened", "tensors_in", "unchanged_test"]


def tensors_in(value: Any) -> Iterator[Any]:
    """Yield the tensors among a call's arguments, through tuples, lists and dicts."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)


def unchanged_test(name: str, tensor: torch.Tensor) -> Callable[[torch.Tensor], bool]:
    """Return a test whether a call left `tensor` as it is now."""
    version = version_of(tensor)
    if "norm" not in name or not tensor.is_floating_point():
        return lambda now: version_of(now) == version
    # Normalisation layers update their running statistics without telling autograd.
    values = tensor.detach().clone()
    return lambda now: version_of(now) == version and torch.equal(values, now.detach())


def _halves_have_gradients() -> bool:
    value = torch.ones(1, dtype=torch.float16)
    try:
        with torch.enable_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it is slow
            torch.nn.functional.mse_loss(value.clone().requires_grad_(), value).backward()
    except RuntimeError:
        return False
    return True


#: Whether this torch can differentiate a loss of halves on a CPU: from 2.1 on.
HALVES_HAVE_GRADIENTS = _halves_have_gradients()


class Widened:
    """A function that gets its 32-bit integers and its halves widened.

    On a CPU indices have 64 bits, and before torch 2.1 few functions take halves.
    """

    def __init__(self, func: Any, keep_first: bool) -> None:
        self._func = func
        self._keep_first = keep_first

    def helps(self, args: Any, kwargs: Any) -> bool:
        """Whether there is something to widen."""
        return any(
            tensor.dtype in _WIDE for tensor in tensors_in((args[self._keep_first :], kwargs))
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        start = int(self._keep_first)
        wide = [*args[:start], *(_widen(arg) for arg in args[start:])]
        result = self._func(*wide, **{key: _widen(value) for key, value in kwargs.items()})
        halves = any(tensor.dtype == torch.float16 for tensor in tensors_in((args, kwargs)))
        floats = any(tensor.dtype == torch.float32 for tensor in tensors_in((args, kwargs)))
        return map_tensors(result, _narrow) if halves and not floats else result


_WIDE = {torch.int32: torch.int64, torch.float16: torch.float32}


def _narrow(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.half() if tensor.dtype == torch.float32 else tensor


def _widen(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(_WIDE.get(value.dtype, value.dtype))
    if type(value) in (list, tuple):
        return type(value)(_widen(item) for item in value)
    return value
