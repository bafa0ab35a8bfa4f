"""One run of one step on the emulator, watched from all sides."""

import inspect
import logging
import sys
import warnings
from contextlib import ExitStack, contextmanager
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Set, Tuple

import torch
from torchmetrics import Metric

from ipu_log_callback.doctor.findings import Finding, finding
from ipu_log_callback.doctor.losses import loss_faults
from ipu_log_callback.doctor.module_state import swapped
from ipu_log_callback.doctor.onlooker import Onlooker
from ipu_log_callback.doctor.source import code_of, definition_of
from ipu_log_callback.doctor.user_code import UserCode, fix_for_library
from ipu_log_callback.doctor.walk import Walk
from ipu_log_callback.doctor.witness import (
    Witness,
    loggers_watched,
    manual_optimization_watched,
    prints_watched,
)
from ipu_log_callback.emulator import compilation, poptorch
from ipu_log_callback.emulator.structures import flatten
from ipu_log_callback.metrics import Metrics
from ipu_log_callback.record import CallSite

__all__ = ["Batch", "StepRun", "run_step"]


class Batch(NamedTuple):
    """What a step is run with.

    Attributes:
        value: The batch of one loader.
        loader: Index of its loader, or `None` where the step is not told.
    """

    value: Any
    loader: Optional[int] = None


class StepRun:
    """What one run of a step showed.

    Attributes:
        step: The step.
        walk: The lines and functions that ran, and what they changed.
        findings: What was noticed on the way.
        error: What ended the run early, if anything did.
        onlooker: The recorder.
        carried: The attributes that carry values from one batch to the next, if that was tried.
    """

    onlooker: Onlooker

    def __init__(self, step: str, module: Any, user_code: UserCode) -> None:
        self.step = step
        self.walk = Walk(module, user_code)
        self.findings: List[Finding] = []
        self.error: Optional[BaseException] = None
        self.carried: Set[str] = set()
        self._owner = type(module).__name__
        self._function = getattr(module, step)
        self._user_code = user_code

    def site(self) -> Optional[CallSite]:
        """Where in the user's file the step is."""
        return self._user_code.innermost(sys._getframe(1))[0]

    def notice(self, kind: str, what: str, fix: str) -> None:
        """Note a finding at the line where the step is."""
        site, library = self._user_code.innermost(sys._getframe(1))
        received = ""
        if library is not None:
            received = str(library)
            if kind != "metric-on-device":
                fix = fix or fix_for_library(library, kind)
        elif kind in ("frozen-log",):
            received = what
        made = finding(kind, self._owner, self.step, site, what, fix=fix, received=received)
        self.findings.append(made)

    def located(self, kind: str, site: Optional[CallSite], what: str, fix: str = "") -> Finding:
        """A finding at a line, or where the step is defined if no line is known."""
        code = "" if site else f"def {self.step}"
        site = site or definition_of(self._function)
        return finding(kind, self._owner, self.step, site, what, code=code, fix=fix)

    def returns(self) -> Optional[CallSite]:
        """The line where the step returned."""
        code = code_of(self._function)
        return None if code is None else self.walk.returned.get(code)


class _OneStep(torch.nn.Module):
    """What the emulator compiles: one step of the module, without Lightning's trainer."""

    def __init__(self, module: Any, step: Callable[..., Any]) -> None:
        super().__init__()
        self.module = module
        self._step = step

    def to(self, *args: Any, **kwargs: Any) -> "_OneStep":
        """Move the module by its own method: it keeps its `device` up to date."""
        self.module.to(*args, **kwargs)
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step."""
        return self._step(*args, **kwargs)


def run_step(
    module: Any,
    step: str,
    batch: Batch,
    trainer: Any,
    invented: bool,
    user_code: UserCode,
    before: Optional[StepRun] = None,
) -> StepRun:
    """Run a step once and go on past everything that would end it.

    Args:
        module: The LightningModule.
        step: Name of the step.
        batch: What to run it with.
        trainer: The trainer that the module is attached to.
        invented: Whether that trainer is the doctor's own.
        user_code: Tells the user's code from that of libraries.
        before: The step's run before this one: what is used of it is carried from one batch to
            the next.
    """
    run = StepRun(step, module, user_code)
    arguments, names, given_once = _arguments(module, step, batch)
    for kind, what in sorted(set(_not_tensors(batch.value, "batch"))):
        run.findings.append(run.located(kind, None, what))
    metrics = Metrics(module)
    positions = _index_positions(arguments, names)
    onlooker = run.onlooker = Onlooker(
        run.notice,
        lambda: _look_for_metrics(run, user_code),
        run.site,
        positions,
        run.walk.holder_of,
        None if before is None else before.onlooker,
    )
    witness = Witness(module, step, metrics, onlooker, run.notice, run.site)
    training = step == "training_step"

    def traced(*args: Any, **kwargs: Any) -> Any:
        function = getattr(module, step)
        with ExitStack() as stack:
            stack.enter_context(metrics.shown())
            stack.enter_context(prints_watched(run.notice, lambda: _is_users(user_code)))
            stack.enter_context(loggers_watched(module, trainer, run.notice, invented))
            stack.enter_context(manual_optimization_watched(module, onlooker.tell_backward))
            stack.enter_context(run.walk.watching())
            output = witness.run(function, *args, **kwargs, **given_once)
        if training and module.automatic_optimization:
            _judge_losses(run, output, witness.anchored)
        return output

    module.train(training)
    executor = poptorch.inferenceModel(_OneStep(module, traced))
    with ExitStack() as stack:
        stack.enter_context(metrics.hidden())
        stack.enter_context(_quietly())
        stack.enter_context(swapped(compilation, "Recorder", lambda: onlooker))
        stack.enter_context(torch.set_grad_enabled(training))
        try:
            executor.compile(*arguments)
        except Exception as error:  # noqa: BLE001  # reported as a finding, whatever it is
            # after the step: what PopTorch makes of its graph is said elsewhere
            if not onlooker.finished and "reassigned within" not in str(error):
                run.error = error
    if any(found.kind == "batch-object" for found in run.findings):
        # what is in it stays on the host, and that is said
        run.findings = [found for found in run.findings if found.kind != "host-tensor"]
    return run


def _judge_losses(run: StepRun, output: Any, anchored: List[Any]) -> None:
    onlooker = run.onlooker
    returns = None if output is None else run.returns()
    faults = loss_faults(onlooker.graph, onlooker.values, output, anchored, onlooker.sites)
    for fault in faults:
        run.findings.append(run.located(fault.kind, fault.site or returns, fault.what, fault.fix))


#: Arguments of a step that Lightning gives when it has several optimizers, or splits sequences.
_GIVEN_ONCE = {"optimizer_idx": 0, "hiddens": None}


def _arguments(module: Any, step: str, batch: Batch) -> Tuple[List[Any], List[str], Dict[str, Any]]:
    """The step's arguments as Lightning's IPU strategy gives them: indices are tensors.

    Returns:
        The arguments, their names, and further ones that are no part of the batch.
    """
    parameters = [
        parameter
        for parameter in inspect.signature(getattr(module, step)).parameters.values()
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    given: List[Any] = [_as_lightning_gives(batch.value)]
    names = ["batch"]
    for parameter in parameters[1:]:
        if parameter.name == "dataloader_idx":
            if batch.loader is None and parameter.default is not parameter.empty:
                break
            given.append(torch.tensor([batch.loader or 0]))
        elif parameter.name == "batch_idx" or (
            len(given) == 1 and parameter.default is parameter.empty
        ):
            given.append(torch.tensor([0]))
        else:
            break
        names.append(parameter.name)
    required = {p.name for p in parameters if p.default is p.empty} - set(names)
    return given, names, {k: v for k, v in _GIVEN_ONCE.items() if k in required}


def _index_positions(arguments: List[Any], names: List[str]) -> Dict[int, str]:
    first = len(flatten(arguments[:1]))
    return {first + index: name for index, name in enumerate(names[1:])}


def _as_lightning_gives(value: Any) -> Any:
    """`IPUStrategy._prepare_input`: lists become tuples, numbers tensors with one element."""
    if isinstance(value, (bool, int, float)):
        return torch.tensor([value])
    if isinstance(value, dict):
        try:
            return type(value)({key: _as_lightning_gives(item) for key, item in value.items()})
        except TypeError:
            return value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(_as_lightning_gives, value))
    if isinstance(value, (list, tuple)):
        return tuple(map(_as_lightning_gives, value))
    return value


def _not_tensors(value: Any, path: str) -> Iterator[Tuple[str, str]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _not_tensors(item, f"{path}[{key!r}]")
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _not_tensors(item, f"{path}[{index}]")
    elif isinstance(value, str):
        yield "batch-value", f"str, `{path}`"
    elif hasattr(value, "__dict__") and not isinstance(value, torch.Tensor) and not flatten(value):
        yield "batch-object", f"{type(value).__name__}, `{path}`"


def _is_users(user_code: UserCode) -> bool:
    """Whether the call that is being noticed stands in the user's code."""
    frame = sys._getframe(3)  # this function, the lambda that calls it, what stands in for `print`
    return user_code.owns_frame(frame)


def _look_for_metrics(run: StepRun, user_code: UserCode) -> None:
    """Notice a metric's own code at work: it was not found among the module's."""
    for frame in user_code.stack():
        if frame.f_globals.get("__name__", "").split(".")[0] == "torch":
            continue
        owner = frame.f_locals.get("self")
        if isinstance(owner, Metric):
            run.notice("metric-on-device", type(owner).__name__, "")
            return


@contextmanager
def _quietly() -> Iterator[None]:
    """Without what PopTorch says while it compiles."""
    logger = logging.getLogger("poptorch::python")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
