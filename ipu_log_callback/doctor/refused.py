"""What the emulator's refusal of a call means: a kind of finding, and what to type instead."""

from typing import Optional

from ipu_log_callback.emulator.errors import NotEmulatedError

__all__ = ["fix_for_shape", "kind_of"]

_BRANCHES = {"__bool__", "is_nonzero", "__contains__"}
_MOVES = ("Illegal move to CPU", "can't convert ipu", "Cannot access data pointer")
_AUTOGRAD = {"backward", "grad", "register_hook", "register_post_accumulate_grad_hook"}

_STATIC_SHAPES = {
    "__getitem__": "keep the shape: torch.where(mask, x, 0), or a weighted mean "
    "(x * mask).sum() / mask.sum()",
    "masked_select": "keep the shape: torch.where(mask, x, 0)",
    "nonzero": "keep the mask and compute with it: (x * mask).sum()",
    "where": "give it all three: torch.where(condition, a, b)",
    "bincount": "F.one_hot(x, num_classes).sum(0), with a fixed number of classes",
    "histc": "compare with fixed edges: ((x >= low) & (x < high)).sum()",
    "repeat_interleave": "repeat_interleave(..., output_size=N), or a fixed number of repeats",
}
_OTHER_SHAPE = "a tensor of fixed shape and a mask, or do it on the host in `on_train_batch_end`"


def fix_for_shape(name: str) -> str:
    """What to type in place of a call whose result's shape depends on values."""
    return _STATIC_SHAPES.get(name, _OTHER_SHAPE)


def kind_of(name: str, error: Exception) -> Optional[str]:
    """The kind of finding that one of the emulator's refusals is, if it is one."""
    text = str(error)
    if isinstance(error, NotEmulatedError):
        return "autograd" if name in _AUTOGRAD else None
    if "aten::item is only supported" in text:
        if name in _BRANCHES:
            return "tensor-branch"
        return "tensor-format" if name == "__format__" else "value-read"
    if any(move in text for move in _MOVES):
        return "host-move"
    if "Type inference failed" in text:
        return "dynamic-shape"
    if "Unsupported ops found" in text:
        return "unsupported-op"
    return "host-tensor" if "Expected an IPU tensor" in text else None
