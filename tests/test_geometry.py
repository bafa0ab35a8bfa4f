"""Micro-batches and output modes, against a loop that keeps them one by one."""

import itertools
from types import SimpleNamespace

import pytest
import torch

from ipu_log_callback.geometry import Geometry, fold

MODES = [("All", 1), ("Final", 1), ("Sum", 1), ("EveryN", 1), ("EveryN", 2)]
# PopTorch refuses a return period that does not divide the micro-batches of a replica
GEOMETRIES = [
    Geometry(iterations, accumulation, replicas, mode, period)
    for iterations, accumulation, replicas in itertools.product((1, 2, 3), (1, 2), (1, 2))
    for mode, period in MODES
    if iterations * accumulation % period == 0
]


def returned(values, mode, period, replicas):
    """What PopTorch returns of `values`, one per micro-batch, replicas innermost."""
    rows = [values[start : start + replicas] for start in range(0, len(values), replicas)]
    kept = {
        "All": lambda: rows,
        "Final": lambda: rows[-1:],
        "Sum": lambda: [[sum(column) for column in zip(*rows)]],
        "EveryN": lambda: rows[period - 1 :: period],
    }[mode]()
    results = [value for row in kept for value in row]
    if len(results) == 1:
        return results[0]
    return torch.cat([value.reshape(-1, *value.shape[1:]) for value in results])


@pytest.mark.parametrize("inner", [(), (1,), (2,), (2, 3)])
@pytest.mark.parametrize("own", GEOMETRIES, ids=str)
def test_folding_gives_what_the_users_own_mode_would_have_returned(own, inner):
    """Fetching everything and folding it equals asking the device for less."""
    values = [torch.randn(inner) for _ in range(own.micro_batches)]
    fetched = returned(values, "All", 1, own.replicas)

    folded = fold(fetched, inner, own)

    expected = returned(values, own.output_mode, own.period, own.replicas)
    assert torch.allclose(folded, expected, atol=1e-6)
    assert folded.shape == expected.shape


def test_an_output_that_came_back_once_is_left_alone():
    """An output made of constants only is not batched by PopTorch, whatever the mode."""
    own = Geometry(3, 1, 2, "Final")
    constant = torch.randn(4)
    assert fold(constant, (4,), own) is constant


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_results_are_counted_as_they_come_back(geometry):
    """`results` says how many results of an output one execution returns."""
    values = [torch.zeros(1) for _ in range(geometry.micro_batches)]
    expected = returned(values, geometry.output_mode, geometry.period, geometry.replicas)
    assert geometry.results == len(expected)
    assert isinstance(geometry.results, int)


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_how_much_the_results_tell_of_the_micro_batches(geometry):
    """One is counted for each micro-batch: a result has those that it sums up."""
    ones = [torch.ones(1) for _ in range(geometry.micro_batches)]
    results = returned(ones, geometry.output_mode, geometry.period, geometry.replicas)
    assert set(results.tolist()) == {geometry.micro_batches_per_result}
    assert geometry.sees_every_micro_batch == (int(results.sum()) == geometry.micro_batches)
    assert geometry.sees_each_micro_batch == (len(results) == geometry.micro_batches)


def test_everything_comes_back_unless_said_otherwise():
    """Of the counts alone, PopTorch's `All`; of `EveryN` without a period, every one."""
    assert Geometry(2, 3, 2).results == 12
    assert Geometry(2, 3, 2, "EveryN").results == 12


@pytest.mark.parametrize("mode", ["All", "Sum", "Final", "EveryN"])
def test_folded_integers_keep_their_dtype(mode):
    """The device returns int32, and so does what is made of what it returned."""
    own = Geometry(4, 1, 2, mode, 2 if mode == "EveryN" else 1)
    assert fold(torch.arange(8, dtype=torch.int32), (), own).dtype == torch.int32


@pytest.mark.parametrize(
    ("mode", "training", "expected"),
    [
        (0, True, ("Final", 1)),
        (1, True, ("EveryN", 3)),
        (2, True, ("All", 1)),
        (3, False, ("Sum", 1)),
        (4, True, ("Final", 1)),
        (4, False, ("All", 1)),
    ],
)
def test_the_geometry_is_what_the_options_say(mode, training, expected):
    """PopTorch's `Default` is `Final` in training, `All` in inference; a period is `EveryN`'s."""
    options = SimpleNamespace(
        output_mode=mode,
        output_return_period=3,
        device_iterations=6,
        replication_factor=2,
        Training=SimpleNamespace(gradient_accumulation=5),
    )
    assert Geometry.from_options(options, training) == Geometry(6, 5, 2, *expected)
