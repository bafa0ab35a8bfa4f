"""How a model's blocks would be spread over IPUs: stages, phases and the execution strategies.

The emulator runs everything on one CPU, so a strategy changes no result. What it does keep are the
mistakes that PopTorch reports (PopTorch 3.4 `options.py`): a block in two stages, a block that no
stage names, a block without an IPU.
"""

from contextlib import contextmanager
from typing import Any, Dict, Iterator, List, Optional, Sequence, Tuple, Union

from ipu_log_callback.emulator import enums
from ipu_log_callback.emulator.errors import backend_error

__all__ = [
    "ParallelPhasedExecution",
    "Phase",
    "PipelinedExecution",
    "SerialPhasedExecution",
    "ShardedExecution",
    "Stage",
    "enter_block",
    "number_blocks_from_zero",
    "refuse_in_training",
]

# The strategy of the model that is being compiled; blocks outside a compilation are not checked.
_active: List["ExecutionStrategy"] = []


def enter_block(user_id: Optional[str], ipu_id: Optional[int]) -> Optional[str]:
    """Check the block that the model enters, if a compilation is under way.

    Returns:
        The block's id: a number in place of a missing `user_id`, unless nothing is being compiled.
    """
    return _active[-1].begin_block(user_id, ipu_id) if _active else user_id


def refuse_in_training(function: str) -> None:
    """Refuse what only an inference model may call (PopTorch 3.4 `Compiler.cpp`).

    Raises:
        Error: If a training model is being compiled.
    """
    if _active and _active[-1].is_training:
        raise backend_error(
            f"poptorch.{function}() is only supported in inference.",
            source="popart_compiler/source/Compiler.cpp",
        )


def number_blocks_from_zero() -> None:
    """Start counting blocks without id anew."""
    if _active:
        _active[-1].unnamed_blocks = 0


class Stage:
    """One or more blocks that run one after the other on one IPU."""

    def __init__(self, *block_ids: str) -> None:
        """Collect blocks by their user ids."""
        assert all(isinstance(block, str) for block in block_ids), (
            f"Block IDs are supposed to be strings but got {block_ids}"
        )
        self._blocks = block_ids
        self._ipu: Optional[int] = None

    @property
    def blocks(self) -> Tuple[str, ...]:
        """User ids of the blocks."""
        return self._blocks

    def ipu(self, ipu: int) -> "Stage":
        """Choose the IPU."""
        assert isinstance(ipu, int)
        self._ipu = ipu
        return self


class Phase:
    """Stages that run side by side."""

    def __init__(self, *arg: Union[str, Stage]) -> None:
        """Collect stages, or the block ids of a single stage."""
        self.stages: Sequence[Stage]
        if all(isinstance(element, Stage) for element in arg):
            self.stages = [element for element in arg if isinstance(element, Stage)]
        else:
            assert all(isinstance(element, str) for element in arg), (
                "All arguments must either be block IDs (strings) or Stages: "
                f"{[type(element) for element in arg]}"
            )
            self.stages = [Stage(*[str(element) for element in arg])]

    def stage(self, idx: int) -> Stage:
        """The stage number `idx`."""
        return self.stages[idx]

    def ipus(self, *ipus: int) -> None:
        """Choose one IPU for each stage."""
        assert len(ipus) == len(self.stages), (
            f"Phase contains {len(self.stages)} stages but you provided {len(ipus)} ipus"
        )
        for stage, ipu in zip(self.stages, ipus):
            stage.ipu(ipu)


class ExecutionStrategy:
    """What all strategies have in common: a map from block ids to stages."""

    _execution_mode = 0

    def __init__(self, stages: Sequence[Stage]) -> None:
        """Map each block of `stages` to its stage."""
        self._block_map: Dict[str, Stage] = {}
        self.unnamed_blocks = 0
        self.is_training = False
        self.entered_ipus: List[int] = []
        for stage in stages:
            for block in stage.blocks:
                assert block not in self._block_map, f"{block} associated with more than one stage"
                self._block_map[block] = stage

    def stage(self, block_id: str) -> Stage:
        """The stage to which a block belongs."""
        assert block_id in self._block_map, f"Unknown block {block_id}"
        return self._block_map[block_id]

    def begin_block(self, user_id: Optional[str], ipu_id: Optional[int]) -> str:
        """Check a block when the model enters it, and return its id."""
        if not user_id:
            user_id = str(self.unnamed_blocks)
            self.unnamed_blocks += 1
        self._check(user_id, ipu_id)
        self.entered_ipus.append(self._ipu_of(user_id, ipu_id))
        return user_id

    def _ipu_of(self, user_id: str, ipu_id: Optional[int]) -> int:
        """The IPU of a block: its stage's, else its own, else one for each stage."""
        stage = self._block_map.get(user_id)
        if stage is not None and stage._ipu is not None:
            return stage._ipu
        if ipu_id is not None:
            return ipu_id
        stages = list(dict.fromkeys(self._block_map.values()))
        return stages.index(stage) if stage is not None else len(set(self.entered_ipus))

    def _check(self, user_id: str, ipu_id: Optional[int]) -> None:
        del ipu_id
        assert user_id in self._block_map, (
            f"Unknown Block '{user_id}' list of expected Blocks: {list(self._block_map)}"
        )

    @contextmanager
    def compiling(self, *, training: bool = False) -> Iterator[None]:
        """Check what a model does while its Python runs; `training` says which kind of model."""
        self.unnamed_blocks = 0
        self.is_training = training
        self.entered_ipus = []
        _active.append(self)
        try:
            yield
        finally:
            _active.pop()

    @property
    def ipus(self) -> int:
        """How many IPUs the blocks of the last compilation need."""
        return max(self.entered_ipus, default=0) + 1

    @property
    def forward_stages(self) -> int:
        """Stages of the last compilation's forward pass: one more than changes of IPU."""
        changes = zip([0, *self.entered_ipus], self.entered_ipus)
        return 1 + sum(before != after for before, after in changes)

    def backendOptions(self) -> Dict[str, Any]:
        """What `Options.toDict` says about the strategy."""
        return {"execution_mode": self._execution_mode}


class PipelinedExecution(ExecutionStrategy):
    """Stages form a pipeline; the default."""

    def __init__(self, *args: Any) -> None:
        """Take an `AutoStage` rule, or stages, or block ids, one stage each."""
        self._auto_stage = enums.AutoStage.SameAsIpu
        if len(args) == 1 and isinstance(args[0], enums.AutoStage):
            self._auto_stage = args[0]
            args = ()
        super().__init__([_as_stage(arg) for arg in args])

    def _check(self, user_id: str, ipu_id: Optional[int]) -> None:
        if self._block_map:
            super()._check(user_id, ipu_id)
        elif self._auto_stage == enums.AutoStage.SameAsIpu:
            assert ipu_id is not None, (
                "poptorch.AutoStage.SameAsIpu was selected but no IPU was specified for block "
                f"{user_id}"
            )


class ShardedExecution(PipelinedExecution):
    """Stages run one at a time."""

    _execution_mode = 1


class _PhasedExecution(ExecutionStrategy):
    """Common part of the two phased strategies."""

    _execution_mode = 2

    def __init__(self, *phases: Any) -> None:
        """Take phases, or lists of stages, or lists of block ids."""
        assert phases, (
            "There is currently no AutoStage for PhasedExecution, please explicitly specify the "
            "phases"
        )
        self._phases = [_as_phase(phase) for phase in phases]
        self._separate_backward_phase = False
        self._tensors_liveness = enums.Liveness.AlwaysLive
        super().__init__([stage for phase in self._phases for stage in phase.stages])

    def phase(self, phase: int) -> Phase:
        """The phase number `phase`."""
        is_index = isinstance(phase, int) and phase >= 0
        assert is_index, "Phases are identified by positive integers"
        return self._phases[phase]

    def useSeparateBackwardPhase(self, use: bool = True) -> "_PhasedExecution":
        """Store whether the passes share their middle phase; no effect in the emulator."""
        assert isinstance(use, bool)
        self._separate_backward_phase = use
        return self

    def backendOptions(self) -> Dict[str, Any]:
        """What `Options.toDict` says about the strategy."""
        return {
            **super().backendOptions(),
            "separate_backward_phase": self._separate_backward_phase,
            "tensors_liveness": self._tensors_liveness.value,
        }


class ParallelPhasedExecution(_PhasedExecution):
    """Phases alternate between two groups of IPUs."""

    def sendTensorsOffChipAfterFwd(self, off_chip: bool = True) -> "ParallelPhasedExecution":
        """Store where tensors wait for the backward pass; no effect in the emulator."""
        assert isinstance(off_chip, bool)
        self._tensors_liveness = (
            enums.Liveness.OffChipAfterFwd if off_chip else enums.Liveness.AlwaysLive
        )
        return self

    def backendOptions(self) -> Dict[str, Any]:
        """What `Options.toDict` says about the strategy."""
        return {**super().backendOptions(), "serial_phases_execution": False}


class SerialPhasedExecution(_PhasedExecution):
    """Phases run one after the other on one group of IPUs."""

    def setTensorsLiveness(self, liveness: enums.Liveness) -> "SerialPhasedExecution":
        """Store where tensors wait between phases; no effect in the emulator."""
        assert isinstance(liveness, enums.Liveness)
        self._tensors_liveness = liveness
        return self

    def backendOptions(self) -> Dict[str, Any]:
        """What `Options.toDict` says about the strategy."""
        return {**super().backendOptions(), "serial_phases_execution": True}


def _as_stage(arg: Any) -> Stage:
    if isinstance(arg, Stage):
        return arg
    if isinstance(arg, str):
        return Stage(arg)
    return Stage(*arg)


def _as_phase(arg: Any) -> Phase:
    if isinstance(arg, Phase):
        return arg
    return Phase(*(arg if isinstance(arg, list) else [arg]))
