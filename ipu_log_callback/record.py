"""The step record: what a step logged and which metrics it fed, without the values.

Plain data in the middle of the package. `capture` writes it while the step's Python runs, `wire`
and `replay` read it after every execution; none of it knows Lightning, PopTorch or a trainer.

Wherever a captured call was given a tensor that lives on the device, its record holds an
`AnchoredOutput` in that place; everything else is held as it was given.
"""

import os
from dataclasses import dataclass
from typing import Any, Callable, Dict, Generic, Iterator, List, Mapping, Tuple, TypeVar, Union

import torch

__all__ = [
    "CHANGING",
    "AnchoredCall",
    "AnchoredOutput",
    "CallSite",
    "DroppedKey",
    "LiveValue",
    "LoggedCall",
    "LoggedCollection",
    "LoggedResults",
    "MetricCall",
    "MetricResult",
    "StepRecord",
    "anchored_outputs",
    "bytes_of_element",
    "leaves_of",
    "map_leaves",
]

T = TypeVar("T")


@dataclass(frozen=True)
class CallSite:
    """Where in the user's file a call stands. For messages only."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{os.path.basename(self.file)}:{self.line}"


@dataclass(frozen=True)
class AnchoredOutput:
    """A detached tensor that joins the step's outputs.

    Args:
        index: Its number among the tensors that the step anchored.
        shape: Shape of one micro-batch's tensor.
        dtype: Its dtype on the device.
    """

    index: int
    shape: Tuple[int, ...]
    dtype: torch.dtype

    @property
    def is_scalar(self) -> bool:
        """Whether it holds one number, and so travels packed with others."""
        return all(size == 1 for size in self.shape)

    @property
    def bytes(self) -> int:
        """Bytes that one micro-batch's tensor takes on its way to the host."""
        if self.is_scalar:
            return 4
        count = 1
        for size in self.shape:
            count *= size
        return count * bytes_of_element(self.dtype)


def bytes_of_element(dtype: torch.dtype) -> int:
    """Bytes that one element takes on the device, which has neither int64 nor float64."""
    return min(torch.empty((), dtype=dtype, device="cpu").element_size(), 4)


@dataclass(frozen=True)
class LiveValue(Generic[T]):
    """A value that lives on the host: the function is called at every replay."""

    function: Callable[[], T]


@dataclass(frozen=True, eq=False)
class LoggedCall:
    """One `self.log` as captured.

    Args:
        name: The key.
        value: An `AnchoredOutput`, a `LiveValue`, a `MetricResult`, a metric object, a frozen
            number or host tensor, or a dict of these.
        options: Exactly what the user passed besides name and value; no defaults.
        site: Where in the user's file.
    """

    name: str
    value: Any
    options: Mapping[str, Any]
    site: CallSite


@dataclass(frozen=True, eq=False)
class LoggedCollection:
    """One `self.log_dict` of a whole `MetricCollection` as captured.

    Args:
        collection: The object, on the host.
        names: Which of its keys were selected.
        options: Exactly what the user passed besides the collection.
        site: Where in the user's file.
    """

    collection: Any
    names: Tuple[str, ...]
    options: Mapping[str, Any]
    site: CallSite


@dataclass(frozen=True, eq=False)
class LoggedResults:
    """One `self.log_dict` of what a metric call returns, whose keys are known on the host only.

    Args:
        result: The metric call's result, a dict.
        selects: Whether one of its keys is wanted.
        options: Exactly what the user passed besides the dict.
        site: Where in the user's file.
    """

    result: "MetricResult"
    selects: Callable[[str], bool]
    options: Mapping[str, Any]
    site: CallSite


@dataclass(frozen=True, eq=False)
class MetricCall:
    """One call of a torchmetrics object's method as captured.

    Args:
        metric: The object, on the host.
        path: Its attribute path in the LightningModule.
        method: `"update"`, `"forward"`, `"compute"` or `"reset"`.
        args: Positional arguments; device tensors are `AnchoredOutput`.
        kwargs: Named arguments, likewise.
        number: Tells the calls of one step apart, so that a `MetricResult` finds its own.
        site: Where in the user's file.
    """

    metric: Any
    path: str
    method: str
    args: Tuple[Any, ...]
    kwargs: Mapping[str, Any]
    number: int
    site: CallSite


@dataclass(frozen=True, eq=False)
class AnchoredCall:
    """One `anchor` call as captured, or one output of a submodule that `activations` names.

    Args:
        name: What it is stored under in `IPULogCallback.anchored`.
        kind: First part of its logged keys: `"anchored"` or `"activation"`.
        value: An `AnchoredOutput`, or a host tensor that the device never saw: the tensor itself or
            its counts `[bins + 2]`; or a tuple of these, one for each of `statistics`.
        site: Where in the user's file.
        statistics: Names of the statistics to which it was reduced on the device.
        edges: Edges of the bins in which it was counted on the device.
    """

    name: str
    kind: str
    value: Any
    site: CallSite
    statistics: Tuple[str, ...] = ()
    edges: Tuple[float, ...] = ()


@dataclass(frozen=True)
class MetricResult:
    """What the metric call of that `number` returned, or the entry `key` of it."""

    number: int
    key: Union[str, None] = None


#: What stands in a record for a value that is known after an execution only.
CHANGING = (AnchoredOutput, LiveValue, MetricResult)


@dataclass(frozen=True)
class DroppedKey:
    """A key, or the attribute path of a metric, that no pattern selected.

    Args:
        name: What to type to get it.
        bytes: What one micro-batch of it would take on its way to the host.
        site: Where in the user's file.
    """

    name: str
    bytes: int
    site: CallSite


Event = Union[AnchoredCall, LoggedCall, LoggedCollection, LoggedResults, MetricCall]


@dataclass(frozen=True, eq=False)
class StepRecord:
    """The ordered logged calls and metric calls of one compiled step.

    Args:
        step: The step's name, e.g. `"training_step"`.
        owner: Class name of the LightningModule, for messages.
        events: What was called, in order.
        dropped: What was called and not selected.
        losses: Keys whose values came straight out of a torch loss function other than that of
            the returned loss.
    """

    step: str
    owner: str
    events: Tuple[Event, ...] = ()
    dropped: Tuple[DroppedKey, ...] = ()
    losses: Tuple[str, ...] = ()

    @property
    def logged(self) -> Tuple[Union[LoggedCall, LoggedCollection, LoggedResults], ...]:
        """The logged calls, in order."""
        return tuple(e for e in self.events if not isinstance(e, (AnchoredCall, MetricCall)))

    @property
    def anchor_calls(self) -> Tuple[AnchoredCall, ...]:
        """The `anchor` calls and the anchored outputs of submodules, in order."""
        return tuple(e for e in self.events if isinstance(e, AnchoredCall))

    @property
    def metric_calls(self) -> Tuple[MetricCall, ...]:
        """The metric calls, in order."""
        return tuple(e for e in self.events if isinstance(e, MetricCall))

    @property
    def anchored(self) -> Tuple[AnchoredOutput, ...]:
        """Every anchored output that an event refers to, once each, by index."""
        found: Dict[int, AnchoredOutput] = {}
        for event in self.events:
            for output in anchored_outputs(event):
                found[output.index] = output
        return tuple(found[index] for index in sorted(found))

    def __repr__(self) -> str:
        return (
            f"<StepRecord of {self.owner}.{self.step}: {len(self.logged)} logged calls, "
            f"{len(self.metric_calls)} metric calls, {len(self.anchored)} anchored outputs>"
        )


def map_leaves(value: Any, function: Callable[[Any], Any]) -> Any:
    """Rebuild dicts, lists and (named) tuples with `function` applied to everything else."""
    if isinstance(value, dict):
        return type(value)({key: map_leaves(item, function) for key, item in value.items()})
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_leaves(item, function) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(map_leaves(item, function) for item in value)
    return function(value)


def leaves_of(value: Any) -> List[Any]:
    """All that `map_leaves` meets, in order."""
    found: List[Any] = []
    map_leaves(value, found.append)
    return found


def anchored_outputs(event: Event) -> Iterator[AnchoredOutput]:
    """The anchored outputs that an event refers to, in the order of its arguments."""
    given: Any = ()
    if isinstance(event, MetricCall):
        given = (event.args, dict(event.kwargs))
    elif isinstance(event, LoggedCall):
        given = (event.value, dict(event.options))
    elif isinstance(event, AnchoredCall):
        given = event.value
    yield from (leaf for leaf in leaves_of(given) if isinstance(leaf, AnchoredOutput))
