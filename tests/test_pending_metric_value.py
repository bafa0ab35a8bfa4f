"""What stands for a metric's value inside a step answers nothing but `self.log`."""

import copy

import pytest
import torch

from ipu_log_callback.errors import IPULogError
from ipu_log_callback.metrics import PendingMetricValue
from ipu_log_callback.record import MetricResult

USES = {
    "arithmetic": lambda value: value * 2,
    "arithmetic from the right": lambda value: 1 - value,
    "a comparison": lambda value: value > 0.5,
    "a branch": lambda value: 1 if value else 0,
    "float()": float,
    "a format": lambda value: f"{value:.2f}",
    "an index": lambda value: value[0],
    "a method of a tensor": lambda value: value.mean(),
    "item()": lambda value: value.item(),
    "a function of torch": torch.sqrt,
    "a function of torch beside tensors": lambda value: torch.add(torch.ones(2), value),
    "a list for a function of torch": lambda value: torch.stack([torch.ones(()), value]),
    "an argument by name": lambda value: torch.clamp(torch.ones(2), max=value),
    "a loop": list,
    "len()": len,
}


@pytest.fixture
def value():
    """The value of a metric's call in a training step."""
    return PendingMetricValue(MetricResult(0), "self.accuracy(...)", "LitNet.training_step")


@pytest.mark.parametrize("use", USES)
def test_any_use_but_self_log_is_an_error_that_says_what_to_do(value, use):
    """It names the metric's call and the step, and both ways out."""
    with pytest.raises(IPULogError) as caught:
        USES[use](value)
    text = str(caught.value)
    assert "self.accuracy(...)" in text
    assert "LitNet.training_step" in text
    assert "self.log(name, self.metric)" in text


def test_python_may_ask_what_it_asks_of_any_object(value):
    """Protocols that are looked up on everything are answered as by an object without them."""
    assert not hasattr(value, "__array__")
    assert not hasattr(value, "__fspath__")
    assert repr(value) == "<value of self.accuracy(...), known on the host after the execution>"
    assert {value: 1}[value] == 1
    assert isinstance(value, PendingMetricValue)
    assert copy.copy([value])[0] is value
