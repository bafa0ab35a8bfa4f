"""One process's part of a data set that several share (PopTorch 3.4 `__init__.py`)."""

from typing import Any, Optional

import torch

from ipu_log_callback.emulator.options import Options

__all__ = ["ProcessPart"]


class ProcessPart:
    """A contiguous part of a map-style data set; process 0 has the first elements.

    With `shuffle`, all processes draw the same order of the whole data set and take their parts of
    that.
    """

    def __init__(self, dataset: Any, options: Options, step: int, drop_last: bool) -> None:
        """Cut out the part of the process that `options` names.

        Args:
            dataset: The whole.
            options: Process id, count of processes and random seed.
            step: Elements that one execution takes.
            drop_last: Whether all parts have the same number of whole executions; otherwise all
                elements are dealt out.
        """
        count, process = options.Distributed.numProcesses, options.Distributed.processId
        elements = len(dataset)
        self._leftover = 0
        if drop_last:
            part = step * (elements // (step * count))
            self._first = process * part
            self._length = min(part, elements - self._first)
            self._leftover = elements % part if part else 0
        else:
            parts = [elements // count + (elements % count > index) for index in range(count)]
            self._first = sum(parts[:process])
            self._length = parts[process]
        self._dataset = dataset
        self._seed = options.random_seed if options.exists("random_seed") else None
        self._generator: Optional[torch.Generator] = None
        self._order: Optional[torch.Tensor] = None
        self._take_leftover = False

    def shuffle(self) -> None:
        """Draw a new order, and let the last and the first elements be left over in turn."""
        if self._generator is None:
            self._generator = torch.Generator()
            assert self._seed is not None  # the loader checked it
            self._generator.manual_seed(self._seed)
        order = torch.randperm(len(self._dataset), generator=self._generator)
        if self._order is None:
            # In shared memory, so that workers that live on see every new order.
            self._order = order.share_memory_()
        else:
            self._order.copy_(order)
        self._take_leftover = not self._take_leftover

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        position = index + self._first + (self._leftover if self._take_leftover else 0)
        return self._dataset[position if self._order is None else int(self._order[position])]
