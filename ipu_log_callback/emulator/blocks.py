"""Marks in a model: blocks, name scopes and the like.

They place computations on IPUs or name them, and change no result. Blocks are still checked against
the execution strategy, because a wrong block name is an error on hardware (PopTorch 3.4 `ops.py`,
`options.py`).
"""

import functools
import weakref
from typing import Any, Callable, Dict, Optional

import torch

from ipu_log_callback.emulator.errors import python_error
from ipu_log_callback.emulator.execution_strategies import enter_block, number_blocks_from_zero

__all__ = [
    "Attribute",
    "BeginBlock",
    "Block",
    "BlockFunction",
    "MultiConv",
    "NameScope",
    "removeBlocks",
]

# The hook by which `BeginBlock` marked a module.
_hooks: "weakref.WeakKeyDictionary[torch.nn.Module, Any]" = weakref.WeakKeyDictionary()


class Block(torch.nn.Module):
    """Context manager: what runs inside belongs to one block of the model."""

    def __init__(self, user_id: Optional[str] = None, ipu_id: Optional[int] = None) -> None:
        """Name the block, and choose its IPU within the model's device."""
        super().__init__()
        self._user_id = user_id
        self._ipu_id = ipu_id

    @staticmethod
    def useAutoId() -> None:
        """Number blocks without a name from 0, from here on."""
        number_blocks_from_zero()

    @staticmethod
    def start(user_id: Optional[str] = None, ipu_id: Optional[int] = None) -> None:
        """Begin a block that ends where the next one begins."""
        enter_block(user_id, ipu_id)

    def __enter__(self) -> None:
        Block.start(self._user_id, self._ipu_id)

    def __exit__(self, *exception: object) -> None:
        del exception


class _BlockHook:
    """Forward pre-hook by which a marked module begins its block; an object, to be pickled."""

    def __init__(self, user_id: Optional[str], ipu_id: Optional[int]) -> None:
        self._user_id = user_id
        self._ipu_id = ipu_id

    def __call__(self, module: torch.nn.Module, inputs: Any) -> None:
        del module, inputs
        self._user_id = enter_block(self._user_id, self._ipu_id)


def BeginBlock(
    layer_to_call: Any, user_id: Optional[str] = None, ipu_id: Optional[int] = None
) -> Any:
    """Let a block begin whenever `layer_to_call` is called.

    Args:
        layer_to_call: A module, marked in place and returned; or a function, which is wrapped.
        user_id: Name of the block.
        ipu_id: Its IPU within the model's device.

    Raises:
        Error: If it is neither, or a module that already begins a block.
    """
    if isinstance(layer_to_call, torch.nn.Module):
        if layer_to_call in _hooks:
            raise python_error("module has already been assigned to a block.")
        hook = layer_to_call.register_forward_pre_hook(_BlockHook(user_id, ipu_id))
        _hooks[layer_to_call] = hook
        return layer_to_call
    if not callable(layer_to_call):
        raise python_error("module is not an instance of torch.nn.Module or function.")

    @functools.wraps(layer_to_call)
    def called(*args: Any, **kwargs: Any) -> Any:
        enter_block(user_id, ipu_id)
        return layer_to_call(*args, **kwargs)

    return called


def removeBlocks(module: torch.nn.Module) -> None:
    """Undo `BeginBlock` on a module and all modules inside it."""
    assert isinstance(module, torch.nn.Module)
    for inner in module.modules():
        hook = _hooks.pop(inner, None)
        if hook is not None:
            hook.remove()


def BlockFunction(
    user_id: Optional[str] = None, ipu_id: Optional[int] = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: what the function does belongs to one block of the model."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def inside_block(*args: Any, **kwargs: Any) -> Any:
            with Block(user_id, ipu_id):
                return function(*args, **kwargs)

        return inside_block

    return decorate


class _Mark:
    """A context manager that changes nothing."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exception: object) -> None:
        del exception


class NameScope(_Mark):
    """Prefix of operators' names in the compiled graph."""

    def __init__(self, name: str) -> None:
        """Choose the prefix."""
        assert isinstance(name, str), "Parameter to NameScope must be a string"
        self.name = name


class Attribute(_Mark):
    """Attributes of operators in the compiled graph."""

    def __init__(self, **kwargs: Any) -> None:
        """Choose the attributes."""
        self.attributes = kwargs


class MultiConv(_Mark):
    """Convolutions that could run side by side; each setter returns the object and only stores."""

    def __init__(self) -> None:
        """Start without settings."""
        self.settings: Dict[str, Any] = {}

    def availableMemoryProportions(self, value: Any) -> "MultiConv":
        """Temporary memory, one value or one per convolution."""
        return self._store("availableMemoryProportions", value)

    def partialsTypes(self, value: Any) -> "MultiConv":
        """Type of partial sums, one or one per convolution."""
        return self._store("partialsTypes", value)

    def enableConvDithering(self, value: Any) -> "MultiConv":
        """Layout over tiles, one value or one per convolution."""
        return self._store("enableConvDithering", value)

    def planType(self, value: Any) -> "MultiConv":
        """A `MultiConvPlanType`."""
        return self._store("planType", value)

    def perConvReservedTiles(self, value: int) -> "MultiConv":
        """Tiles kept for each convolution."""
        return self._store("perConvReservedTiles", value)

    def cycleBackOff(self, value: float) -> "MultiConv":
        """Share of cycles, from 0 to 1."""
        return self._store("cycleBackOff", value)

    def _store(self, name: str, value: Any) -> "MultiConv":
        self.settings[name] = value
        return self
