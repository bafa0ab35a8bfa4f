"""What cannot be done with a device tensor while a step is compiled, and the errors that say so.

Texts are those of PopTorch 3.4 `RegisterAtenOverloads.cpp`, `TypeInferenceHandler.cpp` and
`ErrorOnUnsupportedAten.cpp`.
"""

from typing import Any, Tuple

import torch

from ipu_log_callback.emulator.errors import Error, NotEmulatedError, backend_error

__all__ = [
    "described",
    "illegal_move",
    "item_read",
    "no_active_dispatch",
    "not_on_device",
    "refuse",
]

_OVERLOADS = "poptorch/source/dispatch_tracer/RegisterAtenOverloads.cpp"
_INFERENCE = "poptorch/source/dispatch_tracer/TypeInferenceHandler.cpp"
_UNSUPPORTED = "poptorch/source/ErrorOnUnsupportedAten.cpp"

_ITEM_READS = {
    "item", "is_nonzero", "equal", "allclose", "_local_scalar_dense",
    "__bool__", "__float__", "__int__", "__index__", "__long__", "__complex__", "__contains__",
    # Checks its arguments' values in Python.
    "gaussian_nll_loss",
}  # fmt: skip

_HOST_READS = {
    "tolist", "__reduce_ex__", "__reduce__", "share_memory_", "pin_memory", "cuda",
}  # fmt: skip

_STORAGE_READS = {
    "data_ptr", "storage", "untyped_storage", "_typed_storage", "_storage", "is_set_to", "set_",
    "resize_",
    "resize_as_", "storage_type", "const_data_ptr",
}  # fmt: skip

# The shape of the result depends on values, so PyTorch has no shape inference for them.
_DYNAMIC = {
    "nonzero": "nonzero",
    "argwhere": "nonzero",
    "masked_select": "masked_select",
    "unique": "_unique2",
    "_unique2": "_unique2",
    "_return_output": "_unique2",
    "_return_inverse": "_unique2",
    "_return_counts": "_unique2",
    "_return_inverse_counts": "_unique2",
    "unique_consecutive": "unique_consecutive",
    "unique_dim": "unique_dim",
    "bincount": "bincount",
    "histc": "histc",
}

_UNSUPPORTED_OPS = {
    "huber_loss", "multi_margin_loss", "multilabel_margin_loss",
}  # fmt: skip

_SCALAR_TYPES = {
    torch.float32: "Float",
    torch.float64: "Double",
    torch.float16: "Half",
    torch.bfloat16: "BFloat16",
    torch.int64: "Long",
    torch.int32: "Int",
    torch.int16: "Short",
    torch.int8: "Char",
    torch.uint8: "Byte",
    torch.bool: "Bool",
}

_AUTOGRAD = {"backward", "grad", "register_hook", "register_post_accumulate_grad_hook"}


def described(tensor: torch.Tensor) -> str:
    """Return PopTorch's description of a host tensor."""
    dtype = _SCALAR_TYPES.get(tensor.dtype, str(tensor.dtype))
    return f"tensor(device={tensor.device}, shape={list(tensor.shape)}, dtype={dtype})"


def item_read() -> Error:
    """A value of the device was wanted on the host in the middle of a step."""
    return backend_error(
        "aten::item is only supported in eager mode, but was intercepted in "
        "a static graph. This means an IPU to CPU copy was triggered before "
        "the end of the graph, for example by calling tensor.item(). "
        "Please ensure that any such copies are removed.",
        source=_OVERLOADS,
    )


def illegal_move() -> Error:
    """A device tensor was moved to the host in the middle of a step."""
    return backend_error(
        'Illegal move to CPU (via `.to("cpu")`) when using the '
        "dispatcher. Instead, return this output as an IPU tensor.",
        source=_OVERLOADS,
    )


def no_active_dispatch() -> Error:
    """A device tensor was made or used while no step was being compiled."""
    return backend_error("There is no active dispatch", source=_OVERLOADS)


def not_on_device(tensor: torch.Tensor) -> Error:
    """A host tensor met a device tensor."""
    return backend_error(
        f"Expected an IPU tensor but got {described(tensor)}.\n"
        'Constant tensors should be moved explicitly to the IPU, via cpu_tensor.to("ipu").',
        source=_INFERENCE,
    )


def _dynamic_shape(op: str) -> Error:
    return backend_error(
        f"Type inference failed for aten::{op} because the operator doesn't have an "
        "implementation for the Meta backend.",
        source=_INFERENCE,
    )


def _unsupported(op: str) -> Error:
    return backend_error(
        f"Unsupported ops found in compiled model: [aten::{op}]. Not all operations are "
        "supported yet by Graphcore's PyTorch compiler. If you believe any of these should be, "
        "please report this message to support@graphcore.ai.",
        source=_UNSUPPORTED,
    )


def _is_mask(index: Any) -> bool:
    if isinstance(index, (list, tuple)):
        return any(_is_mask(item) for item in index)
    return isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)


def _is_read(index: Any, is_device: Any) -> bool:
    """Whether PyTorch reads an index's value: positions must be numbers on the host."""
    if isinstance(index, (list, tuple)):
        return any(_is_read(item, is_device) for item in index)
    if isinstance(index, slice):
        return any(map(is_device, (index.start, index.stop, index.step)))
    return is_device(index) and index.dim() == 0 and not _is_mask(index)


def refuse(name: str, args: Tuple[Any, ...], kwargs: Any, is_device: Any) -> None:
    """Raise if the function `name` has no place in a compiled step.

    Args:
        name: The function's plain name, for instance ``"item"``.
        args: Its arguments.
        kwargs: Its keyword arguments.
        is_device: Tells device tensors from others.

    Raises:
        Error: With PopTorch's text where hardware refuses, naming the function where only the
        emulator does.
    """
    if name in _ITEM_READS:
        raise item_read()
    if name in _HOST_READS:
        raise illegal_move()
    if name in _STORAGE_READS:
        msg = "Cannot access data pointer of Tensor that doesn't have storage"
        raise RuntimeError(msg)
    if name in ("numpy", "__array__"):
        msg = (
            "can't convert ipu:0 device type tensor to numpy. "
            "Use Tensor.cpu() to copy the tensor to host memory first."
        )
        raise TypeError(msg)
    if name in _DYNAMIC:
        raise _dynamic_shape(_DYNAMIC[name])
    only_condition = name == "where" and len(args) + len(kwargs) == 1
    if only_condition or (name in ("__getitem__", "index") and _is_mask(args[1])):
        raise _dynamic_shape("nonzero")
    # `poptorch.dynamic_slice` exists because of this (PopTorch 3.4 `ops.py`).
    if name in ("__getitem__", "__setitem__") and _is_read(args[1], is_device):
        raise item_read()
    if name == "repeat_interleave":
        repeats = kwargs.get("repeats", args[1] if len(args) > 1 else args[0])
        if is_device(repeats) and kwargs.get("output_size") is None:
            raise _dynamic_shape("repeat_interleave")
    if name == "one_hot" and (list(args[1:2]) or [kwargs.get("num_classes", -1)])[0] < 0:
        raise item_read()
    if name in _UNSUPPORTED_OPS:
        raise _unsupported(name)
    if name in _AUTOGRAD:
        raise NotEmulatedError(
            name, "the backward pass of a training model is the device's own business"
        )
