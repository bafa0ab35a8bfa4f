"""One run of a trainer on an IPU strategy: what the callback changes there, and puts back."""

import functools
import sys
import threading
from contextlib import ExitStack, contextmanager
from time import perf_counter
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

import torch

from . import _compat
from .captured_calls import captured_step
from .compile_notice import STEP_OF_STAGE, compile_notice
from .errors import (
    LIGHTNING_ISSUE,
    CallbackSetupError,
    bytes_text,
    counted,
    names_text,
    report,
    warn,
)
from .executors import Execution, ExecutorListener
from .geometry import Geometry
from .history import ExecutionRow
from .inspection import Inspector
from .metrics import Metrics
from .processes import Processes, SharedReplay, metrics_synchronised
from .selection import Selection

__all__ = ["Run"]

#: The runs that are under way, with their threads.
_UNDER_WAY: "Dict[Run, threading.Thread]" = {}
_LOCK = threading.Lock()


class Run:
    """From `Callback.setup` to `teardown` or `on_exception`.

    Args:
        trainer: The trainer, with an IPU strategy.
        module: Its LightningModule.
        callback: The callback, which must be first among the trainer's callbacks.
        selection: Which keys to anchor; nothing is selected when the callback is not enabled.
        exact: Whether to change the output mode, where needed, so that every micro-batch comes
            back.
        tell_dropped: Whether to say what was logged and not selected.
        inspector: Looks at what else the executors hold.
    """

    def __init__(
        self,
        trainer: Any,
        module: Any,
        callback: Any,
        selection: Selection,
        exact: bool,
        tell_dropped: bool,
        inspector: Inspector,
    ) -> None:
        self._trainer = trainer
        self._module = module
        self._callback = callback
        self._selection = selection
        self._exact = exact
        self._tell_dropped = tell_dropped
        self._inspector = inspector
        # Lightning's own method: an override of the user's has run at capture
        self._lightning_log = functools.partial(_compat.lightning_class_of(module).log, module)
        self._own_modes: Dict[bool, Geometry] = {}
        self._pending: Optional[Execution] = None
        self._row: Optional[ExecutionRow] = None
        self.listeners: List[ExecutorListener] = []
        self._plain_types: List[Tuple[torch.Tensor, type]] = []
        self._undo = ExitStack()

    def begin(self) -> None:
        """Change what must be changed before the strategy is set up.

        Raises:
            CallbackSetupError: A run of another thread is under way.
        """
        strategy = self._trainer.strategy
        for other in list(_UNDER_WAY):
            if other._trainer is not self._trainer and other._trainer.interrupted:
                other.abandon(interrupted=True)  # nobody told its callback
        with ExitStack() as stack:
            stack.enter_context(_only_thread(self))
            stack.enter_context(_first_callback(self._trainer, self._callback))
            stack.enter_context(self._options_replaced(strategy))
            setup = functools.partial(self._setup_strategy, strategy.setup)
            stack.enter_context(_instance_attribute(strategy, "setup", setup))
            teardown = functools.partial(self._tear_down_strategy, strategy.teardown)
            stack.enter_context(_instance_attribute(strategy, "teardown", teardown))
            self._undo = stack.pop_all()

    def end(self) -> None:
        """Put everything back. Harmless when called again."""
        self._pending = None
        self._undo.close()
        _UNDER_WAY.pop(self, None)  # an interrupt may come between its entry and the undo stack's

    def abandon(self, interrupted: bool) -> None:
        """Put everything back after an exception, also what the strategy and PopTorch leave.

        PopTorch unwraps the parameters and buffers of compiled models only: the next run would find
        the others wrapped and refuse the buffers. So the executors are destroyed, which brings the
        weights back, and what is still wrapped is unwrapped.

        Args:
            interrupted: After Ctrl-C Lightning up to 2.0 does not tear the strategy down, which
                leaves `optimizer_zero_grad` switched off; then it is done here.
        """
        self.end()
        try:
            if interrupted:
                self._trainer.strategy.teardown()
            for listener in self.listeners:
                listener.executor.destroy()
        except Exception as error:  # noqa: BLE001 - the user's own exception must not be masked
            warn(f"the device could not be released after an exception: {error}")
        for tensor, plain in self._plain_types:
            if type(tensor) is not plain:
                tensor.__class__ = plain

    def batch_over(self, step: str) -> None:
        """The trainer is through with an execution: it is replayed by now at the latest."""
        execution, self._pending = self._pending, None
        if execution is not None and execution.replay.record.step == step:
            with _compat.filed_under(self._module, step):
                self._replay(execution, step)
        row, self._row = self._row, None
        if row is not None:
            row.keep()

    def _replay(self, execution: Execution, step: str) -> None:
        started = perf_counter()
        row = self._row = self._callback.history.execution(self._trainer, step)
        # what nobody looks at again goes straight to Lightning
        log = self._lightning_log if row is None else self._log
        seen = row and row.micro_batches
        processes = execution.listener.processes
        if processes is None or not processes.can_exchange:
            execution.replay(execution.returned, log, self._log_collection, seen)
        else:
            moment = f"{step} in epoch {self._trainer.current_epoch}"
            shared = SharedReplay(moment, log, self._log_collection, seen)
            execution.replay(
                execution.returned, shared.log, shared.log_dict, shared.seen, shared.finish
            )
        self._inspector.look(execution, log)
        if self._inspector.settings.measure_cost:
            self._inspector.measure(execution, perf_counter() - started, log)

    def tell(self) -> None:
        """Say once what was logged and not selected, and what was selected and never logged."""
        self._warn_of_dropped()
        self._inspector.tell()
        # `validate` and `test` do not run the steps that other keys are of
        trained = any(listener.training and listener.record for listener in self.listeners)
        for pattern, nearest in self._selection.unmatched() if trained else ():
            warn(
                report(
                    f"`IPULogCallback(keys=[{pattern!r}])` selected nothing in this run",
                    nearest=names_text(nearest),
                    fix="use a name that a step gives to `self.log`, or a glob that matches one",
                )
            )

    # -- the strategy -----------------------------------------------------------------------

    @contextmanager
    def _options_replaced(self, strategy: Any) -> Iterator[None]:
        """Give the strategy clones of its options, where they must differ from the user's own.

        Clones that return every micro-batch, where exact values need that; and clones in which
        anchors can be declared (PopTorch 2.6 gives the executor the very options of the user).
        """
        if not (self._exact or self._inspector.settings.names_tensors):
            yield
            return
        fitting = self._trainer.state.fn in ("fit", "tune")
        names = ("training_opts", "inference_opts") if fitting else ("inference_opts",)
        replacements = {}
        for name in names:
            # the strategy asks executors of an earlier run for their replicas, if it has any
            with _instance_attribute(strategy, "poptorch_models", {}):
                options = getattr(strategy, name)
            training = name == "training_opts"
            geometry = Geometry.from_options(options, training)
            if self._exact and not geometry.sees_each_micro_batch:
                replacements[name] = _returning_all(options)
                self._own_modes[training] = geometry
            elif self._inspector.settings.names_tensors:
                replacements[name] = options.clone()
        with _compat.options_replaced(strategy, replacements):
            yield

    def _setup_strategy(self, setup: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The strategy's own `setup`, then listen to the executors that it made."""
        strategy = self._trainer.strategy
        self._plain_types = [
            (tensor, type(tensor))
            for tensor in (*self._module.parameters(), *self._module.buffers())
        ]
        self._inspector.prepare()
        with Metrics(self._module).hidden(only_with_state=True):
            result = setup(*args, **kwargs)
        heard: List[Any] = []
        for stage, executor in strategy.poptorch_models.items():
            if any(executor is other for other in heard):
                continue  # the sanity check shares the validation executor
            heard.append(executor)
            stage_name = str(getattr(stage, "value", stage))
            training = stage_name == "train"
            listener = ExecutorListener(
                executor,
                self._module,
                self._selection,
                training,
                self._own_modes.get(training),
                self._executed,
                self._compiled,
                self._inspector,
                functools.partial(
                    compile_notice,
                    self._trainer,
                    type(self._module).__name__,
                    STEP_OF_STAGE[stage_name],
                ),
                Processes.of(executor.options),
            )
            self.listeners.append(listener)
            self._undo.enter_context(listener.listening())
        self._inspector.declare(strategy.model, self.listeners)
        if any(h.processes is not None and h.processes.can_exchange for h in self.listeners):
            self._act_together(strategy)
        return result

    def _tear_down_strategy(self, teardown: Callable[[], None]) -> None:
        """The strategy's own `teardown`; and everything put back, if no hook is going to.

        Lightning's finders take all callbacks away while they search: of an exception there no
        callback hears.
        """
        teardown()
        if not any(callback is self._callback for callback in self._trainer.callbacks):
            self._callback.on_exception(self._trainer, self._module, sys.exc_info()[1])

    def _act_together(self, strategy: Any) -> None:
        """Metrics compute, and callbacks decide, over all processes of the launch."""
        self._undo.enter_context(metrics_synchronised(Metrics(self._module)))
        self._undo.enter_context(
            _instance_attribute(strategy, "reduce_boolean_decision", Processes.decide)
        )

    def _executed(self, execution: Execution) -> None:
        """Replay an execution in the trainer's own step, where a CPU run logs.

        Schedulers and the hooks around the optimizer read metrics before the batch ends. What a
        strategy executes elsewhere waits until then.
        """
        step = execution.replay.record.step
        if _compat.current_hook(self._module) == step:
            self._replay(execution, step)
        else:
            self._pending = execution

    def _compiled(self, compiled: ExecutorListener) -> None:
        self._inspector.compiled(compiled)
        if compiled.record is not None:
            self._callback.captured.add(
                captured_step(
                    compiled.record, compiled.fetched.results, compiled.wire.extra_outputs
                )
            )
        if all(other.record is not None for other in self.listeners):
            self._warn_of_dropped()

    # -- logging ----------------------------------------------------------------------------

    def _log(self, name: str, value: Any, **options: Any) -> None:
        self._lightning_log(name, value, **options)
        if self._row is not None:
            self._row.logged(name, value, options)

    def _log_collection(self, collection: Any, names: Any, **options: Any) -> None:
        base = _compat.lightning_class_of(self._module)

        def log_selected(name: str, value: Any, **others: Any) -> None:
            if name in names:
                self._log(name, value, **others)

        with _instance_attribute(self._module, "log", log_selected):
            base.log_dict(self._module, collection, **options)

    def _warn_of_dropped(self) -> None:
        """Once a run: as soon as every step is compiled, or at its end."""
        if not self._tell_dropped:
            return
        rows: List[str] = []
        keys: List[str] = []
        total = 0
        for listener in self.listeners:
            record = listener.record
            if record is None or not record.dropped:
                continue
            count = listener.fetched.micro_batches
            size = sum(dropped.bytes for dropped in record.dropped) * count
            names = [dropped.name for dropped in record.dropped]
            rows.append(f"{record.step}: {names_text(names)} ({bytes_text(size)} per execution)")
            keys += [name for name in names if name not in keys]
            total += size
        if not keys:
            return
        self._tell_dropped = False
        sites = [d.site for h in self.listeners if h.record for d in h.record.dropped]
        selected = (*self._selection.patterns, *keys) if len(keys) <= 8 else ("*",)
        shown = ", ".join(f'"{name}"' for name in selected)
        warn(
            report(
                f"{counted(len(keys), 'key')} of `self.log` {'was' if len(keys) == 1 else 'were'} "
                f"not anchored and so not logged: {names_text(keys)}",
                dropped="\n".join(rows),
                cost=f"{bytes_text(total)} per execution would travel to the host",
                why="a compiled step runs its Python once; only anchored tensors come back "
                f"({LIGHTNING_ISSUE})",
                fix=f"IPULogCallback(keys=[{shown}]), or enabled=False to say nothing",
            ),
            sites[0],
        )


@contextmanager
def _only_thread(run: Run) -> Iterator[None]:
    """Refuse a run while another thread has one; runs within a hook of another are fine."""
    mine = threading.current_thread()
    with _LOCK:
        threads = _UNDER_WAY.values()
        other = next((t for t in threads if t is not mine and t.is_alive()), None)
        if other is None:
            _UNDER_WAY[run] = mine
    if other is not None:
        raise CallbackSetupError(
            report(
                f"`IPULogCallback` was set up in thread '{mine.name}' while another trainer runs "
                f"in thread '{other.name}'",
                received="two runs on IPUs at a time",
                expected="one after the other",
                why="PopTorch has one dispatcher a process, and Lightning's IPU strategy changes "
                "how all trainers make their loaders",
                fix="run them one after the other, or in processes of their own",
            )
        )
    try:
        yield
    finally:
        _UNDER_WAY.pop(run, None)


@contextmanager
def _instance_attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Give an object an attribute of its own while the block runs."""
    attributes = vars(owner)
    had, before = name in attributes, attributes.get(name)
    try:
        attributes[name] = value
        yield
    finally:
        if had:
            attributes[name] = before
        else:
            attributes.pop(name, None)


@contextmanager
def _first_callback(trainer: Any, callback: Any) -> Iterator[None]:
    """Put the callback before all others, which read in a hook what it logs there.

    A list that is being iterated must not be edited: a new one is bound.
    """
    before = trainer.callbacks
    first = [callback, *(other for other in before if other is not callback)]
    try:
        trainer.callbacks = first
        yield
    finally:
        if trainer.callbacks is first:
            trainer.callbacks = before


def _returning_all(options: Any) -> Any:
    from poptorch import OutputMode

    clone = options.clone()
    clone.outputMode(OutputMode.All)
    return clone
