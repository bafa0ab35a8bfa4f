"""What a recorded call does to its arguments, and what it wants of them."""

import functools
import warnings
from typing import Any, Callable, Dict, Iterator, Tuple

import torch

from ipu_log_callback.emulator._torch_private import version_of
from ipu_log_callback.emulator.structures import map_tensors

__all__ = ["Widened", "halves_have_gradients", "tensors_in", "unchanged_test"]


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


@functools.lru_cache(maxsize=None)
def halves_have_gradients() -> bool:
    """Whether this torch can differentiate a loss of halves on a CPU: from 2.1 on."""
    value = torch.ones(1, dtype=torch.float16)
    try:
        with torch.enable_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it is slow
            torch.nn.functional.mse_loss(value.clone().requires_grad_(), value).backward()
    except RuntimeError:
        return False
    return True


class Widened:
    """A function that gets its 32-bit integers and its halves widened.

    On a CPU indices have 64 bits, and before torch 2.1 few functions take halves.

    Attributes:
        helps: Whether there is something to widen.
    """

    def __init__(
        self, func: Any, keep_first: bool, args: Tuple[Any, ...], kwargs: Dict[str, Any]
    ) -> None:
        """Wrap `func` for calls with arguments of the types of `args` and `kwargs`."""
        self._func = func
        self._start = int(keep_first)
        dtypes = {tensor.dtype for tensor in tensors_in((args, kwargs))}
        self._is_narrowed = torch.float16 in dtypes and torch.float32 not in dtypes
        wanted = tensors_in((args[self._start :], kwargs))
        self.helps = any(tensor.dtype in _WIDE for tensor in wanted)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        wide = [*args[: self._start], *(_widen(arg) for arg in args[self._start :])]
        result = self._func(*wide, **{key: _widen(value) for key, value in kwargs.items()})
        return map_tensors(result, _narrow) if self._is_narrowed else result


_WIDE = {torch.int32: torch.int64, torch.float16: torch.float32}


def _narrow(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.half() if tensor.dtype == torch.float32 else tensor


def _widen(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(_WIDE.get(value.dtype, value.dtype))
    if type(value) in (list, tuple):
        return type(value)(_widen(item) for item in value)
    return value
