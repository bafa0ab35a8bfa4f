"""Which tensors of the compiled graph are wanted, and what they hold after an execution."""

from typing import Any, Dict, Iterator, List, Optional, Sequence, Tuple

import torch

from .errors import OutputModeError, UnknownTensorError, report, warn
from .geometry import Geometry
from .inspection_settings import InspectionSettings
from .named_tensors import (
    NamedTensor,
    Parameter,
    by_pattern,
    declared,
    gradients_of,
    last_of,
    parameters_of,
    prefix_of,
    results_of,
    state_names,
    state_scale,
)
from .optimizer_states import OptimizerStates

__all__ = ["NamedAnchors"]


class NamedAnchors:
    """The anchors that one run declares by name in its executors' options.

    Args:
        trainer: The trainer.
        module: Its LightningModule.
        settings: What to look at.

    Attributes:
        states: The optimizer's states that have no stable name, if any are wanted.
    """

    def __init__(self, trainer: Any, module: Any, settings: InspectionSettings) -> None:
        self._trainer = trainer
        self._module = module
        self._settings = settings
        self._parameters: Dict[str, Parameter] = {}
        self._declared: Dict[int, List[NamedTensor]] = {}
        self.states: Optional[OptimizerStates] = None

    def of(self, listener: Any) -> Sequence[NamedTensor]:
        """What is anchored in a listener's executor."""
        return self._declared.get(id(listener), ())

    def prepare(self) -> None:
        """Note what must be known of the parameters; before the strategy wraps them."""
        if self._settings.names_tensors:
            self._parameters = parameters_of(self._module)

    def declare(self, wrapper: Any, listeners: Sequence[Any]) -> None:
        """Find the wanted tensors and anchor them in the executors that hold them.

        Args:
            wrapper: The model that the strategy compiles.
            listeners: The run's `ExecutorListener`s.

        Raises:
            KeySelectionError: A glob matches no trained parameter, or no state of the optimizer.
            OutputModeError: The output mode cannot give what is asked for.
        """
        settings = self._settings
        if not settings.names_tensors:
            return
        training = [listener for listener in listeners if listener.training]
        prefix = prefix_of(wrapper, self._module)
        named = [NamedTensor("tensor", name, tensor) for name, tensor in settings.tensors]
        if training:
            named += self._of_parameters("grad", settings.gradients, "Gradient___" + prefix)
            named += self._of_parameters("weight", settings.weights, "UpdatedVar___" + prefix)
            named += self._optimizer_states(prefix)
        for listener in training or listeners:
            options = listener.executor.options
            _check_output_mode(named, Geometry.from_options(options, listener.training))
            self._declared[id(listener)] = declared(options, named)

    def _of_parameters(
        self, kind: str, patterns: Tuple[str, ...], prefix: str
    ) -> List[NamedTensor]:
        candidates = {
            name: NamedTensor(kind, name, prefix + name, parameter.shape, parameter.dtype)
            for name, parameter in self._parameters.items()
            if parameter.trained
        }
        argument = "gradients" if kind == "grad" else "weights"
        return by_pattern(candidates, patterns, argument, type(self._module).__name__)

    def _optimizer_states(self, prefix: str) -> List[NamedTensor]:
        patterns = self._settings.optimizer_state
        if not patterns or not self._trainer.optimizers:
            return []
        optimizer = self._trainer.optimizers[0]
        stable = state_names(optimizer)
        trained = [name for name, parameter in self._parameters.items() if parameter.trained]
        self.states = OptimizerStates(
            optimizer, prefix, patterns, stable, trained, type(self._module).__name__
        )
        return [
            NamedTensor(
                "optim",
                f"{name}/{state}",
                f"{stable[state]}___{prefix}{name}",
                self._parameters[name].shape,
                self._parameters[name].dtype,
            )
            for name, state in self.states.anchored
        ]

    def values(self, listener: Any) -> Iterator[Tuple[NamedTensor, torch.Tensor]]:
        """What each anchor of an executor held in its last execution.

        Yields:
            The anchor, and `[updates, *shape]` of a gradient, `[1, *shape]` of a weight or a state,
            `[results, *shape]` of anything else.
        """
        geometry = listener.fetched
        for tensor in self.of(listener):
            value = self.returned(tensor, listener)
            if tensor.kind == "grad":
                training = listener.executor.options.Training
                summed = int(training.accumulation_and_replication_reduction_type) == 0
                scale = float(getattr(self._trainer.optimizers[0], "loss_scaling", 1.0))
                value = gradients_of(value, geometry, summed, scale)
            elif tensor.kind == "weight":
                value = last_of(value)
            elif tensor.kind == "optim":
                value = last_of(value) / state_scale(self._trainer.optimizers[0])
            yield tensor, value

    @staticmethod
    def returned(tensor: NamedTensor, listener: Any) -> torch.Tensor:
        """What the last execution returned for an anchor, `[results, *shape]`."""
        returned = listener.executor.getAnchoredTensor(tensor.short)
        value: torch.Tensor = results_of(returned, tensor.shape, listener.fetched.results)
        return value

    def unknown_tensor(self, name: str) -> UnknownTensorError:
        """What to raise when PopART does not know a tensor."""
        named = {tensor.tensor: tensor for each in self._declared.values() for tensor in each}
        tensor = named.get(name)
        if tensor is None or tensor.kind == "tensor":
            short = "..." if tensor is None else tensor.name
            call = f"`IPULogCallback(tensors={{{short!r}: {name!r}}})`"
            why = "the compiled graph has no tensor of that name"
            fix = "compile without it and look: `callback.tensor_names()` lists all names"
        else:
            call = f"`IPULogCallback({_ARGUMENTS[tensor.kind]}=[...])` of '{tensor.name}'"
            why = "a parameter that does not lead to the loss has no gradient and no update"
            fix = "leave that parameter out of the glob"
        return UnknownTensorError(
            report(
                f"{call} names a tensor that PopART does not know",
                received=name,
                why=why,
                fix=fix,
            )
        )


def _check_output_mode(named: Sequence[NamedTensor], geometry: Geometry) -> None:
    kinds = {tensor.kind for tensor in named} - {"tensor"}
    summed = geometry.micro_batches_per_result > 1
    if kinds and summed and (kinds != {"grad"} or geometry.iterations > 1):
        argument = ", ".join(sorted(_ARGUMENTS[kind] for kind in kinds))
        raise OutputModeError(
            report(
                f"`IPULogCallback({argument}=...)` needs every micro-batch, received their sum",
                received="poptorch.OutputMode.Sum",
                expected="poptorch.OutputMode.All",
                why="a device adds up the micro-batches of several weight updates",
                fix="IPULogCallback(..., output_mode='all')",
            )
        )
    if "grad" in kinds and geometry.accumulation > 1 and not geometry.sees_every_micro_batch:
        warn(
            report(
                "gradients of a weight update are those of single micro-batches, "
                "expected those of all that it accumulates",
                received=f"poptorch.OutputMode.{geometry.output_mode} with gradient "
                f"accumulation {geometry.accumulation}",
                fix="IPULogCallback(..., output_mode='auto')",
            )
        )


_ARGUMENTS = {"grad": "gradients", "weight": "weights", "optim": "optimizer_state"}
