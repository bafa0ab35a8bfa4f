"""The enumerations of PopTorch's public interface.

Names and values are those of PopTorch 3.4 `enums.py`. An enumeration that only steers speed or
memory on hardware is accepted by the emulator and has no effect; those that decide *what* comes
back are described at length.
"""

import enum

__all__ = [
    "AutoStage",
    "CommGroupType",
    "ConnectionType",
    "DataLoaderMode",
    "HalfFloatCastingBehavior",
    "Liveness",
    "MatMulSerializationMode",
    "MeanReductionStrategy",
    "MultiConvPlanType",
    "OutputMode",
    "OverlapMode",
    "ReductionType",
    "SharingStrategy",
    "SyncPattern",
    "VariableRetrievalMode",
]


class OutputMode(enum.IntEnum):
    """Which micro-batches' results an execution returns.

    =========== ===========================================================
    ``All``     one result per micro-batch
    ``EveryN``  one result every N micro-batches of a replica
    ``Final``   the last micro-batch of each replica
    ``Sum``     the sum over a replica's micro-batches, one per replica
    ``Default`` not chosen: ``Final`` for training, ``All`` for inference
    =========== ===========================================================
    """

    Final = 0
    EveryN = 1
    All = 2
    Sum = 3
    Default = 4


class ReductionType(enum.IntEnum):
    """How gradients are combined over gradient accumulation and replicas."""

    Sum = 0
    Mean = 1
    NoReduction = 2


class MeanReductionStrategy(enum.IntEnum):
    """When the division of a mean reduction takes place; equal up to rounding."""

    Running = 0
    Post = 1
    PostAndLoss = 2


class DataLoaderMode(enum.IntEnum):
    """How `DataLoader` reads its data set.

    ``AsyncRebatched`` joins an iterable data set's elements across workers, so that fewer are
    dropped.
    """

    Sync = 0
    Async = 1
    AsyncRebatched = 2


class SharingStrategy(enum.IntEnum):
    """How an asynchronous loader reaches its process; no effect in the emulator."""

    SharedMemory = 0
    FileSystem = 1
    Fork = 2
    ForkServer = 3


class ConnectionType(enum.IntEnum):
    """When to attach to the device; a model with ``Never`` can be compiled but not executed."""

    Always = 0
    OnDemand = 1
    Never = 2


class HalfFloatCastingBehavior(enum.IntEnum):
    """Type of a mixed float16/float32 operation; only ``HalfUpcastToFloat`` is emulated."""

    FloatDowncastToHalf = 0
    HalfUpcastToFloat = 1
    Default = 2


class SyncPattern(enum.IntEnum):
    """Synchronisation of IPUs with each other and the host; no effect in the emulator."""

    Full = 0
    SinglePipeline = 1
    ReplicaAndLadder = 2


class MatMulSerializationMode(enum.Enum):
    """Dimension along which a large matrix product is split; no effect in the emulator."""

    InputChannels = "input_channels"
    ReducingDim = "reducing_dim"
    OutputChannels = "output_channels"
    Disabled = "none"


class Liveness(enum.IntEnum):
    """Where tensors stay between execution phases; no effect in the emulator."""

    AlwaysLive = 0
    OffChipAfterFwd = 1
    OffChipAfterFwdNoOverlap = 2
    OffChipAfterEachPhase = 3


class OverlapMode(enum.Enum):
    """Overlap of host copies with computation; no effect in the emulator."""

    NoOverlap = "no_overlap"
    OverlapAccumulationLoop = "overlap_accumulation_loop"
    OverlapDeviceIterationLoop = "overlap_device_iteration_loop"


class AutoStage(enum.IntEnum):
    """How blocks without an explicit stage get one: by their ``ipu_id``, or a new stage each."""

    SameAsIpu = 0
    AutoIncrement = 1


class MultiConvPlanType(enum.IntEnum):
    """Whether the convolutions of a `MultiConv` run side by side; no effect in the emulator."""

    Parallel = 0
    Serial = 1


class CommGroupType(enum.IntEnum):
    """How replicas are grouped when inputs or variables are distributed among them."""

    All = 0
    Consecutive = 1
    Orthogonal = 2
    NoGrouping = 3


class VariableRetrievalMode(enum.IntEnum):
    """Which replicas' values of a grouped variable come back to the host."""

    OnePerGroup = 0
    AllReplicas = 2
