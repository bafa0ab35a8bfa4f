"""Every kind of value that `self.log` takes arrives on the host as the CPU run has it."""

import re

import numpy as np
import pytest
import torch

from ipu_log_callback import IPULogWarning, live

from . import bench
from .bench import ONE_TO_ONE, Net, Setting, check_parity, fit, observe, pl, validate_only

LEVELS = {"on_step": True, "on_epoch": True}
REPLICAS = Setting(iterations=2, accumulation=1, replicas=2)


def logging(value, **options):
    """A module that logs `value(x, loss)` in every step, on both levels."""

    def logs(self, stage, x, loss):
        self.log(f"{stage}_v", value(x, loss), **{**LEVELS, **options})

    return lambda: Net(logs)


TENSORS = {
    "0-d": lambda x, loss: x.sum(),
    "one element": lambda x, loss: x.sum().reshape(1),
    "one element in two dimensions": lambda x, loss: x.sum().reshape(1, 1),
    "loss": lambda x, loss: loss,
    "detached loss": lambda x, loss: loss.detach(),
    "arithmetic on the loss": lambda x, loss: 2 * loss.sqrt(),
    "float16": lambda x, loss: x.sum().half(),
    "bfloat16": lambda x, loss: x.sum().bfloat16(),
    "int32": lambda x, loss: (x > 0).sum().int(),
    "int64": lambda x, loss: (x > 0).sum(),
    "bool": lambda x, loss: (x > 0).any(),
    "bool that varies": lambda x, loss: x[0, 0] > 0,
    "NaN": lambda x, loss: x.sum() * float("nan"),
    "NaN in some micro-batches": lambda x, loss: torch.where(
        x[0, 0] > 0, x.sum(), x.sum() * float("nan")
    ),
    "Inf": lambda x, loss: x.sum().exp() * float("inf"),
    "minus Inf": lambda x, loss: -x.sum().exp() * float("inf"),
    "Inf in some micro-batches": lambda x, loss: torch.where(
        x[0, 0] > 0, x.sum(), x.sum().exp() * float("inf")
    ),
    "large int": lambda x, loss: (x > 0).sum() + 2**24 + 1,
}


@pytest.mark.parametrize("reduce_fx", ["mean", "sum", "min", "max", min, max], ids=str)
@pytest.mark.parametrize("kind", TENSORS)
def test_a_tensor_of_the_device_has_the_cpu_runs_value(kind, reduce_fx):
    """Shape, dtype, NaN and Inf pass the device as they are; halves are summed in float32."""
    half = kind in ("float16", "bfloat16")
    setting = REPLICAS if reduce_fx in ("mean", "max") else Setting()
    # the CPU run sums halves of an epoch in float32 as well, but keeps an `on_step` value half
    check_parity(
        logging(TENSORS[kind], reduce_fx=reduce_fx),
        validate_only if reduce_fx != "mean" else fit,
        setting=setting,
        tolerance=2e-2 if half else 1e-5,
    )


def test_a_halfs_epoch_mean_loses_nothing():
    """The sum of many halves is a float32's."""
    check_parity(
        logging(lambda x, loss: (x.sum() * 0 + 300).half(), on_step=False),
        validate_only,
        setting=Setting(executions=40),
    )


FROZEN = {
    "int": lambda x, loss: 3,
    "float": lambda x, loss: 0.25,
    "bool": lambda x, loss: True,
    "NaN": lambda x, loss: float("nan"),
    "numpy float64": lambda x, loss: np.float64(0.5),
    "numpy float32": lambda x, loss: np.float32(0.5),
    "numpy int64": lambda x, loss: np.int64(4),
    "len of the batch": lambda x, loss: len(x),
}


@pytest.mark.parametrize("reduce_fx", ["mean", "sum", "min", "max"])
@pytest.mark.parametrize("kind", FROZEN)
def test_a_number_that_never_changes_is_that_of_the_cpu_run(kind, reduce_fx):
    """A Python number or a numpy scalar is logged as often as the CPU run logs it."""
    check_parity(logging(FROZEN[kind], reduce_fx=reduce_fx), setting=REPLICAS)


@pytest.mark.parametrize("reduce_fx", ["mean", "sum", "max"])
def test_a_tensor_that_never_touched_the_device_is_frozen_like_a_number(reduce_fx):
    """A tensor attribute that is no buffer stays on the host and keeps its value."""

    class Attribute(Net):
        def __init__(self):
            super().__init__()
            self.kept = [torch.tensor(5.0)]

        def validation_step(self, batch, batch_idx):
            self.loss(batch)
            self.log("kept", self.kept[0], reduce_fx=reduce_fx, **LEVELS)

    told = check_parity(Attribute, validate_only).warnings
    # `torch.jit.trace` sees CPU tensors only: there it counts as one of the step's own
    assert ["frozen" in text for text in told] == ([] if bench.TRACED else [True])


@pytest.mark.parametrize("reduce_fx", ["mean", "sum", "max"])
def test_a_tensor_made_of_constants_in_the_step_counts_once_a_micro_batch(reduce_fx):
    """`torch.tensor(0.3)` in the step comes back once, for every micro-batch."""
    check_parity(logging(lambda x, loss: torch.tensor(0.3), reduce_fx=reduce_fx), setting=REPLICAS)


@pytest.mark.parametrize("reduce_fx", ["mean", "sum", "max"])
def test_a_buffer_is_logged_as_it_is_on_the_device(reduce_fx):
    """A buffer lives on the device: its value there is logged, in every micro-batch."""

    class Buffer(Net):
        def __init__(self):
            super().__init__()
            self.register_buffer("scale", torch.tensor(1.5))

        def validation_step(self, batch, batch_idx):
            self.loss(batch)
            self.log("scale", self.scale, reduce_fx=reduce_fx, **LEVELS)

    check_parity(Buffer, validate_only)


def test_a_parameter_is_logged_as_it_is_on_the_device():
    """A learned scalar is logged with the value that its micro-batch used."""

    class Learned(Net):
        def __init__(self):
            super().__init__()
            self.scale = torch.nn.Parameter(torch.tensor(1.5))

        def forward(self, x):
            return super().forward(x) * self.scale

        def logs(self, stage, x, loss):
            self.log(f"{stage}_scale", self.scale, **LEVELS)

    check_parity(Learned)


def test_frozen_numbers_are_warned_about_with_the_line_to_type():
    """One warning a key shows `live` with the user's own key in it."""
    seen = observe(True, logging(lambda x, loss: 0.25), validate_only)
    (text,) = seen.warnings
    assert "self.log('val_v', live(lambda: ...))" in text
    assert "in `Net.validation_step`" in text
    assert re.search(r"where +test_values\.py:\d", text)
    assert "float 0.25" in text


def test_a_key_logged_twice_with_a_number_is_warned_about_once():
    """The warning is one a key."""

    def logs(self, stage, x, loss):
        self.log(f"{stage}_v", 1.0)
        self.log(f"{stage}_v", 1.0)

    assert len(observe(True, lambda: Net(logs), validate_only).warnings) == 1


class LiveRate(Net):
    """Logs the learning rate, which a scheduler changes after every epoch."""

    def training_step(self, batch, batch_idx):
        self.log("lr", live(lambda: self.optimizers().param_groups[0]["lr"]), **LEVELS)
        return self.loss(batch)

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


def test_live_values_are_looked_up_at_every_execution():
    """What `live` wraps is called at every replay: the learning rate follows its schedule."""
    seen = check_parity(
        LiveRate, lambda run: run.trainer(max_epochs=3).fit(run.module, run.loader())
    )
    assert sorted({row.metrics["lr_step"] for row in seen.rows if row.hook == "train"}) == [
        pytest.approx(rate) for rate in (0.0125, 0.025, 0.05)
    ]


@pytest.mark.parametrize("reduce_fx", ["mean", "sum", "min", "max"])
def test_live_values_are_reduced_like_any_other(reduce_fx):
    """A live value stands for each micro-batch of its execution."""
    check_parity(logging(lambda x, loss: live(lambda: 4.0), reduce_fx=reduce_fx), setting=REPLICAS)


@pytest.mark.parametrize("value", [lambda: 1, lambda: torch.tensor(2.0), lambda: np.float32(3)])
def test_live_functions_may_return_whatever_can_be_logged(value):
    """Numbers, host tensors and numpy scalars."""
    check_parity(logging(lambda x, loss: live(value)))


def test_live_values_are_not_warned_about():
    """`live` is the answer to the warning."""
    seen = observe(True, logging(lambda x, loss: live(lambda: 4.0)), validate_only)
    assert seen.warnings == []


@pytest.mark.parametrize("options", [{}, LEVELS, {"reduce_fx": "sum"}, {"reduce_fx": "max"}])
def test_a_key_logged_twice_in_a_step_is_two_calls_in_order(options):
    """As on the CPU: the later value is the step's, both are in the epoch's."""

    def logs(self, stage, x, loss):
        self.log(f"{stage}_v", x.sum(), **options)
        self.log(f"{stage}_v", loss, **options)

    check_parity(lambda: Net(logs))


def test_a_key_logged_twice_with_other_options_is_lightnings_own_error():
    """Raised while the step is captured, in Lightning's words."""

    def logs(self, stage, x, loss):
        self.log(f"{stage}_v", loss)
        self.log(f"{stage}_v", loss, prog_bar=True)

    messages = []
    for ipu in (False, True):
        with pytest.raises(Exception, match="twice in") as caught:
            observe(ipu, lambda: Net(logs))
        messages.append((type(caught.value), str(caught.value)))
    assert messages[0] == messages[1]


@pytest.mark.parametrize("options", [{}, {"on_epoch": True}, {"prog_bar": True}])
def test_a_key_of_the_step_may_be_logged_in_the_batch_end_hook_too(options):
    """Calls of different hooks are filed apart, as on the CPU."""

    class Both(Net):
        def training_step(self, batch, batch_idx):
            loss = self.loss(batch)
            self.log("v", loss, **options)
            return loss

        def on_train_batch_end(self, *_):
            self.log("v", 7.0, **options)

    check_parity(Both, setting=ONE_TO_ONE)


def test_a_value_logged_only_in_batch_end_hooks_is_as_without_the_callback():
    """The documented workaround keeps working beside the callback."""

    class AtTheEnd(Net):
        def on_train_batch_end(self, outputs, *_):
            self.log("seen", outputs["loss"].mean(), **LEVELS)

        def on_validation_batch_end(self, outputs, *_):
            self.log("val_seen", outputs.mean(), **LEVELS)

        def on_train_epoch_end(self):
            self.log("end", 1.0)

        def on_validation_epoch_end(self):
            self.log("val_end", torch.tensor(2.0))

    check_parity(AtTheEnd, setting=ONE_TO_ONE)


def test_logging_in_every_other_hook_is_untouched():
    """Hooks around the epoch log on the host, as ever."""

    class Hooks(Net):
        def on_train_start(self):
            self.log("a", 1.0)

        def on_train_epoch_start(self):
            self.log("b", 2.0, prog_bar=True)

        def on_validation_start(self):
            self.log("c", 3.0)

        def on_validation_epoch_start(self):
            self.log("d", 4.0)

        def on_train_batch_start(self, *_):
            self.log("e", 5.0)

        def logs(self, stage, x, loss):
            self.log(f"{stage}_loss", loss)

    check_parity(Hooks)


def test_other_callbacks_log_as_ever():
    """`pl_module.log` and a callback's own `self.log` in its hooks."""

    class Speaks(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, *_):
            pl_module.log("from_callback", 1.0, on_epoch=True)

        def on_validation_epoch_end(self, trainer, pl_module):
            self.log("its_own", 2.0)

    check_parity(
        lambda: Net(lambda self, stage, x, loss: self.log(f"{stage}_loss", loss)),
        callbacks=lambda: [Speaks()],
    )


class Branching(Net):
    """Logs a key in training mode only: a branch that Python decides."""

    def shared(self, batch, stage):
        loss = self.loss(batch)
        if self.training:
            self.log("only_in_training", loss, on_epoch=True)
        else:
            self.log(f"{stage}_only", loss)
        if stage == "val":
            self.log("only_val", batch[0].sum())
        return loss

    def training_step(self, batch, batch_idx):
        return self.shared(batch, "train")

    def validation_step(self, batch, batch_idx):
        return self.shared(batch, "val")


def test_a_key_that_only_one_branch_logs():
    """A branch on Python values is taken as on the CPU, stage by stage."""
    check_parity(Branching)


class OnSanity(Net):
    """Logs a key unless the trainer is checking its sanity."""

    def validation_step(self, batch, batch_idx):
        loss = self.loss(batch)
        if not self.trainer.sanity_checking:
            self.log("val", loss)
        self.log("always", loss)


def test_the_largest_int_that_the_device_has_arrives_exactly():
    """Integers travel as int32, never through a float32."""

    def logs(self, stage, x, loss):
        self.log(f"{stage}_n", (x > 0).sum() * 0 + (2**31 - 1), reduce_fx="max")

    check_parity(lambda: Net(logs), validate_only)


@pytest.mark.parametrize(
    "value", ["text", None, [1.0], object()], ids=["str", "None", "list", "object"]
)
def test_a_value_that_lightning_refuses_is_lightnings_own_error(value):
    """The class is that of the CPU run, and it is raised while the step is captured."""
    classes = []
    for ipu in (False, True):
        with pytest.raises(Exception) as caught:  # noqa: PT011 - the CPU run says which
            observe(ipu, logging(lambda x, loss: value), validate_only)
        classes.append(type(caught.value))
    assert classes[0] is classes[1]


def test_warnings_have_a_category_of_their_own():
    """A user can filter the package's warnings."""
    assert issubclass(IPULogWarning, UserWarning)
