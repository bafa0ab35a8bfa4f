"""Tensors of the compiled graph that PopART knows by name: gradients, weights, optimizer states.

What they hold (PopART 2.6-3.4 `tensornames.hpp`, `sgd2decompose.cpp`, `adamdecompose.cpp`,
`adaptivedecompose.cpp`, `compoundscalarhelper.cpp`, `irlowering.cpp`):

=============================  =====================================================================
`Gradient___<parameter>`       the gradient of one micro-batch on one replica: before accumulation,
                               before the reduction over replicas, before clipping, and multiplied
                               by the optimizer's `loss_scaling`
`UpdatedVar___<parameter>`     the weight after its update, equal on all replicas
`Accl1___<parameter>` and on   the optimizer's states after the update, equal on all replicas
=============================  =====================================================================

With automatic loss scaling the scale is the device's own, and gradients show it.

They come back as the session's output mode says, whatever mode the anchor itself was given
(PopTorch `LowerToPopart.cpp`). With gradient accumulation and `All`, PopART copies weights and
states inside the accumulation loop, so hardware may show them one update late.
"""

from dataclasses import dataclass
from typing import Any, Dict, Iterable, List, Mapping, Optional, Tuple

import torch

from .errors import CallbackSetupError, KeySelectionError, names_text, report
from .geometry import Geometry
from .record import bytes_of_element
from .selection import Selection

__all__ = [
    "NamedTensor",
    "Parameter",
    "by_pattern",
    "declared",
    "gradients_of",
    "last_of",
    "parameters_of",
    "prefix_of",
    "results_of",
    "state_names",
    "state_scale",
]


@dataclass(frozen=True)
class Parameter:
    """What must be known of a parameter while its tensor may not be touched.

    Args:
        shape: Its shape.
        dtype: Its dtype.
        trained: Whether it requires a gradient.
    """

    shape: Tuple[int, ...]
    dtype: torch.dtype
    trained: bool


@dataclass(frozen=True)
class NamedTensor:
    """A tensor of the graph that is anchored by name.

    Args:
        kind: `"grad"`, `"weight"`, `"optim"` or `"tensor"`: first part of its keys.
        name: The rest of its key: the parameter's name, that and a state's, or the user's own.
        tensor: PopART's name.
        shape: Shape of one result, where it is known before the first execution.
        dtype: Its dtype, likewise.
        short: What to ask the executor for.
    """

    kind: str
    name: str
    tensor: str
    shape: Optional[Tuple[int, ...]] = None
    dtype: torch.dtype = torch.float32
    short: str = ""

    @property
    def key(self) -> str:
        """What it is stored under, and what its logged keys begin with."""
        return f"{self.kind}/{self.name}"

    def bytes(self, results: int) -> Optional[int]:
        """Bytes that one execution brings to the host, if the shape is known."""
        if self.shape is None:
            return None
        return results * torch.Size(self.shape).numel() * bytes_of_element(self.dtype)


def parameters_of(module: torch.nn.Module) -> Dict[str, Parameter]:
    """Describe a module's parameters; to be called before the model is compiled."""
    return {
        name: Parameter(tuple(parameter.shape), parameter.dtype, parameter.requires_grad)
        for name, parameter in module.named_parameters()
    }


def prefix_of(wrapper: torch.nn.Module, module: torch.nn.Module) -> str:
    """What the names of a module's parameters begin with in the model that PopTorch compiles.

    Raises:
        CallbackSetupError: The module is not part of the model.
    """
    for name, part in wrapper.named_modules():
        if part is module:
            return f"{name}." if name else ""
    raise CallbackSetupError(
        report(
            f"`{type(module).__name__}` is not part of the model that the strategy compiles, "
            "expected the strategy to wrap it",
            received=f"`{type(wrapper).__name__}`",
            why="gradients and weights are found by the names that the wrapper gives them",
        )
    )


def state_names(optimizer: Any) -> Dict[str, str]:
    """PopART's stable names of an optimizer's states, by PyTorch's names of them.

    What is not here can only be read from the optimizer as a whole: the number of steps, and the
    combined accumulator of `poptorch.optim.SGD(use_combined_accum=True)`, which holds no momentum.
    """
    classes = {base.__name__ for base in type(optimizer).__mro__}
    groups = optimizer.param_groups
    if classes & {"Adam", "AdamW", "LAMB"}:
        return {"exp_avg": "Accl1", "exp_avg_sq": "Accl2"}
    momentum = any(group.get("momentum") for group in groups)
    if "RMSprop" in classes:
        names = {"square_avg": "Accl1"}
        if any(group.get("centered") for group in groups):
            names["grad_avg"] = "Accl2"
        return dict(names, momentum_buffer="Accl3") if momentum else names
    if "SGD" in classes and momentum and not getattr(optimizer, "use_combined_accum", False):
        return {"momentum_buffer": "Accl1"}
    return {}


def state_scale(optimizer: Any) -> float:
    """What a state that is anchored by its stable name is kept larger by.

    PopTorch keeps SGD's momentum larger by the loss scaling (PopTorch 3.4 `CompilerImpl.cpp`).
    """
    is_sgd = any(base.__name__ == "SGD" for base in type(optimizer).__mro__)
    return float(getattr(optimizer, "loss_scaling", 1.0)) if is_sgd else 1.0


def by_pattern(
    candidates: Mapping[str, NamedTensor], patterns: Tuple[str, ...], argument: str, owner: str
) -> List[NamedTensor]:
    """The candidates whose names a pattern selects.

    Raises:
        KeySelectionError: A pattern selects none of them.
    """
    selection = Selection(patterns)
    chosen = [tensor for name, tensor in candidates.items() if selection.selects(name)]
    for pattern, nearest in selection.unmatched():
        raise KeySelectionError(
            report(
                f"`IPULogCallback({argument}=[{pattern!r}])` matches no trained parameter of "
                f"`{owner}`",
                nearest=names_text(nearest),
                expected="a name as `named_parameters()` of your LightningModule gives it, "
                "or a glob",
            )
        )
    return chosen


def declared(options: Any, tensors: Iterable[NamedTensor]) -> List[NamedTensor]:
    """Declare anchors in an executor's options, which must not be compiled yet.

    A tensor that the options anchor already is not declared again: PopTorch fills only one of two
    outputs of the same tensor.

    Args:
        options: The executor's own options. `anchorTensor` edits a dict, so that they are frozen
            does not matter (PopTorch 2.6-3.4 `options.py`).
        tensors: What to declare.

    Returns:
        The same with the names to ask the executor for.
    """
    from poptorch import OutputMode

    # PopTorch fills in a mode that is left out when the executor is made, which was before
    mode = OutputMode(int(options.output_mode))
    known = {entry[0]: short for short, entry in options.anchored_tensors.items()}
    result = []
    for tensor in tensors:
        if tensor.tensor not in known:
            known[tensor.tensor] = f"ipu_log/{tensor.key}"
            options.anchorTensor(
                known[tensor.tensor], tensor.tensor, mode, int(options.output_return_period)
            )
        short = known[tensor.tensor]
        result.append(
            NamedTensor(tensor.kind, tensor.name, tensor.tensor, tensor.shape, tensor.dtype, short)
        )
    return result


def results_of(tensor: torch.Tensor, shape: Optional[Tuple[int, ...]], results: int) -> Any:
    """What came back, `[results, *shape]`, halves widened.

    Args:
        tensor: As the executor returned it: dimension 0 multiplied by the results.
        shape: Shape of one result; found from the tensor if it is `None`.
        results: Results that an execution returns; a constant comes back once.
    """
    if tensor.dtype in (torch.float16, torch.bfloat16):
        tensor = tensor.float()
    if shape is None:
        if results == 1 or tensor.dim() == 0 or len(tensor) % results:
            return tensor.unsqueeze(0)
        head = len(tensor) // results
        inner = (head, *tensor.shape[1:]) if head > 1 or tensor.dim() > 1 else ()
        return tensor.reshape(results, *inner)
    return tensor.reshape(-1, *shape)


def gradients_of(
    values: torch.Tensor, geometry: Geometry, summed: bool, scale: float
) -> torch.Tensor:
    """The gradient of each weight update: what plain PyTorch has in `.grad` before its step.

    Args:
        values: The micro-batches' own gradients, `[results, *shape]`.
        geometry: Micro-batches and the output mode.
        summed: Whether gradients are summed over accumulation and replicas, not averaged
            (`Options.Training.accumulationAndReplicationReductionType`).
        scale: The optimizer's `loss_scaling`.

    Returns:
        `[updates, *shape]`. Where only some micro-batches of an update come back (`Final` and
        `EveryN` with gradient accumulation) these stand for it.
    """
    inner = values.shape[1:]
    accumulation = geometry.accumulation if geometry.sees_each_micro_batch else 1
    rows = values.reshape(-1, accumulation * geometry.replicas, *inner)
    divisor = scale * (1 if summed else rows.shape[1] * geometry.micro_batches_per_result)
    reduced = rows.sum(1)
    return reduced if divisor == 1 else reduced / divisor


def last_of(values: torch.Tensor) -> torch.Tensor:
    """The value after the execution's last update, `[1, *shape]`; all replicas hold the same."""
    return values[-1:]
