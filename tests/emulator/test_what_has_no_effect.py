"""What a script may call on hardware and the emulator only stores, answers or refuses by name."""

from datetime import timedelta
from typing import Any

import pytest
import torch

X = torch.ones(2, 2)

#: Setters that change nothing here: a script calls them and goes on.
STORED = {
    "an IPU by number": lambda p, o: o.useIpuId(3),
    "an offline target": lambda p, o: o.useOfflineIpuTarget(),
    "the synchronisation": lambda p, o: o.syncPattern(p.SyncPattern.Full),
    "a directory of logs": lambda p, o: o.logDir("logs"),
    "repeated log lines": lambda p, o: o.maxRepeatLogs(None),
    "a model's name": lambda p, o: o.modelName("net"),
    "cached executables": lambda p, o: o.enableExecutableCaching("cache"),
    "no cached executables": lambda p, o: o.enableExecutableCaching(None),
    "a profile": lambda p, o: o.enableProfiling("profile"),
    "names of operators": lambda p, o: o.disableModuleNamescope(),
    "buffers by name": lambda p, o: o.updatableNamedBuffers([]),
    "hidden source paths": lambda p, o: o.sourceLocationExcludes(["site-packages"]),
    "more hidden source paths": lambda p, o: o.appendToLocationExcludes("lib", "bin"),
    "unexpected optimizer attributes": lambda p, o: o.relaxOptimizerAttributesChecks(),
    "no synthetic data": lambda p, o: o.enableSyntheticData(False),
    "one replica an input group": lambda p, o: o.inputReplicaGrouping(
        1, p.CommGroupType.NoGrouping
    ),
    "stochastic rounding": lambda p, o: o.Precision.enableStochasticRounding(True),
    "no floating point exceptions": lambda p, o: o.Precision.enableFloatingPointExceptions(False),
    "casts of halves": lambda p, o: o.Precision.halfFloatCasting(
        p.HalfFloatCastingBehavior.HalfUpcastToFloat
    ),
    "running statistics": lambda p, o: o.Precision.runningStatisticsAlwaysFloat(False),
    "partial sums": lambda p, o: o.Precision.setPartialsType(torch.half),
    "loss scaling": lambda p, o: o.Training.setAutomaticLossScaling(True),
    "dithering": lambda p, o: o.Training.setConvolutionDithering(True),
    "when a mean is divided": lambda p, o: (
        o.Training.setMeanAccumulationAndReplicationReductionStrategy(
            p.MeanReductionStrategy.PostAndLoss
        )
    ),
    "being the only process": lambda p, o: o.Distributed.disable(),
    "IO tiles": lambda p, o: o.TensorLocations.numIOTiles(32),
    "activations off the chip": lambda p, o: o.TensorLocations.setActivationLocation(
        p.TensorLocationSettings().useOnChipStorage(False).useIOTilesToLoad().useIOTilesToStore()
    ),
    "optimizer states in parts": lambda p, o: o.TensorLocations.setOptimizerLocation(
        p.TensorLocationSettings()
        .useReplicatedTensorSharding()
        .minElementsForReplicatedTensorSharding(8)
    ),
    "accumulators anywhere": lambda p, o: o.TensorLocations.setAccumulatorLocation(
        p.TensorLocationSettings().useOnChipStorage(None)
    ),
}


def model(poptorch: Any, options: Any) -> Any:
    """A compiled model that doubles what it is given."""

    class Doubles(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    return poptorch.inferenceModel(Doubles(), options)


@pytest.mark.parametrize("name", STORED)
def test_what_only_hardware_has_changes_no_result(poptorch, name):
    """A setter is accepted; unless it says that nothing is to be executed, results are the same."""
    options = poptorch.Options()
    assert STORED[name](poptorch, options) is not NotImplemented
    if name != "an offline target":
        assert torch.equal(model(poptorch, options)(X), X * 2)


WRONG = {
    "running statistics": (
        lambda p, o: o.Precision.runningStatisticsAlwaysFloat(1),
        "set to a bool",
    ),
    "type of partial sums": (lambda p, o: o.Precision.setPartialsType(torch.int32), "torch.half"),
    "log level": (lambda p, o: p.setLogLevel("LOUD"), "Unknown log level: LOUD"),
    "log level by number": (lambda p, o: p.setLogLevel(99), "Invalid log level integer"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_poptorch_refuses_is_refused(poptorch, name):
    """With the words that PopTorch has for it."""
    act, words = WRONG[name]
    with pytest.raises(ValueError, match=words):
        act(poptorch, poptorch.Options())


def test_a_strategy_is_asked_for_its_phases_and_stages(poptorch):
    """A script may place stages after the strategy was made."""
    stages = [poptorch.Stage("A"), poptorch.Stage("B")]
    serial = poptorch.SerialPhasedExecution(stages, poptorch.Phase(poptorch.Stage("C")))
    serial.phase(0).ipus(0, 1)
    serial.phase(1).stage(0).ipu(2)
    serial.setTensorsLiveness(poptorch.Liveness.OffChipAfterEachPhase).useSeparateBackwardPhase()
    assert serial.stage("C").blocks == ("C",)
    assert serial.backendOptions()["serial_phases_execution"] is True
    parallel = poptorch.ParallelPhasedExecution(["A"], ["B"]).sendTensorsOffChipAfterFwd()
    assert parallel.backendOptions()["serial_phases_execution"] is False
    assert poptorch.ShardedExecution().backendOptions() == {"execution_mode": 1}
    assert poptorch.PipelinedExecution().backendOptions() == {"execution_mode": 0}
    poptorch.Block.useAutoId()


class Blocks(torch.nn.Module):
    """A model of two blocks with these ids and IPUs."""

    def __init__(self, poptorch: Any, *blocks: Any) -> None:
        super().__init__()
        self.poptorch, self.blocks = poptorch, blocks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            with self.poptorch.Block(*block):
                x = x * 2
        return x


def pipeline(poptorch: Any, *stages: Any) -> Any:
    """Options of a pipeline for two micro-batches."""
    strategy = poptorch.PipelinedExecution(*stages)
    return poptorch.Options().deviceIterations(2).setExecutionStrategy(strategy)


PIPELINES = {
    "IPUs of the blocks": lambda p: (p.Options().deviceIterations(2), ("a", 0), ("b", 1)),
    "stages by id": lambda p: (pipeline(p, "a", "b"), ("a",), ("b",)),
    "stages of several blocks": lambda p: (pipeline(p, ("a", "c"), ["b"]), ("a",), ("b",)),
    "stages with IPUs": lambda p: (
        pipeline(p, p.Stage("a").ipu(0), p.Stage("b").ipu(1)), ("a",), ("b",)
    ),
    "a stage for each block": lambda p: (pipeline(p, p.AutoStage.AutoIncrement), (), ()),
}  # fmt: skip


@pytest.mark.parametrize("name", PIPELINES)
def test_a_pipeline_needs_a_micro_batch_for_each_stage(poptorch, name):
    """Two stages run on two micro-batches, and are refused one.

    PopTorch 3.4 `Compiler.cpp`.
    """
    options, *blocks = PIPELINES[name](poptorch)
    short = options.clone().deviceIterations(1)
    assert torch.equal(poptorch.inferenceModel(Blocks(poptorch, *blocks), options)(X), X * 4)
    with pytest.raises(poptorch.Error, match=r"equal to the number of pipeline stages \(2\)"):
        poptorch.inferenceModel(Blocks(poptorch, *blocks), short)(X)


def test_pipelines_that_cannot_be(poptorch):
    """Too many IPUs, blocks without one, and accumulation in inference.

    PopTorch 3.4 `CompilerImpl.cpp`, `options.py`, `_poplar_executor.py`.
    """
    far = pipeline(poptorch, poptorch.Stage("a"), poptorch.Stage("b").ipu(64))
    with pytest.raises(poptorch.Error, match=r"Too many IPUs requested \(65\)"):
        poptorch.inferenceModel(Blocks(poptorch, ("a",), ("b",)), far)(X)
    same = pipeline(poptorch, poptorch.AutoStage.SameAsIpu)
    with pytest.raises(AssertionError, match="no IPU was specified for block 0"):
        poptorch.inferenceModel(Blocks(poptorch, ()), same)(X)
    for strategy, advises_iterations in (
        (poptorch.PipelinedExecution(), True),
        (poptorch.ShardedExecution(), False),
    ):
        options = poptorch.Options().setExecutionStrategy(strategy)
        options.Training.gradientAccumulation(2)
        with pytest.raises(poptorch.Error, match="gradientAccumulation to 1") as error:
            poptorch.inferenceModel(Blocks(poptorch), options)
        assert ("deviceIterations" in str(error.value)) is advises_iterations


def test_phases_that_cannot_be_are_refused(poptorch):
    """In words that name what is wrong."""
    with pytest.raises(AssertionError, match="no AutoStage for PhasedExecution"):
        poptorch.SerialPhasedExecution()
    with pytest.raises(AssertionError, match="2 stages but you provided 1 ipus"):
        poptorch.Phase(poptorch.Stage("A"), poptorch.Stage("B")).ipus(0)
    with pytest.raises(AssertionError, match="block IDs"):
        poptorch.Phase("A", 3)
    with pytest.raises(AssertionError, match="positive integers"):
        poptorch.SerialPhasedExecution(["A"]).phase(-1)


def test_trace_points_are_accepted(poptorch):
    """PopVision's channel runs what it is given and records nothing."""
    channel = poptorch.profiling.Channel("training")
    thing = object()
    with channel.tracepoint("step"):
        assert channel.instrument(thing, "method") is thing


def test_times_mean_nothing(poptorch):
    """Latencies and counters have PopTorch's form without numbers; cycles are refused."""
    compiled = model(poptorch, poptorch.Options().showCompilationProgressBar(True))
    with pytest.raises(poptorch.Error, match="compile the model before"):
        compiled.compilationTime()
    with pytest.raises(poptorch.Error, match="logCycleCount"):
        compiled.cycleCount()
    compiled(X)
    assert compiled.compilationTime() == timedelta(0)
    assert compiled.getLatency() == (0.0, 0.0, 0.0)
    assert compiled.getPerfCounters()["output"] == [[]]

    quiet = model(poptorch, poptorch.Options().showCompilationProgressBar(False))
    quiet(X)
    with pytest.raises(poptorch.Error, match="showCompilationProgressBar"):
        quiet.compilationTime()

    counting = model(poptorch, poptorch.Options().logCycleCount(True))
    with pytest.raises(poptorch.Error, match="at least once"):
        counting.cycleCount()
    counting(X)
    with pytest.raises(NotImplementedError, match="cycle"):
        counting.cycleCount()
