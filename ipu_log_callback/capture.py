"""Device side: a step's Python runs here once, and becomes a step record.

While a step is captured, every `self.log` of its LightningModule and every call of its metrics is
recorded instead of executed. The tensors that selected calls were given, detached, join the
step's outputs as anchored outputs. Outside a capture nothing here is active.
"""

import functools
import inspect
import re
import threading
import warnings
from contextlib import ExitStack, contextmanager
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Set, Tuple

import torch
from torchmetrics import MetricCollection

from . import _compat
from .call_site import call_site
from .errors import StepCaptureError, report, warn
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
    map_leaves,
)
from .selection import Selection
from .step_errors import describe_value, explained
from .structure import tensors_of
from .wire import Wire, pack

__all__ = ["Capture", "current_capture"]

_ACTIVE = threading.local()

#: How a tensor that was formatted into a key looks; PopTorch prints `<unavailable>` for its values.
_TENSOR_IN_KEY = re.compile(r"tensor\(|<unavailable>|device='ipu")


def current_capture() -> "Optional[Capture]":
    """The capture that is under way in this thread, if any."""
    return getattr(_ACTIVE, "capture", None)


def on_device(tensor: torch.Tensor) -> bool:
    """Whether a tensor belongs to the graph that is being compiled.

    In trace mode a step runs on CPU tensors, all of which belong to the trace.
    """
    return tensor.device.type == "ipu" or in_trace_mode()


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
    """

    def __init__(self, module: Any, step: str, selection: Selection, metrics: Metrics) -> None:
        self.module = module
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
            stack.enter_context(self._active())
            stack.enter_context(_compat.trial_results(self.module.trainer))
            stack.enter_context(_logging_intercepted(self.module))
            stack.enter_context(self._metrics.recorded(self.record_metric))
            stack.enter_context(explained(self.name))
            if not in_trace_mode():
                # in trace mode the tracer alone watches torch's functions
                stack.enter_context(self._losses)
            return function(*args, **kwargs)

    def finish(self, output: Any) -> Tuple[Any, StepRecord, Wire]:
        """Decide what is wanted and pack it with what the step returned.

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
            structured=not in_trace_mode(),
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
        self._check_key(name, site)
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
            with self._inactive():
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

    def _leaf(self, leaf: Any) -> Any:
        """What a record holds in place of an argument."""
        if isinstance(leaf, PendingMetricValue):
            return leaf.result
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if not on_device(leaf):
            # the user may change it in place after the step
            return leaf.detach().clone()
        if id(leaf) not in self._anchors:
            self._anchors[id(leaf)] = AnchoredOutput(
                len(self._tensors), tuple(leaf.shape), leaf.dtype
            )
            self._originals.append(leaf)
            self._tensors.append(leaf.detach())
        return self._anchors[id(leaf)]

    def _logged_leaf(self, name: str, site: CallSite, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.numel() != 1:
            shape = list(leaf.shape)
            raise StepCaptureError(
                report(
                    f"`self.log('{name}', ...)` in `{self.name}` received a tensor of shape "
                    f"{shape}, expected one number",
                    where=str(site),
                    received=describe_value(leaf),
                    expected="a tensor with one element",
                    fix=f"self.log('{name}', value.mean())",
                )
            )
        return self._leaf(leaf)

    def _check_call(
        self, original: Callable[..., None], *args: Any, options: Mapping[str, Any]
    ) -> None:
        """Let Lightning check a call now: its errors must not wait for the first execution."""
        stand_ins = map_leaves(args, self._stand_in)
        weights = {k: 1 if isinstance(v, AnchoredOutput) else v for k, v in options.items()}
        with warnings.catch_warnings():
            # replay gives the same warnings
            warnings.simplefilter("ignore")
            original(self.module, *stand_ins, **weights)

    def _stand_in(self, leaf: Any) -> Any:
        """What Lightning can check in place of a value that is not known yet."""
        if isinstance(leaf, AnchoredOutput):
            return self._tensors[leaf.index]
        return 0.0 if isinstance(leaf, (LiveValue, MetricResult)) else leaf

    def _warn_if_frozen(self, name: str, value: Any, site: CallSite) -> None:
        """Say that a value is not computed on the device and so never changes again."""
        frozen: List[Any] = []
        map_leaves(value, lambda leaf: frozen.append(leaf) if _is_frozen(leaf) else None)
        if frozen and name not in self._frozen:
            self._frozen.add(name)
            warn(
                report(
                    f"`self.log('{name}', ...)` in `{self.name}` received "
                    f"{describe_value(frozen[0])}, which is frozen when the step is compiled",
                    where=str(site),
                    received="a value that was not computed on the device",
                    why="the step's Python runs only once; every execution logs this value again",
                    fix=f"self.log('{name}', live(lambda: ...)) calls the function at every "
                    "execution (from ipu_log_callback import live)",
                ),
                site,
            )

    def _check_key(self, name: Any, site: CallSite) -> None:
        if not isinstance(name, str):
            raise StepCaptureError(
                report(
                    f"`self.log({describe_value(name)}, ...)` in `{self.name}` received "
                    f"{type(name).__name__} as key, expected str",
                    where=str(site),
                    fix="self.log('name', value)",
                )
            )
        if _TENSOR_IN_KEY.search(name):
            raise StepCaptureError(
                report(
                    f"`self.log(f'...{{tensor}}...', ...)` in `{self.name}` received a key built "
                    "from a tensor, expected a key known before the step runs",
                    where=str(site),
                    received=repr(name if len(name) <= 80 else name[:79] + "…"),
                    expected="a str made of Python values",
                    why="batch_idx and dataloader_idx are tensors in a compiled step, whose "
                    "Python runs only once",
                    fix="leave the index out: Lightning appends `/dataloader_idx_N` itself,\n"
                    "or log that key in `on_validation_batch_end`, where the index is an int",
                )
            )

    # -- selection --------------------------------------------------------------------------

    def _wanted_metrics(self) -> Set[int]:
        """Identities of the metrics whose calls must be replayed."""
        by_number = {e.number: e for e in self._events if isinstance(e, MetricCall)}
        wanted = set()

        def visit(leaf: Any) -> None:
            if isinstance(leaf, MetricResult):
                wanted.add(self._root(by_number[leaf.number]))
            elif is_metric(leaf):
                wanted.add(id(self._metrics.root_of(leaf)))

        for event in self._events:
            if isinstance(event, LoggedCall):
                map_leaves(event.value, visit)
            elif isinstance(event, LoggedCollection):
                wanted.add(id(self._metrics.root_of(event.collection)))
            elif isinstance(event, LoggedResults):
                visit(event.result)
            elif isinstance(event, MetricCall) and self._selection.selects(event.path):
                wanted.add(self._root(event))
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
        if name not in self._dropped:
            if isinstance(value, MetricCall):
                size = sum(a.bytes for a in anchored_outputs(value))
            else:
                size = 4 if isinstance(value, torch.Tensor) and on_device(value) else 0
            self._dropped[name] = DroppedKey(name, size, site)

    # -- activity ---------------------------------------------------------------------------

    @contextmanager
    def _active(self) -> Iterator[None]:
        before = current_capture()
        _ACTIVE.capture = self
        try:
            yield
        finally:
            _ACTIVE.capture = before

    @contextmanager
    def _inactive(self) -> Iterator[None]:
        before = current_capture()
        _ACTIVE.capture = None
        try:
            yield
        finally:
            _ACTIVE.capture = before


def _is_frozen(leaf: Any) -> bool:
    return not is_metric(leaf) and not isinstance(leaf, (AnchoredOutput, LiveValue, MetricResult))


@contextmanager
def _logging_intercepted(module: Any) -> Iterator[None]:
    """Send `log` and `log_dict` of the captured module to its capture.

    They are replaced on Lightning's class, not on the instance: a subclass that overrides `log`
    keeps its override, which ends in Lightning's method. Other modules and other threads get that
    method unchanged.
    """
    base = _compat.lightning_class_of(module)
    log, log_dict = base.log, base.log_dict
    log_signature, dict_signature = inspect.signature(log), inspect.signature(log_dict)

    @functools.wraps(log)
    def captured_log(self: Any, *args: Any, **kwargs: Any) -> None:
        capture = current_capture()
        if capture is None or capture.module is not self:
            log(self, *args, **kwargs)
            return
        passed = log_signature.bind(self, *args, **kwargs).arguments
        _, name, value = passed.pop("self"), passed.pop("name"), passed.pop("value")
        capture.record_log(log, name, value, passed)

    @functools.wraps(log_dict)
    def captured_log_dict(self: Any, *args: Any, **kwargs: Any) -> None:
        capture = current_capture()
        passed = dict_signature.bind(self, *args, **kwargs).arguments
        _, dictionary = passed.pop("self"), passed.pop("dictionary")
        if capture is None or capture.module is not self:
            log_dict(self, *args, **kwargs)
        elif isinstance(dictionary, MetricCollection):
            capture.record_log_collection(log_dict, dictionary, passed)
        elif isinstance(dictionary, PendingMetricValue):
            capture.record_log_results(dictionary, passed)
        else:
            log_dict(self, *args, **kwargs)

    base.log, base.log_dict = captured_log, captured_log_dict
    try:
        yield
    finally:
        base.log, base.log_dict = log, log_dict
