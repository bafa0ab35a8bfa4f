"""Tensors of the compiled graph that a user can ask for by name.

Names are PopART's: ``<parameter>``, ``Gradient___<parameter>``, ``UpdatedVar___<parameter>``,
optimizer states such as ``Accl1___<parameter>``, inputs and the loss (PopTorch 3.4
`debug_tensors_test.py`, user guide "Debugging your model").
"""

from typing import Dict, List, Sequence

import torch

from ipu_log_callback.emulator.device_optimizer import DeviceOptimizer
from ipu_log_callback.emulator.errors import backend_error

__all__ = ["AnchorReader", "input_name", "tensor_names", "without_trace_prefix"]

_GRADIENT, _UPDATED = "Gradient___", "UpdatedVar___"
_STATES = ("Accl1___", "Accl2___", "Accl3___")


def input_name(index: int) -> str:
    """Return PopART's name of the input number `index`."""
    return "input" if index == 0 else f"input/{index}"


def without_trace_prefix(name: str) -> str:
    """Return an anchor's name without the ``model.`` of a traced training model's parameters.

    PopTorch 2.6 traces the module inside a wrapper that also holds the optimizer (`_impl.py`,
    `OptimizerWrapper`).
    """
    kind, mark, parameter = name.rpartition("___")
    return kind + mark + (parameter[6:] if parameter.startswith("model.") else parameter)


def tensor_names(states: Sequence[str], trained: Sequence[str], inputs: int) -> List[str]:
    """List the names of a model's tensors.

    Args:
        states: Parameters and buffers on the device.
        trained: Those that the optimizer updates; empty for an inference model.
        inputs: Number of input tensors.
    """
    names = [*states, *map(input_name, range(inputs))]
    if trained:
        names += ["loss", "scaledLearningRate0___default___FLOAT"]
        names += ["weightDecayScaleFactor0___default___FLOAT"]
    for name in trained:
        names += [f"{prefix}{name}" for prefix in (_GRADIENT, _UPDATED)]
    return sorted(names)


class AnchorReader:
    """Reads the anchored tensors of one compiled model, micro-batch by micro-batch."""

    def __init__(
        self, names: Sequence[str], states: Sequence[str], trained: Sequence[str], inputs: int
    ) -> None:
        """Check that every name exists.

        Raises:
            Error: If one does not.
        """
        self.names = list(names)
        known = {*tensor_names(states, trained, inputs)}
        known |= {prefix + name for prefix in _STATES for name in trained}
        for name in self.names:
            if name not in known or name.startswith(("scaledLearningRate", "weightDecayScale")):
                raise backend_error(
                    f"Anchor tensor `{name}' not in Ir Tensors",
                    source="popart/ir.cpp",
                    kind="popart_exception",
                )
        self._inputs = {input_name(index): index for index in range(inputs)}

    @property
    def needs_gradients(self) -> bool:
        """Whether a micro-batch's own gradients are wanted."""
        return any(name.startswith(_GRADIENT) for name in self.names)

    @property
    def needs_update(self) -> bool:
        """Whether values are wanted that exist only after the weight update."""
        return any(name.startswith((_UPDATED, *_STATES)) for name in self.names)

    def before_update(
        self,
        inputs: Sequence[torch.Tensor],
        states: Dict[str, torch.Tensor],
        gradients: Dict[str, torch.Tensor],
        loss: torch.Tensor,
        loss_scaling: float,
    ) -> Dict[str, torch.Tensor]:
        """Return copies of what exists right after a micro-batch's backward pass.

        Gradients are multiplied by the loss scaling, which only the update undoes (PopART 3.4
        `gradgrowerloss.cpp`).
        """
        found = {}
        for name in self.names:
            if name in states:
                value = states[name]
            elif name in self._inputs:
                value = inputs[self._inputs[name]]
            elif name == "loss":
                value = loss
            elif name.startswith(_GRADIENT):
                value = gradients[name[len(_GRADIENT) :]] * loss_scaling
            else:
                continue
            found[name] = value.detach().clone()
        return found

    def after_update(
        self, weights: Dict[str, torch.Tensor], optimizer: DeviceOptimizer
    ) -> Dict[str, torch.Tensor]:
        """Return copies of what exists after the update that ends a device iteration."""
        states = optimizer.state({id(weight): name for name, weight in weights.items()})
        found = {}
        for name in self.names:
            if name.startswith(_UPDATED):
                found[name] = weights[name[len(_UPDATED) :]].detach().clone()
            elif name.startswith(_STATES):
                param = weights[name.partition("___")[2]]
                state = states.get(name, torch.zeros_like(param)).detach()
                found[name] = state * optimizer.velocity_scaling
        return found
