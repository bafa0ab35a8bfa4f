"""Packing and unpacking, with the device played by concatenation."""

from typing import NamedTuple

import pytest
import torch

from ipu_log_callback.geometry import Geometry
from ipu_log_callback.record import AnchoredOutput
from ipu_log_callback.structure import map_tensors, tensors_of
from ipu_log_callback.wire import Wire, pack


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


class Box:
    """A batch type of the user's own."""

    def __init__(self, inside):
        self.inside = inside
        self.label = "box"


def executed(packed_of_each):
    """What one execution returns under `All`: dimension 0 of each output, concatenated."""
    count = len(packed_of_each)
    columns = list(zip(*map(tensors_of, packed_of_each)))
    joined = iter(
        torch.cat([t.reshape(-1, *t.shape[1:]) for t in column]) if count > 1 else column[0]
        for column in columns
    )
    return map_tensors(packed_of_each[0], lambda _: next(joined))


def anchored_of(tensors):
    """What a capture notes of tensors that it anchors."""
    return [AnchoredOutput(i, tuple(t.shape), t.dtype) for i, t in enumerate(tensors)]


TENSORS = [
    lambda: torch.randn(()),
    lambda: torch.randn(1, 1).half(),
    lambda: torch.randint(2**24, 2**31 - 1, ()).int(),
    lambda: torch.randn(2, 3),
    lambda: torch.rand(()) > 0.5,
    lambda: torch.randint(0, 9, (4,)).int(),
    lambda: torch.rand(3) > 0.5,
]

#: What comes back as another dtype: halves among the scalars, and all integers.
WIDENED = {torch.half: torch.float32, torch.int32: torch.int64}

OUTPUTS = [
    lambda: None,
    lambda: torch.randn(()),
    lambda: {"loss": torch.randn(()), "deep": [torch.randn(2), "text"], "n": 3},
    lambda: Pair(torch.randn(3), torch.randn(())),
    lambda: (torch.randn(2), [torch.randn(1)]),
    lambda: Box({"x": torch.randn(2)}),
]


@pytest.mark.parametrize("structured", [True, False])
@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize("count", [1, 6])
def test_what_is_packed_comes_back(count, output, structured):
    """Own outputs and anchored outputs come back with their values, shapes and types."""
    geometry = Geometry(iterations=count, accumulation=1, replicas=1)
    outputs = [output() for _ in range(count)]
    rows = [[make() for make in TENSORS] for _ in range(count)]
    anchored = anchored_of(rows[0])
    packed = [
        pack(own, anchored, dict(enumerate(row)), structured) for own, row in zip(outputs, rows)
    ]
    wire = packed[0][1]

    own, got = wire.unpack(executed([p for p, _ in packed]), geometry, geometry)

    for index, output_ in enumerate(anchored):
        expected = torch.stack([row[index] for row in rows])
        expected = expected.to(WIDENED.get(expected.dtype, expected.dtype))
        assert got.of(output_, count).dtype == expected.dtype
        assert torch.equal(got.of(output_, count), expected)
    assert type(own) is type(outputs[0])
    expected_own = tensors_of(executed(outputs)) if outputs[0] is not None else []
    assert all(torch.equal(a, b) for a, b in zip(tensors_of(own), expected_own))
    if isinstance(own, dict):
        assert own["deep"][1] == "text"
        assert own["n"] == 3
    if isinstance(own, Box):
        assert own.label == "box"


@pytest.mark.parametrize("scalars", [1, 10, 100])
def test_any_number_of_scalars_is_one_output_per_dtype_class(scalars):
    """Every output is a stream copy of its own, so scalars travel together, 4 bytes each."""
    floats = [torch.randn(()) for _ in range(scalars)]
    integers = [torch.ones((), dtype=torch.int32) for _ in range(scalars)]
    tensors = floats + integers
    packed, wire = pack(None, anchored_of(tensors), dict(enumerate(tensors)), structured=True)
    assert len(tensors_of(packed)) == wire.extra_outputs == 2
    assert wire.bytes_per_execution(results=6) == 4 * 6 * len(tensors)


@pytest.mark.parametrize(
    ("output", "structured"),
    [
        ({"loss": torch.zeros(())}, True),
        (None, True),
        (torch.zeros(2, 3), False),
        (None, False),
    ],
)
def test_nothing_anchored_leaves_the_output_alone(output, structured):
    """With nothing selected the compiled step returns the very object that the step returned."""
    packed, wire = pack(output, [], {}, structured)
    geometry = Geometry(1, 1, 1)
    assert packed is output
    assert not wire.carries_anchored
    assert wire.unpack(packed, geometry, geometry)[0] is output


@pytest.mark.parametrize(
    ("dtype", "travels_as"),
    [
        (torch.half, torch.float32),
        (torch.float32, torch.float32),
        (torch.int32, torch.int32),
        (torch.bool, torch.int32),
    ],
    ids=str,
)
def test_scalars_of_one_dtype_travel_as_their_class(dtype, travels_as):
    """Halves lose nothing in float32, nor booleans in int32."""
    tensors = [torch.ones((), dtype=dtype) for _ in range(2)]
    (_, (scalars,)), _ = pack(None, anchored_of(tensors), dict(enumerate(tensors)), structured=True)
    assert scalars.dtype == travels_as
    assert scalars.tolist() == [1, 1]


BATCHES = {
    "a scalar": torch.tensor(3.0),
    "numbers": torch.randn(2, 3),
    "NaN": torch.full((2,), float("nan")),
    "infinity": torch.full((2, 2), float("inf")),
    "integers": torch.tensor([5, 6]),
    "booleans": torch.tensor([True, False]),
}


@pytest.mark.parametrize("varying", BATCHES.values(), ids=BATCHES)
def test_scalars_are_the_same_whatever_the_batch_holds(varying):
    """What ties a constant to the batch, so that `Sum` sums it, adds nothing to it."""
    tensors = [torch.tensor(1.5), torch.tensor(2**24 + 1, dtype=torch.int32)]
    (_, (floats, integers)), _ = pack(
        None, anchored_of(tensors), dict(enumerate(tensors)), True, varying
    )
    assert floats.tolist() == [1.5]
    assert integers.tolist() == [2**24 + 1]
    assert (floats.dtype, integers.dtype) == (torch.float32, torch.int32)


def test_a_large_integer_is_exact():
    """An integer above 2^24 does not pass through a float32."""
    value = torch.tensor(2**24 + 1, dtype=torch.int32)
    (anchored,) = anchored_of([value])
    packed, wire = pack(None, [anchored], {0: value}, structured=True)
    geometry = Geometry(1, 1, 1)
    _, got = wire.unpack(packed, geometry, geometry)
    assert int(got.of(anchored, 1)) == 2**24 + 1


def test_what_was_folded_keeps_its_type():
    """Outputs fetched under `All` come back as the user's own mode promises, in their structure."""
    fetched = Geometry(iterations=3, accumulation=1, replicas=2)
    own = Geometry(iterations=3, accumulation=1, replicas=2, output_mode="Final")
    outputs = [Pair(torch.randn(3), torch.randn(())) for _ in range(6)]
    anchored = anchored_of([torch.randn(())])
    packed = [pack(output, anchored, {0: torch.randn(())}, True) for output in outputs]

    got, _ = packed[0][1].unpack(executed([p for p, _ in packed]), own, fetched)

    assert isinstance(got, Pair)
    assert torch.equal(got.first, torch.cat([output.first for output in outputs[-2:]]))
    assert torch.equal(got.second, torch.stack([output.second for output in outputs[-2:]]))


def test_every_tensor_that_joins_the_steps_outputs_is_counted():
    """Scalars are one output per dtype class, larger tensors one each, with their own bytes."""
    tensors = [make() for make in TENSORS]
    packed, wire = pack(None, anchored_of(tensors), dict(enumerate(tensors)), structured=True)
    assert wire.extra_outputs == len(tensors_of(packed)) == 5
    sizes = [t.numel() * min(t.element_size(), 4) if t.numel() > 1 else 4 for t in tensors]
    assert wire.bytes_per_execution(results=5) == 5 * sum(sizes)


def test_the_steps_own_outputs_are_counted_as_the_device_returns_them():
    """An int64 returns as int32, a float64 as float32, a half as it is."""
    output = {"a": torch.zeros(3, 2).long(), "b": [torch.zeros(5).double(), torch.zeros(7).half()]}
    _, wire = pack(output, [], {}, structured=True)
    assert wire.own_bytes == 4 * 6 + 4 * 5 + 2 * 7
    assert wire.own_shapes == ((3, 2), (5,), (7,))


def test_before_anything_is_compiled_nothing_is_anchored():
    """An empty wire costs nothing and hands on what came back, as it is."""
    wire = Wire()
    output = {"loss": torch.zeros(6)}
    own, fetched = Geometry(3, 1, 2, "Final"), Geometry(3, 1, 2)
    assert not wire.carries_anchored
    assert wire.extra_outputs == wire.bytes_per_execution(results=4) == wire.own_bytes == 0
    assert wire.unpack(output, fetched, fetched)[0] is output
    assert wire.unpack(None, own, fetched)[0] is None


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("came_back", ["every micro-batch", "once"])
@pytest.mark.parametrize("shape", [(), (1,), (4,), (2, 3)], ids=str)
def test_samples_are_the_micro_batches_joined(shape, came_back, count):
    """As one metric call takes them: dimension 0 of all results, a constant's repeated."""
    rows = [torch.randn(shape) for _ in range(count if came_back != "once" else 1)]
    anchored = anchored_of(rows[:1])
    packed = [pack(None, anchored, {0: row}, structured=True) for row in rows]
    geometry = Geometry(count, 1, 1)
    whole = executed([p for p, _ in packed])
    _, got = packed[0][1].unpack(whole, geometry, geometry)
    joined = torch.cat([row.reshape(-1, *row.shape[1:]) for row in rows])
    expected = torch.cat([joined] * (count if came_back == "once" else 1))
    assert torch.equal(got.samples(anchored[0], count), expected)
