"""What `self.log` is called with, against the micro-batches' own values, one by one."""

import builtins
import math
import re

import pytest
import torch
import torchmetrics as tm

from ipu_log_callback.errors import OutputModeError
from ipu_log_callback.geometry import Geometry
from ipu_log_callback.record import (
    AnchoredCall,
    AnchoredOutput,
    CallSite,
    LiveValue,
    LoggedCall,
    LoggedCollection,
    LoggedResults,
    MetricCall,
    MetricResult,
    StepRecord,
)
from ipu_log_callback.replay import Replay, over_processes, reduction_of
from ipu_log_callback.wire import Wire, pack

SITE = CallSite("net.py", 1)
ALL = [Geometry(1, 1, 1), Geometry(3, 1, 1), Geometry(1, 1, 2)]
SUMMED = [Geometry(2, 1, 1, "Sum"), Geometry(2, 3, 2, "Sum")]

REFERENCE = {
    "mean": lambda values: values.double().mean(),
    "AVG": lambda values: values.double().mean(),
    "sum": lambda values: values.sum(),
    "Min": lambda values: values.min(),
    "max": lambda values: values.max(),
    torch.sum: lambda values: values.sum(),
    torch.max: lambda values: values.max(),
}

VALUES = {
    "float": torch.randn,
    "half": lambda count: torch.randint(60000, 65000, (count,)).half(),
    "int": lambda count: torch.randint(2**24, 2**30, (count,)).int(),
    "bool": lambda count: torch.arange(count) % 2 == 0,
}


def replayed(calls, tensors, geometry):
    """What one execution logs, `[(name, value, options)]`, and what is `seen` of it.

    `calls` are `(name, value, options)` of `self.log`, or other events. `tensors[i]` holds the
    values of the anchored output `i`, `[micro_batches]`; a value that stands for all micro-batches
    comes back once.
    """
    anchored = [AnchoredOutput(i, (), t.dtype) for i, t in enumerate(tensors)]
    events = tuple(LoggedCall(*call, SITE) if isinstance(call, tuple) else call for call in calls)
    rows = [
        pack(None, anchored, {i: t[row] for i, t in enumerate(tensors)}, structured=True)
        for row in range(max([len(t) for t in tensors] or [0]))
    ]
    wire = pack(None, anchored, {i: t[0] for i, t in enumerate(tensors)}, structured=True)[1]
    columns = [torch.stack(column) for column in zip(*[packed[1] for (packed, _) in rows])]
    if geometry.output_mode == "Sum":
        columns = [
            column.reshape(-1, geometry.replicas, column.shape[-1]).sum(0, dtype=column.dtype)
            for column in columns
        ]
    whole = (None, tuple(column.flatten() for column in columns)) if rows else None
    _, returned = wire.unpack(whole, geometry, geometry)
    said, seen = [], []
    Replay(StepRecord("validation_step", "Net", events), wire, geometry)(
        returned,
        lambda name, value, **options: said.append((name, value, options)),
        None,
        seen.append,
    )
    return said, seen


def output(index, dtype=torch.float32):
    """The anchored output that a call of `self.log` was given."""
    return AnchoredOutput(index, (), dtype)


@pytest.mark.parametrize("beside", [False, True], ids=["alone", "with others"])
@pytest.mark.parametrize("reduce_fx", REFERENCE, ids=lambda how: getattr(how, "__name__", how))
@pytest.mark.parametrize("kind", VALUES)
@pytest.mark.parametrize("geometry", ALL, ids=str)
def test_a_value_is_the_reduction_of_the_micro_batches(geometry, kind, reduce_fx, beside):
    """Whole numbers stay exact, halves are widened, and one key is as good as many."""
    torch.manual_seed(0)
    values = VALUES[kind](geometry.micro_batches)
    others = [torch.randn(geometry.micro_batches) for _ in range(2)] if beside else []
    calls = [(f"other{i}", output(i), {}) for i in range(len(others))]
    calls.append(("v", output(len(others), values.dtype), {"reduce_fx": reduce_fx}))

    said, seen = replayed(calls, [*others, values], geometry)

    name, value, options = said[-1]
    widened = values.float() if values.is_floating_point() else values.long()
    expected = REFERENCE[reduce_fx](widened)
    assert name == "v"
    assert options == {"reduce_fx": reduce_fx}
    assert torch.as_tensor(value).numel() == 1
    assert torch.as_tensor(value).dtype in (torch.get_default_dtype(), torch.long)
    assert float(value) == pytest.approx(float(expected), rel=1e-6)
    if not values.is_floating_point() and reduction_of(options) != "mean":
        assert int(value) == int(expected)
    assert seen[-1].tolist() == widened.tolist()
    for number, other in enumerate(others):
        assert float(said[number][1]) == pytest.approx(float(other.mean()), rel=1e-5)


@pytest.mark.parametrize("reduce_fx", ["mean", "sum"])
@pytest.mark.parametrize("kind", ["float", "int"])
@pytest.mark.parametrize("geometry", SUMMED, ids=str)
def test_what_the_device_summed_is_a_mean_or_a_sum_of_all_micro_batches(geometry, kind, reduce_fx):
    """Under `Sum` a result holds many micro-batches, and none of them by itself."""
    torch.manual_seed(0)
    values = VALUES["float"](geometry.micro_batches)
    values = values if kind == "float" else (values * 100).int()
    said, seen = replayed(
        [("v", output(0, values.dtype), {"reduce_fx": reduce_fx})], [values], geometry
    )
    expected = REFERENCE[reduce_fx](values)
    assert float(said[0][1]) == pytest.approx(float(expected), rel=1e-5)
    assert seen == []


NAN = float("nan")
KEYS = [[1.0, NAN, 3.0], [NAN, NAN, NAN], [2.0, 5.0, 4.0], [2**24 + 1, 2**24 + 3, 2**24 + 5]]


@pytest.mark.parametrize("reduce_fx", [builtins.min, builtins.max])
@pytest.mark.parametrize("keys", [*([key] for key in KEYS), KEYS], ids=str)
def test_pythons_min_and_max_pass_over_nan(keys, reduce_fx):
    """They do in a CPU run, unlike torch's; only where nothing else is there, NaN it is."""
    tensors = [torch.tensor(values) for values in keys]
    calls = [(str(i), output(i, t.dtype), {"reduce_fx": reduce_fx}) for i, t in enumerate(tensors)]
    said, _ = replayed(calls, tensors, ALL[1])
    for values, (_, value, _) in zip(keys, said):
        expected = reduce_fx([number for number in values if not math.isnan(number)] or [NAN])
        assert value.item() == pytest.approx(expected, rel=0, abs=0, nan_ok=True)


@pytest.mark.parametrize("size", [5, torch.tensor(5)], ids=["int", "host tensor"])
@pytest.mark.parametrize("geometry", [*ALL, *SUMMED], ids=str)
def test_a_batch_size_counts_for_the_whole_execution(geometry, size):
    """It is one micro-batch's, and the value stands for all of them; the call's own is kept."""
    options = {"batch_size": size, "on_epoch": True}
    said, _ = replayed([("v", output(0), options)], [torch.ones(geometry.micro_batches)], geometry)
    assert said[0][2] == {"batch_size": 5 * geometry.micro_batches, "on_epoch": True}
    assert type(said[0][2]["batch_size"]) is int
    assert options["batch_size"] is size


def test_a_live_batch_size_is_asked_at_every_execution():
    """The host's function says what a micro-batch weighs now."""
    options = {"batch_size": LiveValue(lambda: 7)}
    said, _ = replayed([("v", output(0), options)], [torch.tensor([1.0, 2.0, 6.0])], ALL[1])
    assert float(said[0][1]) == pytest.approx(3.0)
    assert said[0][2] == {"batch_size": 21}


@pytest.mark.parametrize("sizes", [[1, 2, 5], [0, 0, 1], [0, 0, 0]])
def test_a_batch_size_from_the_device_weights_the_mean(sizes):
    """Micro-batches of different sizes; if all are empty, each counts the same."""
    values = torch.tensor([1.0, 2.0, 6.0])
    tensors = [values, torch.tensor(sizes, dtype=torch.int32)]
    options = {"batch_size": output(1, torch.int32), "on_epoch": True}
    weights = torch.tensor(sizes).double()
    expected = (values * weights).sum() / weights.sum() if sum(sizes) else values.mean()
    said, _ = replayed([("v", output(0), options)], tensors, ALL[1])
    assert float(said[0][1]) == pytest.approx(float(expected))
    assert said[0][2] == {"batch_size": sum(sizes), "on_epoch": True}


def test_a_batch_size_from_the_device_leaves_sums_and_extremes_alone():
    """Weights are a mean's."""
    tensors = [torch.tensor([1.0, 2.0, 6.0]), torch.tensor([1, 2, 5], dtype=torch.int32)]
    size = output(1, torch.int32)
    calls = [(how, output(0), {"reduce_fx": how, "batch_size": size}) for how in ("sum", "max")]
    said, _ = replayed(calls, tensors, ALL[1])
    assert [float(value) for _, value, _ in said] == [9.0, 6.0]


FROZEN = [0.5, 3, True, torch.tensor(2.0)]


@pytest.mark.parametrize("value", FROZEN, ids=repr)
@pytest.mark.parametrize("live", [False, True])
def test_a_value_of_the_host_is_the_same_in_every_micro_batch(value, live):
    """Its mean is itself, and a sum has it once a micro-batch; the device has nothing to tell."""
    given = LiveValue(lambda: value) if live else value
    calls = [(how, given, {"reduce_fx": how}) for how in ("mean", "sum", "max")]
    said, seen = replayed(calls, [], Geometry(3, 1, 2))
    assert [float(each) for _, each, _ in said] == [float(value), 6 * float(value), float(value)]
    assert seen == []


def test_a_live_value_is_asked_at_every_execution():
    """Nothing of it is kept between executions."""
    numbers = iter([1.0, 2.0])
    record = StepRecord(
        "validation_step", "Net", (LoggedCall("v", LiveValue(lambda: next(numbers)), {}, SITE),)
    )
    _, wire = pack(None, [], {}, structured=True)
    replay = Replay(record, wire, ALL[0])
    said = []
    for _ in range(2):
        _, returned = wire.unpack(None, ALL[0], ALL[0])
        replay(returned, lambda name, value: said.append(value), None)
    assert said == [1.0, 2.0]


def test_a_dict_of_values_is_reduced_entry_by_entry():
    """As `self.log` takes it."""
    calls = [("d", {"a": output(0), "b": 2, "c": LiveValue(lambda: 4)}, {"reduce_fx": "sum"})]
    ((name, value, _),), seen = replayed(calls, [torch.tensor([1.0, 2.0, 6.0])], ALL[1])
    assert name == "d"
    assert {key: float(each) for key, each in value.items()} == {"a": 9.0, "b": 6.0, "c": 12.0}
    assert seen == []


@pytest.mark.parametrize("geometry", [Geometry(2, 1, 2), Geometry(2, 1, 1)], ids=str)
def test_a_constant_that_came_back_once_counts_for_every_micro_batch(geometry):
    """PopTorch does not batch an output that is made of constants only."""
    count = geometry.micro_batches
    calls = [(how, output(0), {"reduce_fx": how}) for how in ("mean", "sum", "min")]
    calls.append(("weighed", output(0), {"batch_size": LiveValue(lambda: 2)}))
    said, seen = replayed(calls, [torch.tensor([1.5])], geometry)
    assert [float(value) for _, value, _ in said] == [1.5, 1.5 * count, 1.5, 1.5]
    assert [values.tolist() for values in seen] == [[1.5] * count] * 4


@pytest.mark.parametrize("geometry", [ALL[1], SUMMED[0]], ids=str)
def test_a_collection_is_logged_whole_and_calls_keep_their_order(geometry):
    """One `log_dict` with the names that were selected and the call's options."""
    events = (
        LoggedCall("before", 1, {}, SITE),
        LoggedCollection("the collection", ("a", "b"), {"on_epoch": True, "batch_size": 2}, SITE),
        LoggedCall("after", 2, {"prog_bar": True}, SITE),
    )
    _, wire = pack(None, [], {}, structured=True)
    _, returned = wire.unpack(None, geometry, geometry)
    said, finished = [], []
    Replay(StepRecord("validation_step", "Net", events), wire, geometry)(
        returned,
        lambda name, value, **options: said.append((name, value, options)),
        lambda collection, names, **options: said.append((collection, names, options)),
        finish=lambda: finished.append(len(said)),
    )
    assert said == [
        ("before", 1, {}),
        (
            "the collection",
            ("a", "b"),
            {"on_epoch": True, "batch_size": 2 * geometry.micro_batches},
        ),
        ("after", 2, {"prog_bar": True}),
    ]
    assert finished == [3]


class MeanAndSquare(tm.MeanMetric):
    """A user's metric whose value is a dict."""

    def compute(self):
        mean = super().compute()
        return {"mean": mean, "square": mean**2}


@pytest.mark.parametrize("geometry", ALL, ids=str)
def test_a_dict_that_a_metric_returned_is_logged_entry_by_entry(geometry):
    """Its keys are known on the host only; those that are wanted have the call's options."""
    options = {"reduce_fx": "sum", "batch_size": 2}
    events = [
        MetricCall(MeanAndSquare(), "both", "forward", (output(0),), {}, 0, SITE),
        LoggedResults(MetricResult(0), {"square"}.__contains__, options, SITE),
        ("largest mean", MetricResult(0, "mean"), {"reduce_fx": "max"}),
    ]
    values = torch.arange(1.0, 1 + geometry.micro_batches)
    said, seen = replayed(events, [values], geometry)
    assert said == [
        ("square", (values**2).sum(), {**options, "batch_size": 2 * len(values)}),
        ("largest mean", len(values), {"reduce_fx": "max"}),
    ]
    assert [each.tolist() for each in seen] == [values.tolist()]


class Sum(tm.SumMetric):
    """A user's metric with a value of its own precision."""

    def __init__(self, dtype):
        super().__init__()
        self.dtype_of_value = dtype

    def compute(self):
        return super().compute().to(self.dtype_of_value)


@pytest.mark.parametrize(
    ("dtype", "values"),
    [
        (torch.half, [60000.0, 60000.0, 60000.0]),
        (torch.bfloat16, [256.0, 1.0, 1.0]),
        (torch.double, [2.0**24, 1.0, 1.0]),
    ],
    ids=str,
)
def test_what_a_metric_returns_is_reduced_without_loss(dtype, values):
    """Halves would overflow, or round the small ones away; so would doubles, were they narrowed."""
    sizes = torch.tensor([1, 2, 5], dtype=torch.int32)
    events = [
        MetricCall(Sum(dtype), "metric", "forward", (output(0),), {}, 0, SITE),
        ("sum", MetricResult(0), {"reduce_fx": "sum"}),
        ("mean", MetricResult(0), {}),
        ("weighted", MetricResult(0), {"batch_size": output(1, torch.int32)}),
    ]
    said, _ = replayed(events, [torch.tensor(values), sizes], ALL[1])
    weighted = sum(value * size for value, size in zip(values, sizes.tolist())) / 8
    expected = [sum(values), sum(values) / 3, weighted]
    assert [float(value) for _, value, _ in said] == torch.tensor(expected).tolist()


@pytest.mark.parametrize("how", ["mean", "sum", "min", "max"])
def test_whole_numbers_of_processes_stay_exact(how):
    """Above 2^24 a float32 would round them."""
    values = [2**24 + 1, 2**24 + 3]
    reduced = over_processes(values, None, {"reduce_fx": how})
    assert int(reduced) == {"mean": 2**24 + 2, "sum": 2**25 + 4}.get(
        how, getattr(builtins, how, min)(values)
    )
    assert reduced.is_floating_point() == (how == "mean")


@pytest.mark.parametrize(
    ("values", "weights", "options", "expected"),
    [
        ([1.0, 4.0], [1, 2], {}, 3.0),
        ([1.0, 4.0], [0, 1], {}, 4.0),
        ([1.0, 4.0], [0, 0], {}, 2.5),
        ([1.0, 4.0], None, {}, 2.5),
        ([1, 4], [1, 2], {"reduce_fx": "mean"}, 3.0),
        ([1.0, 4.0], [1, 2], {"reduce_fx": "sum"}, 5.0),
        ([float("nan"), 4.0], None, {"reduce_fx": max}, 4.0),
        ([0.1, 0.1, 0.1], None, {"reduce_fx": "sum"}, 0.3),
        # a float32 does not hold the first: 0 would be left
        ([2.0**24 + 1, -(2.0**24)], None, {"reduce_fx": "sum"}, 1.0),
    ],
)
def test_numbers_of_processes_are_reduced_as_micro_batches_are(values, weights, options, expected):
    """By the call's own `reduce_fx`; a mean by what each process counts."""
    reduced = over_processes(values, weights, options)
    assert float(reduced) == pytest.approx(expected)
    assert reduced.dtype == torch.get_default_dtype()


@pytest.mark.parametrize("live", [False, True])
def test_a_number_of_the_host_may_be_weighted_anew_at_every_execution(live):
    """Only its weight comes from the execution."""
    sizes = torch.tensor([1, 2, 5], dtype=torch.int32)
    size = LiveValue(lambda: 4) if live else output(0, torch.int32)
    said, _ = replayed([("v", 0.5, {"batch_size": size})], [] if live else [sizes], ALL[1])
    assert said == [("v", 0.5, {"batch_size": 12 if live else 8})]


FIT_FOR_SUM = (
    LoggedCall("mean", output(0), {"batch_size": 2}, SITE),
    LoggedCall("sum", output(0), {"reduce_fx": torch.sum}, SITE),
    LoggedCollection({}, (), {"reduce_fx": "max"}, SITE),
    AnchoredCall(
        "counts", "anchored", AnchoredOutput(1, (4,), torch.int32), SITE, edges=(0.0, 1.0)
    ),
)
NEED_EVERY_MICRO_BATCH = {
    "`self.log('v', ..., reduce_fx='max')`": LoggedCall("v", output(0), {"reduce_fx": max}, SITE),
    "`self.log('v', ..., batch_size=tensor)`": LoggedCall(
        "v", output(0), {"batch_size": output(1)}, SITE
    ),
    "`self.acc.update(...)`": MetricCall(None, "acc", "update", (output(0),), {}, 0, SITE),
    "`anchor('hidden', ...)`": AnchoredCall("hidden", "anchored", output(0), SITE),
}


@pytest.mark.parametrize("call", NEED_EVERY_MICRO_BATCH)
def test_what_needs_every_micro_batch_is_refused_by_name_under_sum(call):
    """Means, sums and counts survive the device's sum, wherever they stand in the step."""
    events = (*FIT_FOR_SUM, NEED_EVERY_MICRO_BATCH[call])
    wire = Wire(floats=(output(0),), integers=(output(1, torch.int32),))
    for geometry in (*ALL, Geometry(1, 1, 2, "Sum")):
        Replay(StepRecord("test_step", "Net", events), wire, geometry)
    for geometry in SUMMED:
        Replay(StepRecord("test_step", "Net", FIT_FOR_SUM), wire, geometry)
        with pytest.raises(OutputModeError, match=re.escape(f"{call} in `Net.test_step`")) as error:
            Replay(StepRecord("test_step", "Net", events), wire, geometry)
        assert str(SITE) in str(error.value)
