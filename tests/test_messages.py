"""Every error of the callback, row by row.

An error's first line is the call as the user typed it and stands alone in a truncated log; then one
aligned row per question: where, what came, what was wanted, why it matters, what to do. The table
`ERRORS` says what each row must tell; wording is free.
"""

import re
import warnings
from dataclasses import dataclass, field
from typing import Any, Callable, Dict

import pytest
import torch
import torch.nn.functional as F
from parity.bench import DEFAULT, Net, Run, Setting, fit, observe, pl, validate_only
from torchmetrics import MeanMetric

from ipu_log_callback import IPULogCallback, IPULogError, anchor, errors
from ipu_log_callback.call_checks import check_key
from ipu_log_callback.record import CallSite

ROWS = ("where", "received", "expected", "why", "fix")


# -- what goes wrong ----------------------------------------------------------------------------


class KeyFromTensor(Net):
    def validation_step(self, batch, batch_idx):
        self.log(f"val_{batch_idx}", self.loss(batch))


class KeyFromValue(Net):
    def validation_step(self, batch, batch_idx):
        self.log(f"val_{batch[0].sum()}", self.loss(batch))


class KeyOfAnotherType(Net):
    def validation_step(self, batch, batch_idx):
        self.log(3, self.loss(batch))


class LogsAVector(Net):
    def validation_step(self, batch, batch_idx):
        self.log("vector", batch[0].sum(1))


class ReadsItem(Net):
    def validation_step(self, batch, batch_idx):
        self.log("val", self.loss(batch).item())


class ReadsFloat(Net):
    def validation_step(self, batch, batch_idx):
        self.log("val", float(self.loss(batch)))


class Branches(Net):
    def validation_step(self, batch, batch_idx):
        if batch[0].sum() > 0:
            self.log("val", self.loss(batch))


class BranchesOnIndex(Net):
    def validation_step(self, batch, batch_idx):
        if batch_idx % 50 == 0:
            self.log("val", self.loss(batch))


class MovesToHost(Net):
    def validation_step(self, batch, batch_idx):
        self.log("val", self.loss(batch).cpu())


class MakesNumpy(Net):
    def validation_step(self, batch, batch_idx):
        self.log("val", self.loss(batch).detach().numpy())


class KeepsTensors(Net):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("total", loss + getattr(self, "kept", [0.0])[0])
        return loss

    def validation_step(self, batch, batch_idx):
        self.kept = [self.loss(batch)]


class UsesAMetricsValue(Net):
    def __init__(self):
        super().__init__()
        self.mean = MeanMetric()

    def validation_step(self, batch, batch_idx):
        self.log("twice", self.mean(self.loss(batch)) * 2)


class LogsALoss(Net):
    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = self.loss(batch)
        self.log("total", loss)
        self.log("mae", F.l1_loss(self(x).squeeze(-1), y))
        self.log("largest", x.amax())
        return loss


class LogsAMaximum(Net):
    def validation_step(self, batch, batch_idx):
        self.log("largest", batch[0].amax(), reduce_fx="max")


class WeighsWithATensor(Net):
    def validation_step(self, batch, batch_idx):
        self.log("val", self.loss(batch), batch_size=(batch[0] > 0).sum())


class FeedsAMetric(Net):
    def __init__(self):
        super().__init__()
        self.mean = MeanMetric()

    def validation_step(self, batch, batch_idx):
        self.mean.update(self.loss(batch))
        self.log("mean", self.mean)


class AnchorsATensor(Net):
    def validation_step(self, batch, batch_idx):
        anchor("hidden", self(batch[0]))


KEPT_SUM = Setting(iterations=2, mode="Sum", output_mode="keep")


def running(module, program=validate_only, setting=DEFAULT):
    """Run a module on the IPU strategy."""
    return lambda: observe(True, module, program, setting)


def two_callbacks():
    """A trainer with two callbacks of this package."""

    def program(run):
        run.trainer(callbacks=[IPULogCallback(["other"])]).fit(run.module, run.loader())

    observe(True, Net, program, Setting(keys=["loss"]))


def compiled_before():
    """An executor that was compiled before the callback could listen."""

    class Precompiles(pl.Callback):
        def on_validation_start(self, trainer, pl_module):
            (executor,) = set(trainer.strategy.poptorch_models.values())
            plain = type(executor).__mro__[1]
            x = torch.zeros(4, 3)
            listening, executor.__class__ = type(executor), plain
            executor.compile((x, x.sum(1)), torch.zeros(2).long())
            executor.__class__ = listening
            pl_module.cpu()  # the compile left `_device` on the IPU, where 1.6 moves the batch

    observe(True, Net, validate_only, callbacks=lambda: [Precompiles()])


# -- what the user is told ----------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One error: how it comes about, its class, its first line, and its rows."""

    name: str
    act: Callable[[], Any]
    kind: str
    call: str
    rows: Dict[str, str] = field(default_factory=dict)


HERE = r"test_messages\.py:\d+"
#: What is told of a call that needs each micro-batch where the device adds them up.
ADDED_UP = {"where": HERE, "received": "Sum", "expected": "All", "why": "adds", "fix": "auto"}
ERRORS = [
    Case(
        "key built from batch_idx",
        running(KeyFromTensor),
        "StepCaptureError",
        r"`self\.log\(f'\.\.\.\{tensor\}\.\.\.', \.\.\.\)` in `KeyFromTensor\.validation_step`",
        {
            "where": HERE,
            "received": r"val_",
            "expected": r"str",
            "why": r"batch_idx .* tensors in a compiled step",
            "fix": r"on_validation_batch_end",
        },
    ),
    Case(
        "key built from a value",
        running(KeyFromValue),
        "StepCaptureError",
        r"sum\(\)}\".* in `KeyFromValue\.validation_step` reads the value .*an f-string",
        {"where": HERE, "received": "aten::item", "expected": "t", "why": "once", "fix": "log"},
    ),
    Case(
        "key that is no str",
        running(KeyOfAnotherType),
        "StepCaptureError",
        r"`self\.log\(int 3, \.\.\.\)` in `KeyOfAnotherType\.validation_step` received int",
        {
            "where": HERE,
            "received": "int 3",
            "expected": "str",
            "why": "name",
            "fix": r"self\.log\('name', value\)",
        },
    ),
    Case(
        "more than one element",
        running(LogsAVector),
        "StepCaptureError",
        r"`self\.log\('vector', \.\.\.\)` in `LogsAVector\.validation_step` received .*\[2\]",
        {
            "where": HERE,
            "received": r"float32\[2\]",
            "expected": "one element",
            "why": "one number",
            "fix": r"self\.log\('vector', value\.mean\(\)\)",
        },
    ),
    Case(
        ".item()",
        running(ReadsItem),
        "StepCaptureError",
        r"`self\.log\(\"val\", self\.loss\(batch\)\.item\(\)\)` in `ReadsItem\.validation_step`",
        {
            "where": HERE,
            "received": "aten::item",
            "expected": "tensors stay tensors",
            "why": "only once",
            "fix": r"self\.log\(name, tensor\)",
        },
    ),
    Case(
        "float()",
        running(ReadsFloat),
        "StepCaptureError",
        r"float\(self\.loss\(batch\)\).* in `ReadsFloat\.validation_step`",
        {
            "where": HERE,
            "received": "aten::item",
            "expected": "tensors",
            "why": "once",
            "fix": "log",
        },
    ),
    Case(
        "branch on a value",
        running(Branches),
        "StepCaptureError",
        r"`if batch\[0\]\.sum\(\) > 0:` in `Branches\.validation_step` reads the value",
        {
            "where": HERE,
            "received": "aten::item",
            "expected": "tensors",
            "why": "once",
            "fix": r"torch\.where",
        },
    ),
    Case(
        "branch on batch_idx",
        running(BranchesOnIndex),
        "StepCaptureError",
        r"`if batch_idx % 50 == 0:` in `BranchesOnIndex\.validation_step`",
        {
            "where": HERE,
            "received": "aten::item",
            "expected": "tensors",
            "why": "once",
            "fix": r"`batch_idx` is a tensor[\s\S]*on_train_batch_end",
        },
    ),
    Case(
        ".cpu()",
        running(MovesToHost),
        "StepCaptureError",
        r"\.cpu\(\).* in `MovesToHost\.validation_step` moves a device tensor to the host",
        {
            "where": HERE,
            "received": "Illegal move to CPU",
            "expected": "stay on the device",
            "why": "only once",
            "fix": "log or return the tensor",
        },
    ),
    Case(
        ".numpy()",
        running(MakesNumpy),
        "StepCaptureError",
        r"\.numpy\(\).* in `MakesNumpy\.validation_step` moves a device tensor to the host",
        {"where": HERE, "received": ".", "expected": "device", "why": "once", "fix": "return"},
    ),
    Case(
        "tensor of another step",
        running(
            KeepsTensors,
            lambda run: run.trainer(num_sanity_val_steps=1).fit(
                run.module, run.loader(), run.loader()
            ),
        ),
        "StepCaptureError",
        r"in `KeepsTensors\.training_step` uses a tensor that was made while another step",
        {
            "where": HERE,
            "received": "active dispatch",
            "expected": "this step",
            "why": "outlive",
            "fix": "register_buffer",
        },
    ),
    Case(
        "value of a metric",
        running(UsesAMetricsValue),
        "StepCaptureError",
        r"the value of `self\.mean\(\.\.\.\)` was used in `UsesAMetricsValue\.validation_step`",
        {
            "where": HERE,
            "received": "an operation",
            "expected": r"self\.log\(name, value\)",
            "why": "on the host",
            "fix": r"torchmetrics\.functional[\s\S]*self\.log\(name, self\.metric\)",
        },
    ),
    Case(
        "second loss",
        running(LogsALoss, fit),
        "SecondLossError",
        r"`self\.log\('mae', \.\.\.\)` in `LogsALoss\.training_step`",
        {
            "where": HERE + "$",
            "received": "Multiple independent losses",
            "expected": "one torch loss function",
            "why": "even detached",
            "fix": r"\(prediction - target\)\.abs\(\)\.mean\(\)",
        },
    ),
    Case(
        "max under Sum",
        running(LogsAMaximum, setting=KEPT_SUM),
        "OutputModeError",
        r"`self\.log\('largest', \.\.\., reduce_fx='max'\)` in `LogsAMaximum\.validation_step`",
        {
            "where": HERE,
            "received": r"^poptorch\.OutputMode\.Sum, with output_mode='keep'$",
            "expected": r"^poptorch\.OutputMode\.All$",
            "why": "^the device adds the micro-batches up; only means and sums survive that$",
            "fix": r"^IPULogCallback\(\.\.\., output_mode='auto'\)$",
        },
    ),
    Case(
        "weights under Sum",
        running(WeighsWithATensor, setting=KEPT_SUM),
        "OutputModeError",
        r"`self\.log\('val', \.\.\., batch_size=tensor\)` in `WeighsWithATensor\.validation_step`",
        ADDED_UP,
    ),
    Case(
        "metric under Sum",
        running(FeedsAMetric, setting=KEPT_SUM),
        "OutputModeError",
        r"`self\.mean\.update\(\.\.\.\)` in `FeedsAMetric\.validation_step`",
        ADDED_UP,
    ),
    Case(
        "anchor under Sum",
        running(AnchorsATensor, setting=KEPT_SUM),
        "OutputModeError",
        r"`anchor\('hidden', \.\.\.\)` in `AnchorsATensor\.validation_step`",
        ADDED_UP,
    ),
    Case(
        "two callbacks",
        two_callbacks,
        "CallbackSetupError",
        "2 `IPULogCallback`s, expected one",
        {
            "received": r"IPULogCallback\(keys=\['\w+'\]\)",
            "expected": "one",
            "why": "replay",
            "fix": r"IPULogCallback\(keys=\['(loss', 'other|other', 'loss)'\]\)",
        },
    ),
    Case(
        "step that was not captured",
        compiled_before,
        "MissingStepRecordError",
        "a compiled step of `Net` was executed whose Python this callback never saw",
        {"why": "which of its outputs", "fix": "loadExecutable"},
    ),
    Case(
        "keys that are no names",
        lambda: IPULogCallback(3),
        "KeySelectionError",
        r"`IPULogCallback\(keys=3\)` received int, expected a str or a sequence of str",
        {"fix": r'keys=\["train_loss", "val_\*"\]'},
    ),
    Case(
        "an empty key",
        lambda: IPULogCallback(["a", ""]),
        "KeySelectionError",
        r"`IPULogCallback\(keys=\.\.\.\)` received '' at position 1",
        {"fix": r'keys="\*"'},
    ),
    Case(
        "a key that is no str in a list",
        lambda: IPULogCallback([3]),
        "KeySelectionError",
        r"received 3 at position 0, expected a name or a glob",
        {"fix": r'keys="\*"'},
    ),
    Case(
        "a key twice",
        lambda: IPULogCallback(["a", "a"]),
        "KeySelectionError",
        r"`IPULogCallback\(keys=\.\.\.\)` received 'a' twice",
        {"fix": "leave one of them out"},
    ),
    Case(
        "an unknown output mode",
        lambda: IPULogCallback(output_mode="sum"),
        "KeySelectionError",
        r"`IPULogCallback\(output_mode='sum'\)` received an unknown mode, expected 'auto'",
        {"fix": "output_mode='auto'"},
    ),
]

_SEEN: Dict[str, Exception] = {}


def error_of(case):
    """The error of a case; each is provoked once."""
    if case.name not in _SEEN:
        with pytest.raises(Exception) as caught:  # noqa: PT011 - the test looks at its class
            case.act()
        _SEEN[case.name] = caught.value
    return _SEEN[case.name]


def rows_of(error):
    """Headline and rows of an error's text."""
    headline, *lines = str(error).splitlines()
    rows: Dict[str, str] = {}
    name = ""
    for line in lines:
        start = re.match(r"    (\w+) +(\S.*)", line)
        if start and start.group(1) in ROWS:
            name, text = start.groups()
            rows[name] = text
        else:
            rows[name] += "\n" + line.strip()
    return headline, rows


cases = pytest.mark.parametrize("case", ERRORS, ids=lambda case: case.name)
case_rows = pytest.mark.parametrize(
    ("case", "row"),
    [pytest.param(case, row, id=f"{case.name}-{row}") for case in ERRORS for row in case.rows],
)


@cases
def test_an_error_has_the_class_that_a_caller_can_react_to(case):
    """One class per reaction, all of them `IPULogError`s."""
    error = error_of(case)
    assert type(error).__name__ == case.kind, error
    assert isinstance(error, IPULogError)


@cases
def test_the_first_line_of_an_error_stands_alone(case):
    """It has the call as the user typed it and the step."""
    headline, _ = rows_of(error_of(case))
    assert re.search(case.call, headline), headline


@case_rows
def test_each_row_of_an_error_answers_its_question(case, row):
    """Where it happened, what came, what was wanted, why it matters, what to type."""
    _, rows = rows_of(error_of(case))
    assert re.search(case.rows[row], rows.get(row, "")), (row, rows)


@cases
def test_an_error_of_a_step_leaves_no_question_open(case):
    """What goes wrong in a step has every row, in the same order."""
    if case.kind not in ("StepCaptureError", "SecondLossError", "OutputModeError"):
        pytest.skip("not an error of a step")
    _, rows = rows_of(error_of(case))
    assert tuple(rows) == ROWS


@cases
def test_an_error_dumps_no_contents(case):
    """Values are shortened: no line grows beyond what a terminal shows."""
    assert max(map(len, str(error_of(case)).splitlines())) < 200


SITES = {
    "key built from batch_idx": "self.log(f",
    "more than one element": 'self.log("vector"',
    "branch on batch_idx": "if batch_idx",
    "value of a metric": "* 2",
    "second loss": 'self.log("mae"',
    "metric under Sum": "self.mean.update",
}


@pytest.mark.parametrize("name", SITES)
def test_an_error_points_at_the_users_line(name):
    """`where` is the line of the user's own file."""
    (case,) = [case for case in ERRORS if case.name == name]
    _, rows = rows_of(error_of(case))
    line = int(re.search(r"test_messages\.py:(\d+)", rows["where"]).group(1))
    with open(__file__, encoding="utf-8") as source:
        assert SITES[name] in source.read().splitlines()[line - 1]


class Recovers(Net):
    """Wrong once, and right afterwards."""

    wrong = True

    def validation_step(self, batch, batch_idx):
        loss = self.loss(batch)
        if self.wrong:
            self.log("val", loss.item())
        else:
            self.log("val", loss)


def test_after_an_error_module_and_process_are_usable():
    """The step is mended and runs, with the same module and a new trainer."""

    def program(run: Run) -> None:
        with pytest.raises(errors.StepCaptureError):
            run.trainer().validate(run.module, run.loader(), verbose=False)
        run.module.wrong = False
        run.results += run.trainer().validate(run.module, run.loader(), verbose=False)

    mended = observe(True, Recovers, program)
    Recovers.wrong, before = False, Recovers.wrong
    try:
        cpu = observe(False, Recovers, validate_only)
    finally:
        Recovers.wrong = before
    assert mended.results[0]["val"] == pytest.approx(cpu.results[0]["val"], rel=1e-5)


@pytest.mark.parametrize("case", ERRORS[:13], ids=lambda case: case.name)
def test_a_steps_error_comes_before_the_long_compilation(case):
    """It is raised while the step's Python runs, or while PopTorch looks at its graph."""
    from ipu_log_callback import emulator

    before = emulator.counters.executions
    with pytest.raises(IPULogError):
        case.act()
    executions = emulator.counters.executions - before
    # a second step may be captured after a first one has run its sanity check
    assert executions <= (2 if case.name in ("tensor of another step", "second loss") else 0)


def test_the_users_own_exception_passes_unchanged():
    """What has nothing to do with the callback is not reworded."""

    class Raises(Net):
        def validation_step(self, batch, batch_idx):
            raise KeyError("the user's own")

    with pytest.raises(KeyError, match="the user's own"):
        observe(True, Raises, validate_only)


@pytest.mark.parametrize(
    ("count", "told"),
    [
        *((64, "64 B"), (3800, "3.8 kB"), (3.8e6, "3.8 MB"), (2.5e9, "2.5 GB"), (None, "unknown")),
        *((999, "999 B"), (999_400, "999 kB"), (999_600, "1 MB"), (1_000_000, "1 MB")),
    ],
)
def test_sizes_are_told_in_the_largest_unit_that_fits(count, told):
    """Three digits of it."""
    assert errors.bytes_text(count) == told


@pytest.mark.parametrize(("count", "told"), [(0, "0 keys"), (1, "1 key"), (2, "2 keys")])
def test_one_thing_is_told_in_the_singular(count, told):
    """Whatever is counted in a message."""
    assert errors.counted(count, "key") == told


def warnings_of(program, keys, module=Net):
    """This package's warnings in a run."""
    told = []

    def watched(run):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            program(run)
        told.extend(warning for warning in caught if warning.category is errors.IPULogWarning)

    observe(True, module, watched, Setting(keys=keys))
    return told


def test_what_was_dropped_is_told_with_the_line_to_type():
    """What is told to type selects what is selected already, and what was dropped."""

    class Two(Net):
        def validation_step(self, batch, batch_idx):
            self.log("val_mean", batch[0].mean())
            self.log("low", batch[0].min())

    (dropped,) = warnings_of(validate_only, ["val_*"], Two)
    headline = str(dropped.message).splitlines()[0]
    assert headline == "1 key of `self.log` was not anchored and so not logged: 'low'"
    assert 'IPULogCallback(keys=["val_*", "low"])' in str(dropped.message)
    assert dropped.filename == __file__


@pytest.mark.parametrize(
    ("step", "hook"),
    [("training_step", "on_train_batch_end"), ("test_step", "on_test_batch_end")],
)
def test_the_hook_that_is_told_follows_the_step(step, hook):
    """Where the index is an int depends on the step that was given a tensor."""
    with pytest.raises(IPULogError, match=f"`{hook}`"):
        check_key("l_tensor(1)", f"Net.{step}", CallSite(__file__, 1))


class LogsItsMean(Net):
    """Logs one key in each step that can."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("train_mean", batch[0].mean())
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_mean", batch[0].mean())

    def test_step(self, batch, batch_idx):
        self.log("test_mean", batch[0].mean())

    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        return batch[0] * 2


def test_a_pattern_that_selects_nothing_is_told_at_the_users_line():
    """The warning points at the call that ran the trainer, not into the package."""

    def program(run):
        run.trainer().fit(run.module, run.loader())

    (nothing,) = warnings_of(program, ["train_*", "train_maen"], LogsItsMean)
    assert "'train_maen'" in str(nothing.message).splitlines()[0]
    assert "nearest  'train_mean'" in str(nothing.message)
    assert nothing.filename == __file__


@pytest.mark.parametrize("method", ["validate", "test", "predict"])
def test_keys_of_steps_that_a_run_does_not_execute_are_no_fault(method):
    """One callback is made for training and evaluation; in `predict_step` nothing is logged."""

    def program(run):
        getattr(run.trainer(), method)(run.module, run.loader())

    assert warnings_of(program, ["train_*", "val_*", "test_mean"], LogsItsMean) == []
