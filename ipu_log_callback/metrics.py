"""Torchmetrics on the device side: step aside, and be recorded.

Metric code never runs inside a compiled step: it branches on data, counts in Python and keeps
tensors, and PopTorch's move of the module to the device would take its states along for good.
So while PopTorch compiles, metrics are out of its sight (`Metrics.hidden`), and while the step's
Python runs, their `update`, `forward`, `compute` and `reset` are recorded with their arguments
instead of executed (`Metrics.recorded`). Replay executes them on the host.
"""

from contextlib import contextmanager
from typing import Any, Callable, Dict, Iterator, List, NoReturn, Optional, Set, Tuple

import torch
from torchmetrics import Metric, MetricCollection, MetricTracker

from ._compat import submodules
from .call_site import call_site
from .errors import StepCaptureError, report
from .record import MetricResult

__all__ = ["METHODS", "Metrics", "PendingMetricValue", "is_metric", "result_keys"]

METHODS = ("update", "forward", "compute", "reset")
_ABSENT = object()

Recorder = Callable[[Any, str, str, Tuple[Any, ...], Dict[str, Any]], Any]


def is_metric(value: object) -> bool:
    """Whether an object is a torchmetrics metric, a collection of them, or a tracker."""
    return isinstance(value, (Metric, MetricCollection, MetricTracker))


class Metrics:
    """The torchmetrics objects of a LightningModule, at any depth.

    Found as children of the module or of its submodules, and in their plain attributes: lists,
    tuples and dicts included. A metric inside a wrapper or a collection belongs to it.

    Args:
        module: The LightningModule.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._paths: Dict[int, str] = {}
        self._roots: Dict[int, Any] = {}
        self._found: List[Any] = []
        self._homes: List[_Home] = []
        self._search(module, "", set())

    def __iter__(self) -> Iterator[Any]:
        return iter(self._found)

    def root_of(self, metric: object) -> Any:
        """The collection that a metric belongs to, or the metric itself."""
        return self._roots.get(id(metric), metric)

    def path_of(self, metric: object) -> str:
        """Attribute path of a metric in the LightningModule."""
        return self._paths[id(metric)]

    def _search(self, module: torch.nn.Module, prefix: str, seen: Set[int]) -> None:
        if id(module) in seen:
            return
        seen.add(id(module))
        children = submodules(module)
        if any(map(is_metric, children.values())):
            self._homes.append(_Home(children))
        for name, child in children.items():
            if is_metric(child):
                self._add(child, prefix + name)
            elif child is not None:
                self._search(child, f"{prefix}{name}.", seen)
        for name, value in vars(module).items():
            if isinstance(value, (list, tuple, dict)):
                items = value.items() if isinstance(value, dict) else enumerate(value)
                for key, item in items:
                    if is_metric(item):
                        self._add(item, f"{prefix}{name}.{key}")

    def _add(self, metric: Any, path: str) -> None:
        if id(metric) in self._roots:
            return
        members = [("", metric)]
        if isinstance(metric, MetricCollection):
            members += [(f".{name}", member) for name, member in submodules(metric).items()]
        for suffix, member in members:
            self._roots.setdefault(id(member), metric)
            self._paths.setdefault(id(member), path + suffix)
            self._found.append(member)

    @contextmanager
    def hidden(self, only_with_state: bool = False) -> Iterator[None]:
        """Take the metrics out of the module tree while the block runs.

        Args:
            only_with_state: Only those that have parameters or buffers: PopTorch would make them
                its own, and every look at them on the host would copy all weights.
        """
        try:
            for home in self._homes:
                home.hide(only_with_state)
            yield
        finally:
            for home in self._homes:
                home.show()

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Put the metrics back inside a `hidden` block: the step's own Python must find them."""
        try:
            for home in self._homes:
                home.show()
            yield
        finally:
            for home in self._homes:
                home.hide()

    @contextmanager
    def recorded(self, recorder: Recorder) -> Iterator[None]:
        """Have `recorder(metric, path, method, args, kwargs)` called instead of the metrics."""
        before: List[Tuple[Dict[str, Any], str, Any]] = []
        try:
            for metric in self._found:
                attributes, path = vars(metric), self.path_of(metric)
                for method in METHODS:
                    before.append((attributes, method, attributes.get(method, _ABSENT)))
                    attributes[method] = _recording(recorder, metric, path, method)
            yield
        finally:
            for attributes, method, original in reversed(before):
                if original is _ABSENT:
                    attributes.pop(method, None)
                else:
                    attributes[method] = original


class _Home:
    """The children of one module, some of which are metrics that can step aside.

    Order is kept: `state_dict` and optimizers depend on it.
    """

    def __init__(self, children: Dict[str, Any]) -> None:
        self._children = children
        self._whole = dict(children)
        self._hidden = False

    def hide(self, only_with_state: bool = False) -> None:
        if not self._hidden:  # else an interrupt came before it was shown: forget nothing
            self._whole = dict(self._children)
        self._hidden = True
        for name, child in self._whole.items():
            if is_metric(child) and not (only_with_state and _stateless(child)):
                self._children.pop(name, None)

    def show(self) -> None:
        visible = dict(self._children)
        self._children.clear()
        for name, child in self._whole.items():
            if name in visible or is_metric(child):
                self._children[name] = visible.pop(name, child)
        self._children.update(visible)
        self._hidden = False


def result_keys(metric: object) -> Optional[List[str]]:
    """Keys of the dict that a metric's `forward` and `compute` return, as far as known in advance.

    Returns:
        The keys of a collection of plain metrics, else `None`: wrappers name their results as they
        go.
    """
    if not isinstance(metric, MetricCollection):
        return None
    members = metric.values(copy_state=False)
    if any(".wrappers" in type(member).__module__ for member in members):
        return None
    return list(map(str, metric.keys(keep_base=False)))


def _stateless(metric: torch.nn.Module) -> bool:
    return next(metric.parameters(), next(metric.buffers(), None)) is None


def _recording(recorder: Recorder, metric: Any, path: str, method: str) -> Callable[..., Any]:
    def record(*args: Any, **kwargs: Any) -> Any:
        return recorder(metric, path, method, args, kwargs)

    return record


class PendingMetricValue:
    """Stands, inside a captured step, for what a metric call will return on the host.

    `self.log` takes it like the value itself; anything else raises, since the value does not
    exist while the step is captured.

    Args:
        result: Which metric call, and which entry of what it returns.
        call: The call as the user typed it.
        step: The step, for messages.
    """

    __slots__ = ("call", "result", "step")

    def __init__(self, result: MetricResult, call: str, step: str) -> None:
        self.result = result
        self.call = call
        self.step = step

    def __repr__(self) -> str:
        return f"<value of {self.call}, known on the host after the execution>"

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise StepCaptureError(
            report(
                f"the value of `{self.call}` was used in `{self.step}`, expected it to be logged",
                where=str(call_site()),
                received="an operation on the value of a torchmetrics object",
                expected="`self.log(name, value)` and nothing else",
                why="metrics run on the host, after the compiled step; "
                "inside the step their values do not exist yet",
                fix="compute it on the device: torchmetrics.functional or plain torch,\n"
                "or log the metric object itself: self.log(name, self.metric)",
            )
        ) from None

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            # protocols that Python and torch look up on any object: answer "not supported"
            raise AttributeError(name)
        self._refuse()

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Tuple[Any, ...] = (), kwargs: Any = None
    ) -> NoReturn:
        pending = [a for a in _flat(args) + _flat(kwargs or {}) if isinstance(a, cls)]
        pending[0]._refuse()

    __hash__ = object.__hash__


for _operator in (
    *("abs", "add", "and", "bool", "contains", "eq", "float", "floordiv", "format", "ge"),
    *("getitem", "gt", "index", "int", "invert", "iter", "le", "len", "lt", "matmul", "mod"),
    *("mul", "ne", "neg", "or", "pow", "radd", "rmul", "round", "rpow", "rsub", "rtruediv"),
    *("sub", "truediv"),
):
    setattr(PendingMetricValue, f"__{_operator}__", PendingMetricValue._refuse)


def _flat(value: Any) -> List[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [leaf for item in value for leaf in _flat(item)]
    return [value]
