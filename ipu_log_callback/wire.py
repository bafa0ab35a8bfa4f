"""Pack a step's own outputs and its anchored outputs into what PopTorch returns, and back.

Every output of a compiled step is a stream copy of its own, so all anchored scalars of a step
travel in one tensor per dtype class: floating point as float32, integers and booleans as int32
(exact up to 2^31; they must not pass through a float32). Larger tensors travel by themselves.

Two forms, for PopTorch's two ways of seeing a step:

- *structured* (dispatcher): `(what the step returned, (anchored, ...))`. PopTorch keeps the step's
  own structure, types registered with it included.
- *flat* (trace mode): `torch.jit.trace` takes tuples of tensors only, so the structure stays on the
  host and is rebuilt there.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

import torch

from .geometry import Geometry, fold
from .record import AnchoredOutput, bytes_of_element
from .structure import map_tensors, tensors_of

__all__ = ["Returned", "Wire", "pack"]


@dataclass(frozen=True)
class Wire:
    """How one compiled step's outputs are laid out. Made by `pack`, read by `unpack`.

    Args:
        floats: Scalars that travel in the float32 tensor, in its order.
        integers: Scalars that travel in the int32 tensor, in its order.
        whole: Tensors that travel by themselves.
        own_shapes: Shapes of the tensors that the step itself returned, for one micro-batch.
        own_bytes: What one micro-batch of these takes on its way to the host.
        flat: In trace mode, what the step returned, to be rebuilt on the host; else `None`.
    """

    floats: Tuple[AnchoredOutput, ...] = ()
    integers: Tuple[AnchoredOutput, ...] = ()
    whole: Tuple[AnchoredOutput, ...] = ()
    own_shapes: Tuple[Tuple[int, ...], ...] = ()
    own_bytes: int = 0
    flat: Optional[Tuple[Any]] = None

    @cached_property
    def carries_anchored(self) -> bool:
        """Whether anything joined the step's own outputs."""
        return bool(self.floats or self.integers or self.whole)

    @property
    def extra_outputs(self) -> int:
        """Output tensors that anchoring added."""
        return bool(self.floats) + bool(self.integers) + len(self.whole)

    def bytes_per_execution(self, results: int) -> int:
        """Bytes that anchoring adds to one execution of which `results` results come back."""
        return results * sum(a.bytes for a in (*self.floats, *self.integers, *self.whole))

    def unpack(self, returned: Any, own: Geometry, fetched: Geometry) -> Tuple[Any, "Returned"]:
        """Take one execution's outputs apart.

        Args:
            returned: What the executor returned.
            own: Geometry with the output mode that the user asked for.
            fetched: Geometry with the output mode that the executor was given.

        Returns:
            What the step returned, with the shapes that the user's own options promise, and the
            anchored outputs.
        """
        output, anchored = self._split(returned)
        if own is not fetched and own != fetched:
            shapes = iter(self.own_shapes)
            output = map_tensors(output, lambda tensor: fold(tensor, next(shapes), own))
        return output, Returned(self, anchored)

    def _split(self, returned: Any) -> Tuple[Any, Sequence[torch.Tensor]]:
        if self.flat is None:
            return returned if self.carries_anchored else (returned, ())
        tensors = returned if isinstance(returned, (tuple, list)) else (returned,)
        rest = iter(tensors)
        output = map_tensors(self.flat[0], lambda _: next(rest))
        return output, tuple(rest)


class Returned:
    """The anchored outputs of one execution, on the host.

    Args:
        wire: The layout they came in.
        tensors: The anchored tensors in the wire's order.
    """

    def __init__(self, wire: Wire, tensors: Sequence[torch.Tensor]) -> None:
        self.wire = wire
        self.tensors = tensors
        self._positions: Optional[Dict[int, torch.Tensor]] = None

    @property
    def floats(self) -> torch.Tensor:
        """All floating point scalars, `[results, len(wire.floats)]`, float32."""
        return self.tensors[0].reshape(-1, len(self.wire.floats))

    @property
    def integers(self) -> torch.Tensor:
        """All integer and boolean scalars, `[results, len(wire.integers)]`, int32."""
        return self.tensors[bool(self.wire.floats)].reshape(-1, len(self.wire.integers))

    def of(self, anchored: AnchoredOutput, results: int) -> torch.Tensor:
        """One anchored output, `[results, *anchored.shape]`.

        Integers are widened to int64 (PopTorch has int32 only, and some metrics refuse it),
        booleans are booleans again. What came back once, an output made of constants only, is
        repeated for every result.
        """
        tensor = self._widened(anchored).reshape(-1, *anchored.shape)
        return tensor.expand(results, *anchored.shape) if len(tensor) == 1 else tensor

    def samples(self, anchored: AnchoredOutput, results: int) -> torch.Tensor:
        """The same with all micro-batches joined, `[results * shape[0], *shape[1:]]`."""
        tensor = self._widened(anchored)
        if not anchored.is_scalar and len(tensor) == results * anchored.shape[0]:
            return tensor  # as PopTorch returned it
        return self.of(anchored, results).reshape(-1, *anchored.shape[1:])

    def _widened(self, anchored: AnchoredOutput) -> torch.Tensor:
        if self._positions is None:
            self._positions = self._by_index()
        tensor = self._positions[anchored.index]
        if anchored.dtype == torch.bool:
            return tensor.bool()
        return tensor if tensor.is_floating_point() else tensor.long()

    def _by_index(self) -> Dict[int, torch.Tensor]:
        wire, found = self.wire, {}
        if wire.floats:
            columns = self.floats.unbind(1)
            found.update({a.index: column for a, column in zip(wire.floats, columns)})
        if wire.integers:
            columns = self.integers.unbind(1)
            found.update({a.index: column for a, column in zip(wire.integers, columns)})
        rest = self.tensors[bool(wire.floats) + bool(wire.integers) :]
        found.update({a.index: tensor for a, tensor in zip(wire.whole, rest)})
        return found


def pack(
    output: Any,
    anchored: Sequence[AnchoredOutput],
    tensors: Mapping[int, torch.Tensor],
    structured: bool,
    varying: Optional[torch.Tensor] = None,
) -> Tuple[Any, Wire]:
    """Join a step's own outputs and its anchored outputs. Runs on the device side.

    Args:
        output: What the step returned.
        anchored: The anchored outputs that are wanted.
        tensors: Detached device tensors by `AnchoredOutput.index`.
        structured: False in trace mode.
        varying: Any tensor of the batch, under `Sum`: scalars made of constants only would come
            back once and not summed, which their shape does not show.

    Returns:
        What the step returns to PopTorch, and its layout.
    """
    scalars = [a for a in anchored if a.is_scalar]
    floats = tuple(a for a in scalars if a.dtype.is_floating_point)
    integers = tuple(a for a in scalars if not a.dtype.is_floating_point)
    whole = tuple(a for a in anchored if not a.is_scalar)
    own = tensors_of(output)

    packed: List[torch.Tensor] = []
    for group, dtype in ((floats, torch.float32), (integers, torch.int32)):
        if group:
            stacked = torch.stack([tensors[a.index].reshape(()).to(dtype) for a in group])
            packed.append(stacked if varying is None else stacked + _zero_of(varying).to(dtype))
    packed.extend(tensors[a.index] for a in whole)

    wire = Wire(
        floats=floats,
        integers=integers,
        whole=whole,
        own_shapes=tuple(tuple(tensor.shape) for tensor in own),
        own_bytes=sum(tensor.numel() * bytes_of_element(tensor.dtype) for tensor in own),
        flat=None if structured else (map_tensors(output, lambda _: _.new_empty(0)),),
    )
    if structured:
        # PopTorch keeps the containers as its template: a step may go on to change its own
        kept = map_tensors(output, lambda tensor: tensor)
        return ((kept, tuple(packed)) if packed else output), wire
    if not packed and (output is None or isinstance(output, torch.Tensor)):
        return output, wire
    return (*own, *packed), wire


def _zero_of(tensor: torch.Tensor) -> torch.Tensor:
    """A zero, `[1]`, that the device computes from a tensor, whatever numbers it holds."""
    number = tensor.reshape(-1)[:1]
    return torch.ne(number, number).int() * 0
