"""Host side: the metric calls of a step are made for real, with what one execution returned.

A CPU run makes them once a micro-batch, and so does replay where it matters: wherever a call's own
result is logged, or the object is logged `on_step`. Elsewhere most metrics come to the same state
from one call with all micro-batches' samples, at a fraction of the cost. Whether a metric does is
not believed but tried: the first execution is replayed both ways, on the metric and on a copy, and
only a metric whose states agree takes the short way from then on.
"""

import copy
from contextlib import ExitStack, contextmanager
from typing import Any, Dict, Iterator, List, Optional, Sequence, Tuple

import torch
from torchmetrics import Metric, MetricCollection

from . import _compat
from .record import (
    AnchoredOutput,
    LiveValue,
    LoggedCall,
    LoggedCollection,
    MetricCall,
    MetricResult,
    StepRecord,
    leaves_of,
    map_leaves,
)
from .wire import Returned

__all__ = ["MetricReplay"]

Results = Dict[int, List[Any]]


class MetricReplay:
    """The metric calls of one compiled step.

    Args:
        record: The step record.
        results: Results that one execution returns.
    """

    def __init__(self, record: StepRecord, results: int) -> None:
        self._calls = record.metric_calls
        self._results = results
        self._joined: Optional[bool] = None if self._may_join(record) else False

    def __call__(self, returned: Returned) -> Results:
        """Make the calls of one execution.

        Returns:
            What each call returned for each micro-batch, by the call's number; empty where there
            is no call, and where the micro-batches were joined, since then nobody asks for it.
        """
        if not self._calls:
            return {}
        if self._joined is None:
            self._joined = self._try_joined(returned)
            return {}
        if self._joined:
            self._make_joined(returned, [call.metric for call in self._calls])
            return {}
        return self._make_each(returned, [call.metric for call in self._calls])

    @contextmanager
    def execution_values(self, made: Results) -> Iterator[None]:
        """Let metric objects show, while they are logged, the execution's value as their last.

        An `on_step` value stands for a whole execution: what Lightning reads off the object is the
        mean of the micro-batches' own values, not the last one.
        """
        with ExitStack() as stack:
            for call in self._calls if self._results > 1 else ():
                if call.method == "forward":
                    for metric, values in _by_member(call.metric, made.get(call.number, ())):
                        if all(isinstance(value, torch.Tensor) for value in values):
                            mean = torch.stack(list(values)).float().mean(0)
                            stack.enter_context(_compat.last_value(metric, mean))
            yield

    # -- one call a micro-batch -------------------------------------------------------------

    def _make_each(self, returned: Returned, metrics: Sequence[Any]) -> Results:
        made: Results = {call.number: [] for call in self._calls}
        for result in range(self._results):

            def argument(leaf: Any, result: int = result) -> Any:
                if isinstance(leaf, AnchoredOutput):
                    return returned.of(leaf, self._results)[result]
                if isinstance(leaf, MetricResult):
                    value = made[leaf.number][result]
                    return value if leaf.key is None else value[leaf.key]
                return leaf.function() if isinstance(leaf, LiveValue) else leaf

            for call, metric in zip(self._calls, metrics):
                made[call.number].append(_make(call, metric, argument))
        return made

    # -- one call an execution --------------------------------------------------------------

    def _may_join(self, record: StepRecord) -> bool:
        """Whether nobody asks for a micro-batch's own result, and every metric is a plain one."""
        if self._results == 1 or not self._calls:
            return False
        given: List[Any] = []
        called_forward = {id(call.metric) for call in self._calls if call.method == "forward"}
        for event in record.logged:
            if isinstance(event, LoggedCall):
                given += leaves_of(event.value)
                logged: Tuple[Any, ...] = (event.value,)
            elif isinstance(event, LoggedCollection):
                logged = (event.collection, *event.collection.values())
            else:
                return False
            on_step = event.options.get("on_step")
            if on_step is None:
                on_step = record.step == "training_step"
            if on_step and called_forward.intersection(map(id, logged)):
                return False
        for call in self._calls:
            given += leaves_of((call.args, dict(call.kwargs)))
        return not any(isinstance(leaf, MetricResult) for leaf in given) and all(
            call.method in ("update", "forward") and _is_plain(call.metric) for call in self._calls
        )

    def _try_joined(self, returned: Returned) -> bool:
        """Replay one execution both ways; the metrics themselves are called as on a CPU."""
        memo: Dict[int, Any] = {}
        copies = [copy.deepcopy(call.metric, memo) for call in self._calls]
        self._make_each(returned, [call.metric for call in self._calls])
        try:
            self._make_joined(returned, copies)
        except Exception:  # noqa: BLE001 - whatever it is, this metric takes one micro-batch a call
            return False
        return all(_agree(call.metric, other) for call, other in zip(self._calls, copies))

    def _make_joined(self, returned: Returned, metrics: Sequence[Any]) -> None:
        def argument(leaf: Any) -> Any:
            if not isinstance(leaf, AnchoredOutput):
                return leaf.function() if isinstance(leaf, LiveValue) else leaf
            return returned.samples(leaf, self._results)

        for call, metric in zip(self._calls, metrics):
            args = map_leaves(call.args, argument)
            kwargs = map_leaves(dict(call.kwargs), argument)
            members = _members(metric)
            before = [_compat.metric_lists(member) for member in members]
            counts = [_compat.update_count(member) for member in members]
            # `update` even for `forward`: the difference is the result, which nobody asks for
            metric.update(*args, **kwargs)
            for member, lists, count in zip(members, before, counts):
                if _compat.update_count(member) > count:
                    self._split(member, lists)

    def _split(self, metric: Metric, lists: Dict[str, int]) -> None:
        """Leave a metric as one update a micro-batch does: its count, its lists' entries."""
        _compat.count_updates(metric, self._results - 1)
        for name, length in lists.items():
            entries = getattr(metric, name)
            if isinstance(entries, list) and len(entries) == length + 1:
                joined = entries.pop()
                exact = len(joined) % self._results == 0
                entries.extend(joined.chunk(self._results) if exact else [joined])


def _make(call: MetricCall, metric: Any, argument: Any) -> Any:
    # `forward` by calling the metric, so that hooks registered on it run as on a CPU
    method = metric if call.method == "forward" else getattr(metric, call.method)
    return method(*map_leaves(call.args, argument), **map_leaves(dict(call.kwargs), argument))


def _members(metric: Any) -> List[Metric]:
    if isinstance(metric, MetricCollection):
        return list(metric.values(copy_state=False))
    return [metric]


def _is_plain(metric: Any) -> bool:
    """Torchmetrics' own classes only: a subclass may do anything, a wrapper counts its updates."""
    module = type(metric).__module__
    if isinstance(metric, MetricCollection):
        return module.startswith("torchmetrics.collections") and all(
            map(_is_plain, _members(metric))
        )
    return module.startswith("torchmetrics.") and ".wrappers" not in module


def _by_member(metric: Any, values: Sequence[Any]) -> Iterator[Tuple[Metric, List[Any]]]:
    """A forward call's results, metric by metric."""
    if not values:
        return
    if not isinstance(metric, MetricCollection):
        yield metric, list(values)
        return
    for name, member in metric.items(keep_base=False, copy_state=False):
        if all(name in value for value in values):
            yield member, [value[name] for value in values]


def _agree(one: Any, other: Any) -> bool:
    """Whether two metrics hold the same states, and the same plain attributes."""
    return all(
        _same(value, _compat.metric_attributes(b).get(name))
        for a, b in zip(_members(one), _members(other))
        for name, value in _compat.metric_attributes(a).items()
    )


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, list) and isinstance(other, list) and one and other:
        if one[-1].dim() != other[-1].dim():
            return False  # entries of no dimension cannot be told apart again
        one, other = _joined_entries(one), _joined_entries(other)
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.shape == other.shape and torch.allclose(
            one.double(), other.double(), rtol=1e-4, atol=1e-6, equal_nan=True
        )
    return bool(one == other)


def _joined_entries(entries: List[torch.Tensor]) -> torch.Tensor:
    return torch.cat([entry.reshape(entry.shape or 1) for entry in entries])
