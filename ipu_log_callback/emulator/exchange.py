"""What the processes of a launch exchange while they train: gradients, added up over all of them.

On hardware the replicas of all processes are one replicated graph; here MPI carries the sums.
Inference needs no exchange.
"""

from typing import Sequence

import torch

from ipu_log_callback.emulator.errors import NotEmulatedError

__all__ = ["add_up", "check_processes"]


def check_processes(count: int) -> None:
    """Refuse to train in `count` processes that cannot exchange gradients.

    Raises:
        NotEmulatedError: If mpi4py is missing, or MPI knows of another number of processes.
    """
    what = f"Options.Distributed with {count} processes, in training"
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise NotEmulatedError(what, f"gradients are exchanged with mpi4py: {error}") from error
    if MPI.COMM_WORLD.Get_size() != count:
        raise NotEmulatedError(what, f"MPI knows of {MPI.COMM_WORLD.Get_size()}")


def add_up(tensors: Sequence[torch.Tensor]) -> None:
    """Replace tensors by their sums over all processes."""
    from mpi4py import MPI

    flat = torch.cat([tensor.flatten() for tensor in tensors])
    # gathered, so that every process adds up in the same order and weights stay equal
    total = torch.stack(MPI.COMM_WORLD.allgather(flat)).sum(0)
    for tensor, part in zip(tensors, total.split([tensor.numel() for tensor in tensors])):
        tensor.copy_(part.view_as(tensor))
