"""What is different while PopTorch compiles a step, and only then.

PopTorch moves the whole module to the device, runs the step's Python once, and puts back nothing
but parameters and buffers (`_poplar_executor.py`, `_compileWithDispatch`). Around that:

- metrics are out of its sight (`Metrics.hidden`);
- the step is captured while its Python runs;
- what the move left on the device, `LightningModule._device` first of all, is put back.
"""

import functools
import threading
import warnings
from contextlib import ExitStack, contextmanager
from typing import Any, Callable, ContextManager, Dict, Iterator, List, Optional, Tuple, Union

import torch

from .capture import Capture, in_trace_mode
from .current import current_capture
from .errors import IPULogWarning, SecondLossError, names_text, report
from .metrics import Metrics
from .record import AnchoredCall, AnchoredOutput, LoggedCall, StepRecord
from .selection import Selection
from .step_errors import reason_of
from .wire import Wire

__all__ = ["STEPS", "Compilation"]

STEPS = ("training_step", "validation_step", "test_step", "predict_step")
_ABSENT = object()

# PopTorch has one dispatcher a process (`RegisterAtenOverloads.cpp`, `GlobalTracerContext`).
_ONE_AT_A_TIME = threading.RLock()


class Compilation:
    """One compilation of one executor's step.

    Use as `with compilation.under_way(): ...`; afterwards `record` and `wire` are there if the
    step's Python ran to its end.

    Args:
        module: The LightningModule.
        selection: Which keys to anchor.
        capturing: Makes what else holds around the step's Python while it is captured.
        check: Refuses a step record before PopTorch starts its long compilation.
        sums: Whether the device adds up the micro-batches of an execution.
    """

    def __init__(
        self,
        module: Any,
        selection: Selection,
        capturing: Callable[[Capture], ContextManager[None]],
        check: Callable[[StepRecord], None],
        sums: bool = False,
    ) -> None:
        self._module = module
        self._selection = selection
        self._capturing = capturing
        self._check = check
        self._sums = sums
        self._metrics = Metrics(module)
        self._traced = False
        self._kept: List[warnings.WarningMessage] = []
        self.record: Optional[StepRecord] = None
        self.wire = Wire()

    @contextmanager
    def under_way(self) -> Iterator[None]:
        """Everything that must hold while PopTorch compiles; undone in any case.

        Raises:
            SecondLossError: PopTorch found a second independent loss among the logged values.
        """
        with ExitStack() as stack:
            stack.enter_context(_ONE_AT_A_TIME)
            stack.enter_context(_left_on_device_put_back(self._module))
            stack.enter_context(self._metrics.hidden())
            stack.enter_context(self._steps_captured())
            try:
                yield
            except Exception as error:
                if "Multiple independent losses found" in str(error) and self.record is not None:
                    raise _second_loss(self.record, error) from error
                raise
        for kept in self._kept:
            warnings.warn_explicit(kept.message, kept.category, kept.filename, kept.lineno)

    @contextmanager
    def _steps_captured(self) -> Iterator[None]:
        attributes = vars(self._module)
        before = {step: attributes.get(step, _ABSENT) for step in STEPS}
        try:
            for step in STEPS:
                attributes[step] = self._captured(step, getattr(self._module, step))
            yield
        finally:
            for step, original in before.items():
                if original is _ABSENT:
                    attributes.pop(step, None)
                else:
                    attributes[step] = original

    def _captured(self, step: str, function: Callable[..., Any]) -> Callable[..., Any]:
        # `wraps` keeps the signature: Lightning decides by it what to pass
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            if current_capture() is not None:
                return function(*args, **kwargs)  # called by another step, and part of that
            self._traced = self._traced or in_trace_mode()
            # `torch.jit.trace` checks its graph: it runs the step again, the last time untraced,
            # and compares. Those runs must return what the first one did; its record holds.
            again = self._traced and self.record is not None
            capture = Capture(self._module, step, self._selection, self._metrics, self._traced)
            with self._metrics.shown(), self._warnings_kept(again):
                with self._capturing(capture):
                    output = capture.run(function, *args, **kwargs)
                batch = (args, kwargs) if self._sums else None
                packed, record, wire = capture.finish(output, batch)
                self._check(record)
            if not again:
                self.record, self.wire = record, wire
            return packed

        return run

    @contextmanager
    def _warnings_kept(self, again: bool) -> Iterator[None]:
        """In trace mode, keep this package's warnings until PopTorch lets warnings out again.

        It drops what is warned of while it traces (PopTorch 2.6 `_poplar_executor.py`,
        `_trace_with_warning_filter`).

        Args:
            again: Whether the step was captured before: its warnings are kept already.
        """
        if not self._traced:
            yield
            return
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("ignore")
            if not again:
                warnings.simplefilter("always", IPULogWarning)
            yield
        self._kept += caught or ()


@contextmanager
def _left_on_device_put_back(module: torch.nn.Module) -> Iterator[None]:
    """Put back whatever a move to the device changed and PopTorch does not restore.

    That is every plain attribute, of the module and of all below it, that held a host device or
    tensor before and one on the device afterwards. Parameters and buffers are not attributes in
    this sense and are not touched: between executions that would copy all weights to the host.
    """
    before: List[Tuple[Dict[str, Any], str, Any]] = [
        (attributes, name, value)
        for attributes in map(vars, module.modules())
        for name, value in attributes.items()
        if isinstance(value, (torch.device, torch.Tensor))
    ]
    try:
        yield
    finally:
        for attributes, name, value in before:
            if _device_type(attributes.get(name)) == "ipu" != _device_type(value):
                attributes[name] = value


def _device_type(value: Any) -> Optional[str]:
    if isinstance(value, torch.device):
        return value.type
    return value.device.type if isinstance(value, torch.Tensor) else None


def _second_loss(record: StepRecord, error: Exception) -> SecondLossError:
    anchored: List[Union[AnchoredCall, LoggedCall]] = [
        event
        for event in record.events
        if isinstance(event, (AnchoredCall, LoggedCall)) and isinstance(event.value, AnchoredOutput)
    ]
    suspects = [event for event in anchored if event.name in record.losses] or anchored
    names = names_text(event.name for event in suspects)
    call = "self.log" if any(isinstance(event, LoggedCall) for event in suspects) else "anchor"
    return SecondLossError(
        report(
            f"`{call}({names}, ...)` in `{record.owner}.{record.step}` received a torch loss "
            "that PopTorch takes for a second loss of the model",
            where=", ".join(str(event.site) for event in suspects),
            received=reason_of(error),
            expected="one torch loss function in training, that of the returned loss",
            why="a value that comes out of a loss function (F.l1_loss, nn.MSELoss, ...) counts as "
            "a loss, even detached, unless it feeds the returned one",
            fix="write the logged one as arithmetic: (prediction - target).abs().mean() instead "
            "of F.l1_loss,\n((prediction - target) ** 2).mean() instead of F.mse_loss; or, if it "
            "is part of the loss, wrap the sum in poptorch.identity_loss",
        )
    )
