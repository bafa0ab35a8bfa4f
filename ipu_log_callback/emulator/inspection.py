"""What can be asked of a compiled model.

Its tensors by name, and times that the emulator has not got.
"""

from datetime import timedelta
from typing import Any, Dict, List, Optional, Tuple

import torch

from ipu_log_callback.emulator.anchors import tensor_names, without_trace_prefix
from ipu_log_callback.emulator.arguments import Arguments
from ipu_log_callback.emulator.device_state import DeviceState
from ipu_log_callback.emulator.errors import NotEmulatedError, python_error

__all__ = ["Inspection"]


class Inspection(DeviceState):
    """The part of an executor that answers questions."""

    def __init__(self) -> None:
        super().__init__()
        self._executable_inputs: Optional[Arguments] = None
        self._anchor_memory: Dict[str, torch.Tensor] = {}

    @property
    def _has_trace_prefix(self) -> bool:
        return self._training and bool(self._options.Jit.trace_model)

    def _anchor_name(self, anchor: List[Any]) -> str:
        name: str = anchor[0]
        return without_trace_prefix(name) if self._has_trace_prefix else name

    # Inspection

    def getTensorNames(self) -> List[str]:
        """Names of the compiled model's tensors, to be used in ``Options.anchorTensor``."""
        assert self._executable is not None, "Model must be compiled before calling getTensorNames"
        layout = self._executable.layout
        assert self._executable_inputs is not None
        inputs = len(self._executable_inputs.tensors(self._executable_inputs))
        prefix = "model." if self._has_trace_prefix else ""
        states = [prefix + name for name in (*layout.parameters, *layout.buffers)]
        return tensor_names(states, [prefix + name for name in layout.trained], inputs)

    def getAnchoredTensor(self, short_name: str) -> torch.Tensor:
        """The anchored tensor's values from the last execution."""
        assert short_name in self._anchor_memory, f"No tensor with name {short_name} found."
        return self._anchor_memory[short_name]

    def getPerfCounters(self) -> Dict[str, List[List[float]]]:
        """PopTorch's structure of time stamps, without any: the emulator measures no time."""
        return {name: [[]] for name in ("input", "input_complete", "output", "output_complete")}

    def _no_latency(self) -> Tuple[float, float, float]:
        return (0.0, 0.0, 0.0)

    getHostIpuLatency = getComputeLatency = getIpuHostLatency = getLatency = _no_latency

    def cycleCount(self) -> int:
        """Refused: there is no hardware whose cycles could be counted.

        Raises:
            Error: If ``Options.logCycleCount`` is off or nothing was executed.
            NotEmulatedError: Otherwise.
        """
        if not self._options._Popart.options["instrumentWithHardwareCycleCounter"]:
            raise python_error(
                "Cycle count logging is disabled. Please set option logCycleCount to True to "
                "enable."
            )
        if not self.isCompiled():
            raise python_error("Please run the model at least once before obtaining cycle count.")
        raise NotEmulatedError("cycleCount()", "there is no hardware whose cycles could be counted")

    def compilationTime(self) -> timedelta:
        """Zero: times of the emulator mean nothing."""
        if not self.isCompiled():
            raise python_error("Please compile the model before obtaining compilation time.")
        if not self._options._show_compilation_progress_bar:
            raise python_error(
                "Please set showCompilationProgressBar option to obtain compilation time."
            )
        return timedelta(0)
