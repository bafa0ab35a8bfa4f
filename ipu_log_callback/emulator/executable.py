"""A compiled model on its device: weights, buffers, optimizer and random numbers of its own."""

import dataclasses
from contextlib import contextmanager
from typing import Dict, Iterator, List, Optional, Sequence, Tuple

import torch

from ipu_log_callback.emulator.anchors import AnchorReader
from ipu_log_callback.emulator.batching import Collector, Geometry, micro_batches
from ipu_log_callback.emulator.device_optimizer import DeviceOptimizer
from ipu_log_callback.emulator.exchange import add_up
from ipu_log_callback.emulator.program import Program
from ipu_log_callback.emulator.replica_groups import ReplicaGroups
from ipu_log_callback.emulator.tracing import to_device_dtype

__all__ = ["Executable", "Layout"]


@dataclasses.dataclass(frozen=True)
class Layout:
    """What a compiled step's values are.

    Attributes:
        geometry: Micro-batches of an execution.
        parameters: Names of floating-point parameters, in order.
        buffers: Names of floating-point buffers.
        grouped: How parameters are divided that have another value for each group of replicas.
        trained: Parameters that require gradients and that the loss depends on.
        snapshots: For each wanted value, whether it must be copied at once because it shares memory
            with something that a later micro-batch may change.
        outputs: How many of the program's values are outputs of the step.
        constant_outputs: Values of the outputs that are constants, by their number; they come back
            once.
        written_inputs: Numbers of the inputs that the step writes to; their values follow the
            outputs.
        loss: Number of the final loss among the program's values, or ``None``.
        loss_scale: What a micro-batch's gradients are multiplied with before they are summed up.
        processes: Processes whose gradients are summed up.
    """

    geometry: Geometry
    parameters: List[str]
    buffers: List[str]
    grouped: Dict[str, ReplicaGroups]
    trained: List[str]
    snapshots: List[bool]
    outputs: int
    constant_outputs: Dict[int, torch.Tensor]
    written_inputs: List[int]
    loss: Optional[int]
    loss_scale: float
    processes: int


class Executable:
    """Executes a program on micro-batches.

    Attributes:
        weights: The device's parameters by name, for each replica; all replicas have the same
            tensors, but for grouped parameters.
        buffers: The device's buffers by name, for each replica.
        optimizer: Updates the weights; ``None`` in an inference model.
        seed: Seed of the device's random numbers.
    """

    def __init__(self, program: Program, layout: Layout, anchors: AnchorReader) -> None:
        self.program = program
        self.layout = layout
        self.anchors = anchors
        self.weights: List[Dict[str, torch.Tensor]] = [{} for _ in range(layout.geometry.replicas)]
        self.buffers: List[Dict[str, torch.Tensor]] = []
        self.optimizer: Optional[DeviceOptimizer] = None
        self.seed = 0
        self._rng = torch.Generator().manual_seed(0).get_state()

    # Weights

    def upload(self, host: Dict[str, torch.Tensor]) -> None:
        """Copy parameters and buffers from the host's tensors, by name, to every replica."""
        with torch.no_grad():
            for name in self.layout.parameters:
                value = to_device_dtype(host[name].detach())
                groups = self.layout.grouped.get(name)
                parts = [value] if groups is None else value.unbind(0)
                if name in self.weights[0]:
                    for tensor, part in zip(self.values_of(name), parts):
                        tensor.copy_(part)
                    continue
                made = [part.clone().requires_grad_(name in self.layout.trained) for part in parts]
                for replica, weights in enumerate(self.weights):
                    weights[name] = made[0 if groups is None else groups.of[replica]]
            self.buffers = [
                {name: to_device_dtype(host[name].detach()).clone() for name in self.layout.buffers}
                for _ in range(self.layout.geometry.replicas)
            ]

    def upload_buffers(self, host: Dict[str, torch.Tensor]) -> None:
        """Copy the given buffers to every replica."""
        for replica in self.buffers:
            for name, value in host.items():
                replica[name].copy_(value)

    def download(self, host: Dict[str, torch.Tensor]) -> None:
        """Copy parameters, and the first replica's buffers, into host tensors by name."""
        with torch.no_grad():
            for name, value in {**self.weights[0], **self.buffers[0]}.items():
                grouped = name in self.layout.grouped
                host[name].copy_(torch.stack(self.values_of(name)) if grouped else value)

    def values_of(self, name: str) -> List[torch.Tensor]:
        """Return the values of a parameter: one, or one for each group of replicas."""
        groups = self.layout.grouped.get(name)
        replicas = [0] if groups is None else groups.first
        return [self.weights[replica][name] for replica in replicas]

    @property
    def weight_names(self) -> Dict[int, str]:
        """Names of the weights of all replicas by `id`."""
        return {id(weight): name for mine in self.weights for name, weight in mine.items()}

    # Random numbers

    def seed_random_numbers(self, seed: int) -> None:
        """Start the device's random numbers from `seed`."""
        self.seed = seed
        self._rng = torch.Generator().manual_seed(seed).get_state()

    @property
    def rng_state(self) -> List[int]:
        """Seed, then state of the device's random numbers."""
        return [self.seed, *self._rng.tolist()]

    @rng_state.setter
    def rng_state(self, state: Sequence[int]) -> None:
        if len(state) == 1:
            self.seed_random_numbers(state[0])
        else:
            self.seed = state[0]
            self._rng = torch.tensor(state[1:], dtype=torch.uint8)

    @contextmanager
    def _device_random_numbers(self) -> Iterator[None]:
        if not self.program.is_random:
            yield
            return
        host = torch.get_rng_state()
        torch.set_rng_state(self._rng)
        try:
            yield
        finally:
            self._rng = torch.get_rng_state()
            torch.set_rng_state(host)

    # Execution

    def execute(
        self, inputs: Sequence[torch.Tensor]
    ) -> Tuple[List[torch.Tensor], Dict[str, torch.Tensor]]:
        """Run all micro-batches of one execution.

        Args:
            inputs: The step's tensor arguments, for all micro-batches: ``[micro-batches * dim 0,
                ...]``.

        Returns:
            The outputs of the step, then the values of inputs that the step wrote to; and the
            anchored tensors by name.
        """
        layout, geometry = self.layout, self.layout.geometry
        slices = [micro_batches(to_device_dtype(tensor), geometry) for tensor in inputs]
        count = layout.outputs + len(layout.written_inputs)
        collectors = [Collector(geometry) for _ in range(count)]
        anchored = {name: Collector(geometry) for name in self.anchors.names}
        grad = torch.enable_grad() if layout.loss is not None else torch.no_grad()
        with grad, self._device_random_numbers():
            for step in range(geometry.per_replica):
                read = []
                for replica in range(geometry.replicas):
                    mine = [part[step * geometry.replicas + replica] for part in slices]
                    values, found = self._micro_batch(mine, replica)
                    read.append(found)
                    for collector, value, snapshot in zip(collectors, values, layout.snapshots):
                        kept = value.detach()
                        collector.add(kept.clone() if snapshot else kept, step, replica)
                if self.optimizer is not None and (step + 1) % geometry.accumulation == 0:
                    self._exchange_gradients()
                    self.optimizer.step()
                self._collect_anchors(anchored, read, step)
        outputs = [
            layout.constant_outputs[index].clone()
            if index in layout.constant_outputs
            else collector.result()
            for index, collector in enumerate(collectors)
        ]
        return outputs, {name: collector.result() for name, collector in anchored.items()}

    def _micro_batch(
        self, inputs: Sequence[torch.Tensor], replica: int
    ) -> Tuple[Tuple[torch.Tensor, ...], Dict[str, torch.Tensor]]:
        """Run forward and backward pass of one micro-batch on one replica."""
        weights, buffers = self.weights[replica], self.buffers[replica]
        # Detached: a buffer updated from a differentiable value must not tie this micro-batch to
        # the next.
        states = [
            weights[name] if name in weights else buffers[name].detach()
            for name in self.program.states
        ]
        values = self.program.run(inputs, states)
        gradients = (
            {} if self.layout.loss is None else self._backward(values[self.layout.loss], weights)
        )
        if not self.anchors.names:
            return values, {}
        loss = values[self.layout.loss] if self.layout.loss is not None else torch.empty(0)
        every = {**weights, **buffers}
        scaling = 1.0 if self.optimizer is None else self.optimizer.loss_scaling
        return values, self.anchors.before_update(inputs, every, gradients, loss, scaling)

    def _backward(
        self, loss: torch.Tensor, weights: Dict[str, torch.Tensor]
    ) -> Dict[str, torch.Tensor]:
        """Add this micro-batch's share to the gradients.

        Returns:
            The micro-batch's own gradients by name, if an anchor wants them.
        """
        scale = self.layout.loss_scale
        if not loss.requires_grad:
            return {}
        if not self.anchors.needs_gradients:
            loss.backward(torch.full_like(loss, scale) if scale != 1.0 else None)
            return {}
        params = [weights[name] for name in self.layout.trained]
        grads = torch.autograd.grad(loss.sum(), params, allow_unused=True)
        for param, grad in zip(params, grads):
            if grad is not None:
                share = grad * scale
                param.grad = share if param.grad is None else param.grad + share
        return {
            name: torch.zeros_like(param) if grad is None else grad
            for name, param, grad in zip(self.layout.trained, params, grads)
        }

    def _exchange_gradients(self) -> None:
        if self.layout.processes > 1:
            params = (self.weights[0][name] for name in self.layout.trained)
            add_up([param.grad for param in params if param.grad is not None])

    def _collect_anchors(
        self, anchored: Dict[str, Collector], read: List[Dict[str, torch.Tensor]], step: int
    ) -> None:
        if not anchored:
            return
        updated: List[Dict[str, torch.Tensor]] = [{}]
        if self.optimizer is not None and self.anchors.needs_update:
            different = self.weights if self.layout.grouped else self.weights[:1]
            updated = [self.anchors.after_update(mine, self.optimizer) for mine in different]
        for replica, found in enumerate(read):
            for name, collector in anchored.items():
                value = found[name] if name in found else updated[replica % len(updated)][name]
                collector.add(value, step, replica)
