"""Hooks and other callbacks receive what the step returned."""

import dataclasses
import functools
from typing import Any, NamedTuple

import pytest
import torch

from .bench import ONE_TO_ONE, Net, Setting, check_parity, observe, pl, validate_only


class Pair(NamedTuple):
    loss: torch.Tensor
    out: torch.Tensor


class Collects(pl.Callback):
    """Keeps what each batch-end hook of a callback receives."""

    def __init__(self):
        self.received = []

    def on_train_batch_end(self, trainer, pl_module, outputs, *_):
        self.received.append(outputs)

    def on_validation_batch_end(self, trainer, pl_module, outputs, *_):
        self.received.append(outputs)

    def on_test_batch_end(self, trainer, pl_module, outputs, *_):
        self.received.append(outputs)


class Returns(Net):
    """Logs, and returns in validation what a function makes of loss, output and batch."""

    def __init__(self, make, log=True):
        super().__init__()
        self.make = make
        self.log_too = log
        self.own = []

    def validation_step(self, batch, batch_idx):
        loss = self.loss(batch)
        if self.log_too:
            self.log("val", loss)
        return self.make(loss, self(batch[0]))

    def on_validation_batch_end(self, outputs, *_):
        self.own.append(outputs)


RETURNS = {
    "tensor": lambda loss, out: loss,
    "batched tensor": lambda loss, out: out,
    "dict": lambda loss, out: {"loss": loss, "out": out},
    "None": lambda loss, out: None,
    "tuple": lambda loss, out: (loss, out),
    "list": lambda loss, out: [loss, out],
    "NamedTuple": Pair,
    "nested dict": lambda loss, out: {"a": {"b": out, "c": [loss, (out,)]}, "d": loss},
    "dict of a NamedTuple": lambda loss, out: {"pair": Pair(loss, out)},
    "dict with non-tensors": lambda loss, out: {"loss": loss, "text": "x", "n": 3, "none": None},
    "tuple with non-tensors": lambda loss, out: (out, "x", 2.5, None),
    "empty dict": lambda loss, out: {},
    "integers": lambda loss, out: {"n": (out > 0).int()},
    "booleans": lambda loss, out: {"n": out > 0},
}


def flattened(structure):
    """Types and tensors of a structure, with a scalar as a vector of one."""
    if isinstance(structure, torch.Tensor):
        return structure.reshape(-1, *structure.shape[1:]).double()
    if isinstance(structure, dict):
        return {key: flattened(item) for key, item in structure.items() if key != "val"}
    if isinstance(structure, (list, tuple)):
        return [type(structure).__name__, *map(flattened, structure)]
    return structure


def joined(structures):
    """What an execution returns when its micro-batches returned these."""
    first = structures[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(structures)
    if isinstance(first, dict):
        return {key: joined([one[key] for one in structures]) for key in first}
    if isinstance(first, (list, tuple)):
        return [joined(list(items)) for items in zip(*structures)]
    assert all(one == first for one in structures)
    return first


def executions_of(received, count):
    """What a side with `count` micro-batches an execution receives for these micro-batches."""
    return [joined(received[n : n + count]) for n in range(0, len(received), count)]


@pytest.mark.parametrize("setting", [Setting(), ONE_TO_ONE], ids=["several", "one"])
@pytest.mark.parametrize("kind", RETURNS)
def test_a_step_returns_to_hooks_and_callbacks_what_it_returned(kind, setting):
    """The type it returned, the tensors of all its micro-batches, non-tensors as they were."""
    make = RETURNS[kind]
    collects, own = {}, {}
    for ipu in (False, True):
        seen = observe(
            ipu, lambda: Returns(make), validate_only, setting, callbacks=lambda: [Collects()]
        )
        (collects[ipu],) = seen.run.callbacks
        own[ipu] = seen.run.module.own
    count = setting.micro_batches(training=False)
    expected = executions_of([flattened(one) for one in collects[False].received], count)
    received = [flattened(one) for one in collects[True].received]
    assert len(received) == len(expected)
    for one, other in zip(received, expected):
        assert_same(one, other)
    # one object for everybody
    assert all(one is other for one, other in zip(own[True], collects[True].received))


def assert_same(one, other):
    """Same structure, same numbers."""
    if isinstance(other, torch.Tensor):
        torch.testing.assert_close(one, other)
    elif isinstance(other, dict):
        assert set(one) == set(other)
        for key in other:
            assert_same(one[key], other[key])
    elif isinstance(other, list):
        assert len(one) == len(other)
        for left, right in zip(one, other):
            assert_same(left, right)
    else:
        assert one == other


TRAINING = {
    "tensor": lambda loss, out: loss,
    "dict": lambda loss, out: {"loss": loss},
    "dict with more": lambda loss, out: {"loss": loss, "out": out.detach(), "text": "x", "n": 3},
    "nested dict": lambda loss, out: {"loss": loss, "more": {"out": out.detach()}},
}


@pytest.mark.parametrize("kind", TRAINING)
def test_training_outputs_arrive_under_lightnings_rules(kind):
    """`outputs` of a training step is a dict with `loss`, as Lightning makes it."""

    class Trains(Net):
        def training_step(self, batch, batch_idx):
            loss = self.loss(batch)
            self.log("train", loss, on_epoch=True)
            return TRAINING[kind](loss, self(batch[0]))

    collected = {}
    for ipu in (False, True):
        seen = observe(
            ipu,
            Trains,
            lambda run: run.trainer().fit(run.module, run.loader()),
            ONE_TO_ONE,
            callbacks=lambda: [Collects()],
        )
        (collects,) = seen.run.callbacks
        collected[ipu] = [flattened_training(one) for one in collects.received]
    for one, other in zip(collected[True], collected[False]):
        assert_same(one, other)


def flattened_training(outputs):
    """`flattened`, without the anchored key."""
    return {k: v for k, v in flattened(outputs).items() if k != "train"}


@pytest.mark.parametrize("kind", TRAINING)
def test_training_outputs_do_not_disturb_what_is_logged(kind):
    """With several micro-batches an execution, loss and logged values are the CPU run's."""

    class Trains(Net):
        def training_step(self, batch, batch_idx):
            loss = self.loss(batch)
            self.log("train", loss, on_epoch=True)
            return TRAINING[kind](loss, self(batch[0]))

    check_parity(Trains)


@dataclasses.dataclass
class Box:
    """A batch type of the user's own."""

    out: torch.Tensor
    label: Any = "box"


@pytest.fixture
def _registered_box():
    """`Box` is known to PopTorch."""
    import poptorch

    class Parser(poptorch.ICustomArgParser):
        def yieldTensors(self, struct):
            yield struct.out

        def reconstruct(self, original_structure, tensor_iterator):
            return Box(next(tensor_iterator), original_structure.label)

    poptorch.registerCustomArgParser(Box, Parser())


@pytest.mark.usefixtures("_registered_box")
@pytest.mark.parametrize("mode", [None, "All", "Final", "Sum"])
def test_a_registered_type_comes_back_as_itself(mode):
    """Types that the user registered with PopTorch pass through the wire."""
    collects = Collects()
    observe(
        True,
        lambda: Returns(lambda loss, out: Box(out)),
        validate_only,
        Setting(mode=mode),
        callbacks=lambda: [collects],
    )
    assert all(type(one) is Box and one.label == "box" for one in collects.received)
    expected = {None: 4, "All": 4, "Final": 2, "Sum": 2}[mode]
    assert {len(one.out) for one in collects.received} == {expected}


@pytest.mark.parametrize("kind", ["tensor", "dict", "tuple", "NamedTuple", "nested dict"])
@pytest.mark.parametrize("mode", ["Final", "Sum", "EveryN", "All", None])
def test_outputs_have_the_shapes_that_the_users_own_options_promise(mode, kind):
    """With `output_mode="auto"` every micro-batch is fetched, and hooks see the user's mode."""
    received = {}
    setting = Setting(iterations=4, replicas=1, mode=mode, period=2)
    for keys in ((), "*"):
        make = functools.partial(Returns, RETURNS[kind], log=bool(keys))
        cut = dataclasses.replace(setting, keys=keys)
        seen = observe(True, make, validate_only, cut, callbacks=lambda: [Collects()])
        (collects,) = seen.run.callbacks
        received[keys] = [raw(one) for one in collects.received]
    for one, other in zip(received["*"], received[()]):
        assert_same(one, other)


def raw(structure):
    """A structure as it is, without the anchored key, tuples as lists."""
    if isinstance(structure, dict):
        return {key: raw(item) for key, item in structure.items() if key != "val"}
    if isinstance(structure, (list, tuple)):
        return [raw(item) for item in structure]
    return structure


def test_a_dict_output_has_the_requested_tensors_under_their_keys():
    """Each selected tensor is in the dict as well, if its key is free."""
    collects = Collects()
    seen = observe(
        True,
        lambda: Returns(RETURNS["dict"]),
        validate_only,
        callbacks=lambda: [collects],
    )
    values = torch.cat([one["val"] for one in collects.received])
    assert values.mean() == pytest.approx(seen.results[0]["val"])


def test_a_key_that_the_dict_has_already_stays_the_steps_own():
    """The step's own entries are never replaced."""

    class Own(Net):
        def validation_step(self, batch, batch_idx):
            loss = self.loss(batch)
            self.log("val", loss)
            return {"val": -loss}

    collects = Collects()
    observe(True, Own, validate_only, callbacks=lambda: [collects])
    assert all((one["val"] <= 0).all() for one in collects.received)


@pytest.mark.skipif(
    not hasattr(pl.LightningModule, "validation_epoch_end"), reason="gone in Lightning 2.0"
)
@pytest.mark.parametrize("kind", ["dict", "tensor", "tuple"])
def test_epoch_end_hooks_get_every_output(kind):
    """`validation_epoch_end(outputs)` sees what the batch-end hooks saw."""

    class EpochEnd(Returns):
        def validation_epoch_end(self, outputs):
            self.all_outputs = outputs

    seen = observe(True, lambda: EpochEnd(RETURNS[kind]), validate_only)
    for one, other in zip(seen.run.module.all_outputs, seen.run.module.own):
        assert_same(raw(one), raw(other))


def test_a_step_may_return_none_in_training_as_lightning_allows():
    """Without a loss PopTorch refuses to compile: its error is the user's to see, unchanged."""

    class NoLoss(Net):
        def training_step(self, batch, batch_idx):
            self.log("train", batch[0].sum())

    with pytest.raises(Exception, match="loss"):
        observe(True, NoLoss)
