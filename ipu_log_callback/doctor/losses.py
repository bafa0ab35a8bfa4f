"""The one-loss rule, asked for every value that leaves a training step.

In training, every torch loss function marks its result as a loss of the model. A loss that feeds
another one is an ordinary operation; of the rest there must be exactly one among what leaves the
step (PopTorch 3.4 `RemoveSurplusIdentityLosses.cpp`).
"""

import copy
from typing import Any, Dict, List, Optional, Set, Tuple

import torch

from ipu_log_callback.emulator.graph import Graph, Node
from ipu_log_callback.emulator.losses import is_loss
from ipu_log_callback.emulator.structures import flatten
from ipu_log_callback.record import CallSite

__all__ = ["LossFault", "loss_faults", "returned_loss"]

#: Kind, what, line.
LossFault = Tuple[str, str, Optional[CallSite]]


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
        sites: Line of each call of a loss function, by identity of its node.
    """
    loss = returned_loss(output)
    slot = getattr(loss, "_slot", None)
    if slot is None:
        shown = "None" if output is None else f"{type(output).__name__} without a loss"
        return [("no-loss", f"returns {shown}, expected the loss", None)]
    own = _losses_behind(graph, slot, values)
    if not own:
        return [("no-loss", "returns a loss that no torch loss function made", None)]
    final = [node for node in own if not graph.feeds(node, own)]
    faults: List[LossFault] = []
    if len(final) > 1:
        faults.append(("several-losses", "", sites.get(id(final[-1]))))
    known = {id(node) for node in own}
    others = [("returns", tensor, None) for tensor in flatten(output) if tensor is not loss]
    seen: Set[Any] = set()
    for what, tensor, site in [*anchored, *others]:
        behind = _losses_behind(graph, getattr(tensor, "_slot", -1), values)
        strange = [node for node in behind if id(node) not in known]
        place = site or (sites.get(id(strange[0])) if strange else None)
        if strange and place not in seen:
            seen.add(place)
            faults.append(("second-loss", what, place))
    return faults


def _losses_behind(graph: Graph, slot: int, values: Dict[int, Any]) -> List[Node]:
    """The calls of loss functions that a value depends on."""
    if slot not in graph.groups:
        return []
    part = copy.copy(graph)
    part.nodes = list(graph.nodes)
    part.states, part.inputs, part.outputs = {}, [], [slot]
    part.remove_dead_calls()
    return [node for node in part.nodes if is_loss(node, values)]
