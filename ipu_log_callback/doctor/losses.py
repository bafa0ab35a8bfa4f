"""The one-loss rule, asked for every value that leaves a training step.

In training, every torch loss function marks its result as a loss of the model. A loss that feeds
another one is an ordinary operation; of the rest there must be exactly one among what leaves the
step (PopTorch 3.4 `RemoveSurplusIdentityLosses.cpp`).
"""

from typing import Any, Dict, List, NamedTuple, Optional, Set, Tuple

import torch

from ipu_log_callback.emulator.graph import Graph, Node
from ipu_log_callback.emulator.losses import is_loss, smooths_labels
from ipu_log_callback.emulator.structures import flatten
from ipu_log_callback.record import CallSite

__all__ = ["LossFault", "loss_faults", "returned_loss"]

#: Calls that hand on what they are given.
_PASSING = {
    "alias", "clone", "contiguous", "detach", "float", "reshape", "squeeze", "to",
    "unsqueeze", "view",
}  # fmt: skip
#: Calls that hand on what they are given if it is one number.
_REDUCING = {"mean", "sum"}


class LossFault(NamedTuple):
    """One breach of the rule.

    Attributes:
        kind: Kind of the finding.
        what: What it is about.
        site: The line, or `None` for the one where the step returns.
        fix: Replaces the kind's.
    """

    kind: str
    what: str
    site: Optional[CallSite] = None
    fix: str = ""


def returned_loss(output: Any) -> Any:
    """The loss among what a `training_step` returned, as Lightning finds it."""
    if isinstance(output, dict):
        return output.get("loss")
    return output if isinstance(output, torch.Tensor) else None


def loss_faults(
    graph: Graph,
    values: Dict[int, Any],
    output: Any,
    anchored: List[Tuple[str, torch.Tensor, CallSite]],
    sites: Dict[int, Optional[CallSite]],
) -> List[LossFault]:
    """What breaks the one-loss rule.

    Args:
        graph: The recorded step.
        values: Hidden value of each slot.
        output: What the step returned.
        anchored: Logged and metric values: what is done with the value, the tensor, the line.
        sites: Line of each recorded call, by identity of its node.
    """
    loss = returned_loss(output)
    if getattr(loss, "_slot", None) is None:
        shown = "None" if output is None else f"{type(output).__name__} without a loss"
        fix = 'return the loss, or a dict with it under "loss"'
        return [LossFault("no-loss", f"returns {shown}, expected the loss", fix=fix)]
    needed = _calls_behind(graph, loss)
    own = [node for node in needed if is_loss(node, values)]
    if not own:
        return [LossFault("no-loss", "returns a loss that no torch loss function made")]
    final = [node for node in own if not graph.feeds(node, own)]
    faults: List[LossFault] = []
    if len(final) > 1:
        faults.append(LossFault("several-losses", "", sites.get(id(final[-1]))))
    else:
        wanted = {id(node) for node in needed}
        later = [node for node in graph.computed_from(final[0]) if id(node) in wanted]
        faults.extend(_taken_too_early(final[0], later, values, sites))
    known = {id(node) for node in own}
    others = [("returns", tensor, None) for tensor in flatten(output) if tensor is not loss]
    seen: Set[Any] = set()
    for what, tensor, site in [*anchored, *others]:
        losses = [node for node in _calls_behind(graph, tensor) if is_loss(node, values)]
        strange = [node for node in losses if id(node) not in known]
        place = site or (sites.get(id(strange[0])) if strange else None)
        if strange and place not in seen:
            seen.add(place)
            faults.append(LossFault("second-loss", what, place))
    return faults


def _taken_too_early(
    final: Node,
    later: List[Node],
    values: Dict[int, Any],
    sites: Dict[int, Optional[CallSite]],
) -> List[LossFault]:
    """What the returned loss has and the one that PopTorch differentiates has not."""
    site = sites.get(id(final))
    if smooths_labels(final):
        return [LossFault("loss-form", "smooths the labels of its loss", site)]
    if values[final.outputs[0][0]].numel() != 1:
        return [LossFault("loss-form", 'takes its loss of every element (reduction="none")', site)]
    changes = [node for node in later if not _hands_on(node, values)]
    return [LossFault("loss-arithmetic", "", sites.get(id(changes[0])))] if changes else []


def _hands_on(node: Node, values: Dict[int, Any]) -> bool:
    one = node.name in _REDUCING and all(values[read].numel() == 1 for read in node.reads)
    return one or node.name in _PASSING or node.name.startswith("get:")


def _calls_behind(graph: Graph, tensor: Any) -> List[Node]:
    slot = getattr(tensor, "_slot", None)
    return graph.calls_behind(slot) if slot in graph.groups else []
