"""The private names of PyTorch that the emulator's device needs, in one place.

Checked on torch 1.13.1, 2.0.1 and 2.13.0. Everything else in the emulator uses PyTorch's public
interface.

* ``_make_wrapper_subclass``: only it makes a tensor that says ``ipu:0`` without memory on such a
  device
* ``DisableTorchFunction…``: reads a device tensor's own metadata without recording
* ``Tensor._version``: tells which tensors a call changed in place
* ``Tensor.storage``: 1.13 has no public ``untyped_storage``; tells which tensors share memory
* ``torch._C.parse_schema``: tells which arguments of a traced operator are keyword-only
* ``Distribution._validate_args``: PopTorch switches the validation of distributions off while it
  compiles
"""

from typing import Any, ContextManager, Tuple

import torch

__all__ = [
    "distribution_checks",
    "make_device_tensor",
    "parse_schema",
    "storage_key",
    "version_of",
    "without_torch_function",
]


def make_device_tensor(cls: type, shape: Any, strides: Any, dtype: torch.dtype) -> Any:
    """Return an instance of `cls`, a tensor class, that claims to live on ``ipu:0``."""
    return torch.Tensor._make_wrapper_subclass(
        cls, shape, strides=strides, dtype=dtype, device=torch.device("ipu:0")
    )


def without_torch_function() -> ContextManager[None]:
    """While the block runs, tensor subclasses behave like plain tensors."""
    renamed = getattr(torch._C, "DisableTorchFunctionSubclass", None)
    return (renamed or torch._C.DisableTorchFunction)()


def version_of(tensor: torch.Tensor) -> int:
    """Return a number that grows whenever `tensor`, or a view of it, is written to."""
    return 0 if tensor.is_inference() else tensor._version


def storage_key(tensor: torch.Tensor) -> Tuple[str, int]:
    """Return what tensors that share memory have in common."""
    untyped = getattr(tensor, "untyped_storage", None)
    address = (untyped() if untyped is not None else tensor.storage()).data_ptr()
    return ("memory", address) if address else ("empty", id(tensor))


def distribution_checks() -> bool:
    """Whether `torch.distributions` validates arguments at the moment."""
    return bool(torch.distributions.Distribution._validate_args)


def parse_schema(text: str) -> Any:
    """Return the schema of a traced operator: name, overload, kinds of arguments."""
    return torch._C.parse_schema(text)
