"""The recorded step: which functions were called on which values, and what of it matters.

A *slot* stands for one tensor value of the step. Tensors that share memory are one *group*: writing
to one of them writes to all, so liveness and data flow are tracked by group.
"""

import dataclasses
from typing import Any, Callable, Dict, FrozenSet, Hashable, Iterator, List, Set, Tuple

import torch

__all__ = ["Graph", "Node", "Ref", "refs_in"]

Group = Hashable


@dataclasses.dataclass(frozen=True)
class Ref:
    """Place of a slot's value in a call's recorded arguments."""

    slot: int


def refs_in(template: Any) -> Iterator[int]:
    """Yield the slots named in recorded arguments."""
    if isinstance(template, Ref):
        yield template.slot
    elif isinstance(template, (list, tuple)):
        for item in template:
            yield from refs_in(item)
    elif isinstance(template, dict):
        for item in template.values():
            yield from refs_in(item)


@dataclasses.dataclass
class Node:
    """One recorded call.

    Attributes:
        func: What to call.
        args: Positional arguments, with `Ref` for values of the step.
        kwargs: Keyword arguments, likewise.
        outputs: New slots, each with the path that leads to it in the call's result; ``()`` is the
            result itself.
        mutates: Groups that the call writes to.
        grad: Whether gradients were enabled.
        random: Whether the call draws random numbers.
        name: Name of the function, for the loss rule and for error messages.
    """

    func: Callable[..., Any]
    args: Tuple[Any, ...]
    kwargs: Dict[str, Any]
    outputs: List[Tuple[int, Tuple[int, ...]]]
    mutates: FrozenSet[Group]
    grad: bool
    random: bool
    name: str

    @property
    def reads(self) -> List[int]:
        """Slots among the arguments."""
        return list(refs_in((self.args, self.kwargs)))


class Graph:
    """The calls of one step in order, and where their values come from and go to.

    Attributes:
        nodes: The calls.
        groups: Group of each slot.
        inputs: Slots of the step's tensor arguments, in the order of the flattened arguments.
        states: Slot of each floating-point parameter and buffer.
        constants: Values known at compile time, integer buffers among them.
        outputs: Slots of the tensors that the step returned, in order.
    """

    def __init__(self) -> None:
        self.nodes: List[Node] = []
        self.groups: Dict[int, Group] = {}
        self.inputs: List[int] = []
        self.states: Dict[str, int] = {}
        self.constants: Dict[int, torch.Tensor] = {}
        self.outputs: List[int] = []

    def new_slot(self, group: Group) -> int:
        """Return a slot for one more value, which belongs to `group`."""
        slot = len(self.groups)
        self.groups[slot] = group
        return slot

    def mutated(self) -> Set[Group]:
        """Return the groups that some call writes to."""
        return {group for node in self.nodes for group in node.mutates}

    def fold_constants(self, values: Dict[int, torch.Tensor]) -> None:
        """Replace calls that depend on nothing but constants by their values at compile time."""
        mutated = self.mutated()
        kept = []
        for node in self.nodes:
            slots = [slot for slot, _ in node.outputs]
            involved = node.reads + slots
            foldable = (
                not node.random
                and not node.mutates
                and all(slot in self.constants for slot in node.reads)
                and not any(self.groups[slot] in mutated for slot in involved)
            )
            if foldable:
                self.constants.update({slot: values[slot].detach() for slot in slots})
            else:
                kept.append(node)
        self.nodes = kept

    def remove_dead_calls(self) -> None:
        """Keep only calls that an output, or a value that outlives the execution, depends on."""
        lasting = {self.groups[slot] for slot in [*self.states.values(), *self.inputs]}
        live: Set[Group] = {self.groups[slot] for slot in self.outputs}
        live |= lasting & self.mutated()
        _, self.nodes = self._computing(live)

    def origins(self, slot: int) -> Set[Group]:
        """Return the groups that the value in `slot` is computed from, its own among them."""
        needed, _ = self._computing({self.groups[slot]})
        return needed

    def calls_behind(self, slot: int) -> List[Node]:
        """Return the calls that the value in `slot` is computed from, in order."""
        return self._computing({self.groups[slot]})[1]

    def _computing(self, wanted: Set[Group]) -> Tuple[Set[Group], List[Node]]:
        """Return the groups that `wanted` are computed from, themselves too, and by which calls."""
        needed, calls = set(wanted), []
        for node in reversed(self.nodes):
            produced = {self.groups[slot] for slot, _ in node.outputs}
            if needed & (produced | node.mutates):
                needed |= {self.groups[slot] for slot in node.reads}
                calls.append(node)
        return needed, calls[::-1]

    def feeds(self, source: Node, targets: List[Node]) -> bool:
        """Whether a value made by `source` reaches one of `targets`, over any number of calls."""
        wanted = {id(target) for target in targets}
        return any(id(node) in wanted for node in self.computed_from(source))

    def computed_from(self, source: Node) -> Iterator[Node]:
        """The calls that a value made by `source` reaches, in order."""
        tainted = {self.groups[slot] for slot, _ in source.outputs}
        for node in self.nodes[self.nodes.index(source) + 1 :]:
            if tainted & {self.groups[slot] for slot in node.reads}:
                yield node
                tainted |= {self.groups[slot] for slot, _ in node.outputs} | node.mutates
