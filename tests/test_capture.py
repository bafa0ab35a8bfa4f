"""What becomes of a step's calls: recorded if wanted, else told with what they would cost."""

import pytest
import torch
from host_capture import OnTheHost
from torchmetrics import CatMetric, MeanMetric, MetricCollection, SumMetric

from ipu_log_callback.call_site import source_line
from ipu_log_callback.errors import StepCaptureError
from ipu_log_callback.metrics import Metrics, PendingMetricValue
from ipu_log_callback.record import AnchoredOutput, LoggedCollection, MetricResult
from ipu_log_callback.selection import Selection


class Net(torch.nn.Module):
    """Metrics alone and in a collection."""

    def __init__(self):
        super().__init__()
        self.total = SumMetric()
        self.all = CatMetric()
        self.group = MetricCollection({"low": MeanMetric(), "high": MeanMetric()}, prefix="val_")


def captured(keys, step):
    """Run `step(module, log, log_dict)`; returns its record and its layout."""
    module = Net()
    metrics = Metrics(module)
    capture = OnTheHost(module, "validation_step", Selection(keys), metrics, False)

    def log(name, value, **options):
        capture.record_log(None, name, value, options)

    def log_dict(given, **options):
        if isinstance(given, PendingMetricValue):
            capture.record_log_results(given, options)
        else:
            capture.record_log_collection(None, given, options)

    with metrics.recorded(capture.record_metric):
        step(module, log, log_dict)
    _, record, wire = capture.finish(None)
    return record, wire


def everything(module, log, log_dict):
    """A scalar, a number, two metrics and a collection."""
    x = torch.randn(4, 3)
    log("scalar", x.sum())
    log("number", 3)
    module.total.update(x[0])
    module.all(x)
    module.all.compute()
    module.group.update(x.mean())
    log("total", module.total)
    log_dict(module.group, on_epoch=True)


def test_what_is_not_selected_is_told_with_what_it_would_cost():
    """Scalars are 4 bytes, numbers nothing; a metric costs what it is fed, told under its path."""
    record, wire = captured((), everything)
    assert record.events == ()
    assert not wire.carries_anchored
    assert {key.name: key.bytes for key in record.dropped} == {
        "scalar": 4,
        "number": 0,
        "total": 4 * 3,
        "all": 4 * 12,
        "group": 4,
        "val_low": 0,
        "val_high": 0,
    }
    assert all(key.site.file == __file__ for key in record.dropped)


@pytest.mark.filterwarnings("ignore:`self.log.'number'")
@pytest.mark.parametrize(
    ("keys", "wanted"),
    [
        (["scalar"], []),
        (["total"], ["total"]),
        (["all"], ["all", "all"]),
        (["val_low"], ["group"]),
        (["group"], ["group"]),
        (["*"], ["total", "all", "all", "group"]),
    ],
)
def test_a_metric_is_fed_if_it_or_what_it_is_logged_as_is_selected(keys, wanted):
    """By its path or by a key; the calls of others are dropped, and theirs alone."""
    record, _ = captured(keys, everything)
    assert [call.path for call in record.metric_calls] == wanted
    told = {key.name for key in record.dropped}
    assert told.isdisjoint(wanted)
    assert {"total", "all", "group"} - set(wanted) <= told


def test_of_a_collection_the_selected_keys_are_logged():
    """The others are told; the options stay the call's own."""
    record, _ = captured(["val_high"], everything)
    (logged,) = [event for event in record.logged if isinstance(event, LoggedCollection)]
    assert logged.names == ("val_high",)
    assert logged.options == {"on_epoch": True}
    assert "val_low" in {key.name for key in record.dropped}
    assert "val_high" not in {key.name for key in record.dropped}


def test_a_tensor_that_is_used_twice_travels_once():
    """Under two keys and in a metric, it is one anchored output, as it was at the first call."""

    def step(module, log, log_dict):
        value = torch.tensor([2.0])
        log("a", value)
        log("b", value, reduce_fx="sum")
        module.total.update(value)

    record, wire = captured(["*"], step)
    first, second = record.logged
    assert first.value is second.value is record.metric_calls[0].args[0]
    assert len(record.anchored) == wire.extra_outputs == 1
    assert (first.options, second.options) == ({}, {"reduce_fx": "sum"})


def test_the_larger_cost_of_a_name_is_told():
    """A metric that is logged under its own path costs what its calls are given."""

    def step(module, log, log_dict):
        log("total", module.total)
        module.total.update(torch.randn(5))

    record, _ = captured((), step)
    assert [(key.name, key.bytes) for key in record.dropped] == [("total", 20)]


def test_a_cheaper_call_of_a_name_hides_no_dearer_one():
    """Whichever came first, the larger cost is told."""

    def step(module, log, log_dict):
        log("a", torch.tensor(1.0))
        log("a", 3)

    record, _ = captured((), step)
    assert [(key.name, key.bytes) for key in record.dropped] == [("a", 4)]


def test_of_calls_that_cost_the_same_the_first_is_told():
    """A metric that is fed twice is told once, at the first of the two lines."""

    def step(module, log, log_dict):
        module.total.update(torch.tensor(1.0))
        module.total.update(torch.tensor(2.0))

    record, _ = captured((), step)
    (key,) = record.dropped
    assert "tensor(1.0)" in source_line(key.site)


def test_what_costs_nothing_in_a_metric_is_not_told():
    """A value that is asked for and a reset carry nothing to the host."""

    def step(module, log, log_dict):
        module.total.reset()
        module.all.compute()

    record, _ = captured((), step)
    assert record.events == record.dropped == ()


@pytest.mark.parametrize(
    ("keys", "fed"),
    [(["first"], {"total"}), (["second"], {"group"}), (["*t", "*d"], {"total", "group"})],
)
def test_a_metric_whose_value_is_logged_is_fed(keys, fed):
    """The value's key selects the metric; the record knows which call gives the value."""

    def step(module, log, log_dict):
        x = torch.tensor(1.0)
        log("first", module.total(x))
        log("second", module.group(value=x)["val_low"])

    record, _ = captured(keys, step)
    numbers = {call.path: call.number for call in record.metric_calls}
    assert set(numbers) == fed
    assert all(
        isinstance(leaf, AnchoredOutput)
        for call in record.metric_calls
        for leaf in (*call.args, *call.kwargs.values())
    )
    values = {"first": ("total", None), "second": ("group", "val_low")}
    for logged in record.logged:
        path, key = values[logged.name]
        assert logged.value == MetricResult(numbers[path], key)


def test_a_call_that_has_no_value_returns_none():
    """`update` and `reset` return nothing, in a step as elsewhere."""
    returned = []

    def step(module, log, log_dict):
        returned.append(module.total.update(torch.tensor(1.0)))
        returned.append(module.total.reset())

    captured(["*"], step)
    assert returned == [None, None]


@pytest.mark.parametrize("keys", [(), ["val_*"]])
def test_a_dict_whose_keys_the_host_will_know_is_recorded_if_anything_is_selected(keys):
    """Its keys are told apart on the host; where nothing is selected nothing is carried."""

    def step(module, log, log_dict):
        log_dict(module.all(torch.ones(3)), on_epoch=True)

    record, wire = captured(keys, step)
    assert len(record.logged) == len(record.metric_calls) == bool(keys)
    assert wire.carries_anchored == bool(keys)
    if keys:
        (logged,) = record.logged
        assert logged.result == MetricResult(record.metric_calls[0].number)
        assert logged.selects("val_low")
        assert not logged.selects("low")
        assert logged.options == {"on_epoch": True}


@pytest.mark.parametrize(
    ("value", "call"),
    [
        (lambda module, x: module.total(x), "self.total(...)"),
        (lambda module, x: module.total.compute(), "self.total.compute()"),
        (lambda module, x: module.group(x)["val_low"], "self.group(...)"),
        (lambda module, x: module.group.compute()["val_high"], "self.group.compute()"),
    ],
)
def test_the_value_of_a_metrics_call_knows_the_call(value, call):
    """A step that uses it before the host has it is told which one."""

    def step(module, log, log_dict):
        value(module, torch.tensor(1.0)) * 2

    with pytest.raises(StepCaptureError) as caught:
        captured(["*"], step)
    assert f"`{call}` was used in `Net.validation_step`" in str(caught.value)


def test_a_metric_that_is_logged_under_another_name_is_fed():
    """The key selects it, wherever in the module it lives."""

    def step(module, log, log_dict):
        module.total.update(torch.tensor(1.0))
        module.all.update(torch.tensor(1.0))
        log("renamed", module.total)

    record, _ = captured(["renamed"], step)
    assert [call.path for call in record.metric_calls] == ["total"]
