"""Factory functions without a device are forced onto the device while a step is compiled.

PopTorch replaces them on the `torch` module and warns (PopTorch 3.4 `_poplar_executor.py`,
`_SetDefaultDeviceType`), so a function imported by name beforehand is not affected, there as here.
"""

import functools
from contextlib import contextmanager
from typing import Any, Callable, Iterator

import torch

from ipu_log_callback.emulator._torch_private import distribution_checks
from ipu_log_callback.emulator.console import logger
from ipu_log_callback.emulator.tracing import active_recorder

__all__ = ["factories_on_device"]

_FACTORIES = (
    "arange", "empty", "full", "full_like", "linspace", "logspace", "ones", "rand", "randint",
    "randn", "randperm",
    "range", "tensor", "zeros", "zeros_like",
)  # fmt: skip


def _forced(function: Callable[..., Any], only_without_tensors: bool) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        recorder = active_recorder()
        if recorder is None or recorder.is_suspended or "device" in kwargs:
            return function(*args, **kwargs)
        if only_without_tensors and any(
            isinstance(arg, torch.Tensor) for arg in (*args, *kwargs.values())
        ):
            return function(*args, **kwargs)
        logger.warning("No device set in torch.%s(): forcing to IPU", function.__name__)
        return function(*args, device="ipu", **kwargs)

    return wrapper


@contextmanager
def factories_on_device() -> Iterator[None]:
    """Force factory functions onto the device.

    Leave distributions unchecked, while the block runs.

    The checks of `torch.distributions` read values, which no step can.
    """
    replaced = {name: getattr(torch, name) for name in (*_FACTORIES, "normal")}
    checked = distribution_checks()
    for name, function in replaced.items():
        setattr(torch, name, _forced(function, only_without_tensors=name == "normal"))
    torch.distributions.Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        for name, function in replaced.items():
            setattr(torch, name, function)
        torch.distributions.Distribution.set_default_validate_args(checked)
