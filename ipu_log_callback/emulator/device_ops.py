"""PopTorch's operators as PyTorch operators, under PopTorch's names (``torch.ops.poptorch``).

They must be operators and not plain functions: `torch.jit.trace` keeps an operator as one node of
its graph, where the trace front end finds it again, but looks into a function (names from PopTorch
3.4 `RegisterAtenOverloads.cpp`).
"""

import sys
from typing import Any, Callable, List, Tuple

import torch

from ipu_log_callback.emulator.compile_hooks import isRunningOnIpu

__all__ = ["OPERATORS"]


def _identity_loss(x: torch.Tensor, reduction: int) -> torch.Tensor:
    if reduction == 0:
        return x.sum()
    if reduction == 1:
        return x.mean()
    return x.clone()


def _ipu_print_tensor(self: torch.Tensor, title: str, print_gradient: int) -> torch.Tensor:
    _print(title, self)
    printed = self.clone()
    if print_gradient and printed.requires_grad:
        printed.register_hook(lambda grad: _print(f"{title}_gradient", grad))
    return printed


def _print(title: str, tensor: torch.Tensor) -> None:
    if not isRunningOnIpu():  # a compilation computes values of its own, which nobody is to see
        sys.stderr.write(f"{title}: {tensor.detach()}\n")


def _dynamic_slice(
    self: torch.Tensor, dim: int, start: torch.Tensor, size: int, step: int
) -> torch.Tensor:
    part = self.narrow(dim, int(start), size)
    return part[(slice(None),) * (dim % self.dim()) + (slice(None, None, step),)]


def _dynamic_update(
    self: torch.Tensor, src: torch.Tensor, dim: int, start: torch.Tensor, size: int
) -> torch.Tensor:
    first = int(start)
    return torch.slice_scatter(self, src, dim, first, first + size, 1)


OPERATORS: List[Tuple[str, Callable[..., Any]]] = [
    ("identity_loss(Tensor x, int reduction) -> Tensor", _identity_loss),
    (
        "ipu_print_tensor(Tensor self, str title, int print_gradient) -> Tensor",
        _ipu_print_tensor,
    ),
    (
        "dynamic_slice(Tensor self, int dim, Tensor start, int size, int step) -> Tensor",
        _dynamic_slice,
    ),
    (
        "dynamic_update(Tensor self, Tensor src, int dim, Tensor start, int size) -> Tensor",
        _dynamic_update,
    ),
]

# Kept alive here: dropping a library unregisters its operators.
_library: Any = torch.library.Library("poptorch", "DEF")
for _schema, _implementation in OPERATORS:
    _library.define(_schema)
    _library.impl(_schema.split("(")[0], _implementation)
