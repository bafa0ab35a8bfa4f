"""PopTorch's errors inside a step, said so that a Lightning user can act on them.

PopTorch raises texts of its own for what a compiled step cannot do
(`RegisterAtenOverloads.cpp`); they name neither step nor line nor a way out.
"""

from contextlib import contextmanager
from typing import Iterator, NamedTuple

from .call_site import source_line, user_frame_of
from .errors import IPULogError, StepCaptureError, report, shortened

__all__ = ["explained", "reason_of"]


class _Explanation(NamedTuple):
    text: str
    headline: str
    expected: str
    why: str
    fix: str


_READS_A_VALUE = _Explanation(
    text="aten::item is only supported in eager mode",
    headline="reads the value of a device tensor (`.item()`, `float()`, `if tensor:`, an f-string)",
    expected="tensors stay tensors while the step runs",
    why="the step's Python runs only once, when it is compiled; there is no value to read yet",
    fix="log the tensor itself: self.log(name, tensor)\n"
    "instead of a branch: torch.where(condition, a, b)",
)
_LEAVES_THE_DEVICE = _Explanation(
    text="Illegal move to CPU",
    headline="moves a device tensor to the host (`.cpu()`, `.tolist()`, `.numpy()`)",
    expected="tensors stay on the device while the step runs",
    why="the step's Python runs only once, when it is compiled; there is no value to move yet",
    fix="log or return the tensor as it is; it is on the host in `on_train_batch_end` and the like",
)
_OUTLIVES_A_STEP = _Explanation(
    text="There is no active dispatch",
    headline="uses a tensor that was made while another step was compiled",
    expected="tensors of this step only",
    why="what a step computes exists on the device only, and does not outlive its compilation",
    fix="return the tensor from the step that made it, or keep it in a buffer:\n"
    "self.register_buffer(name, torch.zeros(...)) and self.name.copy_(tensor)",
)
_NUMPY = _LEAVES_THE_DEVICE._replace(text="can't convert ipu")


@contextmanager
def explained(step: str) -> Iterator[None]:
    """Raise PopTorch's errors of a step as a `StepCaptureError` with step, line and way out.

    Every other exception passes unchanged.
    """
    try:
        yield
    except IPULogError:
        raise
    except Exception as error:
        for known in (_READS_A_VALUE, _LEAVES_THE_DEVICE, _NUMPY, _OUTLIVES_A_STEP):
            if known.text in str(error):
                raise _explanation(known, step, error) from error
        raise


def _explanation(known: _Explanation, step: str, error: Exception) -> StepCaptureError:
    site = user_frame_of(error.__traceback__)
    line = source_line(site) if site else ""
    fix = known.fix
    index = next((name for name in ("dataloader_idx", "batch_idx") if name in line), None)
    if index is not None:
        fix = (
            f"`{index}` is a tensor in a compiled step: move what depends on it to a hook on the "
            "host,\ne.g. on_train_batch_end, where it is an int"
        )
    return StepCaptureError(
        report(
            f"`{line or '...'}` in `{step}` {known.headline}",
            where=str(site) if site else "",
            received=reason_of(error),
            expected=known.expected,
            why=known.why,
            fix=fix,
        )
    )


def reason_of(error: Exception, width: int = 100) -> str:
    """What PopTorch says in an error's first line, without the place in its own source."""
    return shortened(str(error).splitlines()[0].split("_error': ", 1)[-1], width)
