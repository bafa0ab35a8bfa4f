"""The structures that a step returns: walk them, rebuild them with other tensors."""

import copy
from typing import Any, Callable, List

import torch

__all__ = ["map_tensors", "tensors_of"]


def map_tensors(structure: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    """Rebuild what a step returned with `function` applied to each of its tensors.

    Dicts, lists, tuples and NamedTuples keep their types. Any other object that holds tensors in
    its attributes (a batch type registered with PopTorch, a dataclass) is copied and its attributes
    are rebuilt. Everything else comes back as it is.
    """
    if isinstance(structure, torch.Tensor):
        return function(structure)
    if isinstance(structure, dict):
        rebuilt = copy.copy(structure)
        for key, item in structure.items():
            rebuilt[key] = map_tensors(item, function)
        return rebuilt
    if isinstance(structure, tuple) and hasattr(structure, "_fields"):
        return type(structure)(*(map_tensors(item, function) for item in structure))
    if isinstance(structure, (list, tuple)):
        return type(structure)(map_tensors(item, function) for item in structure)
    if _holds_tensors(structure):
        rebuilt = copy.copy(structure)
        for name, item in vars(structure).items():
            # `object.__setattr__`: a frozen dataclass is rebuilt like any other
            object.__setattr__(rebuilt, name, map_tensors(item, function))
        return rebuilt
    return structure


def tensors_of(structure: Any) -> List[torch.Tensor]:
    """Every tensor of a structure, in the order in which `map_tensors` meets them."""
    found: List[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    map_tensors(structure, note)
    return found


def _holds_tensors(structure: Any) -> bool:
    if isinstance(structure, (type, torch.nn.Module)) or not hasattr(structure, "__dict__"):
        return False
    return any(
        isinstance(item, torch.Tensor)
        or (isinstance(item, (dict, list, tuple)) and bool(tensors_of(item)))
        for item in vars(structure).values()
    )
