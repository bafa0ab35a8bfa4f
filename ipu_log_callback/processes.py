"""Several processes: with `poprun` each sees its own replicas, and what is logged tells of all.

How many processes a launch has stands in `poptorch.Options.Distributed` and nowhere else: PopTorch
reads it from the environment of the launch (`OMPI_COMM_WORLD_SIZE` and `_RANK`; PopTorch 3.4
`options.py`), `popdist.poptorch.Options` from what `poprun` sets, and the data loader divides the
data by it. Under an `mpirun` that the options know nothing of, nothing here is active.

Lightning's `IPUStrategy.reduce` returns what it is given, and `self.log` does not even ask it. So
values are reduced here, between the processes of MPI, which `poprun` itself starts. They are
gathered and then reduced by every process in the same way, not reduced on the way: all processes
hold the very same numbers then, and callbacks that compare them decide alike.
"""

from contextlib import contextmanager
from functools import partial
from numbers import Number
from typing import Any, Callable, Dict, Iterable, Iterator, List, Mapping, Optional, Tuple

import torch
from torchmetrics import Metric

from .errors import MissingExtraError, ProcessMismatchError, report, warn
from .record import StepRecord, leaves_of, map_leaves
from .replay import over_processes

__all__ = ["Processes", "SharedReplay", "gathered", "metrics_synchronised"]


def gathered(what: str, value: Any) -> List[Any]:
    """The `value` of every process, in the order of their ranks.

    Args:
        what: What the processes are about to exchange; it must be the same in all of them.
        value: This process's own.

    Raises:
        ProcessMismatchError: The processes are about to exchange different things.
    """
    from mpi4py import MPI

    everyone = MPI.COMM_WORLD.allgather((what, value))
    if any(other != what for other, _ in everyone):
        raise ProcessMismatchError(
            report(
                "the processes of this launch log different things, expected the same in each",
                received="\n".join(
                    f"process {n}: {other}" for n, (other, _) in enumerate(everyone)
                ),
                why="what all processes log together must be logged by all, as often and in the "
                "same order",
                fix="give each process as many executions (drop_last=True), and log under no "
                "condition that differs between processes",
            )
        )
    return [value for _, value in everyone]


class Processes:
    """The processes of one launch.

    Args:
        count: How many there are.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._obstacle: Optional[str] = None
        self._known_to_mpi: int = count
        try:
            from mpi4py import MPI
        except (ImportError, RuntimeError) as error:  # mpi4py's wheels bring no MPI along
            self._obstacle = str(error)
        else:
            self._known_to_mpi = MPI.COMM_WORLD.Get_size()

    @classmethod
    def of(cls, options: Any) -> "Optional[Processes]":
        """The processes that a `poptorch.Options` tells of; `None` if this is the only one."""
        count = int(options.Distributed.numProcesses)
        return cls(count) if count > 1 else None

    @property
    def can_exchange(self) -> bool:
        """Whether MPI is there and knows of the same processes."""
        return self._obstacle is None and self._known_to_mpi == self.count

    def check(self, record: StepRecord) -> None:
        """Refuse a captured step that asks for what the processes cannot give.

        Raises:
            MissingExtraError: A selected call has `sync_dist=True`, and mpi4py is missing.
            ProcessMismatchError: The same, and MPI knows of another number of processes.
        """
        if self.can_exchange:
            return
        step = f"{record.owner}.{record.step}"
        for event in record.logged:
            if is_synchronised(event.options):
                name = getattr(event, "name", "...")
                self._refuse(f"self.log('{name}', ..., sync_dist=True)", step, str(event.site))
        if record.metric_calls:
            call = record.metric_calls[0]
            warn(
                report(
                    f"the torchmetrics objects of `{step}` hold this process's own share, "
                    f"1 of {self.count}",
                    received=self._obstacle or f"MPI knows of {self._known_to_mpi}",
                    fix="pip install 'ipu-log-callback[mpi]', and start with poprun or mpirun",
                ),
                call.site,
            )

    def _refuse(self, call: str, step: str, where: str) -> None:
        if self._obstacle is not None:
            raise MissingExtraError(
                call,
                "mpi4py",
                "mpi",
                where=where,
                received=f"a launch of {self.count} processes, {self._obstacle}",
                why=f"`{step}` runs in each of them, on its own share of the data",
            )
        raise ProcessMismatchError(
            report(
                f"`{call}` in `{step}` needs the {self.count} processes of the launch, "
                f"MPI knows of {self._known_to_mpi}",
                where=where,
                received=f"Options.Distributed.numProcesses = {self.count}, "
                f"MPI.COMM_WORLD.size = {self._known_to_mpi}",
                why="mpi4py uses another MPI than the one that started the processes, or they "
                "were started without MPI",
                fix="start with poprun, or with the mpirun of the MPI that mpi4py was built for",
            )
        )

    @staticmethod
    def decide(decision: Any, all: bool = True) -> bool:  # noqa: A002 - Lightning's name
        """What the processes decide together: `Strategy.reduce_boolean_decision`.

        Lightning's own counts the processes, and with mpi4py installed knows of all of them, but
        sums up with the strategy's `reduce`, which does nothing: no checkpoint would ever be
        better than the first (Lightning 2.0 `ParallelStrategy`).
        """
        decisions = [bool(one) for one in gathered("a decision", bool(decision))]
        return False not in decisions if all else True in decisions


def is_synchronised(options: Mapping[str, Any]) -> bool:
    """Whether a logged call's options ask for all processes, by Lightning's own rule."""
    return bool(options.get("sync_dist")) and not options.get("rank_zero_only")


class SharedReplay:
    """The calls of one execution's replay, held back until all processes' values are known.

    One exchange serves all keys of an execution.

    Args:
        moment: Step and epoch, which must be the same in every process.
        log: Makes a logged call, as `log(name, value, **options)`.
        log_dict: Makes one of a whole collection.
        seen: Takes the micro-batch values that belong to the call before; this process's own.
    """

    def __init__(
        self,
        moment: str,
        log: Callable[..., None],
        log_dict: Callable[..., None],
        seen: Optional[Callable[[torch.Tensor], None]],
    ) -> None:
        self._moment = moment
        self._log = log
        self._log_dict = log_dict
        self._seen = seen
        self._held: List[Callable[[], None]] = []
        self._shared: List[Tuple[str, Any, Dict[str, Any]]] = []
        self._everyones: List[List[Any]] = []

    def log(self, name: str, value: Any, **options: Any) -> None:
        """Hold a logged call back."""
        if is_synchronised(options):
            self._held.append(partial(self._log_shared, len(self._shared)))
            self._shared.append((name, value, options))
        else:
            self._held.append(partial(self._log, name, value, **options))

    def log_dict(self, collection: Any, names: Any, **options: Any) -> None:
        """Hold a call for a whole collection back; its metrics synchronise by themselves."""
        self._held.append(partial(self._log_dict, collection, names, **options))

    def seen(self, values: torch.Tensor) -> None:
        """Hold the micro-batch values of a logged call back."""
        if self._seen is not None:
            self._held.append(partial(self._seen, values))

    def finish(self) -> None:
        """Exchange the values and make all calls, in order."""
        if self._shared:
            names = ", ".join(name for name, _, _ in self._shared)
            mine = [
                (_numbers(value), options.get("batch_size")) for _, value, options in self._shared
            ]
            self._everyones = gathered(f"{self._moment}: {names}", mine)
        for call in self._held:
            call()

    def _log_shared(self, index: int) -> None:
        name, value, options = self._shared[index]
        ours = [mine[index] for mine in self._everyones]
        weights = None
        if options.get("batch_size") is not None:
            weights = [int(weight) for _, weight in ours]
            options = dict(options, batch_size=sum(weights))
        reduced = iter(
            over_processes(list(numbers), weights, options)
            for numbers in zip(*(numbers for numbers, _ in ours))
        )
        shared = map_leaves(value, lambda leaf: next(reduced) if _is_number(leaf) else leaf)
        self._log(name, shared, **options)


def _is_number(leaf: Any) -> bool:
    return isinstance(leaf, (Number, torch.Tensor))


def _numbers(value: Any) -> List[Any]:
    """The numbers in a logged value, in order: usually one."""
    numbers = filter(_is_number, leaves_of(value))
    return [leaf.item() if isinstance(leaf, torch.Tensor) else leaf for leaf in numbers]


# -- torchmetrics -------------------------------------------------------------------------------
# Functions of the module, with no state: metrics are copied and pickled with what they refer to.


def _gather_state(state: torch.Tensor, group: Any = None) -> List[torch.Tensor]:  # noqa: ARG001
    """Torchmetrics' `dist_sync_fn`: a metric's state in every process."""
    return gathered("the state of a metric", state)


def _available() -> bool:
    """Torchmetrics' `distributed_available_fn`."""
    return True


@contextmanager
def metrics_synchronised(metrics: Iterable[Any]) -> Iterator[None]:
    """Let metrics compute over all processes while the block runs, as under DDP.

    A metric to which the user gave a `dist_sync_fn` keeps it.
    """
    roots = list(metrics)
    available: Any = None
    for metric in _parts(roots):
        if metric.dist_sync_fn is None:
            available = metric.distributed_available_fn
            metric.dist_sync_fn = _gather_state
            metric.distributed_available_fn = _available
    try:
        yield
    finally:
        # looked up again: a tracker has made copies in the meantime
        for metric in _parts(roots):
            if metric.dist_sync_fn is _gather_state:
                metric.dist_sync_fn, metric.distributed_available_fn = None, available


def _parts(roots: Iterable[Any]) -> Iterator[Metric]:
    for root in roots:
        yield from (part for part in root.modules() if isinstance(part, Metric))
