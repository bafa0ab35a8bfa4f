"""Hooks and settings that Lightning's IPU strategy ignores, refuses, or calls to no effect.

Read in `IPUStrategy`, `IPUPrecisionPlugin`, `IPUAccelerator` and the trainer's configuration
validator of pytorch-lightning 1.6.5 to 2.0.9 and of lightning-graphcore 0.1.0.
"""

import ast
from dataclasses import replace
from typing import Any, Dict, Iterator, List, NamedTuple, Optional

import torch

from ipu_log_callback import _compat
from ipu_log_callback.doctor.findings import Finding, finding
from ipu_log_callback.doctor.source import code_of, definition_of, function_node
from ipu_log_callback.doctor.static import assigned_attributes, host_methods
from ipu_log_callback.record import CallSite

__all__ = ["configured_optimizers", "hook_findings"]


class _Hook(NamedTuple):
    kind: str
    why: str
    fix: str


_NO_GRADIENTS = "it runs on the host, where no parameter has a gradient: the device keeps them"
_GRADIENTS = 'IPULogCallback(gradients="*") logs those of the device'
_CLIP = "poptorch.optim.AdamW(..., max_grad_norm=1.0) clips on the device"
_TRANSFER = "the strategy gives the batch to PopTorch, which moves it to the device"

_HOOKS: Dict[str, _Hook] = {
    "optimizer_zero_grad": _Hook(
        "hook-ignored", "gradients are zeroed on the device, after every step", "leave it out"
    ),
    "backward": _Hook(
        "hook-ignored",
        "the backward pass is part of the compiled step",
        "leave it out; scale the loss in `training_step`",
    ),
    "on_after_backward": _Hook("hook-ignored", _NO_GRADIENTS, _GRADIENTS),
    "on_before_optimizer_step": _Hook("hook-ignored", _NO_GRADIENTS, _GRADIENTS),
    "configure_gradient_clipping": _Hook("hook-ignored", _NO_GRADIENTS, _CLIP),
    "optimizer_step": _Hook(
        "hook-late",
        "the optimizer steps on the device: `optimizer.step(closure)` only runs the execution, and "
        "a change\nof its learning rate takes effect at the next one",
        "a learning rate scheduler in `configure_optimizers`",
    ),
    "transfer_batch_to_device": _Hook(
        "hook-refused", _TRANSFER, "the dataset, `collate_fn`, or `on_before_batch_transfer`"
    ),
    "on_after_batch_transfer": _Hook(
        "hook-refused",
        _TRANSFER,
        "the same code in the step, where it runs on the device, or in `on_before_batch_transfer`",
    ),
}


def configured_optimizers(module: Any) -> List[Any]:
    """What `configure_optimizers` makes, as far as it can without a running trainer."""
    try:
        return _optimizers_in(module.configure_optimizers())
    except Exception:  # noqa: BLE001  # what it needs of a trainer is not there yet: nothing is known
        return []


def hook_findings(module: Any, trainer: Any, optimizers: List[Any]) -> Iterator[Finding]:
    """Findings about the module as a whole.

    Args:
        module: The LightningModule.
        trainer: The user's own trainer, or `None`.
        optimizers: What `configure_optimizers` made.
    """
    owner = type(module).__name__
    base = _compat.lightning_class_of(module)
    for name, hook in _HOOKS.items():
        function = getattr(type(module), name, None)
        if function is None or function is getattr(base, name, None):
            continue
        if _does_the_usual(name, function):
            continue
        code = f"def {name}"
        yield finding(
            hook.kind, owner, "", definition_of(function), hook.why, code=code, fix=hook.fix
        )
    if not module.automatic_optimization:
        yield finding(
            "manual-optimization",
            owner,
            "training_step",
            _switched_off(module) or definition_of(getattr(type(module), "training_step", None)),
            code="automatic_optimization = False",
        )
    yield from _optimizer_findings(module, owner, optimizers)
    clip = getattr(trainer, "gradient_clip_val", None)
    if clip:
        made = finding(
            "trainer-setting",
            owner,
            "",
            None,
            "gradients are on the device",
            code=f"Trainer(gradient_clip_val={clip})",
            fix=_CLIP,
        )
        yield replace(made, headline=made.headline.replace(f" in `{owner}`", ""))


def _optimizer_findings(module: Any, owner: str, optimizers: List[Any]) -> Iterator[Finding]:
    site = definition_of(getattr(type(module), "configure_optimizers", None))
    if len(optimizers) > 1:
        yield finding(
            "trainer-setting",
            owner,
            "configure_optimizers",
            site,
            "the strategy gives PopTorch one optimizer",
            code=f"{len(optimizers)} optimizers",
            fix="one optimizer, with parameter groups",
        )
    elif any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in optimizers):
        yield finding(
            "trainer-setting",
            owner,
            "configure_optimizers",
            site,
            "it calls the step several times for one update, a compiled step includes the update",
            code="LBFGS",
            fix="poptorch.optim.AdamW or SGD",
        )


def _optimizers_in(answer: Any) -> List[Any]:
    if isinstance(answer, torch.optim.Optimizer):
        return [answer]
    if isinstance(answer, dict):
        return _optimizers_in(answer.get("optimizer"))
    if isinstance(answer, (list, tuple)):
        return [found for item in answer for found in _optimizers_in(item)]
    return []


#: Of hooks, the call that is all that a device does of them anyway.
_USUAL = {"optimizer_zero_grad": ("zero_grad",), "optimizer_step": ("optimizer_step", "step")}


def _does_the_usual(name: str, function: Any) -> bool:
    """Whether a hook begins with what the device does as well, and so does what it does on a CPU.

    What follows the update, a step of a scheduler, say, is in time for the next one.
    """
    code = code_of(function)
    node = None if code is None else function_node(code)
    body = [] if node is None else [s for s in node.body if not _is_docstring(s)]
    first = body[0].value if body and isinstance(body[0], ast.Expr) else None
    called = getattr(first.func, "attr", "") if isinstance(first, ast.Call) else ""
    return called in _USUAL.get(name, ()) and (name == "optimizer_step" or len(body) == 1)


def _is_docstring(statement: ast.AST) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _switched_off(module: Any) -> Optional[CallSite]:
    """The line that turns automatic optimization off, if a method of the module's does."""
    for method in host_methods(module, {}):
        for target in assigned_attributes(method.node):
            if target.attr == "automatic_optimization":
                return CallSite(method.code.co_filename, target.lineno)
    return None
