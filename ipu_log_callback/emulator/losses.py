"""The one-loss rule: a training step has exactly one final loss, and gradients flow from there.

Every loss function of PyTorch that PopTorch knows, and `poptorch.identity_loss`, marks its result
as a loss. A loss that feeds another one is an ordinary operation; of the rest there must be exactly
one. What is computed from it afterwards has no influence on gradients (PopTorch 3.4
`RemoveSurplusIdentityLosses.cpp`, `LossOps.cpp`, `AtenHandlers.gen.cpp`).
"""

from typing import Any, Dict

from ipu_log_callback.emulator.errors import NotEmulatedError, backend_error
from ipu_log_callback.emulator.graph import Graph, Node

__all__ = ["final_loss", "is_loss", "smooths_labels"]

_SOURCE = "poptorch/source/RemoveSurplusIdentityLosses.cpp"

_LOSSES = {
    "identity_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits",
    "cosine_embedding_loss",
    "cross_entropy", "cross_entropy_loss", "ctc_loss", "hinge_embedding_loss", "kl_div", "l1_loss",
    "margin_ranking_loss", "mse_loss", "nll_loss", "nll_loss2d", "nll_loss2d_forward",
    "nll_loss_forward",
    "nll_loss_nd", "poisson_nll_loss", "smooth_l1_loss", "soft_margin_loss", "triplet_margin_loss",
}  # fmt: skip


def is_loss(node: Node, dtypes: Dict[int, Any]) -> bool:
    """Whether a recorded call marks its result as a loss.

    Args:
        node: The call.
        dtypes: Hidden value of each slot; needed because `cross_entropy` with class probabilities
            is no loss of PopTorch's.
    """
    if node.name not in _LOSSES:
        return False
    if node.name in ("cross_entropy", "cross_entropy_loss"):
        target = node.reads[1]
        return not dtypes[target].is_floating_point()
    return True


def smooths_labels(node: Node) -> bool:
    """Whether a loss is smoothed: PopTorch would differentiate only its unsmoothed part."""
    traced = node.args[5:6] if node.name == "cross_entropy_loss" else ()
    return bool(node.kwargs.get("label_smoothing") or any(traced))


def final_loss(graph: Graph, values: Dict[int, Any]) -> int:
    """Return the slot from which gradients flow.

    Raises:
        Error: If there is no loss, or more than one that does not feed another.
        NotEmulatedError: If the final loss is not a single number, or differs from what PopTorch
        would differentiate.
    """
    losses = [node for node in graph.nodes if is_loss(node, values)]
    if not losses:
        raise backend_error("Couldn't find a loss in graph!", source=_SOURCE)
    independent = [node for node in losses if not graph.feeds(node, losses)]
    if len(independent) != 1:
        raise backend_error(
            "Multiple independent losses found in graph. Graph must have one final loss. "
            "Wrap final graph loss in poptorch.identity_loss.",
            source=_SOURCE,
        )
    node = independent[0]
    if smooths_labels(node):
        raise NotEmulatedError(
            f"{node.name}(label_smoothing=...) as the final loss",
            "PopTorch would differentiate only its unsmoothed part; wrap it in "
            "poptorch.identity_loss",
        )
    slot = node.outputs[0][0]
    if values[slot].numel() != 1:
        raise NotEmulatedError(
            f"{node.name}(reduction='none') as the final loss",
            "a final loss must be a single number; wrap it in poptorch.identity_loss(..., "
            "reduction='mean')",
        )
    return slot
