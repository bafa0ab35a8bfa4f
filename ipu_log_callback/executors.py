"""Listening to a `poptorch.PoplarExecutor`: what it compiles, what it returns.

The strategy keeps one executor a stage in its public `poptorch_models`. A listener stands between
the executor and whoever calls it, in place and under the same identity, so that a strategy, a
subclass of one, or a user's own call all get what the step returned.
"""

from contextlib import contextmanager
from dataclasses import replace
from time import perf_counter
from typing import Any, Callable, ContextManager, Iterator, NamedTuple, Optional

import torch

from .compilation import Compilation
from .errors import MissingStepRecordError, report, warn
from .geometry import Geometry, fold
from .inspection import Inspector
from .processes import Processes
from .record import AnchoredCall, AnchoredOutput, LoggedCall, StepRecord
from .replay import Replay
from .selection import Selection
from .wire import Returned, Wire

__all__ = ["Execution", "ExecutorListener"]


class Execution(NamedTuple):
    """The anchored outputs of one execution, waiting to be replayed.

    Args:
        replay: How to replay them.
        returned: The anchored outputs.
        listener: Whose execution it was.
        seconds: What it took; `None` if that includes a compilation.
    """

    replay: Replay
    returned: Returned
    listener: "ExecutorListener"
    seconds: Optional[float]


class ExecutorListener:
    """Captures the step that an executor compiles and unpacks what it returns.

    Args:
        executor: The executor.
        module: The LightningModule.
        selection: Which keys to anchor.
        training: Whether it is the training executor.
        own_mode: Geometry with the output mode of the user's own options.
        on_execution: Called with every `Execution`.
        on_compiled: Called with the listener after every compilation.
        inspector: Looks at what else the executor holds.
        notice: Says, while its block runs, that the step is being compiled.
        processes: Those that the executor's options tell of, if there are several.
    """

    def __init__(
        self,
        executor: Any,
        module: Any,
        selection: Selection,
        training: bool,
        own_mode: Optional[Geometry],
        on_execution: Callable[[Execution], None],
        on_compiled: "Callable[[ExecutorListener], None]",
        inspector: Inspector,
        notice: Callable[[], ContextManager[None]],
        processes: Optional[Processes] = None,
    ) -> None:
        self.executor = executor
        self._module = module
        self._selection = selection
        self.training = training
        self._own_mode = own_mode
        self._on_execution = on_execution
        self._on_compiled = on_compiled
        self._inspector = inspector
        self._notice = notice
        self.processes = processes
        self.record: Optional[StepRecord] = None
        self.wire = Wire()
        self.fetched: Geometry
        self.own: Geometry
        self._replay: Optional[Replay] = None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Stand in the executor's place while the block runs."""
        executor, plain = self.executor, type(self.executor)
        # PopTorch changes a wrapped model's class in the same way: `__call__` is looked up on the
        # class, and a stand-in object would not be the executor that others hold.
        try:
            executor.__class__ = _listening_class(plain, self)
            yield
        finally:
            executor.__class__ = plain

    @contextmanager
    def compiling(self, anew: bool = False) -> Iterator[None]:
        """Capture what is compiled in the block, if anything is.

        Args:
            anew: Whether it compiles even if the executor is compiled already.
        """
        if self.executor.isCompiled() and not anew:
            yield
            return
        self.record = None
        self.fetched = Geometry.from_options(self.executor.options, self.training)
        compilation = Compilation(
            self._module,
            self._selection,
            self._inspector.capturing,
            self._check,
            sums=self.fetched.micro_batches_per_result > 1,
        )
        with self._notice(), self._inspector.compiling(), compilation.under_way():
            yield
        if compilation.record is not None:
            self._prepare(compilation.record, compilation.wire)

    def received(self, returned: Any, seconds: Optional[float]) -> Any:
        """Take one execution's outputs apart; returns what the step returned.

        Args:
            returned: What the executor returned.
            seconds: What that took; `None` if it compiled first.
        """
        if self.record is None:
            if self._selection:
                raise _missing_record(self._module)
            return returned
        output, anchored = self.wire.unpack(returned, self.own, self.fetched)
        if self._replay is not None:
            self._on_execution(Execution(self._replay, anchored, self, seconds))
        if isinstance(output, dict) and self.wire.carries_anchored:
            output = self._with_anchored(output, anchored)
        return output

    def _check(self, record: StepRecord) -> None:
        if self.processes is not None:
            self.processes.check(record)

    def _prepare(self, record: StepRecord, wire: Wire) -> None:
        self.record, self.wire = record, wire
        own = self._own_mode
        self.own = (
            self.fetched
            if own is None
            else replace(self.fetched, output_mode=own.output_mode, period=own.period)
        )
        wanted = record.events or self._inspector.watches(self)
        self._replay = Replay(record, wire, self.fetched) if wanted else None
        logs = wire.carries_anchored and bool(record.logged or record.metric_calls)
        if logs and not self.fetched.sees_every_micro_batch:
            _warn_inexact(record, self.fetched)
        self._on_compiled(self)

    def _with_anchored(self, output: Any, anchored: Returned) -> Any:
        """A dict output with the logged tensors in it, where their keys are free."""
        output = dict(output) if type(output) is dict else output
        results = self.fetched.results
        for event in self.record.events if self.record is not None else ():
            if not isinstance(event, (AnchoredCall, LoggedCall)) or event.name in output:
                continue
            if isinstance(event.value, AnchoredOutput):
                values = anchored.of(event.value, results)
                logged = isinstance(event, LoggedCall)
                output[event.name] = self._as_own(values.reshape(-1) if logged else values)
        return output

    def _as_own(self, values: torch.Tensor) -> torch.Tensor:
        """`[results, *shape]` as PopTorch would have returned it under the user's own mode."""
        inner = values.shape[1:]
        values = values.flatten(0, 1) if inner else values
        if self.own != self.fetched:
            values = fold(values, inner, self.own)
        return values.reshape(()) if not inner and values.numel() == 1 else values


def _listening_class(plain: Any, listener: ExecutorListener) -> type:
    """A subclass of the executor's class that lets the listener see what comes and goes."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.isCompiled():
            started = perf_counter()
            returned = plain.__call__(self, *args, **kwargs)
            return listener.received(returned, perf_counter() - started)
        with listener.compiling():
            returned = plain.__call__(self, *args, **kwargs)
        return listener.received(returned, None)

    def compile_only(self: Any, *args: Any, **kwargs: Any) -> None:
        with listener.compiling():
            plain.compile(self, *args, **kwargs)

    def load_executable(self: Any, *args: Any, **kwargs: Any) -> None:
        with listener.compiling(anew=True):
            plain.loadExecutable(self, *args, **kwargs)

    def reduce(self: Any, protocol: int) -> Any:
        # a copy or a pickle is a plain executor: this class exists for one run
        _, _, *rest = plain.__reduce_ex__(self, protocol)
        return (object.__new__, (plain,), *rest)

    members = {
        "__call__": call,
        "compile": compile_only,
        "loadExecutable": load_executable,
        "__reduce_ex__": reduce,
        "__module__": plain.__module__,
        "__qualname__": plain.__qualname__,
    }
    return type(plain.__name__, (plain,), members)


def _missing_record(module: Any) -> MissingStepRecordError:
    return MissingStepRecordError(
        report(
            f"a compiled step of `{type(module).__name__}` was executed whose Python this "
            "callback never saw, expected it to be captured when it was compiled or loaded",
            why="which of its outputs are logged, and how, is known only from that run of its "
            "Python",
            fix="load it after the trainer has set up, e.g. in `on_fit_start`:\n"
            "trainer.strategy.poptorch_models[RunningStage.TRAINING].loadExecutable(filename)",
        )
    )


def _warn_inexact(record: StepRecord, geometry: Geometry) -> None:
    seen = f"{geometry.results} of {geometry.micro_batches}"
    warn(
        report(
            f"`{record.owner}.{record.step}` logs {seen} micro-batches of an execution",
            received=f"poptorch.OutputMode.{geometry.output_mode}, with output_mode='keep'",
            why="the other micro-batches do not come back; means and metrics differ from a CPU run",
            fix="IPULogCallback(..., output_mode='auto')",
        )
    )
