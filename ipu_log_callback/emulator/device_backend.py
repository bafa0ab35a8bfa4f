"""What PyTorch's dispatcher does with a plain tensor sent to ``ipu`` while no step is compiled.

PyTorch knows the device type but has no kernels for it; without these its own text would appear
instead of PopTorch's (PopTorch 3.4 `RegisterAtenOverloads.cpp`).
"""

from typing import Any

import torch

from ipu_log_callback.emulator.refusals import no_active_dispatch

__all__ = ["OPERATORS"]

# Everything that could make a tensor on the device begins with one of these.
OPERATORS = ("empty.memory_format", "empty_strided")


def _refuse(*args: Any, **kwargs: Any) -> Any:
    del args, kwargs
    raise no_active_dispatch()


# Kept alive here: dropping a library unregisters its kernels.
_library = torch.library.Library("aten", "IMPL", "IPU")
for _operator in OPERATORS:
    _library.impl(_operator, _refuse)
