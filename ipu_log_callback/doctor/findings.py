"""What the doctor can find: one entry a kind, with why it matters and what to type instead."""

import tokenize
from dataclasses import dataclass, replace
from typing import Any, Dict, NamedTuple, Optional, Tuple

from ipu_log_callback.call_checks import batch_end_of
from ipu_log_callback.call_site import source_line
from ipu_log_callback.compilation import STEPS
from ipu_log_callback.errors import report, shortened
from ipu_log_callback.record import CallSite

__all__ = ["KINDS", "Finding", "Kind", "finding"]


class Kind(NamedTuple):
    """One kind of finding.

    Attributes:
        fails: Whether the step fails once compiled; otherwise it runs and behaves differently.
        says: What the code does, to follow the code in the headline.
        why: Why that is different in a compiled step.
        fix: What to type instead.
    """

    fails: bool
    says: str
    why: str
    fix: str


_ONCE = "the step's Python runs only once, when it is compiled"
_NO_VALUE = f"{_ONCE}; there is no value to read yet"

KINDS: Dict[str, Kind] = {
    "value-read": Kind(
        True,
        "reads the value of a device tensor",
        _NO_VALUE,
        "keep the tensor and compute with it; self.log(name, tensor) takes it as it is, and its\n"
        "value is on the host in `on_train_batch_end(self, outputs, ...)` and the like",
    ),
    "tensor-branch": Kind(
        True,
        "branches on a device tensor",
        _NO_VALUE,
        "torch.where(condition, a, b) computes both and selects",
    ),
    "tensor-format": Kind(
        True,
        "formats the value of a device tensor into a text",
        _NO_VALUE,
        "leave the value out of the text; self.log(name, tensor) shows it after every execution",
    ),
    "host-move": Kind(
        True,
        "moves a device tensor to the host",
        _NO_VALUE,
        "return or log the tensor as it is; it is on the host in\n"
        "`on_train_batch_end(self, outputs, ...)` and the like",
    ),
    "batch-index": Kind(
        True,
        "uses `{what}` as a Python number",
        "`{what}` is a tensor in a compiled step, whose Python runs only once",
        "move what depends on it to a hook on the host, e.g. `on_train_batch_end`, "
        "where it is an int",
    ),
    "tensor-key": Kind(
        True,
        "builds a key from a tensor",
        "`batch_idx`, `dataloader_idx` and whatever comes from the batch are tensors in a "
        "compiled step",
        "leave it out of the key: Lightning appends `/dataloader_idx_N` itself, and counts steps",
    ),
    "dynamic-shape": Kind(
        True,
        "makes a tensor whose shape depends on values",
        "shapes are fixed when the step is compiled",
        "{what}",
    ),
    "unsupported-op": Kind(
        True,
        "calls `{what}`, which PopTorch does not compile",
        "PopTorch knows no such operation",
        "write it in other operations of torch",
    ),
    "host-tensor": Kind(
        True,
        "uses a tensor that is not on the device",
        "only parameters, buffers and the step's arguments move to the device",
        "self.register_buffer(name, tensor) in `__init__`; a constant that the step makes:\n"
        "tensor.to(self.device)",
    ),
    "autograd": Kind(
        True,
        "differentiates inside the step",
        "the backward pass is PopTorch's own, from the loss that `training_step` returns",
        "return the loss; what needs gradients inside the step cannot run on the device",
    ),
    "manual-optimization": Kind(
        True,
        "optimizes by hand",
        "backward pass and optimizer are part of the compiled step",
        "return the loss from `training_step` and leave `automatic_optimization` on",
    ),
    "step-tensor-used": Kind(
        True,
        "uses a tensor that another step made: {what}",
        "what a step computes exists on the device only, and does not outlive its compilation",
        "self.register_buffer(name, torch.zeros(...)) in `__init__`, and "
        "self.name.copy_(tensor) in the step",
    ),
    "tensor-kept": Kind(
        True,
        "keeps a device tensor in `{what}`",
        "what a step computes exists on the device only: any later use of it raises "
        '"There is no active dispatch"',
        "return the tensor from the step and keep `outputs` in\n"
        "`on_train_batch_end(self, outputs, ...)` and the like, where it is on the host",
    ),
    "side-effect": Kind(
        False,
        "changes `{what}`, once",
        f"{_ONCE}: the change happens then and never again",
        "make the change in `on_train_batch_end` and the like, which run for every execution",
    ),
    "print": Kind(
        False,
        "writes a text, once",
        f"{_ONCE}, and no tensor has a value then",
        "write it in `on_train_batch_end(self, outputs, ...)` and the like, or self.log(...)",
    ),
    "logger-call": Kind(
        False,
        "calls a logger past `self.log`, once",
        f"{_ONCE}, and so does this call",
        "self.log(name, value); images and tables in `on_train_batch_end(self, outputs, ...)`",
    ),
    "logger-call-tensor": Kind(
        True,
        "gives a device tensor to a logger past `self.log`",
        _NO_VALUE,
        "self.log(name, tensor); images and tables: return the tensor and make the call in\n"
        "`on_train_batch_end(self, outputs, ...)`",
    ),
    "frozen-log": Kind(
        False,
        "logs a value that is frozen when the step is compiled",
        f"{_ONCE}; every execution logs this value again",
        "{what}",
    ),
    "frozen-value": Kind(
        False,
        "reads `{what}`, which freezes when the step is compiled",
        f"{_ONCE}; later changes of it never reach the device",
        "give it with the batch, as a tensor, e.g. in `on_before_batch_transfer`;\n"
        "to log it: self.log(name, live(lambda: ...))",
    ),
    "frozen-random": Kind(
        False,
        "draws from `{what}`, which freezes when the step is compiled",
        f"{_ONCE}; every execution uses the same draw",
        "draw on the device (torch.rand(...)), or in the dataset",
    ),
    "metric-on-device": Kind(
        True,
        "runs a torchmetrics object on the device",
        "it is none of the module's own, so it cannot be fed on the host after an execution",
        "make it an attribute of the module: self.name = {what}(...) in `__init__`",
    ),
    "metric-value": Kind(
        True,
        "computes with the value of `{what}`",
        "metrics run on the host, after the compiled step; inside it their values do not exist",
        "log the metric object, self.log(name, self.metric), or compute it in plain torch",
    ),
    "second-loss": Kind(
        True,
        "{what} a torch loss beside the returned one",
        "PopTorch takes every torch loss that leaves the step for a loss of the model, and allows "
        "one",
        "write it as arithmetic: (a - b).abs().mean() instead of F.l1_loss(a, b),\n"
        "((a - b) ** 2).mean() instead of F.mse_loss(a, b)",
    ),
    "several-losses": Kind(
        True,
        "joins several torch losses without marking the result as the loss",
        'PopTorch allows one final loss: "Multiple independent losses found in graph"',
        'return poptorch.identity_loss(loss, reduction="mean")',
    ),
    "no-loss": Kind(
        True,
        "{what}",
        "PopTorch trains what comes out of a torch loss function or of poptorch.identity_loss",
        'return poptorch.identity_loss(loss, reduction="mean")',
    ),
    "loss-arithmetic": Kind(
        False,
        "computes with the loss after the torch loss function",
        "PopTorch differentiates what the torch loss function returns: what is computed from it\n"
        "afterwards has no influence on the gradients",
        'return poptorch.identity_loss(loss, reduction="mean")',
    ),
    "loss-form": Kind(
        True,
        "{what}",
        "PopTorch differentiates what the torch loss function returns, one unsmoothed number",
        'return poptorch.identity_loss(loss, reduction="mean")',
    ),
    "data-replaced": Kind(
        True,
        "replaces `.data` of a device tensor",
        "PopTorch does not see the new tensor, only what changes the old one in place",
        "with torch.no_grad(): tensor.copy_(...), or another call that works in place",
    ),
    "state-carried": Kind(
        False,
        "expects what the batch before left in `{what}`",
        f"{_ONCE}; every execution starts with what `{{what}}` was then",
        "keep it on the device, as a float buffer: self.register_buffer(name, torch.zeros(...)) in"
        "\n`__init__`, and self.name.copy_(tensor) in the step",
    ),
    "device-kept": Kind(
        True,
        "keeps the device in `{what}`",
        "nothing can be moved to the device outside a compiled step",
        "use self.device where it is needed: on the host it is the CPU",
    ),
    "batch-object": Kind(
        True,
        "gets a batch with a {what}",
        "PopTorch takes tensors out of tuples, lists, dicts and NamedTuples; others stay on the "
        "host",
        "give its tensors in a dict or tuple, or poptorch.registerCustomArgParser(type, parser)",
    ),
    "buffer-reassigned": Kind(
        True,
        "replaces the buffer or parameter `{what}`",
        "PopTorch knows the tensors that a module had before the step, and no others",
        "change it in place: self.{what}.copy_(...)",
    ),
    "log-shape": Kind(
        True,
        "logs a tensor of shape {what}",
        "`self.log` takes one number",
        "log value.mean()",
    ),
    "batch-value": Kind(
        True,
        "gets a batch with a {what}",
        "it becomes part of the compiled step, and the next batch with another one is refused",
        "leave it out of the batch, in the dataset's `__getitem__` or the loader's `collate_fn`",
    ),
    "hook-ignored": Kind(
        False,
        "has no effect on the device",
        "{what}",
        "{fix}",
    ),
    "host-weights": Kind(
        False,
        "changes weights on the host",
        "the weights live on the device while the model trains: what changes on the host never\n"
        "reaches them, and looking at them copies all of them",
        "do it in the step, in place: with torch.no_grad(): average.lerp_(weight, 0.01)",
    ),
    "hook-late": Kind(False, "does not reach the update that it is called for", "{what}", "{fix}"),
    "hook-refused": Kind(True, "is refused by Lightning on IPUs", "{what}", "{fix}"),
    "trainer-setting": Kind(True, "is refused by Lightning on IPUs", "{what}", "{fix}"),
    "step-raises": Kind(
        True,
        "raises {what}",
        "the step ended there: what follows was not run",
        "run it on the CPU first; if it runs there, another finding is the cause, or it does what\n"
        "the emulated device does not know",
    ),
}


@dataclass(frozen=True)
class Finding:
    """One thing that behaves differently once its step is compiled.

    Args:
        kind: A key of `KINDS`.
        fails: Whether the step would fail; otherwise it runs and behaves differently.
        headline: What was found, as one line that stands alone.
        site: Where in the user's file, if a line is known.
        steps: The steps that reach it.
        why: Why it matters.
        fix: What to type instead.
        received: What was seen, if that says more than the headline.
        reached: Whether the line was run; otherwise it stands in code that this batch did not
            reach.
    """

    kind: str
    fails: bool
    headline: str
    site: Optional[CallSite]
    steps: Tuple[str, ...]
    why: str
    fix: str
    received: str = ""
    reached: bool = True

    def __str__(self) -> str:
        where = "" if self.site is None else str(self.site)
        if len(self.steps) > 1:
            where = f"{where}, in {', '.join(self.steps)}" if where else ", ".join(self.steps)
        if not self.reached:
            where += ", in code that this batch did not reach"
        verdict = "fails" if self.fails else "differs"
        return report(
            f"{verdict}: {self.headline}",
            where=where,
            received=self.received,
            why=self.why,
            fix=self.fix,
        )

    def to_dict(self) -> Dict[str, Any]:
        """The finding as plain data, for JSON."""
        return {
            "kind": self.kind,
            "fails": self.fails,
            "headline": self.headline,
            "file": None if self.site is None else self.site.file,
            "line": None if self.site is None else self.site.line,
            "code": None if self.site is None else _code_on(self.site),
            "steps": list(self.steps),
            "why": self.why,
            "fix": self.fix,
            "received": self.received,
            "reached": self.reached,
        }

    def with_fix(self, fix: str) -> "Finding":
        """The same finding, with another fix."""
        return replace(self, fix=_in_hook_of(self.steps[:1], fix))

    def seen_in(self, steps: Tuple[str, ...]) -> "Finding":
        """The same finding, in other steps as well."""
        more = tuple(step for step in steps if step not in self.steps)
        return replace(self, steps=self.steps + more) if more else self


def finding(
    kind: str,
    owner: str,
    step: str,
    site: Optional[CallSite],
    what: str = "",
    *,
    code: str = "",
    fix: str = "",
    received: str = "",
    reached: bool = True,
    fails: Optional[bool] = None,
) -> Finding:
    """Make a finding of a kind.

    Args:
        kind: A key of `KINDS`.
        owner: Class name of the LightningModule.
        step: The step, or another method, or `""` where there is none.
        site: Where in the user's file.
        what: Fills the `{what}` of the kind's texts.
        code: What to quote in the headline in place of the source line.
        fix: Replaces the kind's.
        received: What was seen.
        reached: Whether the line was run.
        fails: Replaces the kind's. What was not reached never fails.
    """
    entry = KINDS[kind]
    quoted = code or ("" if site is None else _code_on(site))
    place = f"{owner}.{step}" if step else owner
    steps = (step,) if step in STEPS else ()
    return Finding(
        kind=kind,
        fails=(entry.fails if fails is None else fails) and reached,
        headline=f"`{shortened(quoted, 72) or '...'}` in `{place}` {_filled(entry.says, what)}",
        site=site,
        steps=steps,
        why=_filled(entry.why, what),
        fix=_in_hook_of(steps, fix or _filled(entry.fix, what)),
        received=received,
        reached=reached,
    )


def _code_on(site: CallSite) -> str:
    """The code of a line, without its comment."""
    line = source_line(site)
    try:
        for token in tokenize.generate_tokens(iter([line]).__next__):
            if token.type == tokenize.COMMENT:
                return line[: token.start[1]].rstrip() or line
    except (tokenize.TokenError, SyntaxError, StopIteration):
        pass  # a statement that goes on below
    return line


def _in_hook_of(steps: Tuple[str, ...], fix: str) -> str:
    """A fix that names the hook which runs after the step."""
    for step in steps:
        fix = fix.replace("on_train_batch_end", batch_end_of(step))
    return fix


def _filled(text: str, what: str) -> str:
    return text.replace("{what}", what)
