"""What `self.log` may be given inside a compiled step, and what is said of the rest.

Lightning's own checks are made by Lightning (`_compat.trial_results`); these are about what only a
compiled step cannot do.
"""

import re
from typing import Any, List

import torch

from .errors import StepCaptureError, describe_value, report, shortened, warn
from .metrics import is_metric
from .record import CHANGING, CallSite, leaves_of

__all__ = ["batch_end_of", "check_key", "check_one_number", "frozen_values", "warn_of_frozen"]

#: How a tensor that was formatted into a key looks; PopTorch prints `<unavailable>` for its values.
_TENSOR_IN_KEY = re.compile(r"tensor\(|<unavailable>|device='ipu")


def check_key(name: Any, step: str, site: CallSite) -> None:
    """Refuse a key that is no str, or was built from a tensor.

    Raises:
        StepCaptureError: It is one of these.
    """
    if not isinstance(name, str):
        raise StepCaptureError(
            report(
                f"`self.log({describe_value(name)}, ...)` in `{step}` received "
                f"{type(name).__name__} as key, expected str",
                where=str(site),
                received=describe_value(name),
                expected="a str",
                why="loggers and callbacks find a value by its name",
                fix="self.log('name', value)",
            )
        )
    if _TENSOR_IN_KEY.search(name):
        raise StepCaptureError(
            report(
                f"`self.log(f'...{{tensor}}...', ...)` in `{step}` received a key built "
                "from a tensor, expected a key known before the step runs",
                where=str(site),
                received=repr(shortened(name, 80)),
                expected="a str made of Python values",
                why="batch_idx and dataloader_idx are tensors in a compiled step, whose "
                "Python runs only once",
                fix="leave the index out: Lightning appends `/dataloader_idx_N` itself,\n"
                f"or log that key in `{batch_end_of(step)}`, where the index is an int",
            )
        )


def batch_end_of(step: str) -> str:
    """The hook that follows a step, `training_step` or `LitNet.training_step`."""
    name = step.rpartition(".")[2].replace("training", "train")
    return f"on_{name.replace('_step', '_batch_end')}"


def check_one_number(name: str, value: torch.Tensor, step: str, site: CallSite) -> None:
    """Refuse a tensor that is not one number.

    Raises:
        StepCaptureError: It has no or several elements.
    """
    if value.numel() != 1:
        raise StepCaptureError(
            report(
                f"`self.log('{name}', ...)` in `{step}` received a tensor of shape "
                f"{list(value.shape)}, expected one number",
                where=str(site),
                received=describe_value(value),
                expected="a tensor with one element",
                why="Lightning keeps one number a key",
                fix=f"self.log('{name}', value.mean())",
            )
        )


def frozen_values(value: Any) -> List[Any]:
    """The parts of a captured value that no execution can change."""
    leaves = leaves_of(value)
    return [leaf for leaf in leaves if not is_metric(leaf) and not isinstance(leaf, CHANGING)]


def warn_of_frozen(name: str, frozen: Any, step: str, site: CallSite) -> None:
    """Say that a value was not computed on the device and so never changes again."""
    warn(
        report(
            f"`self.log('{name}', ...)` in `{step}` received {describe_value(frozen)}, which is "
            "frozen when the step is compiled",
            where=str(site),
            received="a value that was not computed on the device",
            why="the step's Python runs only once; every execution logs this value again",
            fix=f"self.log('{name}', live(lambda: ...)) calls the function at every execution "
            "(from ipu_log_callback import live)",
        ),
        site,
    )
