"""From the runs of a module's steps to a diagnosis."""

import html
import json
from typing import Any, Dict, Iterable, List, Mapping, NamedTuple, Sequence, Tuple

import torch

from ipu_log_callback import _compat
from ipu_log_callback.call_site import user_frame_of
from ipu_log_callback.compilation import STEPS
from ipu_log_callback.doctor.findings import Finding, finding
from ipu_log_callback.doctor.hooks import configured_optimizers, hook_findings
from ipu_log_callback.doctor.host_weights import weight_findings
from ipu_log_callback.doctor.logged_values import logged_number
from ipu_log_callback.doctor.module_state import attached_trainer, optimizers_known, restored
from ipu_log_callback.doctor.source import Scope, reachable, scope_of
from ipu_log_callback.doctor.static import (
    changing_attributes,
    mentions,
    remarks,
)
from ipu_log_callback.doctor.step_run import Batch, StepRun, run_step
from ipu_log_callback.doctor.user_code import UserCode
from ipu_log_callback.doctor.walk import Change, RunFunction, device_tensors_in
from ipu_log_callback.errors import KeySelectionError, report

__all__ = ["Diagnosis", "check", "diagnose"]


class Diagnosis(NamedTuple):
    """What the doctor found in a module.

    Attributes:
        module: Class name of the LightningModule.
        steps: The steps that were run.
        findings: What behaves differently once compiled; first what fails, then in order of lines.
        notes: What could not be diagnosed, and why.
    """

    module: str
    steps: Tuple[str, ...]
    findings: Tuple[Finding, ...]
    notes: Tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        """1 if something would fail, else 0."""
        return int(any(found.fails for found in self.findings))

    @property
    def summary(self) -> str:
        """One line: how many findings of which weight, in which steps."""
        failing = sum(found.fails for found in self.findings)
        differing = len(self.findings) - failing
        steps = ", ".join(self.steps) or "no step"
        if not self.findings:
            found = "nothing found that behaves differently once compiled"
            return f"{self.module}: {found}, in {steps}"
        counts = [f"{failing} would fail"] * bool(failing)
        counts += [f"{differing} would behave differently"] * bool(differing)
        return f"{self.module}: {', '.join(counts)}, in {steps}"

    def to_json(self) -> str:
        """The diagnosis as JSON."""
        data = {
            "module": self.module,
            "steps": list(self.steps),
            "findings": [found.to_dict() for found in self.findings],
            "notes": list(self.notes),
            "exit_code": self.exit_code,
        }
        return json.dumps(data, indent=2)

    def __str__(self) -> str:
        blocks = [str(found) for found in self.findings]
        return "\n\n".join([*blocks, "\n".join([*self.notes, self.summary])])

    def __repr__(self) -> str:
        return f"<Diagnosis of {self.summary}>"

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


def check(module: Any, batch: Any, *, steps: Sequence[str] = ()) -> Diagnosis:
    """Run the steps of a module once on the emulator and say what compilation would change.

    Nothing is trained, and the module is left as it was.

    Args:
        module: The LightningModule.
        batch: One micro-batch, as a DataLoader gives it, for all steps.
        steps: The steps to run, e.g. `["training_step"]`; all that the module has by default.

    Returns:
        The diagnosis; `print` it, or let a notebook show it.

    Raises:
        KeySelectionError: `module` is no LightningModule, or `steps` has a name that is no step's.

    Example:
        >>> print(doctor.check(LitNet(), next(iter(loader))))  # doctest: +SKIP
        LitNet: nothing found that behaves differently once compiled, in training_step
    """
    _check_arguments(module, steps)
    chosen = tuple(steps) or _own_steps(module)
    return diagnose(module, {step: [Batch(batch, 0)] for step in chosen}, shared_batch=not steps)


def _check_arguments(module: Any, steps: Sequence[str]) -> None:
    if _compat.namespace_of(module, "LightningModule") is None:
        raise KeySelectionError(
            report(
                f"`doctor.check({type(module).__name__}(...), ...)` received a "
                f"{type(module).__name__}, expected a LightningModule",
                fix="doctor.check(module, next(iter(loader)))",
            )
        )
    unknown = [step for step in steps if step not in STEPS]
    if isinstance(steps, str) or unknown:
        raise KeySelectionError(
            report(
                f"`doctor.check(..., steps={steps!r})` received a name that is no step's",
                expected="some of " + ", ".join(map(repr, STEPS)),
                fix='doctor.check(module, batch, steps=["training_step"])',
            )
        )


def _own_steps(module: Any) -> Tuple[str, ...]:
    base = _compat.lightning_class_of(module)
    return tuple(
        step
        for step in STEPS
        if step in vars(module) or getattr(type(module), step) is not getattr(base, step)
    )


def diagnose(
    module: Any,
    batches: Mapping[str, Sequence[Batch]],
    *,
    shared_batch: bool = False,
) -> Diagnosis:
    """Run steps with batches of their own.

    Args:
        module: The LightningModule.
        batches: For each step, one batch of each of its loaders.
        shared_batch: Whether all steps got the same batch, which need not be theirs.
    """
    user_code = UserCode(module)
    notes: List[str] = []
    runs: List[StepRun] = []
    with restored(module), attached_trainer(module) as (trainer, invented):
        optimizers = configured_optimizers(module)
        hooks = list(hook_findings(module, None if invented else trainer, optimizers))
        with optimizers_known(trainer, optimizers):
            for step, step_batches in batches.items():
                for batch in step_batches:
                    run = run_step(module, step, batch, trainer, invented, user_code)
                    if run.error is None and _keeps_tensors(run):
                        again = run_step(module, step, batch, trainer, invented, user_code, run)
                        run.findings += [f for f in again.findings if f.kind == "state-carried"]
                        run.carried = again.onlooker.carried
                    others = any(other.error is None for other in runs)
                    if run.error is not None and shared_batch and others:
                        notes.append(_not_run(run))
                    else:
                        runs.append(run)
        callbacks = getattr(trainer, "callbacks", ())
        findings = [*hooks, *_findings(module, runs, callbacks)]
        findings += weight_findings(module, callbacks, user_code)
    steps = tuple(dict.fromkeys(run.step for run in runs))
    return Diagnosis(type(module).__name__, steps, _in_order(_merged(findings)), tuple(notes))


def _keeps_tensors(run: StepRun) -> bool:
    return any(device_tensors_in(change.now) for change in run.walk.changes)


def _not_run(run: StepRun) -> str:
    return f"not diagnosed: {run.step}, which raises {_error_text(run)} with this batch"


def _error_text(run: StepRun) -> str:
    lines = str(run.error).splitlines()
    return f"{type(run.error).__name__}{': ' + lines[0] if lines else ''}"


def _findings(module: Any, runs: Sequence[StepRun], callbacks: Sequence[Any]) -> Iterable[Finding]:
    """Everything that the runs, taken together, showed."""
    functions: Dict[Any, RunFunction] = {}
    lines = set()
    for run in runs:
        functions.update(run.walk.functions)
        lines |= run.walk.lines
    changing = changing_attributes(module, functions, callbacks)
    for run in runs:
        scopes = _reachable(run.walk.functions)
        yield from _of_numbers(run.findings, scopes, changing)
        for change in run.walk.changes:
            yield from _change_findings(module, run, change, functions)
        for scope in scopes:
            for remark in remarks(scope, module, lines, changing):
                if remark.what == "self.trainer.sanity_checking" and run.step != "validation_step":
                    continue
                if remark.reached and (remark.site.file, remark.site.line) not in run.walk.lines:
                    continue  # another step reaches it, and says so
                yield finding(
                    remark.kind,
                    type(module).__name__,
                    run.step,
                    remark.site,
                    remark.what,
                    received=remark.received,
                    reached=remark.reached,
                )
        if run.error is not None:
            yield _raised(run)


def _reachable(functions: Mapping[Any, RunFunction]) -> List[Scope]:
    """The functions that ran, and those that they would have called on another way."""
    ran = [scope for scope in map(scope_of, functions.values()) if scope is not None]
    own_files = {scope.file for scope in ran}
    return reachable(ran, lambda scope: scope.file in own_files)


def _of_numbers(
    findings: Sequence[Finding], scopes: List[Scope], changing: Dict[Tuple[int, str], str]
) -> Iterable[Finding]:
    """The findings, without those about logged numbers that are the same all through a CPU run."""
    for found in findings:
        if found.kind != "frozen-log" or found.site is None:
            yield found
            continue
        number = logged_number(scopes, found.site, changing)
        if not number.is_fixed:
            yield found.with_fix(number.fix)


def _change_findings(
    module: Any, run: StepRun, change: Change, functions: Mapping[Any, RunFunction]
) -> Iterable[Finding]:
    owner = type(module).__name__
    if change.kind == "buffer":
        yield finding("buffer-reassigned", owner, run.step, change.site, change.what[5:])
        return
    if change.what in run.carried:
        return
    keeps = device_tensors_in(change.now)
    elsewhere = mentions(module, dict(functions), change.attribute)
    if elsewhere and isinstance(change.now, torch.device) and change.now.type == "ipu":
        yield finding("device-kept", owner, run.step, change.site, change.what)
    elif keeps and (change.kind == "grown" or elsewhere):
        yield finding("tensor-kept", owner, run.step, change.site, change.what, fails=elsewhere)
    elif not keeps and (change.kind == "grown" or change.before is not None):
        yield finding("side-effect", owner, run.step, change.site, change.what)


def _raised(run: StepRun) -> Finding:
    site = user_frame_of(run.error.__traceback__ if run.error is not None else None)
    return run.located("step-raises", site, _error_text(run))


def _merged(findings: Iterable[Finding]) -> List[Finding]:
    """One finding for each kind and line, with all steps that reach it."""
    merged: Dict[Any, Finding] = {}
    for found in findings:
        key = (found.kind, found.site, found.fix if found.site is None else "")
        known = merged.get(key)
        if known is None:
            merged[key] = found
        else:
            better = known if known.reached or not found.reached else found
            merged[key] = better.seen_in(found.steps).seen_in(known.steps)
    return _without_doubles(list(merged.values()))


#: Of two kinds at one line, the second says nothing more.
_COVERED = (
    ("frozen-log", "frozen-value"),
    ("value-read", "frozen-log"),
    ("frozen-value", "side-effect"),
    ("batch-index", "tensor-key"),
    ("tensor-key", "tensor-format"),
    ("metric-on-device", "value-read"),
    ("metric-on-device", "tensor-branch"),
    ("metric-on-device", "dynamic-shape"),
    ("metric-on-device", "host-tensor"),
    ("metric-on-device", "side-effect"),
    ("metric-on-device", "tensor-kept"),
    ("logger-call-tensor", "logger-call"),
    ("logger-call-tensor", "frozen-value"),
    ("logger-call", "frozen-value"),
    ("tensor-kept", "side-effect"),
)


def _without_doubles(findings: List[Finding]) -> List[Finding]:
    present = {(found.kind, found.site) for found in findings}
    covered = {
        (less, site) for more, less in _COVERED for kind, site in present if kind == more and site
    }
    return [found for found in findings if (found.kind, found.site) not in covered]


def _in_order(findings: Iterable[Finding]) -> Tuple[Finding, ...]:
    def place(found: Finding) -> Any:
        file, line = ("", 0) if found.site is None else (found.site.file, found.site.line)
        return (not found.fails, found.site is None, file, line)

    return tuple(sorted(findings, key=place))
