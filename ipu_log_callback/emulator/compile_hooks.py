"""What surrounds the run of a step's Python.

Hooks, the execution strategy, and knowing that it is for the device.
"""

import collections
from contextlib import contextmanager
from typing import Any, Callable, Dict, Iterator, List

import torch
from torch.utils.hooks import RemovableHandle

from ipu_log_callback.emulator.options import Options

__all__ = ["compiling", "isRunningOnIpu", "registerPostCompileHook", "registerPreCompileHook"]

_before: Dict[int, Callable[[], Any]] = collections.OrderedDict()
_after: Dict[int, Callable[[], Any]] = collections.OrderedDict()
_under_way: List[torch.nn.Module] = []


def isRunningOnIpu() -> bool:
    """Whether a step's Python runs for the device at the moment: true only while it is compiled."""
    return bool(_under_way)


@contextmanager
def compiling(model: torch.nn.Module, options: Options, training: bool) -> Iterator[None]:
    """What is different while the Python of `model` runs."""
    begun = None
    strategy = options._execution_strategy
    _under_way.append(model)
    try:
        if options.Jit.trace_model:
            # A trace runs the step more than once; only one run's blocks count.
            begun = model.register_forward_pre_hook(lambda *_: strategy.entered_ipus.clear())
        for hook in list(_before.values()):
            hook()
        with strategy.compiling(training=training):
            yield
    finally:
        if begun is not None:
            begun.remove()
        for hook in list(_after.values()):
            hook()
        _under_way.pop()


def registerPreCompileHook(hook: Callable[[], Any]) -> RemovableHandle:
    """Call `hook` before the step's Python runs, in every compilation.

    Raises:
        RuntimeError: If it is not callable.
    """
    return _register(_before, hook, "Pre-compile")


def registerPostCompileHook(hook: Callable[[], Any]) -> RemovableHandle:
    """Call `hook` after the step's Python ran, in every compilation.

    Raises:
        RuntimeError: If it is not callable.
    """
    return _register(_after, hook, "Post-compile")


def _register(hooks: Dict[int, Callable[[], Any]], hook: Any, kind: str) -> RemovableHandle:
    if not callable(hook):
        msg = f"{kind} hook must be callable"
        raise RuntimeError(msg)
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle
