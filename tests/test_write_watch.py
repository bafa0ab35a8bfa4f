"""Which calls of torch change a tensor."""

import pytest
import torch
from torch.nn import functional as F

from ipu_log_callback.write_watch import WriteWatch


def _add_to(x):
    x += 1


def _set_item(x):
    x[0] = 1


def _set_data(x):
    x.data = torch.zeros(2)


WRITES = {
    "a method in place": lambda x: x.add_(1),
    "an operator in place": _add_to,
    "an item": _set_item,
    "the data": _set_data,
    "a function into a tensor": lambda x: torch.add(x, 1, out=x),
    "an activation in place": lambda x: F.relu(x, inplace=True),
}
READS = {
    "an operator": lambda x: x + 1,
    "a function": torch.exp,
    "an item": lambda x: x[0],
    "an index": lambda x: [1, 2][x[0].int()],
    "a loop": list,
    "an activation": lambda x: F.relu(x, inplace=False),
    "an inversion": lambda x: ~x.bool(),
}


def is_noticed(use):
    """Whether a use of a tensor is taken for a write."""
    told = []
    with WriteWatch(lambda: told.append(use)):
        use(torch.zeros(2))
    return bool(told)


@pytest.mark.parametrize("name", WRITES)
def test_a_write_is_noticed(name):
    """However it is written in Python."""
    assert is_noticed(WRITES[name])


@pytest.mark.parametrize("name", READS)
def test_reading_is_not_writing(name):
    """What leaves its argument as it is."""
    assert not is_noticed(READS[name])
