"""The one-loss rule, asked for every value that leaves a training step.

In training, every torch loss function marks its result as a loss of the model. A loss that feeds
another one is an ordinary operation; of the rest there must be exactly one among what leaves the
step (PopTorch 3.4 `RemoveSurplusIdentityLosses.cpp`).
"""

import copy
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
    slot = getattr(loss, "_slot", None)
    if slot is None:
        shown = "None" if output is None else f"{type(output).__name__} without a loss"
        fix = 'return the loss, or a dict with it under "loss"'
        return [LossFault("no-loss", f"returns {shown}, expected the loss", fix=fix)]
    own = _losses_behind(graph, slot, values)
    if not own:
        return [LossFault("no-loss", "returns a loss that no torch loss function made")]
    final = [node for node in own if not graph.feeds(node, own)]
    faults: List[LossFault] = []
    if len(final) > 1:
        faults.append(LossFault("several-losses", "", sites.get(id(final[-1]))))
    else:
        faults.extend(_taken_too_early(graph, final[0], slot, values, sites))
    known = {id(node) for node in own}
    others = [("returns", tensor, None) for tensor in flatten(output) if tensor is not loss]
    seen: Set[Any] = set()
    for what, tensor, site in [*anchored, *others]:
        behind = _losses_behind(graph, getattr(tensor, "_slot", -1), values)
        strange = [node for node in behind if id(node) not in known]
        place = site or (sites.get(id(strange[0])) if strange else None)
        if strange and place not in seen:
            seen.add(place)
            faults.append(LossFault("second-loss", what, place))
    return faults


def _taken_too_early(
    graph: Graph,
    final: Node,
    slot: int,
    values: Dict[int, Any],
    sites: Dict[int, Optional[CallSite]],
) -> List[LossFault]:
    """What the returned loss has and the one that PopTorch differentiates has not."""
    site = sites.get(id(final))
    if smooths_labels(final):
        return [LossFault("loss-form", "smooths the labels of its loss", site)]
    if values[final.outputs[0][0]].numel() != 1:
        return [LossFault("loss-form", 'takes its loss of every element (reduction="none")', site)]
    changes = [node for node in _computed_from(graph, final, slot) if not _hands_on(node, values)]
    return [LossFault("loss-arithmetic", "", sites.get(id(changes[0])))] if changes else []


def _hands_on(node: Node, values: Dict[int, Any]) -> bool:
    one = node.name in _REDUCING and all(values[read].numel() == 1 for read in node.reads)
    return one or node.name in _PASSING or node.name.startswith("get:")


def _computed_from(graph: Graph, source: Node, slot: int) -> List[Node]:
    """The calls between what one call made and a value."""
    needed = _calls_behind(graph, slot)
    tainted = {graph.groups[made] for made, _ in source.outputs}
    between: List[Node] = []
    for node in needed[needed.index(source) + 1 :]:
        if tainted & {graph.groups[read] for read in node.reads}:
            between.append(node)
            tainted |= {graph.groups[made] for made, _ in node.outputs} | node.mutates
    return between


def _losses_behind(graph: Graph, slot: int, values: Dict[int, Any]) -> List[Node]:
    """The calls of loss functions that a value depends on."""
    return [node for node in _calls_behind(graph, slot) if is_loss(node, values)]


def _calls_behind(graph: Graph, slot: int) -> List[Node]:
    """The calls that a value depends on, in order."""
    if slot not in graph.groups:
        return []
    part = copy.copy(graph)
    part.nodes = list(graph.nodes)
    part.states, part.inputs, part.outputs = {}, [], [slot]
    part.remove_dead_calls()
    return part.nodes
