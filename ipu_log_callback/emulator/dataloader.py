"""`poptorch.DataLoader`: batches for a whole execution at a time.

The asynchronous modes give the same batches as on hardware, but fetch them when they are asked for:
no process is started and nothing is loaded ahead (PopTorch 3.4 `__init__.py`, `_dataloader.py`).
"""

from typing import (
    Any,
    Callable,
    Dict,
    Iterable,
    Iterator,
    List,
    Optional,
    Sequence,
    Sized,
    Union,
    cast,
)

import torch
from torch.utils.data import IterableDataset, Sampler

from ipu_log_callback.emulator.console import logger
from ipu_log_callback.emulator.enums import DataLoaderMode, SharingStrategy
from ipu_log_callback.emulator.errors import python_error
from ipu_log_callback.emulator.options import Options
from ipu_log_callback.emulator.partition import ProcessPart
from ipu_log_callback.emulator.structures import flatten, rebuild

__all__ = ["AsynchronousDataAccessor", "DataLoader"]


class DataLoader(torch.utils.data.DataLoader):  # type: ignore[type-arg]  # generic only for checkers
    """PyTorch's loader, a batch being `batch_size` times iterations, replicas, accumulation."""

    def __init__(
        self,
        options: Options,
        dataset: Any,
        batch_size: Optional[int] = 1,
        shuffle: Optional[bool] = None,
        num_workers: int = 0,
        drop_last: bool = True,
        persistent_workers: Optional[bool] = None,
        auto_distributed_partitioning: bool = True,
        mode: DataLoaderMode = DataLoaderMode.Sync,
        async_options: Optional[Dict[str, Any]] = None,
        rebatched_worker_size: Optional[int] = None,
        batch_sampler: Optional[Union["Sampler[List[int]]", Iterable[List[int]]]] = None,
        **kwargs: Any,
    ) -> None:
        """Build the loader and freeze `options`.

        Args:
            options: Those of the model that will get the batches.
            dataset: Map-style or iterable.
            batch_size: Elements in a micro-batch; ``None`` for elements as they are.
            shuffle: Whether to draw in random order.
            num_workers: Processes that read the data set.
            drop_last: Whether to drop an incomplete last batch; the device needs complete ones.
            persistent_workers: Whether workers outlive an epoch; by default if there are any.
            auto_distributed_partitioning: Whether each process gets its own part of the data set.
            mode: `DataLoaderMode`.
            async_options: Arguments for `AsynchronousDataAccessor`.
            rebatched_worker_size: Elements that a worker loads at a time when batches are put
                together later.
            batch_sampler: Draws the micro-batches; excludes `batch_size` and `shuffle`.
            **kwargs: For PyTorch's loader.

        Raises:
            Error: If `batch_sampler` comes with what it excludes.
            AssertionError: If the process's part of the data set cannot be cut out.
        """
        assert isinstance(options, Options)
        self._accessor: Optional[AsynchronousDataAccessor] = None
        self._options = options
        self._drop_last_asked = drop_last
        self._own_batch_sampler = batch_sampler is not None
        if batch_sampler is not None:
            _refuse_with_batch_sampler(options, batch_size, shuffle, auto_distributed_partitioning)
            batch_size = getattr(batch_sampler, "batch_size", batch_size)
        options._freeze()
        self._set_combined_batch_size(options, batch_size)
        self._is_iterable = isinstance(dataset, IterableDataset)
        self._reshuffled: Optional[ProcessPart] = None
        if self._is_iterable:
            _check_iterable(options, num_workers, auto_distributed_partitioning, kwargs)
        else:
            self._warn_of_incomplete_batch(dataset, batch_sampler)
            if options.Distributed.numProcesses > 1 and auto_distributed_partitioning:
                dataset = self._own_part(dataset, shuffle)
                if shuffle:
                    self._reshuffled, shuffle = dataset, False

        rebatched_size = None
        worker_batch_size = 1 if self._own_batch_sampler else self._combined_batch_size
        if self._must_rebatch(mode):
            rebatched_size = self._combined_batch_size
            drop_last = False
            if rebatched_worker_size is not None:
                assert rebatched_worker_size <= (rebatched_size or 0), (
                    f"The rebatched_worker_size ({rebatched_worker_size}) must be <= to the "
                    f"combined batch size ({rebatched_size})"
                )
                worker_batch_size = rebatched_worker_size
        super().__init__(
            dataset,
            batch_size=worker_batch_size,
            shuffle=None if self._own_batch_sampler else bool(shuffle),
            batch_sampler=batch_sampler,
            num_workers=num_workers,
            drop_last=False if self._own_batch_sampler else drop_last,
            persistent_workers=num_workers > 0
            if persistent_workers is None
            else persistent_workers,
            **kwargs,
        )
        if mode != DataLoaderMode.Sync:
            async_options = async_options or {}
            assert "rebatched_size" not in async_options, (
                "You cannot use DataLoaderMode.AsyncRebatched and manually specify the "
                "rebatched_size in async_options"
            )
            self._accessor = AsynchronousDataAccessor(
                self, **async_options, rebatched_size=rebatched_size
            )

    @property
    def combinedBatchSize(self) -> Optional[int]:
        """Elements that one execution takes."""
        return self._combined_batch_size

    @property
    def options(self) -> Options:
        """The options given."""
        return self._options

    def terminate(self) -> None:
        """Stop an asynchronous mode's process; there is none in the emulator."""
        if self._accessor is not None:
            self._accessor.terminate()

    def __len__(self) -> int:
        if self._accessor is not None and self._accessor.rebatched_size:
            whole, rest = divmod(len(cast(Sized, self.dataset)), self._accessor.rebatched_size)
            return whole + bool(rest and not self._drop_last_asked)
        return super().__len__()

    def __iter__(self) -> Any:
        if self._accessor is not None:
            return iter(self._accessor)
        return self.iterate_here()

    def iterate_here(self) -> Iterator[Any]:
        """Iterate without the asynchronous accessor."""
        if self._reshuffled is not None:
            self._reshuffled.shuffle()
        batches: Iterator[Any] = super().__iter__()
        if self._own_batch_sampler and self._num_batches_to_combine not in (None, 1):
            return _joined(batches, self._num_batches_to_combine, self._drop_last_asked)
        return batches

    def _set_combined_batch_size(self, options: Options, batch_size: Optional[int]) -> None:
        self._combined_batch_size: Optional[int] = None
        self._num_batches_to_combine: Optional[int] = None
        if batch_size is not None:
            groups = options.replication_factor // options.input_group_size
            self._num_batches_to_combine = (
                options.device_iterations * groups * options.Training.gradient_accumulation
            )
            self._combined_batch_size = batch_size * self._num_batches_to_combine

    def _must_rebatch(self, mode: DataLoaderMode) -> bool:
        """Whether batches are put together after the workers: only the very last is incomplete."""
        if mode == DataLoaderMode.AsyncRebatched:
            return True
        return (
            mode == DataLoaderMode.Async
            and not self._drop_last_asked
            and (self._combined_batch_size or 0) > 1
        )

    def _own_part(self, dataset: Any, shuffle: Optional[bool]) -> ProcessPart:
        assert not shuffle or self._options.exists("random_seed"), (
            "When using auto_distributed_partitioning you must set "
            "poptorch.Options.randomSeed() to ensure that tensors are in the same order in all "
            "processes."
        )
        assert self._combined_batch_size is not None, (
            "batch_size=None not allowed when using auto_distributed_partitioning."
        )
        return ProcessPart(dataset, self._options, self._combined_batch_size, self._drop_last_asked)

    def _warn_of_incomplete_batch(self, dataset: Any, batch_sampler: Any) -> None:
        if self._drop_last_asked or self._combined_batch_size is None:
            return
        if self._own_batch_sampler:
            batches = _length(batch_sampler)
            assert self._num_batches_to_combine is not None
            rest = None if batches is None else batches % self._num_batches_to_combine
            what = "micro-batches from the batch sampler"
        else:
            processes = self._options.Distributed.numProcesses
            rest = len(dataset) % (self._combined_batch_size * processes)
            what = "elements of the data set"
        if rest != 0:
            logger.warning(
                "drop_last=False and %s %s are left over for the last batch, which the device will "
                "not accept; use drop_last=True, or handle that batch yourself.",
                "an unknown number of" if rest is None else rest,
                what,
            )


class AsynchronousDataAccessor:
    """Iterates over a data set or loader of flat batches of tensors; rebatches them if asked."""

    def __init__(
        self,
        dataset: Any,
        buffer_size: int = 3,
        miss_sleep_time_in_ms: float = 0.1,
        load_indefinitely: bool = True,
        early_preload: bool = False,
        sharing_strategy: SharingStrategy = SharingStrategy.ForkServer,
        rebatched_size: Optional[int] = None,
    ) -> None:
        """Wrap `dataset`; only `rebatched_size` matters, there being no process to set up.

        Args:
            dataset: A `DataLoader` or any iterable.
            buffer_size: Accepted.
            miss_sleep_time_in_ms: Accepted.
            load_indefinitely: Accepted.
            early_preload: Accepted.
            sharing_strategy: Accepted.
            rebatched_size: Elements of the batches to return, whatever the size of those that come.

        Raises:
            Error: If the loader already is asynchronous.
            AssertionError: If the loader's incomplete last batch could not be returned, or
                `rebatched_size` is not above 1.
        """
        del buffer_size, miss_sleep_time_in_ms, load_indefinitely, early_preload, sharing_strategy
        if isinstance(dataset, DataLoader):
            if dataset._accessor is not None:
                raise python_error(
                    "The DataLoader already uses an AsynchronousDataAccessor internally. Either "
                    "use the existing one or set mode='poptorch.DataLoaderMode.Sync' in the "
                    "DataLoader."
                )
            if not dataset._own_batch_sampler and not dataset.drop_last and rebatched_size is None:
                assert dataset.combinedBatchSize in (None, 1), (
                    "The 'drop_last=False' option from the DataLoader only works if "
                    "'rebatched_size' is specified too."
                )
        assert rebatched_size is None or rebatched_size > 1, (
            "rebatched_size must be None or greater than 1"
        )
        self._dataset = dataset
        self.rebatched_size = rebatched_size
        self._current: Optional[Iterator[Any]] = None

    def terminate(self) -> None:
        """Forget the iteration under way."""
        self._current = None

    def __len__(self) -> int:
        length = len(self._dataset)
        embedded = getattr(self._dataset, "_accessor", None) is self
        if self.rebatched_size and not embedded:
            return length * int(self._dataset.batch_size) // self.rebatched_size
        return length

    def __iter__(self) -> "AsynchronousDataAccessor":
        self._current = self._batches()
        return self

    def __next__(self) -> Any:
        assert self._current is not None
        return next(self._current)

    def _batches(self) -> Iterator[Any]:
        loader = self._dataset
        source = loader.iterate_here() if isinstance(loader, DataLoader) else iter(loader)
        flat = (_as_flat_container(batch) for batch in source)
        if self.rebatched_size is None:
            return flat
        return _rebatched(flat, self.rebatched_size, getattr(loader, "_drop_last_asked", True))


def _refuse_with_batch_sampler(
    options: Options, batch_size: Optional[int], shuffle: Optional[bool], partitioning: bool
) -> None:
    if batch_size != 1 or shuffle:
        raise python_error("`batch_sampler` option is mutually exclusive with batch_size, shuffle.")
    if options.Distributed.numProcesses > 1 and partitioning:
        raise python_error(
            "`batch_sampler` option is mutually exclusive with auto_distributed_partitioning=True."
        )


def _check_iterable(
    options: Options, num_workers: int, partitioning: bool, kwargs: Dict[str, Any]
) -> None:
    assert not partitioning or options.Distributed.numProcesses == 1, (
        "auto_distributed_partitioning not supported for IterableDataset"
    )
    if num_workers > 1 and "worker_init_fn" not in kwargs:
        logger.warning(
            "%d workers and no worker_init_fn: an IterableDataset returns each element %d times.",
            num_workers,
            num_workers,
        )


def _length(sampler: Any) -> Optional[int]:
    try:
        length = len(sampler) if isinstance(sampler, Sized) else None
    except NotImplementedError:
        return None
    return length


def _as_flat_container(batch: Any) -> Any:
    """Return a batch as the accessor does: tuples become lists, the rest is as it was."""
    if isinstance(batch, (list, tuple)):
        for index, tensor in enumerate(batch):
            assert isinstance(tensor, torch.Tensor), (
                f"Tensor at index {index} is not a torch tensor ({type(tensor)}). "
                "AsynchronousDataAccessor expects data to be organised as a flat 1D container of "
                "tensors."
            )
        return list(batch)
    return batch


def _join(batches: Sequence[Any]) -> Any:
    """Concatenate the tensors of like batches along dimension 0."""
    columns = zip(*(flatten(batch) for batch in batches))
    return rebuild(batches[-1], [torch.cat(column) for column in columns])


def _sliced(batch: Any, cut: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    return rebuild(batch, [cut(tensor) for tensor in flatten(batch)])


def _joined(batches: Iterator[Any], count: Optional[int], drop_last: bool) -> Iterator[Any]:
    """Join every `count` batches into one."""
    held: List[Any] = []
    for batch in batches:
        held.append(batch)
        if len(held) == count:
            yield _join(held)
            held = []
    if held and not drop_last:
        yield _join(held)


def _rebatched(batches: Iterator[Any], size: int, drop_last: bool) -> Iterator[Any]:
    """Cut a stream of batches into batches of `size` elements."""
    held: List[Any] = []
    count = 0
    for batch in batches:
        held.append(batch)
        count += len(flatten(batch)[0])
        while count >= size:
            joined = _join(held)
            yield _sliced(joined, lambda tensor: tensor[:size])
            count -= size
            held = [_sliced(joined, lambda tensor: tensor[size:])] if count else []
    if held and not drop_last:
        yield _join(held)
