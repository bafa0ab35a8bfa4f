import copy
import pickle
from typing import Any, Callable, Dict

import pytest
import torch

CHANGES: Dict[str, Callable[[Any], object]] = {
    "a number": lambda options: options.deviceIterations(2),
    "a group": lambda options: options.Training.gradientAccumulation(2),
    "the PopART session": lambda options: options._Popart.set("autoRecomputation", 3),
    "a new option": lambda options: options.modelName("net"),
    "a private switch": lambda options: options.disableModuleNamescope(),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_options_freeze_when_a_loader_takes_them(poptorch, change):
    """After a loader took the options no setter of theirs works any more."""
    options = poptorch.Options()
    change(options)
    poptorch.DataLoader(options, [1, 2, 3])
    with pytest.raises(AttributeError, match="Can't modify frozen Options"):
        change(options)


def test_a_model_takes_a_copy_with_an_output_mode_and_freezes_the_original(poptorch):
    """The user's options keep their default mode; the model's have one picked for its kind."""
    options = poptorch.Options()
    inference = poptorch.inferenceModel(torch.nn.Linear(1, 1), options)
    assert options.defaultOutputMode()
    assert inference.options.output_mode == poptorch.OutputMode.All
    with pytest.raises(AttributeError, match="Can't modify frozen Options"):
        options.replicationFactor(2)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda options: options.clone()])
def test_a_copy_is_independent_and_not_frozen(poptorch, duplicate):
    """A copy of frozen options can be changed, group by group, without changing the original."""
    options = poptorch.Options().deviceIterations(5)
    options.Training.gradientAccumulation(4)
    options.anchorTensor("grad", "Gradient___weight")
    options._freeze()
    twin = duplicate(options)
    twin.deviceIterations(2)
    twin.Training.gradientAccumulation(3)
    twin.Precision.setPartialsType(torch.half)
    twin.anchorTensor("loss", "loss")
    assert (options.device_iterations, options.Training.gradient_accumulation) == (5, 4)
    assert list(options.anchored_tensors) == ["grad"]
    assert "partialsTypeMatMuls" not in options._Popart.options
    assert twin._Popart.options["partialsTypeMatMuls"] == "half"


def test_options_survive_pickling(poptorch):
    """Pickled and read again, options say the same."""
    options = poptorch.Options().deviceIterations(3)
    options.Distributed.configureProcessId(1, 2)
    read = pickle.loads(pickle.dumps(options))  # noqa: S301  # written a moment ago
    assert repr(read) == repr(options)


def test_a_value_must_keep_its_type(poptorch):
    """A number of iterations that is no integer is refused, with both types named."""
    with pytest.raises(AssertionError, match=r"float.* for option device_iterations.*int"):
        poptorch.Options().deviceIterations(2.0)


def test_an_option_must_exist(poptorch):
    """A misspelt name is refused in reading as in writing."""
    with pytest.raises(AttributeError, match="Invalid attribute device_iteration"):
        _ = poptorch.Options().device_iteration
    with pytest.raises(AssertionError, match="Invalid option device_iteration"):
        poptorch.Options().device_iteration = 3
    with pytest.raises(AttributeError, match="Invalid private attribute _device"):
        poptorch.Options()._device = 3


def test_every_n_needs_a_period(poptorch):
    """`EveryN` without a positive period makes no sense."""
    for period in (None, 0, -1):
        with pytest.raises(AssertionError, match="valid positive integer"):
            poptorch.Options().outputMode(poptorch.OutputMode.EveryN, period)
    options = poptorch.Options().outputMode(poptorch.OutputMode.EveryN, 3)
    assert (options.output_mode, options.output_return_period) == (poptorch.OutputMode.EveryN, 3)


def test_a_named_anchor_has_a_period_with_every_n_only(poptorch):
    """An anchor's period is kept for `EveryN` and 1 for any other mode."""
    modes = poptorch.OutputMode
    options = poptorch.Options()
    options.anchorTensor("sum", "loss", modes.Sum, 4)
    options.anchorTensor("some", "loss", modes.EveryN, 4)
    options.anchorTensor("as the model", "loss")
    assert options.anchored_tensors == {
        "sum": ["loss", False, modes.Sum, 1],
        "some": ["loss", False, modes.EveryN, 4],
        "as the model": ["loss", True, None, 1],
    }


def test_to_dict_wants_an_output_mode(poptorch):
    """Options can be serialised only once an output mode is chosen, and then hold all groups."""
    options = poptorch.Options().replicationFactor(2)
    options.Training.gradientAccumulation(4)
    with pytest.raises(AssertionError, match="An output mode must be picked before serialisation"):
        options.toDict()
    values = options.outputMode(poptorch.OutputMode.Sum).toDict()
    assert values["replication_factor"] == 2
    assert values["gradient_accumulation"] == 4
    assert values["output_mode"] == poptorch.OutputMode.Sum.value


def test_a_group_answers_by_name(poptorch):
    """An option is read by calling its group, and set by its name.

    PopTorch 3.4 `_options_impl.py`.
    """
    options = poptorch.Options()
    options.Training.gradientAccumulation(4)
    assert options.Training("gradient_accumulation") == 4
    options.Training.gradient_accumulation = 5
    assert options.Training("gradient_accumulation") == 5


def test_a_period_without_every_n_is_ignored(poptorch, caplog):
    """It has a meaning with one output mode only, and that is said.

    PopTorch 3.4 `options.py`.
    """
    with caplog.at_level("INFO", logger="poptorch::python"):
        poptorch.Options().outputMode(poptorch.OutputMode.All, 3)
        poptorch.Options().outputMode(poptorch.OutputMode.EveryN, 3)
    assert caplog.text.count("return period argument ignored") == 1


def test_options_come_from_files_one_on_top_of_the_other(poptorch, tmp_path):
    """A file holds one setter a line, and comments; a second file only adds."""
    first, second = tmp_path / "first.cfg", tmp_path / "second.cfg"
    first.write_text(
        "deviceIterations(32)\n\n  replicationFactor(2)\n"
        "# a comment\noutputMode(poptorch.OutputMode.All) # another\n"
    )
    second.write_text("deviceIterations(4)")
    options = poptorch.Options().loadFromFile(str(first)).loadFromFile(str(second))
    assert (options.device_iterations, options.replication_factor) == (4, 2)
    assert options.output_mode == poptorch.OutputMode.All


def test_a_broken_file_is_named(poptorch, tmp_path):
    """A line that is not Python is shown with its number and the file's name."""
    broken = tmp_path / "broken.cfg"
    broken.write_text("deviceIterations(32)\nreplicationFactor(2")
    with pytest.raises(poptorch.ConfigFileError) as error:
        poptorch.Options().loadFromFile(str(broken))
    assert "SyntaxError at line 2 of broken.cfg" in str(error.value)
    assert "> options.replicationFactor(2" in str(error.value)


def test_options_come_from_the_environment(poptorch, monkeypatch):
    """`POPTORCH_DEFAULT_OPTIONS` calls setters, in groups too, with enumerations by name."""
    monkeypatch.setenv(
        "POPTORCH_DEFAULT_OPTIONS",
        '{"deviceIterations": 2, "Training.gradientAccumulation": 3,'
        ' "connectionType": "ConnectionType.OnDemand", "_Popart.set": ["autoRecomputation", 1]}',
    )
    monkeypatch.setenv("POPTORCH_CACHE_DIR", "some/cache")
    options = poptorch.Options()
    assert options._Popart.options["cachePath"] == "some/cache"
    assert options.device_iterations == 2
    assert options.Training.gradient_accumulation == 3
    assert options.connection_type == poptorch.ConnectionType.OnDemand.value
    assert options._Popart.options["autoRecomputation"] == 1


REFUSED: Dict[str, Callable[[Any, Any], object]] = {
    "enableSyntheticData": lambda poptorch, options: options.enableSyntheticData(True),
    "enableFloatingPointExceptions": lambda poptorch, options: (
        options.Precision.enableFloatingPointExceptions(True)
    ),
    "halfFloatCasting": lambda poptorch, options: options.Precision.halfFloatCasting(
        poptorch.HalfFloatCastingBehavior.FloatDowncastToHalf
    ),
    "syntheticDataMode": lambda poptorch, options: options._Popart.set("syntheticDataMode", 2),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_change_results_is_refused_by_name(poptorch, name):
    """An option that the emulator cannot honour raises at once and says which one it is."""
    with pytest.raises(NotImplementedError, match=name):
        REFUSED[name](poptorch, poptorch.Options())


def test_an_input_grouping_that_does_not_fit_is_a_mistake(poptorch):
    """Group sizes must divide the number of replicas, and not all replicas may share an input."""
    options = poptorch.Options().replicationFactor(4)
    consecutive = poptorch.CommGroupType.Consecutive
    with pytest.raises(ValueError, match="cannot be larger than replication_factor"):
        options.inputReplicaGrouping(5, consecutive)
    with pytest.raises(ValueError, match="must be a factor of replication_factor"):
        options.inputReplicaGrouping(3, consecutive)
    with pytest.raises(ValueError, match="cannot be All"):
        options.inputReplicaGrouping(2, poptorch.CommGroupType.All)


def test_what_changes_no_result_is_accepted(poptorch, tmp_path):
    """Placement, caching, profiling and the like can be set, and setters chain."""
    options = (
        poptorch.Options()
        .setAvailableMemoryProportion({"IPU0": 0.5, "IPU1": 0.25})
        .enableExecutableCaching(str(tmp_path))
        .logDir(str(tmp_path))
        .maxRepeatLogs(None)
        .enableProfiling(str(tmp_path))
        .syncPattern(poptorch.SyncPattern.SinglePipeline)
        .showCompilationProgressBar(False)
        .enableStableNorm(True)
        .autoRoundNumIPUs(True)
        .useIpuModel(True)
        .broadcastBuffers(False)
    )
    options._Popart.setPatterns({"PadSum": True}, level=0)
    options.TensorLocations.setWeightLocation(
        poptorch.TensorLocationSettings().useOnChipStorage(False).minElementsForOffChip(4)
    )
    assert options.available_memory_proportion == {0: 0.5, 1: 0.25}
    assert options.TensorLocations.location_weight == {"onChip": 0, "minElementsForOffChip": 4}


@pytest.mark.parametrize("tiles", [10, 33, 193])
def test_io_tiles_are_an_even_number_in_range(poptorch, tiles):
    """The hardware reserves an even number of IO tiles from 32 to 192."""
    with pytest.raises(AssertionError, match=r"even number between 32 and 192\."):
        poptorch.Options().TensorLocations.numIOTiles(tiles)


def test_memory_proportions_are_given_by_ipu(poptorch):
    """A key that does not name an IPU is shown."""
    with pytest.raises(AssertionError, match="Invalid key: 0"):
        poptorch.Options().setAvailableMemoryProportion({"0": 0.5})


def test_the_random_seed_seeds_the_host_as_well(poptorch):
    """As in PopTorch, `randomSeed` also seeds torch's own generator."""
    poptorch.Options().randomSeed(7)
    first = torch.rand(3)
    torch.manual_seed(7)
    assert torch.equal(first, torch.rand(3))


def test_a_reduction_must_be_a_mean_or_a_sum(poptorch):
    """Gradients cannot be left unreduced, nor reduced by a number."""
    training = poptorch.Options().Training
    for wrong in (poptorch.ReductionType.NoReduction, 1):
        with pytest.raises(ValueError, match=r"poptorch\.ReductionType\.Mean"):
            training.accumulationAndReplicationReductionType(wrong)


def test_groups_can_be_subclassed_by_a_launcher(poptorch):
    """PopDist replaces the class of the group of processes; the group keeps working."""

    class Launched(poptorch.options._DistributedOptions):
        pass

    options = poptorch.Options()
    options.Distributed.__class__ = Launched
    assert options.Distributed.numProcesses == 1


class TwoBlocks(torch.nn.Module):
    """A model whose blocks are called A and B."""

    def __init__(self, poptorch: Any, ipu_ids: Any = (0, 1)) -> None:
        super().__init__()
        self.first = poptorch.BeginBlock(torch.nn.Linear(2, 2), "A", ipu_id=ipu_ids[0])
        self.poptorch = poptorch
        self.ipu_ids = ipu_ids

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        with self.poptorch.Block("B", ipu_id=self.ipu_ids[1]):
            return x * 2


def test_a_block_that_no_stage_names_is_an_error(poptorch):
    """Explicit stages must cover all blocks of a model; the message lists those named."""
    options = poptorch.Options().setExecutionStrategy(poptorch.PipelinedExecution("A", "C"))
    model = poptorch.inferenceModel(TwoBlocks(poptorch), options)
    with pytest.raises(AssertionError, match=r"Unknown Block 'B'.*\['A', 'C'\]"):
        model(torch.ones(1, 2))


def test_a_block_without_ipu_needs_explicit_stages(poptorch):
    """By default a block's stage is its IPU, so it must have one."""
    model = poptorch.inferenceModel(TwoBlocks(poptorch, ipu_ids=(0, None)))
    with pytest.raises(AssertionError, match="no IPU was specified for block B"):
        model(torch.ones(1, 2))


def test_blocks_change_no_result(poptorch):
    """A model in blocks computes what it computes without them."""
    module = TwoBlocks(poptorch)
    x = torch.ones(1, 2)
    expected = module(x)
    options = poptorch.Options().setExecutionStrategy(poptorch.ShardedExecution())
    assert torch.equal(poptorch.inferenceModel(module, options)(x), expected)


def test_a_block_belongs_to_one_stage(poptorch):
    """Stages and phases that share a block are refused."""
    with pytest.raises(AssertionError, match="A associated with more than one stage"):
        poptorch.PipelinedExecution("A", poptorch.Stage("B", "A"))
    with pytest.raises(AssertionError, match="A associated with more than one stage"):
        poptorch.SerialPhasedExecution(["A"], ["A"])
