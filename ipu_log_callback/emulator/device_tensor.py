"""Tensors that say ``ipu:0``: names of values in the step that is being compiled.

A device tensor holds no numbers. While its step is compiled every call on it goes to the recorder;
afterwards it still knows its shape and type, and anything else is an error, as on hardware.
"""

from typing import Any, Dict, Optional, Protocol, Tuple

import torch

from ipu_log_callback.emulator._torch_private import make_device_tensor, without_torch_function
from ipu_log_callback.emulator.refusals import no_active_dispatch

__all__ = ["DEVICE", "OWN_KNOWLEDGE", "DeviceTensor", "is_device_tensor"]

DEVICE = torch.device("ipu:0")

#: What a tensor knows without its values, and for ever.
OWN_KNOWLEDGE = {
    "get:shape", "get:dtype", "get:device", "get:ndim", "get:requires_grad", "get:is_leaf",
    "get:layout", "get:grad",
    "get:grad_fn", "get:is_cuda", "get:is_ipu", "get:is_cpu", "get:names", "get:is_sparse",
    "get:is_quantized",
    "get:is_meta", "get:is_mkldnn", "get:is_nested", "get:is_xpu", "get:is_mps",
    "size", "dim", "numel", "nelement", "__len__", "is_floating_point", "is_complex", "stride",
    "element_size",
    "ndimension", "get_device",
}  # fmt: skip


class Recorder(Protocol):
    """What a device tensor needs of the recorder of its step."""

    is_open: bool

    def call(self, func: Any, args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> Any:
        """Record a call through PyTorch's Python interface and return its result."""

    def call_aten(self, func: Any, args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> Any:
        """Record a call that reached an operator without passing the Python interface."""


def function_name(func: Any) -> str:
    """Return a function's plain name; ``get:shape`` and ``set:data`` for properties."""
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        return f"{name.strip('_')}:{getattr(func.__self__, '__name__', '')}"
    # Operators carry their overload: ``mul.Tensor``.
    return str(name).split(".")[0]


class DeviceTensor(torch.Tensor):
    """One value of a step, as the step's Python sees it."""

    _recorder: Recorder
    _slot: int
    _is_param: bool

    @staticmethod
    def __new__(cls: type, hidden: torch.Tensor, slot: int, recorder: Recorder) -> "DeviceTensor":
        """Make a device tensor with the shape and type of `hidden`, named by `slot`."""
        self: DeviceTensor = make_device_tensor(cls, hidden.shape, hidden.stride(), hidden.dtype)
        self._slot = slot
        self._recorder = recorder
        return self

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Any,
        args: Tuple[Any, ...] = (),
        kwargs: Optional[Dict[str, Any]] = None,
    ) -> Any:
        """Hand a call to the recorder of its step, or answer what a tensor knows for ever."""
        del types
        kwargs = kwargs or {}
        recorder = _open_recorder(args, kwargs)
        if recorder is not None:
            return recorder.call(func, args, kwargs)
        name = function_name(func)
        if name in ("__repr__", "__str__"):
            with without_torch_function():
                return f"tensor(<unavailable>, device='{DEVICE}', size={tuple(args[0].shape)})"
        if name not in OWN_KNOWLEDGE:
            raise no_active_dispatch()
        with without_torch_function():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # a stub error: it is a class method
        cls,
        func: Any,
        types: Any,
        args: Tuple[Any, ...] = (),
        kwargs: Optional[Dict[str, Any]] = None,
    ) -> Any:
        """Hand an operator call that bypassed the Python interface to the recorder."""
        del types
        recorder = _open_recorder(args, kwargs or {})
        if recorder is None:
            raise no_active_dispatch()
        return recorder.call_aten(func, args, kwargs or {})


def is_device_tensor(value: Any) -> bool:
    """Whether `value` is a tensor on the emulated device."""
    return isinstance(value, DeviceTensor)


def _open_recorder(args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> Optional[Recorder]:
    stack = [args, kwargs]
    while stack:
        value: Any = stack.pop()
        if isinstance(value, DeviceTensor):
            return value._recorder if value._recorder.is_open else None
        if isinstance(value, (list, tuple)):
            stack.extend(value)
        elif isinstance(value, dict):
            stack.extend(value.values())
    return None
