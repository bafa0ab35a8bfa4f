"""The groups inside `Options`: Jit, Precision, Training, Distributed, TensorLocations, PopART.

Setters check and store what PopTorch 3.4 `options.py` does. A setting that could change results and
is not emulated is refused where it is set; one that only steers speed, memory or rounding on
hardware is stored and has no effect.
"""

import os
from typing import Any, Dict

import torch

from ipu_log_callback.emulator import enums
from ipu_log_callback.emulator.console import logger
from ipu_log_callback.emulator.errors import NotEmulatedError
from ipu_log_callback.emulator.options_dict import Freezable, OptionsDict

__all__ = [
    "DistributedOptions",
    "JitOptions",
    "PopartOptions",
    "PrecisionOptions",
    "TensorLocationOptions",
    "TensorLocationSettings",
    "TrainingOptions",
]

# PopART session options that would change what a model computes or returns, with the values that
# leave it alone.
_POPART_NEUTRAL = {
    "syntheticDataMode": (0,),
    "enableFloatingPointChecks": (False,),
    "accumulationFactor": (1,),
    "delayVarUpdates": (False,),
    "enableDistributedReplicatedGraphs": (False,),
    "globalReplicationFactor": (1,),
}


class PopartOptions(Freezable):
    """Options of the PopART session, by PopART's own names (`Options._Popart`)."""

    def __init__(self) -> None:
        """Start from PopTorch's two defaults."""
        self.options: Dict[str, Any] = {
            "instrumentWithHardwareCycleCounter": False,
            "rearrangeAnchorsOnHost": False,
        }

    def set(self, key: str, value: Any) -> "PopartOptions":
        """Store the session option `key`.

        Raises:
            AttributeError: If frozen.
            NotEmulatedError: If the option would change results.
        """
        self.checkIsFrozen()
        if key in _POPART_NEUTRAL and value not in _POPART_NEUTRAL[key]:
            raise NotEmulatedError(
                f"Options._Popart.set({key!r}, {value!r})", "it changes what the model computes"
            )
        self.options[key] = value
        return self

    def setEngineOptions(self, engine_options: Dict[str, str]) -> "PopartOptions":
        """Store options of the Poplar engine; no effect in the emulator."""
        return self.set("engineOptions", engine_options)

    def setPatterns(self, patterns: Dict[str, bool], level: int = 2) -> "PopartOptions":
        """Store PopART's graph patterns; no effect in the emulator."""
        assert isinstance(level, int)
        assert isinstance(patterns, dict)
        self.set("patterns_level", level)
        return self.set("patterns", patterns)

    def __repr__(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in self.options.items())
        return f"{type(self).__name__}({options})"


class JitOptions(OptionsDict):
    """How the step's Python becomes a graph (`Options.Jit`)."""

    def __init__(self) -> None:
        """Start with the dispatcher, the default since SDK 3.0."""
        super().__init__(trace_model=False)

    def traceModel(self, trace_model: bool) -> "JitOptions":
        """Choose `torch.jit.trace` (SDK 2.x) or the dispatcher (SDK 3.x, the default).

        SDK 3.1 and later have only the dispatcher; the emulator keeps both, so that programs for
        either can be run.
        """
        if trace_model:
            logger.warning(
                "options.Jit.traceModel(True) selects the front end of SDK 2.x; "
                "SDK 3.1 and later no longer have it."
            )
        self.set(trace_model=trace_model)
        return self


class PrecisionOptions(OptionsDict):
    """Number formats (`Options.Precision`)."""

    def __init__(self, popart_options: PopartOptions) -> None:
        """Write what PopART decides into `popart_options`."""
        self._popart_options = popart_options
        super().__init__()

    def halfFloatCasting(
        self, half_float_casting: enums.HalfFloatCastingBehavior
    ) -> "PrecisionOptions":
        """Accept PyTorch's rule for mixed float16/float32 operations, the only one since SDK 3.1.

        Raises:
            NotEmulatedError: For ``FloatDowncastToHalf``.
        """
        if half_float_casting == enums.HalfFloatCastingBehavior.FloatDowncastToHalf:
            raise NotEmulatedError(
                "Options.Precision.halfFloatCasting(FloatDowncastToHalf)",
                "mixed operations follow PyTorch's rule, HalfUpcastToFloat",
            )
        logger.warning(
            "[Deprecated] options.Precision.halfFloatCasting() has no effect: "
            "HalfUpcastToFloat is the only behaviour."
        )
        return self

    def runningStatisticsAlwaysFloat(self, value: bool) -> "PrecisionOptions":
        """Accept what SDK 3.4 ignores: running statistics have the type of the layer's input.

        Raises:
            ValueError: If not a bool.
        """
        if not isinstance(value, bool):
            msg = "runningStatisticsAlwaysFloat needs to be set to a bool"
            raise ValueError(msg)
        logger.warning(
            "[Deprecated] options.Precision.runningStatisticsAlwaysFloat() has no effect: "
            "False is the only behaviour."
        )
        return self

    def enableFloatingPointExceptions(self, enabled: bool) -> "PrecisionOptions":
        """Accept ``False``; an exception in the middle of an execution is not emulated.

        Raises:
            NotEmulatedError: For ``True``.
        """
        assert isinstance(enabled, bool), "enableFloatingPointExceptions needs to be set to a bool"
        if enabled:
            raise NotEmulatedError(
                "Options.Precision.enableFloatingPointExceptions(True)",
                "no exception is raised for NaN or infinity; check the returned values",
            )
        self._popart_options.set("enableFloatingPointChecks", enabled)
        return self

    def enableStochasticRounding(self, enabled: bool) -> "PrecisionOptions":
        """Store the rounding of float16 values; the emulator always rounds to nearest."""
        self._popart_options.set("enableStochasticRounding", enabled)
        return self

    def setPartialsType(self, dtype: torch.dtype) -> "PrecisionOptions":
        """Store the type of partial sums in matrix products and convolutions; no effect here.

        Raises:
            ValueError: If neither `torch.float` nor `torch.half`.
        """
        names = {torch.float32: "float", torch.float16: "half"}
        if dtype not in names:
            msg = "parameter to setPartialsType should be eithertorch.float or torch.half"
            raise ValueError(msg)
        self._popart_options.set("partialsTypeMatMuls", names[dtype])
        self._popart_options.set("convolutionOptions", {"partialsType": names[dtype]})
        return self


class TrainingOptions(OptionsDict):
    """Gradient accumulation and reduction (`Options.Training`)."""

    def __init__(self, popart_options: PopartOptions) -> None:
        """Write what PopART decides into `popart_options`."""
        self._popart_options = popart_options
        super().__init__(
            gradient_accumulation=1,
            accumulation_and_replication_reduction_type=enums.ReductionType.Mean,
            meanAccumulationAndReplicationReductionStrategy=enums.MeanReductionStrategy.Post,
        )

    def gradientAccumulation(self, gradient_accumulation: int) -> "TrainingOptions":
        """Set how many micro-batches of a replica contribute to one optimizer step."""
        self.set(gradient_accumulation=gradient_accumulation)
        return self

    def accumulationAndReplicationReductionType(
        self, reduction_type: enums.ReductionType
    ) -> "TrainingOptions":
        """Set whether gradients are averaged (default) or summed over accumulation and replicas.

        Raises:
            ValueError: If neither ``Mean`` nor ``Sum``.
        """
        if reduction_type not in (enums.ReductionType.Mean, enums.ReductionType.Sum) or not (
            isinstance(reduction_type, enums.ReductionType)
        ):
            msg = (
                "accumulationAndReplicationReductionType must be set to "
                "poptorch.ReductionType.Mean or poptorch.ReductionType.Sum"
            )
            raise ValueError(msg)
        self.set(accumulation_and_replication_reduction_type=reduction_type)
        return self

    def setMeanAccumulationAndReplicationReductionStrategy(
        self, mean_reduction_strategy: enums.MeanReductionStrategy
    ) -> "TrainingOptions":
        """Store when a mean is divided; equal up to rounding, so no effect in the emulator."""
        self.set(meanAccumulationAndReplicationReductionStrategy=mean_reduction_strategy)
        return self

    def setAutomaticLossScaling(self, enabled: bool) -> "TrainingOptions":
        """Store loss scaling, which only guards float16 gradients; no effect in the emulator."""
        self._popart_options.set("automaticLossScalingSettings.enabled", enabled)
        return self

    def setConvolutionDithering(self, enabled: bool) -> "TrainingOptions":
        """Store the layout of convolutions over tiles; no effect in the emulator."""
        self._popart_options.set("convolutionOptions", {"enableConvDithering": enabled})
        return self


class DistributedOptions(OptionsDict):
    """Which of several processes this one is (`Options.Distributed`)."""

    def __init__(self) -> None:
        """Read Open MPI's environment variables, as PopTorch does."""
        super().__init__(num_distributed_processes=1, distributed_process_id=0, ipuof_configs={})
        self.setEnvVarNames("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK")

    def disable(self) -> "DistributedOptions":
        """Be the only process."""
        return self.configureProcessId(0, 1)

    def setEnvVarNames(self, var_num_processes: str, var_process_id: str) -> "DistributedOptions":
        """Read process id and count from environment variables of these names, now."""
        return self.configureProcessId(
            int(os.environ.get(var_process_id, "0")), int(os.environ.get(var_num_processes, "1"))
        )

    def configureProcessId(self, process_id: int, num_processes: int) -> "DistributedOptions":
        """Be process `process_id` of `num_processes`."""
        self.set(distributed_process_id=process_id, num_distributed_processes=num_processes)
        return self

    @property
    def processId(self) -> int:
        """Number of this process, from 0."""
        return int(self.distributed_process_id)

    @property
    def numProcesses(self) -> int:
        """Count of processes."""
        return int(self.num_distributed_processes)


class TensorLocationSettings(OptionsDict):
    """Where one kind of tensor is kept; no effect in the emulator."""

    def minElementsForOffChip(self, min_elements: int) -> "TensorLocationSettings":
        """Keep tensors with fewer elements on the chip."""
        assert isinstance(min_elements, int)
        self.createOrSet(minElementsForOffChip=min_elements)
        return self

    def minElementsForReplicatedTensorSharding(self, min_elements: int) -> "TensorLocationSettings":
        """Split only tensors with more elements among replicas."""
        assert isinstance(min_elements, int)
        self.createOrSet(minElementsForReplicatedTensorSharding=min_elements)
        return self

    def useOnChipStorage(self, use: bool = True) -> "TensorLocationSettings":
        """Keep on the chip, off it, or (``None``) leave undecided."""
        if use is None:
            self.deleteIfExists("onChip")
            return self
        return self._switch("onChip", use)

    def useReplicatedTensorSharding(self, use: bool = True) -> "TensorLocationSettings":
        """Split the tensor among replicas."""
        return self._switch("useReplicatedTensorSharding", use)

    def useIOTilesToLoad(self, use: bool = True) -> "TensorLocationSettings":
        """Load through IO tiles."""
        return self._switch("useIOTilesToLoad", use)

    def useIOTilesToStore(self, use: bool = True) -> "TensorLocationSettings":
        """Store through IO tiles."""
        return self._switch("useIOTilesToStore", use)

    def _switch(self, name: str, use: bool) -> "TensorLocationSettings":
        assert isinstance(use, bool)
        self.createOrSet(**{name: int(use)})
        return self


class TensorLocationOptions(OptionsDict):
    """Where tensors are kept, by kind (`Options.TensorLocations`); no effect in the emulator."""

    def numIOTiles(self, num_tiles: int) -> "TensorLocationOptions":
        """Reserve tiles for IO: an even number from 32 to 192."""
        assert isinstance(num_tiles, int)
        is_possible = 32 <= num_tiles <= 192 and num_tiles % 2 == 0
        assert is_possible, "numIOTiles must be an even number between 32 and 192."
        self.createOrSet(numIOTiles=num_tiles)
        return self

    def setActivationLocation(self, location: TensorLocationSettings) -> "TensorLocationOptions":
        """Place activations."""
        return self._place("location_activation", location)

    def setWeightLocation(self, location: TensorLocationSettings) -> "TensorLocationOptions":
        """Place weights."""
        return self._place("location_weight", location)

    def setOptimizerLocation(self, location: TensorLocationSettings) -> "TensorLocationOptions":
        """Place optimizer states."""
        return self._place("location_optimizer", location)

    def setAccumulatorLocation(self, location: TensorLocationSettings) -> "TensorLocationOptions":
        """Place gradient accumulators."""
        return self._place("location_accumulator", location)

    def _place(self, kind: str, location: TensorLocationSettings) -> "TensorLocationOptions":
        assert isinstance(location, TensorLocationSettings)
        self.createOrSet(**{kind: location.toDict()})
        return self
