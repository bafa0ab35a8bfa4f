"""A recorded step as a Python function on real tensors.

The calls become straight-line Python source with one local variable per slot, freed after its last
use, so that replaying a micro-batch costs little more than the calls themselves. PyTorch's autograd
sees ordinary calls on ordinary tensors.
"""

import dataclasses
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import torch

from ipu_log_callback.emulator.graph import Graph, Node, Ref

__all__ = ["Program", "compile_program"]

_LITERALS = (bool, int, type(None))


@dataclasses.dataclass(frozen=True)
class Program:
    """What a device executes for one micro-batch.

    Attributes:
        run: Called with one list of input slices and one list of states; returns the wanted values.
        states: Names of the states that `run` expects, in order.
        is_random: Whether it draws random numbers.
    """

    run: Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], Tuple[torch.Tensor, ...]]
    states: List[str]
    is_random: bool


class _Writer:
    """Turns a graph into Python source and the objects that the source refers to."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._names: Dict[int, str] = {}
        self.namespace: Dict[str, Any] = {"set_grad_enabled": torch.set_grad_enabled}
        self.lines: List[str] = []

    def bind(self, value: Any, prefix: str) -> str:
        """Return a name under which the source can use `value`."""
        name = self._names.get(id(value))
        if name is None:
            name = self._names[id(value)] = f"{prefix}{len(self._names)}"
            self.namespace[name] = value
        return name

    def expression(self, template: Any) -> str:
        if isinstance(template, Ref):
            return f"v{template.slot}"
        if type(template) in _LITERALS:
            return repr(template)
        if type(template) is list:
            return f"[{', '.join(map(self.expression, template))}]"
        if type(template) is tuple:
            return f"({''.join(self.expression(item) + ', ' for item in template)})"
        return self.bind(template, "c")

    def call(self, node: Node) -> str:
        arguments = [self.expression(arg) for arg in node.args]
        named = [f"{key}={self.expression(value)}" for key, value in node.kwargs.items()]
        return f"{self.bind(node.func, 'f')}({', '.join(arguments + named)})"

    def write(self, node: Node) -> None:
        call = self.call(node)
        paths = {path: slot for slot, path in node.outputs}
        if () in paths:
            self.lines.append(f"v{paths[()]} = {call}")
        elif not paths:
            self.lines.append(call)
        else:
            self.lines.append(f"r = {call}")
            for path, slot in paths.items():
                self.lines.append(f"v{slot} = r{''.join(f'[{index}]' for index in path)}")

    def write_all(self, last_use: Dict[int, int]) -> None:
        """Write every call; `last_use` says after which call a slot may be freed."""
        grad = True
        freed: Dict[int, List[int]] = {}
        for slot, index in last_use.items():
            freed.setdefault(index, []).append(slot)
        for index, node in enumerate(self._graph.nodes):
            if node.grad != grad:
                grad = node.grad
                self.lines.append(f"set_grad_enabled({grad})")
            self.write(node)
            self.lines += [f"v{slot} = None" for slot in freed.get(index, ())]
        if not grad:
            self.lines.append("set_grad_enabled(True)")


def _last_uses(graph: Graph, wanted: Sequence[int]) -> Dict[int, int]:
    uses: Dict[int, int] = {}
    for index, node in enumerate(graph.nodes):
        for slot in [*node.reads, *(slot for slot, _ in node.outputs)]:
            uses[slot] = index
    for slot in [*wanted, *graph.constants]:
        uses.pop(slot, None)
    return uses


def compile_program(graph: Graph, wanted: Sequence[int], no_grad: bool) -> Program:
    """Make a function of `graph` that returns the slots `wanted`.

    Args:
        graph: The recorded step, already cleaned of dead calls.
        wanted: Slots whose values are returned, in order.
        no_grad: Whether gradients are never needed; grad-mode switches of the step are then left
            out.
    """
    if no_grad:
        for node in graph.nodes:
            node.grad = True
    writer = _Writer(graph)
    used = {slot for node in graph.nodes for slot in node.reads} | set(wanted)
    mutated = graph.mutated()
    states = [name for name, slot in graph.states.items() if slot in used]
    header = []
    for index, slot in enumerate(graph.inputs):
        if slot in used:
            # The device has memory of its own: a step that writes to an input must not reach the
            # host's tensor.
            copy = ".clone()" if graph.groups[slot] in mutated else ""
            header.append(f"v{slot} = inputs[{index}]{copy}")
    header += [f"v{graph.states[name]} = states[{index}]" for index, name in enumerate(states)]
    for slot, value in graph.constants.items():
        if slot in used:
            copy = ".clone()" if graph.groups[slot] in mutated else ""
            header.append(f"v{slot} = {writer.bind(value, 'k')}{copy}")
    writer.write_all(_last_uses(graph, wanted))
    tail = f"return ({''.join(f'v{slot}, ' for slot in wanted)})"
    body = "\n    ".join([*header, *writer.lines, tail])
    source = f"def run(inputs, states):\n    {body}\n"
    exec(compile(source, "<compiled step>", "exec"), writer.namespace)  # noqa: S102  # our own text
    run: Optional[Callable[..., Any]] = writer.namespace["run"]
    assert run is not None
    return Program(run, states, any(node.random for node in graph.nodes))
