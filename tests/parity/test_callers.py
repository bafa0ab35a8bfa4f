"""Wherever in the user's code `self.log` is called from, it is the same call."""

import functools

import pytest
import torch
from torchmetrics import MaxMetric, MeanMetric, MetricCollection

from .bench import ONE_TO_ONE, Net, Setting, check_parity, observe, pl, validate_only

LEVELS = {"on_step": True, "on_epoch": True}


class Shared(Net):
    """The usual `shared_step` of a module whose stages differ in a name only."""

    def shared_step(self, batch, stage):
        loss = self.loss(batch)
        self.log(f"{stage}/loss", loss, prog_bar=True, **LEVELS)
        return loss

    def training_step(self, batch, batch_idx):
        return self.shared_step(batch, "train")

    def validation_step(self, batch, batch_idx):
        return self.shared_step(batch, "val")

    def test_step(self, batch, batch_idx):
        return self.shared_step(batch, "test")


class SharedWithArguments(Shared):
    """Steps that take what they are given, whatever it is."""

    def training_step(self, *args, **kwargs):
        return self.shared_step(args[0], "train")

    def validation_step(self, *args, **kwargs):
        return self.shared_step(args[0], "val")


class WithoutIndex(Shared):
    """A step that takes the batch alone, which Lightning allows in training."""

    def training_step(self, batch):
        return self.shared_step(batch, "train")


class OtherNames(Shared):
    """Steps whose batch has another name."""

    def training_step(self, pair, number):
        return self.shared_step(pair, "train")

    def validation_step(self, pair, number):
        return self.shared_step(pair, "val")


class LogsLosses:
    """A mixin that knows nothing of Lightning but `self.log`."""

    def log_loss(self, stage, loss):
        self.log(f"{stage}_mixed_in", loss, **LEVELS)


class WithMixin(LogsLosses, Net):
    """A module that inherits its logging."""

    def logs(self, stage, x, loss):
        self.log_loss(stage, loss)


class MixinAfter(Net, LogsLosses):
    """The same with the bases the other way round."""

    def logs(self, stage, x, loss):
        self.log_loss(stage, loss)


def free_function(pl_module, name, value):
    """Log something through a module that was passed in."""
    pl_module.log(name, value, **LEVELS)


class FromFreeFunction(Net):
    """A module that leaves its logging to a function."""

    def logs(self, stage, x, loss):
        free_function(self, f"{stage}_free", loss)


class FromForward(Net):
    """`self.log` in `forward`, which the steps call."""

    def forward(self, x):
        out = super().forward(x)
        self.log("mean_output", out.mean(), on_epoch=True)
        return out


class FromInnerFunction(Net):
    """`self.log` in a closure, a loop, a comprehension and a partial."""

    def logs(self, stage, x, loss):
        def inner(name):
            self.log(f"{stage}_{name}", loss)

        inner("closure")
        for value in map(lambda value: value * 2, [loss]):  # noqa: C417 - the point of it
            self.log(f"{stage}_mapped", value)
        [self.log(f"{stage}_{number}", x[:, number].sum()) for number in range(3)]
        functools.partial(self.log, f"{stage}_partial")(loss)


class BoundEarly(Net):
    """`self.log` kept in a local name."""

    def logs(self, stage, x, loss):
        log = self.log
        log(f"{stage}_a", loss)
        log(f"{stage}_b", x.sum())


class OverridesLog(Net):
    """A subclass whose `log` prefixes every key."""

    def log(self, name, value, *args, **kwargs):
        super().log(f"mine/{name}", value, *args, **kwargs)

    def logs(self, stage, x, loss):
        self.log(f"{stage}_loss", loss)
        self.log_dict({f"{stage}_a": loss, f"{stage}_b": x.sum()})


class OverridesLogTwice(OverridesLog):
    """A subclass of it that doubles every value and logs a key of its own."""

    def log(self, name, value, **kwargs):
        super().log(name, value * 2, **kwargs)
        super().log(f"{name}_single", value, **kwargs)


class OverridesLogDict(Net):
    """A subclass whose `log_dict` drops keys and adds options."""

    def log_dict(self, dictionary, **kwargs):
        super().log_dict({k: v for k, v in dictionary.items() if "drop" not in k}, on_epoch=True)

    def logs(self, stage, x, loss):
        self.log_dict({f"{stage}_a": loss, f"{stage}_drop": x.sum()})


class Backbone(pl.LightningModule):
    """A LightningModule inside another one, used as a plain module."""

    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(3, 1)

    def forward(self, x):
        return self.inner(x)

    def training_step(self, batch, batch_idx):
        raise AssertionError("never called")


class Nested(Net):
    """A module with LightningModules below it."""

    def __init__(self):
        super().__init__()
        self.backbone = Backbone()
        self.more = torch.nn.ModuleList([Backbone()])

    def forward(self, x):
        return self.layer(x) + self.backbone(x) + self.more[0](x)

    def logs(self, stage, x, loss):
        self.log(f"{stage}_loss", loss, **LEVELS)
        self.log(f"{stage}_inner", self.backbone(x).mean())


class Wrapping(Net):
    """A module that trains another one and calls that one's methods."""

    def __init__(self):
        super().__init__()
        self.wrapped = Shared()

    def training_step(self, batch, batch_idx):
        loss = self.wrapped.loss(batch)
        self.log("wrapped", loss, **LEVELS)
        return loss


class SharedStepOfAnother(Net):
    """A module that hands its own `log` to a helper object."""

    class Helper:
        def __init__(self, log):
            self.log = log

        def report(self, name, value):
            self.log(name, value, **LEVELS)

    def logs(self, stage, x, loss):
        self.Helper(self.log).report(f"{stage}_helped", loss)


def decorated(step):
    """Wrap a step as user code does, without a word about its signature."""

    @functools.wraps(step)
    def wrapper(self, *args, **kwargs):
        return step(self, *args, **kwargs)

    return wrapper


class DecoratedSteps(Shared):
    """Steps behind a decorator."""

    @decorated
    def training_step(self, batch, batch_idx):
        return self.shared_step(batch, "train")


class AttachedInSetup(Net):
    """A step that the module attaches to itself in its own `setup`."""

    def setup(self, stage=None):
        def training_step(batch, batch_idx):
            loss = self.loss(batch)
            self.log("attached", loss, **LEVELS)
            return loss

        self.training_step = training_step


class Logger(Net):
    """A module with properties and attributes of telling names."""

    def __init__(self):
        super().__init__()
        self.step_name = "x"

    @property
    def key(self):
        return f"{self.step_name}_loss"

    def logs(self, stage, x, loss):
        self.log(f"{stage}_{self.key}", loss)


@pytest.mark.parametrize(
    "module",
    [
        Shared, SharedWithArguments, WithoutIndex, OtherNames, WithMixin, MixinAfter,
        FromFreeFunction, FromForward, FromInnerFunction, BoundEarly, OverridesLog,
        OverridesLogTwice, OverridesLogDict, Nested, Wrapping, SharedStepOfAnother,
        DecoratedSteps, AttachedInSetup, Logger,
    ],
)  # fmt: skip
def test_a_call_is_captured_wherever_it_comes_from(module):
    """Helpers, mixins, overrides, closures, `forward`, other objects: all end in one method."""
    # without an index Lightning itself clears the gradients at every micro-batch on the CPU
    check_parity(module, setting=ONE_TO_ONE if module is WithoutIndex else Setting())


def test_the_steps_of_a_module_remain_its_own():
    """After a run the module has the attributes that a CPU run leaves, and Lightning's own one."""
    cpu, ipu = (vars(observe(side, AttachedInSetup).run.module) for side in (False, True))
    assert set(ipu) ^ set(cpu) <= {"optimizer_zero_grad"}
    assert ipu["training_step"].__qualname__ == cpu["training_step"].__qualname__


class ChildLogs(Net):
    """A child LightningModule that logs by itself, which Lightning does not support."""

    def __init__(self):
        super().__init__()
        self.child = Shared()

    def validation_step(self, batch, batch_idx):
        return self.child.shared_step(batch, "child")


class ChildLogsACollection(ChildLogs):
    """A child LightningModule whose `log_dict` is called with metrics of the outer one."""

    def __init__(self):
        super().__init__()
        self.pair = MetricCollection([MeanMetric(), MaxMetric()])

    def validation_step(self, batch, batch_idx):
        self.pair.update(self.loss(batch))
        self.child.log_dict(self.pair)


class ChildLogsByName(ChildLogsACollection):
    """The same with the argument by name."""

    def validation_step(self, batch, batch_idx):
        self.child.log_dict(dictionary=self.pair)


@pytest.mark.parametrize("module", [ChildLogs, ChildLogsACollection, ChildLogsByName])
def test_a_child_modules_own_log_ends_as_on_the_cpu(module):
    """Lightning manages the outer module only: both sides raise the same, or log the same."""
    outcomes = []
    for ipu in (False, True):
        try:
            outcomes.append(sorted(observe(ipu, module, validate_only).final[0]))
        except Exception as error:  # noqa: BLE001, PERF203 - whatever the CPU run raises
            outcomes.append((type(error), str(error)))
    assert outcomes[0] == outcomes[1]


def test_log_outside_of_a_run_is_as_ever():
    """Without a trainer `self.log` warns, as it does without this package."""
    module = Shared()
    x = torch.ones(2, 3)
    with pytest.warns(UserWarning, match="trainer"):
        module.training_step((x, x.sum(1)), 0)
