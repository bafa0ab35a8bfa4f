"""Device side: a step's Python runs here once, and becomes a step record.

While a step is captured, every `self.log` of its LightningModule and every call of its metrics is
recorded instead of executed. The tensors that selected calls were given, detached, join the
step's outputs as anchored outputs. Outside a capture nothing here is active.
"""

import functools
import inspect
import warnings
from contextlib import ExitStack, contextmanager
from typing import Any, Callable, Dict, Iterator, List, Mapping, Set, Tuple

import torch
from torchmetrics import MetricCollection

from . import _compat
from .call_checks import check_key, check_one_number, frozen_values, warn_of_frozen
from .call_site import call_site
from .current import current_capture, made_current
from .loss_watch import LossWatch
from .metrics import Metrics, PendingMetricValue, is_metric, result_keys
from .record import (
    AnchoredCall,
    AnchoredOutput,
    CallSite,
    DroppedKey,
    Event,
    LiveValue,
    LoggedCall,
    LoggedCollection,
    LoggedResults,
    MetricCall,
    MetricResult,
    StepRecord,
    anchored_outputs,
    leaves_of,
    map_leaves,
)
from .selection import Selection
from .step_errors import explained
from .structure import tensors_of
from .wire import Wire, pack
from .write_watch import WriteWatch

__all__ = ["LOG_SIGNATURE", "Capture", "in_trace_mode"]

# As imported: who replaces Lightning's methods later need not keep their signatures.
LOG_SIGNATURE = inspect.signature(_compat.LightningModule.log)
_LOG_DICT_SIGNATURE = inspect.signature(_compat.LightningModule.log_dict)


def in_trace_mode() -> bool:
    """Whether `torch.jit.trace` is running the step (`Jit.traceModel(True)`)."""
    # torch gives neither an annotation nor an explicit export to this public function
    return bool(torch.jit.is_tracing())  # type: ignore[attr-defined, no-untyped-call]


class Capture:
    """One run of a step's Python, recorded.

    Args:
        module: The LightningModule.
        step: Name of the step.
        selection: Which keys to anchor.
        metrics: The module's metrics.
        traced: Whether PopTorch compiles in trace mode.
    """

    def __init__(
        self, module: Any, step: str, selection: Selection, metrics: Metrics, traced: bool
    ) -> None:
        self.module = module
        self._traced = traced
        self.step = step
        self.owner = type(module).__name__
        self._selection = selection
        self._metrics = metrics
        self._events: List[Event] = []
        self._dropped: Dict[str, DroppedKey] = {}
        self._frozen: Set[str] = set()
        self._losses = LossWatch()
        self.takes_anchors = True
        self.anchored_at: Dict[str, str] = {}
        self._anchors: Dict[int, AnchoredOutput] = {}
        self._tensors: List[torch.Tensor] = []
        # keeps the originals alive: an anchor is found again by the identity of its tensor
        self._originals: List[torch.Tensor] = []

    @property
    def name(self) -> str:
        """The step as a user would say it, e.g. `LitNet.training_step`."""
        return f"{self.owner}.{self.step}"

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the step's Python with everything that it logs recorded."""
        with ExitStack() as stack:
            stack.enter_context(made_current(self))
            # a user may compile in any hook, e.g. load an executable in `on_fit_start`
            stack.enter_context(_compat.filed_under(self.module, self.step))
            stack.enter_context(_compat.trial_results(self.module.trainer))
            stack.enter_context(_logging_intercepted(self.module))
            stack.enter_context(self._metrics.recorded(self.record_metric))
            stack.enter_context(explained(self.name))
            stack.enter_context(self._losses)
            stack.enter_context(WriteWatch(self._anchors.clear))
            return function(*args, **kwargs)

    def finish(self, output: Any, batch: Any = None) -> Tuple[Any, StepRecord, Wire]:
        """Decide what is wanted and pack it with what the step returned.

        Args:
            output: What the step returned.
            batch: The step's arguments, where the device adds micro-batches up.

        Returns:
            What the step returns to PopTorch, the step record, and the layout.
        """
        wanted = self._wanted_metrics()
        events = []
        for event in self._events:
            if not isinstance(event, MetricCall) or self._root(event) in wanted:
                events.append(event)
            elif event.method in ("update", "forward"):
                self._drop(event.path, event, event.site)
        record = StepRecord(
            self.step,
            self.owner,
            tuple(events),
            tuple(self._dropped.values()),
            self._losses_besides(output),
        )
        packed, wire = pack(
            output,
            record.anchored,
            dict(enumerate(self._tensors)),
            structured=not self._traced,
            varying=next(iter(tensors_of(batch)), None),
        )
        return packed, record, wire

    # -- what the step calls ----------------------------------------------------------------

    def record_log(
        self, original: Callable[..., None], name: Any, value: Any, options: Mapping[str, Any]
    ) -> None:
        """Record one `self.log` of the captured module.

        Args:
            original: Lightning's own `log`; checks the call.
            name: The key.
            value: What to log.
            options: What the user passed besides these.

        Raises:
            StepCaptureError: The key was built from a device tensor, or the value cannot be
                carried across compilation.
        """
        site = call_site()
        check_key(name, self.name, site)
        if not self._selection.selects(name):
            self._drop(name, value, site)
            return
        value = map_leaves(value, functools.partial(self._logged_leaf, name, site))
        options = map_leaves(dict(options), self._leaf)
        self._check_call(original, name, value, options=options)
        self._warn_if_frozen(name, value, site)
        self._events.append(LoggedCall(name, value, options, site))

    def record_log_collection(
        self, original: Callable[..., None], collection: Any, options: Mapping[str, Any]
    ) -> None:
        """Record one `self.log_dict` of a whole `MetricCollection`."""
        site = call_site()
        names = list(collection.keys())
        selected = tuple(name for name in names if self._selection.selects(name))
        for name in names:
            if name not in selected:
                self._drop(name, None, site)
        if selected:
            with made_current(None):
                self._check_call(original, collection, options=options)
            self._events.append(LoggedCollection(collection, selected, dict(options), site))

    def record_log_results(self, pending: PendingMetricValue, options: Mapping[str, Any]) -> None:
        """Record one `self.log_dict` of a metric call's result whose keys are not known yet."""
        if self._selection:
            self._events.append(
                LoggedResults(pending.result, self._selection.selects, dict(options), call_site())
            )

    def record_metric(
        self, metric: Any, path: str, method: str, args: Tuple[Any, ...], kwargs: Dict[str, Any]
    ) -> Any:
        """Record one call of a metric's method; returns what stands for its result."""
        number = len(self._events)
        self._events.append(
            MetricCall(
                metric,
                path,
                method,
                map_leaves(args, self._leaf),
                map_leaves(kwargs, self._leaf),
                number,
                call_site(),
            )
        )
        if method in ("update", "reset"):
            return None
        call = f"self.{path}(...)" if method == "forward" else f"self.{path}.compute()"
        keys = result_keys(metric)
        if keys is not None:
            return {
                key: PendingMetricValue(MetricResult(number, key), call, self.name) for key in keys
            }
        return PendingMetricValue(MetricResult(number), call, self.name)

    def record_anchor(
        self, name: str, kind: str, value: Any, site: CallSite, **reduced: Any
    ) -> None:
        """Record a tensor, or the few numbers it was reduced to: the fields of `AnchoredCall`."""
        self.anchored_at[name] = str(site)
        value = map_leaves(value, self._leaf)
        self._events.append(AnchoredCall(name, kind, value, site, **reduced))

    # -- values -----------------------------------------------------------------------------

    def _on_device(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor belongs to the graph that is being compiled.

        In trace mode a step runs on CPU tensors, all of which belong to the trace.
        """
        return self._traced or tensor.device.type == "ipu"

    def _leaf(self, leaf: Any) -> Any:
        """What a record holds in place of an argument."""
        if isinstance(leaf, PendingMetricValue):
            return leaf.result
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if not self._on_device(leaf):
            # the user may change it in place after the step
            return leaf.detach().clone()
        if id(leaf) not in self._anchors:
            self._anchors[id(leaf)] = AnchoredOutput(
                len(self._tensors), tuple(leaf.shape), leaf.dtype
            )
            self._originals.append(leaf)
            # cloned: the step may go on to change it in place
            self._tensors.append(leaf.detach().clone())
        return self._anchors[id(leaf)]

    def _logged_leaf(self, name: str, site: CallSite, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            check_one_number(name, leaf, self.name, site)
        return self._leaf(leaf)

    def _check_call(
        self, original: Callable[..., None], *args: Any, options: Mapping[str, Any]
    ) -> None:
        """Let Lightning check a call now: its errors must not wait for the first execution."""
        stand_ins = map_leaves(args, self._stand_in)
        with warnings.catch_warnings():
            # replay gives the same warnings
            warnings.simplefilter("ignore")
            original(self.module, *stand_ins, **options)

    def _stand_in(self, leaf: Any) -> Any:
        """What Lightning can check in place of a value that is not known yet."""
        if isinstance(leaf, AnchoredOutput):
            return self._tensors[leaf.index]
        return 0.0 if isinstance(leaf, (LiveValue, MetricResult)) else leaf

    def _warn_if_frozen(self, name: str, value: Any, site: CallSite) -> None:
        frozen = frozen_values(value)
        if frozen and name not in self._frozen:
            self._frozen.add(name)
            warn_of_frozen(name, frozen[0], self.name, site)

    # -- selection --------------------------------------------------------------------------

    def _wanted_metrics(self) -> Set[int]:
        """Identities of the metrics whose calls must be replayed."""
        by_number = {e.number: e for e in self._events if isinstance(e, MetricCall)}
        logged: List[Any] = []
        wanted = set()
        for event in self._events:
            if isinstance(event, LoggedCall):
                logged += leaves_of(event.value)
            elif isinstance(event, LoggedCollection):
                logged.append(event.collection)
            elif isinstance(event, LoggedResults):
                logged.append(event.result)
            elif isinstance(event, MetricCall) and self._selection.selects(event.path):
                wanted.add(self._root(event))
        for leaf in logged:
            if isinstance(leaf, MetricResult):
                wanted.add(self._root(by_number[leaf.number]))
            elif is_metric(leaf):
                wanted.add(id(self._metrics.root_of(leaf)))
        return wanted

    def _losses_besides(self, output: Any) -> Tuple[str, ...]:
        """Keys whose values came out of a loss function and are not what the step returned."""
        returned = tensors_of(output)
        names = []
        for event in self._events:
            if isinstance(event, LoggedCall) and isinstance(event.value, AnchoredOutput):
                value = self._originals[event.value.index]
                if self._losses.saw(value) and not any(value is own for own in returned):
                    names.append(event.name)
        return tuple(names)

    def _root(self, event: MetricCall) -> int:
        return id(self._metrics.root_of(event.metric))

    def _drop(self, name: str, value: Any, site: CallSite) -> None:
        if isinstance(value, MetricCall):
            size = sum(a.bytes for a in anchored_outputs(value))
        else:
            size = 4 if isinstance(value, torch.Tensor) and self._on_device(value) else 0
        # a metric object may be logged under its own path: its calls say what it costs
        if name not in self._dropped or self._dropped[name].bytes < size:
            self._dropped[name] = DroppedKey(name, size, site)


@contextmanager
def _logging_intercepted(module: Any) -> Iterator[None]:
    """Send `log` and `log_dict` of the captured module to its capture.

    They are replaced on Lightning's class, not on the instance: a subclass that overrides `log`
    keeps its override, which ends in Lightning's method. Other modules and other threads get that
    method unchanged.
    """
    base = _compat.lightning_class_of(module)
    log, log_dict = base.log, base.log_dict

    @functools.wraps(log)
    def captured_log(self: Any, *args: Any, **kwargs: Any) -> None:
        capture = current_capture()
        if capture is None or capture.module is not self:
            log(self, *args, **kwargs)
            return
        passed = LOG_SIGNATURE.bind(self, *args, **kwargs).arguments
        _, name, value = passed.pop("self"), passed.pop("name"), passed.pop("value")
        capture.record_log(log, name, value, passed)

    @functools.wraps(log_dict)
    def captured_log_dict(self: Any, *args: Any, **kwargs: Any) -> None:
        capture = current_capture()
        passed = _LOG_DICT_SIGNATURE.bind(self, *args, **kwargs).arguments
        _, dictionary = passed.pop("self"), passed.pop("dictionary")
        if capture is None or capture.module is not self:
            log_dict(self, *args, **kwargs)
        elif isinstance(dictionary, MetricCollection):
            capture.record_log_collection(log_dict, dictionary, passed)
        elif isinstance(dictionary, PendingMetricValue):
            capture.record_log_results(dictionary, passed)
        else:
            log_dict(self, *args, **kwargs)

    try:
        base.log, base.log_dict = captured_log, captured_log_dict
        yield
    finally:
        base.log, base.log_dict = log, log_dict
