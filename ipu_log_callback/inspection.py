"""One run's look inside the device: gradients, weights, optimizer states, activations, any tensor.

Before the model is compiled the wanted tensors are found and declared as anchors; after each
compile their price is told; after every n-th execution they are stored in
`IPULogCallback.anchored`, their statistics are logged, and histograms are made where asked for.
"""

import logging
import re
from contextlib import contextmanager
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

import torch

from .activations import Activations
from .anchor import histogram_of
from .capture import Capture
from .cost import CostEntry, anchored_entries, dtype_text, own_output_entry
from .errors import OutputModeError, UnknownTensorError, bytes_text, report, warn
from .geometry import Geometry
from .histograms import HistogramLogger
from .inspection_settings import InspectionSettings
from .measurement import log_device_latencies
from .named_tensors import (
    NamedTensor,
    Parameter,
    by_pattern,
    declared,
    gradients_of,
    last_of,
    parameters_of,
    prefix_of,
    results_of,
    state_names,
    state_scale,
)
from .optimizer_states import OptimizerStates
from .record import AnchoredCall
from .tensor_statistics import REDUCTIONS, statistics_of

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
        self._parameters: Dict[str, Parameter] = {}
        self._named: Dict[int, List[NamedTensor]] = {}
        self._states: Optional[OptimizerStates] = None
        self._histograms: Optional[HistogramLogger] = None
        self._executions: Dict[int, int] = {}

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
        if settings.names_tensors:
            self._parameters = parameters_of(self._module)

    def declare(self, wrapper: Any, listeners: Sequence[Any]) -> None:
        """Find the wanted tensors and anchor them in the executors that hold them.

        Args:
            wrapper: The model that the strategy compiles.
            listeners: The run's `ExecutorListener`s.

        Raises:
            KeySelectionError: A glob matches no trained parameter, or no state of the optimizer.
        """
        settings = self.settings
        if not (settings.enabled and settings.names_tensors):
            return
        training = [listener for listener in listeners if listener.training]
        prefix = prefix_of(wrapper, self._module)
        named = [NamedTensor("tensor", name, tensor) for name, tensor in settings.tensors]
        if training:
            named += self._of_parameters("grad", settings.gradients, "Gradient___" + prefix)
            named += self._of_parameters("weight", settings.weights, "UpdatedVar___" + prefix)
            named += self._optimizer_states(prefix)
        for listener in training or listeners:
            self._named[id(listener)] = declared(listener.executor.options, named)

    def _of_parameters(
        self, kind: str, patterns: Tuple[str, ...], prefix: str
    ) -> List[NamedTensor]:
        candidates = {
            name: NamedTensor(kind, name, prefix + name, parameter.shape, parameter.dtype)
            for name, parameter in self._parameters.items()
            if parameter.trained
        }
        argument = "gradients" if kind == "grad" else "weights"
        return by_pattern(candidates, patterns, argument, type(self._module).__name__)

    def _optimizer_states(self, prefix: str) -> List[NamedTensor]:
        patterns = self.settings.optimizer_state
        if not patterns or not self._trainer.optimizers:
            return []
        optimizer = self._trainer.optimizers[0]
        stable = state_names(optimizer)
        trained = [name for name, parameter in self._parameters.items() if parameter.trained]
        self._states = OptimizerStates(
            optimizer, prefix, patterns, stable, trained, type(self._module).__name__
        )
        return [
            NamedTensor(
                "optim",
                f"{name}/{state}",
                f"{stable[state]}___{prefix}{name}",
                self._parameters[name].shape,
                self._parameters[name].dtype,
            )
            for name, state in self._states.anchored
        ]

    def watches(self, listener: Any) -> bool:
        """Whether there is something to do after this executor's executions."""
        return self.settings.enabled and bool(
            self.settings.measure_cost
            or self._named.get(id(listener))
            or (self._states is not None and listener.training)
            or (listener.record is not None and listener.record.anchor_calls)
        )

    @contextmanager
    def capturing(self, capture: Capture) -> Iterator[None]:
        """What joins the capture of a step's Python."""
        if self._activations is None:
            capture.takes_anchors = False
            yield
            return
        capture.reserved = frozenset(name for name, _ in self.settings.tensors)
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
            raise self._unknown_tensor(unknown.group(1)) from error

    def _unknown_tensor(self, name: str) -> UnknownTensorError:
        named = {tensor.tensor: tensor for each in self._named.values() for tensor in each}
        tensor = named.get(name)
        arguments = {"grad": "gradients", "weight": "weights", "optim": "optimizer_state"}
        if tensor is None or tensor.kind == "tensor":
            short = "..." if tensor is None else tensor.name
            call = f"`IPULogCallback(tensors={{{short!r}: {name!r}}})`"
            why = "the compiled graph has no tensor of that name"
            fix = "compile without it and look: `callback.tensor_names()` lists all names"
        else:
            call = f"`IPULogCallback({arguments[tensor.kind]}=[...])` of '{tensor.name}'"
            why = "a parameter that does not lead to the loss has no gradient and no update"
            fix = "leave that parameter out of the glob"
        return UnknownTensorError(
            report(
                f"{call} names a tensor that PopART does not know",
                received=name,
                why=why,
                fix=fix,
            )
        )

    # -- after a compile --------------------------------------------------------------------

    def compiled(self, listener: Any) -> None:
        """Tell the price, and refuse an output mode that cannot give what is asked for."""
        if not self.settings.enabled:
            return
        self._check_output_mode(listener)
        record = listener.record
        entries = anchored_entries(record, listener.wire, listener.fetched.results)
        more = own_output_entry(record, listener.wire, listener.own, listener.fetched)
        entries += [more] if more is not None else []
        entries += [
            self._entry(record.step, tensor, listener)
            for tensor in self._named.get(id(listener), ())
        ]
        packed = bool(listener.wire.floats) + bool(listener.wire.integers)
        self._callback.cost = self._callback.cost.replaced(record.step, entries, packed)
        self._callback._tensor_names[record.step] = tuple(listener.executor.getTensorNames())
        known = all(tensor.shape is not None for tensor in self._named.get(id(listener), ()))
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
            "%s: %d anchored things bring %s to the host per execution, in %d extra output "
            "streams; the largest is '%s' (%s)",
            step,
            count,
            bytes_text(total),
            cost.extra_streams(step),
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
        kinds = {tensor.kind for tensor in self._named.get(id(listener), ())} - {"tensor"}
        many = geometry.micro_batches_per_result > 1
        if kinds and many and (kinds != {"grad"} or geometry.iterations > 1):
            raise OutputModeError(
                report(
                    f"`IPULogCallback` anchors {', '.join(sorted(kinds))} of `{step}`, which needs "
                    "every micro-batch, received their sum",
                    received="poptorch.OutputMode.Sum",
                    expected="poptorch.OutputMode.All",
                    fix="IPULogCallback(..., output_mode='auto')",
                )
            )
        partial = geometry.accumulation > 1 and not geometry.sees_every_micro_batch
        if partial and "grad" in kinds:
            warn(
                report(
                    f"gradients of `{step}` are those of single micro-batches, "
                    "expected those of whole weight updates",
                    received=f"poptorch.OutputMode.{geometry.output_mode} with gradient "
                    f"accumulation {geometry.accumulation}",
                    fix="IPULogCallback(..., output_mode='auto')",
                )
            )
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
        count = self._executions.get(id(listener), 0)
        self._executions[id(listener)] = count + 1
        if count == 0:
            self._complete_cost(listener)
        if count % self.settings.every_n_executions:
            return
        if self.settings.histograms and self._histograms is None:
            self._histograms = HistogramLogger(self._trainer)
        quiet = step == "predict_step"  # Lightning has no `self.log` there
        self._look_at_named(listener, _nothing if quiet else log)
        self._look_at_anchored(execution, _nothing if quiet else log)
        if self._states is not None and listener.training:
            for name, value in self._states.read():
                self._store(f"optim/{name}", value.unsqueeze(0), log)

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
        geometry: Geometry = listener.fetched
        for tensor in self._named.get(id(listener), ()):
            returned = listener.executor.getAnchoredTensor(tensor.short)
            value = results_of(returned, tensor.shape, geometry.results)
            if tensor.kind == "grad":
                value = self._gradients(value, listener)
                squares.append(value.reshape(len(value), -1).square().sum(1))
            elif tensor.kind != "tensor":
                value = last_of(value)
                if tensor.kind == "optim":
                    value = value / state_scale(self._trainer.optimizers[0])
            if tensor.kind == "tensor":
                self._callback.anchored[tensor.name] = value
            self._store(tensor.key, value, log)
        if squares:
            norms = torch.stack(squares).sum(0).sqrt()
            log("grad/norm", norms.mean(), batch_size=1)

    def _gradients(self, values: torch.Tensor, listener: Any) -> torch.Tensor:
        training = listener.executor.options.Training
        summed = int(training.accumulation_and_replication_reduction_type) == 0
        optimizers = self._trainer.optimizers
        scale = float(getattr(optimizers[0], "loss_scaling", 1.0)) if optimizers else 1.0
        return gradients_of(values, listener.fetched, summed, scale)

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

    def _store(self, name: str, rows: torch.Tensor, log: LogFunction, key: str = "") -> None:
        """Store a tensor, log its statistics, draw its histogram.

        Args:
            name: What it is stored under, and logged unless `key` is given.
            rows: `[results or updates, *shape]`.
            log: Lightning's `self.log`.
            key: What its logged keys begin with.
        """
        key = key or name
        if not name.startswith("tensor/"):
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
        named = self._named.get(id(listener), ())
        if all(tensor.shape is not None for tensor in named):
            return
        step, cost = listener.record.step, self._callback.cost
        for tensor in named:
            if tensor.shape is None:
                returned = listener.executor.getAnchoredTensor(tensor.short)
                shape = results_of(returned, None, listener.fetched.results).shape[1:]
                size = returned.numel() * returned.element_size()
                found = CostEntry(
                    step, tensor.key, tuple(shape), dtype_text(returned.dtype), size, 1
                )
                entries = [
                    found if (e.step, e.name) == (step, tensor.key) else e
                    for e in cost
                    if e.step == step
                ]
                cost = cost.replaced(step, entries, cost.packed(step))
        self._callback.cost = cost
        self._tell_cost(step)


def _nothing(*_: Any, **__: Any) -> None:
    """Log nowhere."""
