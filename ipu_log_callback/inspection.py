"""One run's look inside the device: gradients, weights, optimizer states, activations, any tensor.

Before the model is compiled the wanted tensors are found and declared as anchors; after each
compile their price is told; after every n-th execution they are stored in
`IPULogCallback.anchored`, their statistics are logged, and histograms are made where asked for.
"""

import logging
import re
from contextlib import contextmanager
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Set

import torch

from .activations import Activations
from .capture import Capture
from .cost import CostEntry
from .cost_entries import anchored_entries, dtype_text, own_output_entry
from .errors import bytes_text, counted, report, warn
from .histograms import HistogramLogger
from .inspection_settings import InspectionSettings
from .measurement import log_device_latencies
from .named_anchors import NamedAnchors
from .named_tensors import NamedTensor
from .record import AnchoredCall
from .tensor_statistics import REDUCTIONS, histogram_of, statistics_of

__all__ = ["Inspector"]

LogFunction = Callable[..., None]

_LOGGER = logging.getLogger("ipu_log_callback")


class Inspector:
    """Looks at what the executors of one run hold.

    Args:
        callback: Holds the results: `anchored`, `cost` and `measured`.
        trainer: The trainer.
        module: Its LightningModule.
        settings: What to look at.
    """

    def __init__(
        self, callback: Any, trainer: Any, module: Any, settings: InspectionSettings
    ) -> None:
        self._callback = callback
        self._trainer = trainer
        self._module = module
        self.settings = settings
        self._activations: Optional[Activations] = None
        self._named = NamedAnchors(trainer, module, settings)
        self._histograms: Optional[HistogramLogger] = None
        self._executions: Dict[int, int] = {}
        self._seen_enough: Set[int] = set()

    # -- before the first execution ---------------------------------------------------------

    def prepare(self) -> None:
        """Note what must be known of the module; before the strategy wraps it.

        Raises:
            KeySelectionError: A glob of `activations` matches no submodule.
        """
        settings = self.settings
        if not settings.enabled:
            return
        self._activations = Activations(
            self._module, settings.activations, settings.reduce_activations, settings.statistics
        )
        self._named.prepare()

    def declare(self, wrapper: Any, listeners: Sequence[Any]) -> None:
        """Find the wanted tensors and anchor them in the executors that hold them.

        Args:
            wrapper: The model that the strategy compiles.
            listeners: The run's `ExecutorListener`s.

        Raises:
            KeySelectionError: A glob matches no trained parameter, or no state of the optimizer.
        """
        if self.settings.enabled:
            self._named.declare(wrapper, listeners)

    def watches(self, listener: Any) -> bool:
        """Whether there is something to do after this executor's executions."""
        return self.settings.enabled and bool(
            self.settings.measure_cost
            or self._named.of(listener)
            or (self._named.states is not None and listener.training)
            or (listener.record is not None and listener.record.anchor_calls)
        )

    @contextmanager
    def capturing(self, capture: Capture) -> Iterator[None]:
        """What joins the capture of a step's Python."""
        if self._activations is None:
            capture.takes_anchors = False
            yield
            return
        for name, _ in self.settings.tensors:
            capture.anchored_at[name] = "IPULogCallback(tensors=...)"
        with self._activations.recorded(capture):
            yield

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """Explain PopART's error about a tensor that it does not know."""
        try:
            yield
        except Exception as error:
            unknown = re.search(r"Anchor tensor [`'](.+?)' not in Ir Tensors", str(error))
            if unknown is None:
                raise
            raise self._named.unknown_tensor(unknown.group(1)) from error

    # -- after a compile --------------------------------------------------------------------

    def compiled(self, listener: Any) -> None:
        """Tell the price, and refuse an output mode that cannot give what is asked for."""
        self._seen_enough.discard(id(listener))
        if not self.settings.enabled:
            return
        self._check_output_mode(listener)
        record = listener.record
        entries = anchored_entries(record, listener.wire, listener.fetched.results)
        more = own_output_entry(record, listener.wire, listener.own, listener.fetched)
        entries += [more] if more is not None else []
        entries += [
            self._entry(record.step, tensor, listener) for tensor in self._named.of(listener)
        ]
        packed = bool(listener.wire.floats) + bool(listener.wire.integers)
        self._callback.cost = self._callback.cost.replaced(record.step, entries, packed)
        self._callback._tensor_names[record.step] = tuple(listener.executor.getTensorNames())
        known = all(tensor.shape is not None for tensor in self._named.of(listener))
        if entries and known:
            self._tell_cost(record.step)

    def _entry(self, step: str, tensor: NamedTensor, listener: Any) -> CostEntry:
        size = tensor.bytes(listener.fetched.results)
        dtype = "?" if size is None else dtype_text(tensor.dtype)
        return CostEntry(step, tensor.key, tensor.shape, dtype, size, 1)

    def _tell_cost(self, step: str) -> None:
        cost, limit = self._callback.cost, self.settings.cost_warning
        total, largest = cost.bytes_per_execution(step), cost.largest(step)
        count = sum(entry.step == step for entry in cost)
        _LOGGER.info(
            "%s: %s to the host per execution for %s, in %s; the largest is '%s' (%s)",
            step,
            bytes_text(total),
            counted(count, "anchored thing"),
            counted(cost.extra_streams(step), "extra output stream"),
            largest.name,
            bytes_text(largest.bytes),
        )
        if limit is not None and total > limit:
            warn(
                report(
                    f"anchoring brings {bytes_text(total)} to the host in each execution of "
                    f"`{step}`, more than {bytes_text(limit)}",
                    largest=f"'{largest.name}': {bytes_text(largest.bytes)} "
                    f"({cost.share(largest):.0%})",
                    why="what travels is not computed meanwhile; `print(callback.cost)` has all",
                    fix="fewer of them, anchor(..., reduce='stats'), reduce_activations='stats';\n"
                    "or IPULogCallback(..., cost_warning=None) to say nothing",
                )
            )

    def _check_output_mode(self, listener: Any) -> None:
        geometry, step = listener.fetched, listener.record.step
        if listener.record.anchor_calls and not geometry.sees_each_micro_batch:
            warn(
                report(
                    f"`callback.anchored` gets {geometry.results} of {geometry.micro_batches} "
                    f"micro-batches of `{step}`",
                    received=f"poptorch.OutputMode.{geometry.output_mode}",
                    fix="IPULogCallback(..., output_mode='all')",
                )
            )

    # -- after an execution -----------------------------------------------------------------

    def look(self, execution: Any, log: LogFunction) -> None:
        """Store, log and draw what one execution brought.

        Args:
            execution: The `Execution`.
            log: Lightning's `self.log`.
        """
        listener, step = execution.listener, execution.listener.record.step
        if id(listener) in self._seen_enough:
            return
        count = self._executions.get(id(listener), 0)
        self._executions[id(listener)] = count + 1
        if count == 0:
            self._complete_cost(listener)
            if not self.watches(listener):
                self._seen_enough.add(id(listener))
        if count % self.settings.every_n_executions:
            return
        if self.settings.histograms and self._histograms is None:
            self._histograms = HistogramLogger(self._trainer)
        quiet = step == "predict_step"  # Lightning has no `self.log` there
        self._look_at_named(listener, _nothing if quiet else log)
        self._look_at_anchored(execution, _nothing if quiet else log)
        if self._named.states is not None and listener.training:
            for name, value in self._named.states.read():
                self._store(f"optim/{name}", value.unsqueeze(0), log, f"optim/{name}")

    def measure(self, execution: Any, host_seconds: float, log: LogFunction) -> None:
        """Note and log what an execution took, on the device and on the host."""
        listener = execution.listener
        step, measured = listener.record.step, self._callback.measured
        anchored = self._callback.cost.bytes_per_execution(step) > 0
        measured.replayed(step, host_seconds)
        if execution.seconds is not None:
            measured.executed(step, anchored, execution.seconds)
        if step == "predict_step":
            return

        def log_mean(key: str, value: float) -> None:
            log(key, value, batch_size=1)

        log_mean("ipu_log/host_seconds", host_seconds)
        if execution.seconds is not None:
            log_mean("ipu_log/execution_seconds", execution.seconds)
        log_device_latencies(listener.executor, log_mean)

    def tell(self) -> None:
        """Summarise the run."""
        if self.settings.measure_cost:
            for line in self._callback.measured.summary():
                _LOGGER.info("%s", line)

    def _look_at_named(self, listener: Any, log: LogFunction) -> None:
        squares: List[torch.Tensor] = []
        for tensor, value in self._named.values(listener):
            if tensor.kind == "grad":
                squares.append(value.reshape(len(value), -1).square().sum(1))
            name = tensor.name if tensor.kind == "tensor" else tensor.key
            self._store(name, value, log, tensor.key)
        if squares:
            norms = torch.stack(squares).sum(0).sqrt()
            log("grad/norm", norms.mean(), batch_size=1)

    def _look_at_anchored(self, execution: Any, log: LogFunction) -> None:
        listener = execution.listener
        results = listener.fetched.results
        for event in listener.record.anchor_calls:
            key = f"{event.kind}/{event.name}"
            if event.statistics:
                numbers = {
                    name: execution.returned.of(number, results).reshape(-1)
                    for name, number in zip(event.statistics, event.value)
                }
                self._callback.anchored[event.name] = numbers
                self._log_statistics(key, numbers, log)
                continue
            value = event.value
            if not isinstance(value, torch.Tensor):
                value = execution.returned.of(value, results)
            else:
                value = value.expand(results, *value.shape)
            self._store_anchored(event, key, value, log)

    def _store_anchored(
        self, event: AnchoredCall, key: str, value: torch.Tensor, log: LogFunction
    ) -> None:
        anchored = self._callback.anchored
        if event.edges:
            anchored[event.name] = histogram_of(value.sum(0), event.edges)
            if self._histograms is not None:
                self._histograms.add_counts(key, anchored[event.name])
            return
        anchored[event.name] = value
        if event.kind == "activation":
            self._store(event.name, value, log, key)
        elif self._histograms is not None:
            self._histograms.add(key, value)

    def _store(self, name: str, rows: torch.Tensor, log: LogFunction, key: str) -> None:
        """Store a tensor, log its statistics, draw its histogram.

        Args:
            name: What it is stored under.
            rows: `[results or updates, *shape]`.
            log: Lightning's `self.log`.
            key: What its logged keys begin with.
        """
        self._callback.anchored[name] = rows
        names = self.settings.statistics
        columns = statistics_of(rows.reshape(len(rows), -1), names).unbind(1)
        self._log_statistics(key, dict(zip(names, columns)), log)
        if self._histograms is not None:
            self._histograms.add(key, rows)

    def _log_statistics(
        self, key: str, numbers: Mapping[str, torch.Tensor], log: LogFunction
    ) -> None:
        for name in self.settings.statistics:
            reduction = REDUCTIONS[name]
            value = getattr(numbers[name], reduction)()
            log(f"{key}/{name}", value, reduce_fx=reduction, batch_size=1)

    def _complete_cost(self, listener: Any) -> None:
        """Fill in what only an execution can tell: the sizes of tensors named by the user."""
        unknown = [tensor for tensor in self._named.of(listener) if tensor.shape is None]
        if not unknown:
            return
        step, cost = listener.record.step, self._callback.cost
        found = {}
        for tensor in unknown:
            returned = listener.executor.getAnchoredTensor(tensor.short)
            shape = tuple(self._named.returned(tensor, listener).shape[1:])
            size = returned.numel() * returned.element_size()
            dtype = dtype_text(returned.dtype)
            found[tensor.key] = CostEntry(step, tensor.key, shape, dtype, size, 1)
        entries = [found.get(entry.name, entry) for entry in cost if entry.step == step]
        self._callback.cost = cost.replaced(step, entries, cost.packed(step))
        self._tell_cost(step)


def _nothing(*_: Any, **__: Any) -> None:
    """Log nowhere."""
