"""PopTorch's functions for use inside a model (PopTorch 3.4 `ops.py`).

Those that compute something support ``__torch_function__``, so that a compilation records the call
itself. Those that only tune the hardware return their argument. Those that run code the emulator
has not got are refused by name.
"""

from typing import Any, Callable, List, Sequence

import torch
from torch.overrides import handle_torch_function, has_torch_function

from ipu_log_callback.emulator import device_ops, enums
from ipu_log_callback.emulator.blocks import (
    Attribute,
    BeginBlock,
    Block,
    BlockFunction,
    MultiConv,
    NameScope,
    removeBlocks,
)
from ipu_log_callback.emulator.errors import NotEmulatedError, python_error
from ipu_log_callback.emulator.execution_strategies import refuse_in_training

__all__ = [
    "CPU",
    "Attribute",
    "BeginBlock",
    "Block",
    "BlockFunction",
    "MultiConv",
    "NameScope",
    "cond",
    "ctc_beam_search_decoder",
    "custom_op",
    "dynamic_slice",
    "dynamic_update",
    "for_loop",
    "fps",
    "identity_loss",
    "ipu_print_tensor",
    "nearest",
    "nop",
    "recomputationCheckpoint",
    "removeBlocks",
    "serializedMatMul",
    "set_available_memory",
    "set_overlap_for_input",
    "set_overlap_for_output",
]

del device_ops  # imported so that `torch.ops.poptorch` exists

_REDUCTIONS = {"sum": 0, "mean": 1, "none": 2}


def identity_loss(x: torch.Tensor, reduction: str) -> torch.Tensor:
    """Mark a tensor as the loss from which gradients start.

    Args:
        x: The loss.
        reduction: ``"sum"``, ``"mean"`` or ``"none"``, applied to `x`.

    Raises:
        AssertionError: If there is no such reduction.
    """
    if has_torch_function((x,)):
        return handle_torch_function(identity_loss, (x,), x, reduction=reduction)
    assert reduction in _REDUCTIONS, "Unsupported reduction type!"
    result: torch.Tensor = torch.ops.poptorch.identity_loss(x, _REDUCTIONS[reduction])
    return result


def ipu_print_tensor(
    tensor: torch.Tensor,
    title: str = "",
    print_gradient: bool = True,
    summarise_threshold: int = 1000,
    edge_items: int = 3,
    max_line_width: int = 80,
    digits: int = 4,
    float_format: str = "auto",
    separator: str = ", ",
    open_bracket: str = "(",
    close_bracket: str = ")",
) -> torch.Tensor:
    """Print a tensor on stderr whenever the device computes it, and its gradient likewise.

    Printed is what is used: as on hardware, the returned tensor must take part in the outputs. The
    arguments about the format are accepted; the format is PyTorch's.

    Returns:
        The same values; use it in place of `tensor`.
    """
    del summarise_threshold, edge_items, max_line_width, digits, float_format
    del separator, open_bracket, close_bracket
    if has_torch_function((tensor,)):
        return handle_torch_function(
            ipu_print_tensor, (tensor,), tensor, title=title, print_gradient=print_gradient
        )
    _require_tensor(tensor, "ipu print tensor must take a torch.tensor argument.")
    result: torch.Tensor = torch.ops.poptorch.ipu_print_tensor(tensor, title, int(print_gradient))
    return result


def dynamic_slice(
    tensor: torch.Tensor, dim: int, start: torch.Tensor, size: int, step: int
) -> torch.Tensor:
    """Slice from a start that only the device knows.

    Args:
        tensor: What to slice.
        dim: Dimension to slice along.
        start: First index, an integer tensor with one element.
        size: Length of the slice before `step` thins it out.
        step: Distance of the elements kept.
    """
    if has_torch_function((tensor, start)):
        return handle_torch_function(dynamic_slice, (tensor, start), tensor, dim, start, size, step)
    _require_tensor(tensor, "dynamic_slice must take a torch.tensor input.")
    _require_tensor(start, "Slice start argument to dynamic_slice must be a torch.tensor.")
    result: torch.Tensor = torch.ops.poptorch.dynamic_slice(tensor, dim, start, size, step)
    return result


def dynamic_update(
    input: torch.Tensor,
    src: torch.Tensor,
    dim: int,
    start: torch.Tensor,
    size: int,
) -> torch.Tensor:
    """Return `input` with `src` put in at a start that only the device knows.

    Raises:
        Error: If `input` and `src` differ in the number of dimensions or in type.
    """
    if has_torch_function((input, src, start)):
        return handle_torch_function(
            dynamic_update, (input, src, start), input, src, dim, start, size
        )
    _require_tensor(input, "dynamic_update must take a torch.tensor input.")
    _require_tensor(start, "Slice start argument to dynamic_update must be a torch.tensor.")
    _require_tensor(src, "Src argument to dynamic_update must be a torch.tensor.")
    if input.dim() != src.dim():
        raise python_error(
            f"input and src tensors must have same dimensionality. ({input.dim()}) vs ({src.dim()})"
        )
    if input.dtype != src.dtype:
        raise python_error(
            f"input and src tensor must have same dtype. ({input.dtype} vs {src.dtype})"
        )
    result: torch.Tensor = torch.ops.poptorch.dynamic_update(input, src, dim, start, size)
    return result


def for_loop(
    count: int, body: Callable[..., Any], inputs: List[torch.Tensor]
) -> List[torch.Tensor]:
    """Apply `body` to `inputs` `count` times, each time to what it returned before.

    The emulator unrolls the loop: other than on hardware, the Python of `body` runs `count` times
    in a compilation.

    Raises:
        Error: In a training model.
        ValueError: If `inputs` is not a list of tensors.
    """
    if not isinstance(inputs, list):
        msg = (
            "poptorch.for_loop expects input tensors (inputs) to be a list of tensors. "
            "(Object is not list)"
        )
        raise ValueError(msg)
    for index, tensor in enumerate(inputs):
        if not isinstance(tensor, torch.Tensor):
            msg = (
                "poptorch.for_loop expects input tensors (inputs) to be a list of tensors. "
                f"(Object contained in list at index {index} is not torch.tensor)"
            )
            raise ValueError(msg)
    refuse_in_training("for_loop")
    values = [tensor.clone() for tensor in inputs]
    for _ in range(count):
        values = _as_list(body(*values))
    return values


def cond(
    condition: torch.Tensor,
    then_body: Callable[..., Any],
    then_inps: List[torch.Tensor],
    else_body: Callable[..., Any],
    else_inps: List[torch.Tensor],
) -> List[torch.Tensor]:
    """Return what `then_body` returns where `condition` holds, else what `else_body` returns.

    The emulator computes both inside a model and picks one; on the host only one of them runs.

    Raises:
        Error: In a training model.
        ValueError: If the inputs are not lists.
    """
    if not isinstance(then_inps, list) or not isinstance(else_inps, list):
        msg = (
            "poptorch.cond expects then_inps and else_inps tensors to be a list of tensors. "
            "(Object is not list)"
        )
        raise ValueError(msg)
    refuse_in_training("cond")
    tracing = torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]  # torch's
    if condition.device.type == "cpu" and not tracing:
        return _as_list(then_body(*then_inps) if condition else else_body(*else_inps))
    results_then = _as_list(then_body(*[tensor.clone() for tensor in then_inps]))
    results_else = _as_list(else_body(*[tensor.clone() for tensor in else_inps]))
    return [torch.where(condition, a, b) for a, b in zip(results_then, results_else)]


def nop(tensor: torch.Tensor) -> torch.Tensor:
    """Return the argument; on hardware an operator that the compiler never removes."""
    _require_tensor(tensor, "nop must take a torch.tensor argument.")
    return tensor


def recomputationCheckpoint(*tensors: Any) -> Any:
    """Return the arguments; on hardware these values are kept for the backward pass.

    Raises:
        ValueError: If one is not a tensor.
    """
    if len(tensors) == 1 and isinstance(tensors[0], (tuple, list)):
        return type(tensors[0])(recomputationCheckpoint(*tensors[0]))
    if not all(isinstance(tensor, torch.Tensor) for tensor in tensors):
        msg = "All inputs must be tensors"
        raise ValueError(msg)
    return tensors[0] if len(tensors) == 1 else tensors


def serializedMatMul(
    lhs: torch.Tensor,
    rhs: torch.Tensor,
    mode: enums.MatMulSerializationMode,
    factor: int = 0,
    keep_precision: bool = False,
) -> torch.Tensor:
    """Matrix product; on hardware computed in `factor` parts."""
    assert isinstance(keep_precision, bool)
    assert isinstance(factor, int)
    assert isinstance(mode, enums.MatMulSerializationMode)
    return torch.matmul(lhs, rhs)


def set_available_memory(tensor: torch.Tensor, available_memory_proportion: float) -> torch.Tensor:
    """Return the argument; on hardware this limits the memory of the operation that made it."""
    del available_memory_proportion
    _require_tensor(tensor, "You may only set available memory for torch.tensor values.")
    return tensor


def set_overlap_for_input(input_tensors: Any, mode: enums.OverlapMode) -> Any:
    """Return the argument; on hardware its transfer overlaps with computation."""
    del mode
    return input_tensors


def set_overlap_for_output(output_tensors: Any, mode: enums.OverlapMode) -> Any:
    """Return the argument; on hardware its transfer overlaps with computation."""
    del mode
    return output_tensors


def custom_op(*args: Any, **kwargs: Any) -> Any:
    """Refused: a custom operator is compiled code for the IPU.

    Raises:
        NotEmulatedError: Always.
    """
    raise NotEmulatedError("poptorch.custom_op", "it is compiled code for the IPU")


def ctc_beam_search_decoder(*args: Any, **kwargs: Any) -> Any:
    """Refused: PyTorch has no such operator.

    Raises:
        NotEmulatedError: Always.
    """
    raise NotEmulatedError("poptorch.ctc_beam_search_decoder", "PyTorch has no such operator")


def fps(*args: Any, **kwargs: Any) -> Any:
    """Refused: PyTorch has no such operator.

    Raises:
        NotEmulatedError: Always.
    """
    raise NotEmulatedError("poptorch.fps", "PyTorch has no such operator")


def nearest(*args: Any, **kwargs: Any) -> Any:
    """Refused: PyTorch has no such operator.

    Raises:
        NotEmulatedError: Always.
    """
    raise NotEmulatedError("poptorch.nearest", "PyTorch has no such operator")


class CPU:
    """Refused: a call back to the host in the middle of an inference graph.

    Raises:
        NotEmulatedError: Always.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise NotEmulatedError("poptorch.CPU", "a graph of the emulator never calls the host")


def _require_tensor(value: Any, message: str) -> None:
    if not isinstance(value, torch.Tensor):
        raise python_error(f"{message} {type(value)} is not supported.")


def _as_list(results: Any) -> List[torch.Tensor]:
    sequence: Sequence[torch.Tensor] = results if isinstance(results, (list, tuple)) else [results]
    return list(sequence)
