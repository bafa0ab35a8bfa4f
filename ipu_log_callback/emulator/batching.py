"""Micro-batches of an execution: how inputs are cut, and what comes back.

Inputs and full outputs are laid out as ``[iterations, accumulation, replicas]`` micro-batches along
dimension 0; inputs that replicas share count once for each group of them. With n results, a 0-d
output becomes ``[n]`` when n > 1 and stays 0-d when n = 1; any other has its dimension 0 multiplied
by n (PopTorch 3.4 `PoplarExecutable.cpp`, `Compiler::popartBatchDimForAnchor`, user guide
"Efficient data batching").
"""

import dataclasses
from typing import List, Optional

import torch

from ipu_log_callback.emulator.enums import OutputMode
from ipu_log_callback.emulator.replica_groups import ReplicaGroups

__all__ = ["Collector", "Geometry", "micro_batches", "narrow_to_micro_batch"]


@dataclasses.dataclass(frozen=True)
class Geometry:
    """How many micro-batches an execution holds and which of their results it returns.

    Attributes:
        iterations: Device iterations, each ending in a weight update.
        accumulation: Micro-batches per replica and weight update; 1 in inference.
        replicas: Copies of the model working side by side.
        mode: Which results come back.
        period: The N of ``EveryN``, counted in a replica's micro-batches.
        shared_inputs: Which replicas share inputs; ``None`` if none do.
    """

    iterations: int
    accumulation: int
    replicas: int
    mode: OutputMode
    period: int = 1
    shared_inputs: Optional[ReplicaGroups] = None

    @property
    def per_replica(self) -> int:
        """Micro-batches that one replica sees."""
        return self.iterations * self.accumulation

    @property
    def total(self) -> int:
        """Micro-batches of an execution."""
        return self.per_replica * self.replicas

    @property
    def input_groups(self) -> int:
        """Groups of replicas that share inputs."""
        return self.replicas if self.shared_inputs is None else self.shared_inputs.count

    @property
    def results(self) -> int:
        """Results that an execution returns."""
        if self.mode == OutputMode.All:
            return self.total
        if self.mode == OutputMode.EveryN:
            return self.total // self.period
        return self.replicas


def narrow_to_micro_batch(tensor: torch.Tensor, geometry: Geometry) -> torch.Tensor:
    """Return the first micro-batch's part of an input.

    Raises:
        AssertionError: If dimension 0 is not a multiple of the number of micro-batches.
    """
    size = tensor.size(0) if tensor.dim() else 1
    groups = geometry.input_groups
    total = geometry.per_replica * groups
    assert size % total == 0, (
        f"Invalid batch dimension: In the input {tensor.shape}, the batch "
        f"dimension ({size}) must be a multiple of "
        f"Options.deviceIterations({geometry.iterations}) * "
        f"(Options.replicationFactor({geometry.replicas}) / "
        f"Options.inputReplicaGrouping.input_group_size({geometry.replicas // groups})) * "
        f"Options.Training.gradientAccumulation({geometry.accumulation}) = {total} "
        "because it is used to calculate the batch size which will "
        "be executed on the device in any given iteration. For a "
        "full explanation see the batching semantics page of the "
        "documentation."
    )
    return tensor if tensor.dim() == 0 else tensor.narrow(0, 0, size // total)


def micro_batches(tensor: torch.Tensor, geometry: Geometry) -> List[torch.Tensor]:
    """Cut an input into views, one for each micro-batch, in the order of their execution."""
    total = geometry.per_replica * geometry.input_groups
    size = tensor.size(0) // total if total > 1 else 0
    parts = list(tensor.split(size)) if size else [tensor] * total
    if geometry.shared_inputs is None:
        return parts
    return [parts[group] for group in geometry.shared_inputs.of]


class Collector:
    """Gathers one output over the micro-batches of an execution."""

    def __init__(self, geometry: Geometry) -> None:
        self._geometry = geometry
        self._kept: List[Optional[torch.Tensor]] = []
        if geometry.mode in (OutputMode.Final, OutputMode.Sum):
            self._kept = [None] * geometry.replicas

    def add(self, value: torch.Tensor, step: int, replica: int) -> None:
        """Take the value of a replica's micro-batch number `step`."""
        mode = self._geometry.mode
        if mode == OutputMode.All:
            self._kept.append(value)
        elif mode == OutputMode.EveryN:
            if (step + 1) % self._geometry.period == 0:
                self._kept.append(value)
        elif mode == OutputMode.Final:
            if step + 1 == self._geometry.per_replica:
                self._kept[replica] = value
        else:
            before = self._kept[replica]
            self._kept[replica] = value.clone() if before is None else before.add_(value)

    def result(self) -> torch.Tensor:
        """Return what the execution returns: ``[results * dim 0, ...]``, or ``[results]``."""
        values = [value for value in self._kept if value is not None]
        if len(values) == 1:
            return values[0]
        return torch.stack(values) if values[0].dim() == 0 else torch.cat(values)
