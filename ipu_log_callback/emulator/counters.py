"""What costs time on hardware, counted.

`counters` adds up over all models; each executor has its own in ``executor.counters``. Nothing here
measures time: on a CPU time says nothing about an IPU.
"""

import dataclasses
from typing import Dict

__all__ = ["Counters", "counters"]


@dataclasses.dataclass
class Counters:
    """Numbers of costly events since the start or the last `reset`.

    Attributes:
        compiles: Models compiled.
        executions: Calls of compiled models.
        micro_batches: Passes of a step on one replica.
        implicit_copies_to_host: Copies of all weights caused by touching a stale parameter or
            buffer.
        explicit_copies_to_host: Calls of ``copyWeightsToHost``.
        implicit_copies_to_device: Copies of all weights by an inference model whose training twin
            moved on, by loading a state dict, or at attachment to the device.
        explicit_copies_to_device: Calls of ``copyWeightsToDevice``.
        output_tensors: Tensors that came back from executions.
        output_bytes: Their size.
        last_output_tensors: Tensors that came back from the last execution.
        last_output_bytes: Their size.
        stream_copies: Copies from device to host for outputs: with ``All`` one per tensor and
            micro-batch.
    """

    compiles: int = 0
    executions: int = 0
    micro_batches: int = 0
    implicit_copies_to_host: int = 0
    explicit_copies_to_host: int = 0
    implicit_copies_to_device: int = 0
    explicit_copies_to_device: int = 0
    output_tensors: int = 0
    output_bytes: int = 0
    last_output_tensors: int = 0
    last_output_bytes: int = 0
    stream_copies: int = 0

    def reset(self) -> None:
        """Set every number to zero."""
        for field in dataclasses.fields(self):
            setattr(self, field.name, 0)

    def as_dict(self) -> Dict[str, int]:
        """Return the numbers by name."""
        return dataclasses.asdict(self)


counters = Counters()


class Tally:
    """Counts an event for one executor and for all of them."""

    def __init__(self) -> None:
        self.own = Counters()

    def add(self, **events: int) -> None:
        """Add `events`, given by the names of `Counters`."""
        for target in (self.own, counters):
            for name, count in events.items():
                setattr(target, name, getattr(target, name) + count)

    def set_last_outputs(self, tensors: int, size: int) -> None:
        """Note what an execution returned: how many tensors, how many bytes."""
        self.add(output_tensors=tensors, output_bytes=size)
        for target in (self.own, counters):
            target.last_output_tensors = tensors
            target.last_output_bytes = size
