"""The module that answers to `import poptorch` while the emulator is installed.

It offers what IPU scripts and Lightning's strategies touch, under PopTorch's names and signatures.
"""

from ipu_log_callback.emulator import enums, ops, optim, options, profiling
from ipu_log_callback.emulator import errors as poptorch_core
from ipu_log_callback.emulator.compile_hooks import (
    isRunningOnIpu,
    registerPostCompileHook,
    registerPreCompileHook,
)
from ipu_log_callback.emulator.console import setLogLevel
from ipu_log_callback.emulator.dataloader import AsynchronousDataAccessor, DataLoader
from ipu_log_callback.emulator.enums import *  # noqa: F403  # the module's `__all__` is the list
from ipu_log_callback.emulator.errors import Error, RecoverableError, UnrecoverableError
from ipu_log_callback.emulator.executor import (
    PoplarExecutor,
    inferenceModel,
    load,
    trainingModel,
)
from ipu_log_callback.emulator.ops import *  # noqa: F403  # the module's `__all__` is the list
from ipu_log_callback.emulator.options import *  # noqa: F403  # the module's `__all__` is the list
from ipu_log_callback.emulator.structures import ICustomArgParser, registerCustomArgParser

__version__ = "3.4.0+emulator"


def ipuHardwareIsAvailable(num_ipus: int = 1) -> bool:
    """Whether `num_ipus` IPUs are there: always, since a CPU stands in for any number of them."""
    del num_ipus
    return True


def ipuHardwareVersion() -> int:
    """The IPU's version: -1, PopTorch's word for an unknown one."""
    return -1


__all__ = [
    "AsynchronousDataAccessor",
    "DataLoader",
    "Error",
    "ICustomArgParser",
    "PoplarExecutor",
    "RecoverableError",
    "UnrecoverableError",
    "enums",
    "inferenceModel",
    "ipuHardwareIsAvailable",
    "ipuHardwareVersion",
    "isRunningOnIpu",
    "load",
    "ops",
    "optim",
    "options",
    "poptorch_core",
    "profiling",
    "registerCustomArgParser",
    "registerPostCompileHook",
    "registerPreCompileHook",
    "setLogLevel",
    "trainingModel",
]
__all__ += enums.__all__ + ops.__all__ + options.__all__
