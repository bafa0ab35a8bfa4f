"""Which tensors of a step come straight out of a torch loss function.

PopTorch takes every such tensor that reaches an output for a loss of the model, detached or not,
unless it feeds the one final loss (`RemoveSurplusIdentityLosses.cpp`). When it finds two, its
error names neither; what was seen here does.
"""

from typing import Any, Dict, List, Optional

import torch
from torch.overrides import TorchFunctionMode

__all__ = ["LossWatch"]

_LOSSES = frozenset(
    ("binary_cross_entropy", "binary_cross_entropy_with_logits", "cross_entropy", "kl_div")
)


def _is_loss(name: str) -> bool:
    return name in _LOSSES or name.endswith("_loss")


class LossWatch(TorchFunctionMode):
    """While active, remembers what torch's loss functions return."""

    def __init__(self) -> None:
        super().__init__()
        self._losses: List[torch.Tensor] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Optional[Dict[str, Any]] = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and _is_loss(getattr(func, "__name__", "")):
            self._losses.append(result)
        return result

    def saw(self, tensor: torch.Tensor) -> bool:
        """Whether this very tensor came out of a loss function."""
        return any(tensor is loss for loss in self._losses)
