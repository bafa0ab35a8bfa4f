"""`poptorch.Options`: everything a user says about how a model is compiled and executed.

Names, defaults and checks are those of PopTorch 3.4 `options.py`, except that `Options.Jit` still
offers the trace front end of SDK 2.x. Settings that could change results and are not emulated are
refused by name; settings without effect on results are stored.
"""

import json
import os
from pathlib import Path
from typing import Any, Dict, List, Optional

import torch

from ipu_log_callback.emulator import enums
from ipu_log_callback.emulator.console import logger
from ipu_log_callback.emulator.errors import NotEmulatedError
from ipu_log_callback.emulator.execution_strategies import (
    ExecutionStrategy,
    ParallelPhasedExecution,
    Phase,
    PipelinedExecution,
    SerialPhasedExecution,
    ShardedExecution,
    Stage,
)
from ipu_log_callback.emulator.option_groups import (
    DistributedOptions,
    JitOptions,
    PopartOptions,
    PrecisionOptions,
    TensorLocationOptions,
    TensorLocationSettings,
    TrainingOptions,
)
from ipu_log_callback.emulator.options_dict import OptionsDict

__all__ = [
    "ConfigFileError",
    "Options",
    "ParallelPhasedExecution",
    "Phase",
    "PipelinedExecution",
    "SerialPhasedExecution",
    "ShardedExecution",
    "Stage",
    "TensorLocationSettings",
]

# The names under which launchers such as PopDist subclass these groups.
_DistributedOptions = DistributedOptions
_JitOptions = JitOptions
_PopartOptions = PopartOptions
_PrecisionOptions = PrecisionOptions
_TensorLocationOptions = TensorLocationOptions
_TrainingOptions = TrainingOptions

_UNLIMITED_LOG_LINES = (1 << 64) - 1


class ConfigFileError(Exception):
    """A file given to `Options.loadFromFile` is not Python."""


class Options(OptionsDict):
    """Set of options for one model.

    Every setter returns the object, so that calls chain. Values are read as attributes
    (`device_iterations`, `replication_factor`, `output_mode` …). `Training`, `Jit`, `Precision`,
    `Distributed`, `TensorLocations` are groups.

    Example::

        options = poptorch.Options().deviceIterations(4).replicationFactor(2)
        options.Training.gradientAccumulation(8)
    """

    def __init__(self) -> None:
        """Start from the defaults, then ``POPTORCH_CACHE_DIR`` and ``POPTORCH_DEFAULT_OPTIONS``."""
        self._popart = PopartOptions()
        self._jit = JitOptions()
        self._precision = PrecisionOptions(self._popart)
        self._training = TrainingOptions(self._popart)
        self._distributed = DistributedOptions()
        self._tensor_locations = TensorLocationOptions()
        self._execution_strategy: ExecutionStrategy = PipelinedExecution()
        self._source_location_excludes: List[str] = []
        self._relax_optimizer_checks = False
        self._show_compilation_progress_bar = True
        self._module_namescope_enabled = True
        super().__init__(
            replication_factor=1,
            input_group_size=1,
            input_cgt=enums.CommGroupType.Consecutive,
            broadcast_buffers=True,
            device_iterations=1,
            log_dir=".",
            max_repeat_logs=4,
            auto_round_num_ipus=False,
            anchored_tensors={},
            output_mode=enums.OutputMode.Default.value,
            output_return_period=1,
            connection_type=enums.ConnectionType.Always.value,
            sync_pattern=enums.SyncPattern.Full.value,
            available_memory_proportion={},
        )
        cache = os.environ.get("POPTORCH_CACHE_DIR", "")
        if cache:
            self.enableExecutableCaching(cache)
        self.from_json(os.environ.get("POPTORCH_DEFAULT_OPTIONS", "{}"))

    # Groups

    @property
    def Training(self) -> TrainingOptions:
        """Gradient accumulation and reduction."""
        return self._training

    @property
    def Jit(self) -> JitOptions:
        """Front end: dispatcher or `torch.jit.trace`."""
        return self._jit

    @property
    def Precision(self) -> PrecisionOptions:
        """Number formats."""
        return self._precision

    @property
    def Distributed(self) -> DistributedOptions:
        """Processes."""
        return self._distributed

    @property
    def TensorLocations(self) -> TensorLocationOptions:
        """Placement of tensors."""
        return self._tensor_locations

    @property
    def _Popart(self) -> PopartOptions:
        return self._popart

    # Geometry and outputs

    def deviceIterations(self, device_iterations: int) -> "Options":
        """Set how many iterations an execution runs before it returns."""
        self.set(device_iterations=device_iterations)
        return self

    def replicationFactor(self, replication_factor: int) -> "Options":
        """Set how many replicas of the model run side by side."""
        self.set(replication_factor=replication_factor)
        return self

    def outputMode(
        self, output_mode: enums.OutputMode, output_return_period: Optional[int] = None
    ) -> "Options":
        """Choose which results an execution returns.

        Args:
            output_mode: The mode, for all outputs of the model.
            output_return_period: The N of ``EveryN``, in micro-batches of a replica.

        Raises:
            AssertionError: If ``EveryN`` comes without a positive period.
        """
        assert isinstance(output_mode, enums.OutputMode)
        if output_mode == enums.OutputMode.EveryN:
            assert (output_return_period or 0) > 0, (
                "EveryN anchor must have output_return_period set to valid positive integer"
            )
        elif output_return_period:
            logger.info(
                "Anchor return period argument ignored with output_mode set to %s", output_mode
            )
        self.set(output_mode=output_mode.value, output_return_period=output_return_period or 1)
        return self

    def defaultOutputMode(self) -> bool:
        """Whether no output mode was chosen yet."""
        return bool(self.output_mode == enums.OutputMode.Default)

    def anchorTensor(
        self,
        short_name: str,
        long_name: str,
        output_mode: Optional[enums.OutputMode] = None,
        output_return_period: Optional[int] = 1,
    ) -> None:
        """Declare a tensor of the graph that `PoplarExecutor.getAnchoredTensor` shall return.

        Args:
            short_name: Name to ask for it by.
            long_name: Its name in the graph, one of `PoplarExecutor.getTensorNames`.
            output_mode: Mode of its own; the model's if ``None``. Stored, but the session's mode is
                what holds.
            output_return_period: The N of ``EveryN``; 1 with any other mode.
        """
        if output_mode != enums.OutputMode.EveryN:
            output_return_period = 1
        # Not `set`: PopTorch edits the dictionary in place, which frozen options do not notice.
        self.anchored_tensors[short_name] = [
            long_name,
            output_mode is None,
            output_mode,
            output_return_period,
        ]

    def broadcastBuffers(self, broadcast_buffers: bool = True) -> "Options":
        """Choose whether replicas share buffers; updating them in place needs ``False``."""
        self.set(broadcast_buffers=broadcast_buffers)
        return self

    def inputReplicaGrouping(
        self, input_group_size: int, input_group_type: enums.CommGroupType
    ) -> "Options":
        """Let the replicas of a group share their inputs.

        Args:
            input_group_size: Replicas in a group; 1 by default.
            input_group_type: How replicas are arranged in groups.

        Raises:
            ValueError: If the grouping does not fit the replication factor.
        """
        if input_group_type == enums.CommGroupType.NoGrouping:
            input_group_size = 1
            input_group_type = enums.CommGroupType.Consecutive
        if input_group_type == enums.CommGroupType.All:
            msg = "input_group_type cannot be All"
            raise ValueError(msg)
        if self.replication_factor < input_group_size:
            msg = "input_group_size cannot be larger than replication_factor"
            raise ValueError(msg)
        if self.replication_factor % input_group_size != 0:
            msg = "input_group_size must be a factor of replication_factor"
            raise ValueError(msg)
        self.set(input_group_size=input_group_size, input_cgt=input_group_type)
        return self

    def randomSeed(self, random_seed: int) -> "Options":
        """Seed the device's random numbers, and torch's own on the host, as PopTorch does."""
        assert isinstance(random_seed, int)
        torch.manual_seed(random_seed)
        self.createOrSet(random_seed=random_seed)
        return self

    def enableSyntheticData(self, enabled: bool) -> "Options":
        """Accept ``False``.

        Raises:
            NotEmulatedError: For ``True``.
        """
        if enabled:
            raise NotEmulatedError(
                "Options.enableSyntheticData(True)",
                "results are computed from the data that the model is given",
            )
        self._popart.set("syntheticDataMode", 0)
        return self

    # Stored, without effect on results

    def setExecutionStrategy(self, strategy: ExecutionStrategy) -> "Options":
        """Choose how blocks are spread over IPUs; only its checks on block names take effect."""
        assert isinstance(strategy, ExecutionStrategy)
        self._execution_strategy = strategy
        return self

    def connectionType(self, connection_type: enums.ConnectionType) -> "Options":
        """Choose when to attach; a model with ``Never`` cannot be executed."""
        assert isinstance(connection_type, enums.ConnectionType)
        self.set(connection_type=connection_type.value)
        return self

    def useOfflineIpuTarget(self, ipu_version: int = 2) -> "Options":
        """Compile only: `connectionType` becomes ``Never``."""
        self.connectionType(enums.ConnectionType.Never)
        self.createOrSet(ipu_version=ipu_version)
        return self

    def syncPattern(self, sync_pattern: enums.SyncPattern) -> "Options":
        """Store the synchronisation pattern."""
        assert isinstance(sync_pattern, enums.SyncPattern)
        self.set(sync_pattern=sync_pattern.value)
        return self

    def useIpuId(self, ipu_id: int) -> "Options":
        """Store the device id."""
        assert isinstance(ipu_id, int)
        self.createOrSet(ipu_id=ipu_id)
        return self

    def useIpuModel(self, use_model: bool) -> "Options":
        """Store whether Poplar's simulator would be used."""
        self.createOrSet(use_model=use_model)
        return self

    def autoRoundNumIPUs(self, auto_round_num_ipus: bool = True) -> "Options":
        """Store whether the number of IPUs is rounded up to a power of 2."""
        self.set(auto_round_num_ipus=auto_round_num_ipus)
        return self

    def setAvailableMemoryProportion(
        self, available_memory_proportion: Dict[str, float]
    ) -> "Options":
        """Store the share of temporary memory by IPU, for instance ``{"IPU0": 0.5}``.

        Raises:
            AssertionError: If a key is not ``"IPU<number>"``.
        """
        by_number = {}
        for key, share in available_memory_proportion.items():
            assert key.startswith("IPU"), (
                "Available memory proportions are expected to be in a dictionary of "
                f'{{"IPU0": 0.5}} where the 0 in IPU is the index of the IPU. Invalid key: {key}'
            )
            by_number[int(key[3:])] = share
        self.createOrSet(available_memory_proportion=by_number)
        return self

    def logDir(self, log_dir: str) -> "Options":
        """Store the directory of log files."""
        self.set(log_dir=log_dir)
        return self

    def maxRepeatLogs(self, max_lines: Optional[int]) -> "Options":
        """Store after how many repetitions a log line is suppressed; ``None`` for never."""
        self.set(max_repeat_logs=_UNLIMITED_LOG_LINES if max_lines is None else max_lines)
        return self

    def modelName(self, name: str) -> "Options":
        """Store the model's name in profiles."""
        self.createOrSet(model_name=name)
        return self

    def enableExecutableCaching(self, path: Optional[str]) -> "Options":
        """Store the directory of compiled executables; the emulator writes none."""
        if path is not None:
            self._popart.set("cachePath", path)
        self._popart.set("enableEngineCaching", path is not None)
        return self

    def enableStableNorm(self, enabled: bool) -> "Options":
        """Store which algorithm normalisation layers use on hardware."""
        self._popart.set("enableStableNorm", enabled)
        return self

    def logCycleCount(self, log_cycle_count: bool) -> "Options":
        """Store whether hardware cycles are counted; the emulator has none to count."""
        self._popart.set("instrumentWithHardwareCycleCounter", log_cycle_count)
        return self

    def enableProfiling(self, profile_dir: Optional[str] = None) -> "Options":
        """Store the profile directory; the emulator writes no profile."""
        self._popart.setEngineOptions(
            {
                **self._popart.options.get("engineOptions", {}),
                "debug.allowOutOfMemory": "true",
                "autoReport.directory": profile_dir or ".",
                "autoReport.all": "true",
            }
        )
        return self

    def disableModuleNamescope(self) -> "Options":
        """Store that operators are not named after their module."""
        self._module_namescope_enabled = False
        return self

    def updatableNamedBuffers(self, buffers: List[str]) -> "Options":
        """Name the buffers that `PoplarExecutor.copyNamedBuffersToDevice` sends."""
        self._popart.set("updatableNamedBuffers", buffers)
        return self

    def sourceLocationExcludes(self, excludes: List[str]) -> "Options":
        """Replace the list of paths hidden in printed graphs."""
        self._source_location_excludes = excludes
        return self

    def appendToLocationExcludes(self, *excludes: str) -> "Options":
        """Add to the list of paths hidden in printed graphs."""
        self._source_location_excludes += excludes
        return self

    def showCompilationProgressBar(self, show: bool = True) -> "Options":
        """Store whether a compilation shows its progress; the emulator's are too short for that."""
        self._show_compilation_progress_bar = show
        return self

    def relaxOptimizerAttributesChecks(self, relax: bool = True) -> "Options":
        """Choose whether unexpected optimizer attributes are only a debug message."""
        self._relax_optimizer_checks = relax
        return self

    # Files, copies, text

    def from_json(self, string: str) -> "Options":
        """Call setters by name, for instance ``{"Training.gradientAccumulation": 4}``.

        A list is the setter's arguments; ``"OutputMode.All"`` and the like become members of their
        enumeration.
        """
        for path, value in json.loads(string).items():
            setter: Any = self
            for name in path.split("."):
                setter = getattr(setter, name)
            arguments = value if isinstance(value, list) else [_enum_member(value)]
            setter(*arguments)
        return self

    def loadFromFile(self, filepath: str) -> "Options":
        """Call setters listed in a file, one a line, as they would be typed after ``options.``.

        Raises:
            ConfigFileError: If a line is not Python.
        """
        from ipu_log_callback.emulator import poptorch  # here, because it imports this module

        text = Path(filepath).read_text()
        lines = [line.strip() for line in text.splitlines()]
        calls = ["options." + line for line in lines if line and not line.startswith("#")]
        try:
            names = {"poptorch": poptorch, "options": self}
            exec("\n".join(calls), {}, names)  # noqa: S102  # the file's format is Python
        except SyntaxError as err:
            msg = (
                f"{type(err).__name__} at line {err.lineno} of {Path(filepath).name}: {err.msg}\n"
                f"> {err.text}"
            )
            raise ConfigFileError(msg) from err
        return self

    def toDict(self) -> Dict[str, Any]:
        """All options except Jit and Precision in one dictionary.

        Raises:
            AssertionError: If no output mode was chosen.
        """
        assert not self.defaultOutputMode(), "An output mode must be picked before serialisation"
        merged = {**self._execution_strategy.backendOptions(), **self._popart.options}
        merged = super().update(merged)
        for group in (self._training, self._distributed, self._tensor_locations):
            merged = group.update(merged)
        return merged

    def clone(self) -> "Options":
        """An independent copy that is not frozen."""
        return self.__deepcopy__({})

    def __repr__(self) -> str:
        groups = {
            "Distributed": self._distributed,
            "Jit": self._jit,
            "Precision": self._precision,
            "TensorLocations": self._tensor_locations,
            "Training": self._training,
            "_Popart": self._popart,
        }
        shown = {**self._values, **groups}
        return f"Options({', '.join(f'{name}={value!r}' for name, value in shown.items())})"


def _enum_member(value: Any) -> Any:
    """Turn ``"OutputMode.All"`` into that member; leave anything else alone."""
    if not isinstance(value, str) or value.count(".") != 1:
        return value
    kind, member = value.split(".")
    if kind not in enums.__all__:
        return value
    return getattr(getattr(enums, kind), member, value)
