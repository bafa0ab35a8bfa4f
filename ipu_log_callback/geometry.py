"""Micro-batches of an execution, and what an output mode returns of them.

PopTorch lays the results of one execution out along dimension 0 in the order
`[iterations, accumulation, replicas]`, replicas innermost. Which of them come back is the output
mode's choice (PopTorch user guide, "Efficient data batching"; `PoplarExecutable.cpp` and
`Compiler::popartBatchDimForAnchor` in SDK 3.4):

========  ==============================================  ==============================
mode      results                                         value of a result
========  ==============================================  ==============================
`All`     iterations x accumulation x replicas            one micro-batch
`EveryN`  the same, divided by the return period          every n-th micro-batch
`Final`   replicas                                        the last micro-batch
`Sum`     replicas                                        sum over the replica's own
========  ==============================================  ==============================
"""

from dataclasses import dataclass
from typing import Any, Sequence

import torch

__all__ = ["Geometry", "fold"]


@dataclass(frozen=True)
class Geometry:
    """How many micro-batches one execution holds, and which of their results come back.

    Args:
        iterations: Device iterations.
        accumulation: Gradient accumulation; 1 in inference.
        replicas: Replication factor.
        output_mode: `"All"`, `"EveryN"`, `"Final"` or `"Sum"`.
        period: Return period of `"EveryN"`.
    """

    iterations: int
    accumulation: int
    replicas: int
    output_mode: str = "All"
    period: int = 1

    @classmethod
    def from_options(cls, options: Any, training: bool) -> "Geometry":
        """Read the geometry off a `poptorch.Options`.

        Args:
            options: The options that an executor holds, or that it is going to be made with.
            training: Decides what PopTorch's `Default` output mode stands for.
        """
        # PopTorch stores the mode as the enum's integer; the enum's order is
        # Final, EveryN, All, Sum, Default since SDK 2.4 (`enums.py`).
        mode = ("Final", "EveryN", "All", "Sum", "Default")[int(options.output_mode)]
        if mode == "Default":
            mode = "Final" if training else "All"
        return cls(
            iterations=int(options.device_iterations),
            accumulation=int(options.Training.gradient_accumulation),
            replicas=int(options.replication_factor),
            output_mode=mode,
            period=int(options.output_return_period) if mode == "EveryN" else 1,
        )

    @property
    def micro_batches(self) -> int:
        """Micro-batches of one execution, over all replicas."""
        return self.iterations * self.accumulation * self.replicas

    @property
    def results(self) -> int:
        """How many results of an output come back from one execution."""
        if self.output_mode == "All":
            return self.micro_batches
        if self.output_mode == "EveryN":
            return self.micro_batches // self.period
        return self.replicas

    @property
    def micro_batches_per_result(self) -> int:
        """How many micro-batches one result sums up: more than one under `Sum` only."""
        return self.iterations * self.accumulation if self.output_mode == "Sum" else 1

    @property
    def sees_every_micro_batch(self) -> bool:
        """Whether the results together tell of every micro-batch."""
        return self.results * self.micro_batches_per_result == self.micro_batches

    @property
    def sees_each_micro_batch(self) -> bool:
        """Whether every micro-batch has a result of its own."""
        return self.results == self.micro_batches


def fold(returned: torch.Tensor, inner: Sequence[int], geometry: Geometry) -> torch.Tensor:
    """Make of a tensor fetched under `All` what the user's own output mode would have returned.

    Args:
        returned: Fetched tensor, `[iterations * accumulation * replicas * inner[0], *inner[1:]]`.
        inner: Shape of one micro-batch's tensor; `()` for a scalar.
        geometry: The geometry with the user's own output mode.

    Returns:
        The user's view of it; a tensor that came back once (an output made of constants only) is
        returned as it came.
    """
    inner = tuple(inner)
    head = inner[0] if inner else 1
    if geometry.sees_each_micro_batch or tuple(returned.shape) != (
        geometry.micro_batches * head,
        *inner[1:],
    ):
        return returned
    # [updates, replicas * head, ...]: one row per micro-batch of a replica
    rows = returned.reshape(-1, geometry.replicas * head, *inner[1:])
    if geometry.output_mode == "Final":
        folded = rows[-1]
    elif geometry.output_mode == "Sum":
        folded = rows.sum(0, dtype=rows.dtype)
    else:
        folded = rows[geometry.period - 1 :: geometry.period].flatten(0, 1)
    if not inner and folded.numel() == 1:
        return folded.reshape(())
    return folded
