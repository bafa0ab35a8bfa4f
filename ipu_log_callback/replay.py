"""Host side: a step record and what one execution returned become calls of `self.log` again.

A logged call is replayed once an execution. Its value stands for all micro-batches of the
execution, reduced by the call's own `reduce_fx`, and it weighs as much as all of them together: an
`on_epoch` value is then what a CPU run of the same micro-batches gives.

Metric calls are replayed micro-batch by micro-batch, before the logged calls: metric objects then
hold the epoch's data, once, as after a CPU run.
"""

from contextlib import nullcontext
from numbers import Number
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

import torch

from .errors import OutputModeError, report
from .geometry import Geometry
from .metric_replay import MetricReplay, Results
from .record import (
    CHANGING,
    AnchoredCall,
    AnchoredOutput,
    LiveValue,
    LoggedCall,
    LoggedCollection,
    LoggedResults,
    MetricResult,
    StepRecord,
    leaves_of,
    map_leaves,
)
from .wire import Returned, Wire

__all__ = ["Replay", "over_processes", "reduction_of"]

LogFunction = Callable[..., None]


def _largest_number(values: torch.Tensor) -> torch.Tensor:
    """The largest of `[results, ...]` that is a number; NaN where none is."""
    if not values.is_floating_point():
        return values.amax(0)
    largest = values.masked_fill(values.isnan(), -float("inf")).amax(0)
    return largest.masked_fill(values.isnan().all(0), float("nan"))


_REDUCTIONS: Dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "mean": lambda values: values.mean(0),
    "sum": lambda values: values.sum(0),
    "min": lambda values: values.amin(0),
    "max": lambda values: values.amax(0),
    "Python's min": lambda values: -_largest_number(-values),
    "Python's max": _largest_number,
}


def reduction_of(options: Mapping[str, Any]) -> str:
    """Name of the `reduce_fx` that a logged call was given: mean, sum, min or max.

    Lightning takes the names in any case, `"avg"` for the mean, and the functions of torch and
    Python that have these names.
    """
    reduce_fx = options.get("reduce_fx", "mean")
    name = (reduce_fx if isinstance(reduce_fx, str) else reduce_fx.__name__).lower()
    return "mean" if name == "avg" else name


def _reducer_of(options: Mapping[str, Any]) -> str:
    """As `reduction_of`; but Python's own `min` and `max` pass over NaN, in Lightning as here."""
    reduction = reduction_of(options)
    return f"Python's {reduction}" if options.get("reduce_fx") in (min, max) else reduction


def over_processes(
    values: Sequence[Any], weights: Optional[Sequence[int]], options: Mapping[str, Any]
) -> torch.Tensor:
    """Reduce one number of every process as the logged call's `reduce_fx` does.

    Args:
        values: The numbers.
        weights: What each counts in a mean; `None` if all count the same.
        options: The logged call's.
    """
    # as they came from the device, or Python's own: neither loses anything
    numbers = torch.tensor(values, dtype=None if _are_whole(values) else torch.double)
    reduction = _reducer_of(options)
    if reduction != "mean":
        reduced = _REDUCTIONS[reduction](numbers)
    elif weights is not None and sum(weights) > 0:
        reduced = (numbers.double() * torch.tensor(weights)).sum() / sum(weights)
    else:
        reduced = numbers.double().mean()
    return reduced.to(torch.get_default_dtype()) if reduced.is_floating_point() else reduced


def _are_whole(values: Sequence[Any]) -> bool:
    return all(isinstance(value, int) for value in values)


class Replay:
    """The way back of one compiled step; prepared once, called after every execution.

    Args:
        record: What was captured.
        wire: How the step's outputs are laid out.
        geometry: Micro-batches and the output mode that the executor was given.

    Raises:
        OutputModeError: A logged call needs what the output mode cannot give.
    """

    def __init__(self, record: StepRecord, wire: Wire, geometry: Geometry) -> None:
        self.record = record
        self._geometry = geometry
        self._columns: Dict[int, Tuple[bool, int]] = {}
        for is_float, group in ((True, wire.floats), (False, wire.integers)):
            self._columns.update({a.index: (is_float, n) for n, a in enumerate(group)})
        self._single_float = len(wire.floats) == 1
        self._sums_arrive = geometry.micro_batches_per_result > 1
        self._means_of_few = not self._sums_arrive and geometry.results <= 64
        self._logged = [
            (event, self._options_of(event), self._column_of(event), self._fixed_value_of(event))
            for event in record.logged
        ]
        self._metrics = MetricReplay(record, geometry.results)
        _check_output_mode(record, geometry)

    def __call__(
        self,
        returned: Returned,
        log: LogFunction,
        log_dict: LogFunction,
        seen: Optional[Callable[[torch.Tensor], None]] = None,
        finish: Optional[Callable[[], None]] = None,
    ) -> None:
        """Replay one execution.

        Args:
            returned: The anchored outputs of the execution.
            log: Called as `log(name, value, **options)`.
            log_dict: Called as `log_dict(collection, names, **options)`.
            seen: Called after `log` with the micro-batch values, `[results]`, where there are any.
            finish: Called at last, while metric objects still show the execution's values.
        """
        results = self._metrics(returned)
        with self._metrics.execution_values(results) if results else nullcontext():
            self._replay_logged(returned, results, log, log_dict, seen)
            if finish is not None:
                finish()

    def _replay_logged(
        self,
        returned: Returned,
        results: Results,
        log: LogFunction,
        log_dict: LogFunction,
        seen: Optional[Callable[[torch.Tensor], None]],
    ) -> None:
        reduced: Dict[Tuple[bool, str], Sequence[torch.Tensor]] = {}
        for event, options, place, fixed in self._logged:
            if isinstance(event, LoggedCollection):
                log_dict(event.collection, event.names, **options)
                continue
            if isinstance(event, LoggedResults):
                self._replay_results(event, results, log)
                continue
            if place is not None:
                # a key's reduction is cheap because all keys of a kind are reduced in one operation
                kind, column = place
                if kind not in reduced:
                    reduced[kind] = self._reduced_columns(returned, *kind)
                log(event.name, reduced[kind][column], **options)
            elif fixed:
                log(event.name, fixed[0], **options)
                continue
            else:
                value, weight = self._value(event, returned, results)
                weighed = options if weight is None else dict(options, batch_size=weight)
                log(event.name, value, **weighed)
            if seen is not None and not self._sums_arrive:
                values = self._micro_batches(event.value, returned, results)
                if values is not None:
                    seen(values)

    def _column_of(self, event: Any) -> Optional[Tuple[Tuple[bool, str], int]]:
        """Where a call's value stands among all scalars: their kind, and its column there."""
        if not isinstance(event, LoggedCall) or not isinstance(event.value, AnchoredOutput):
            return None
        if isinstance(event.options.get("batch_size"), (AnchoredOutput, LiveValue)):
            return None  # weighted one by one
        is_float, column = self._columns[event.value.index]
        return (is_float, _reducer_of(event.options)), column

    def _fixed_value_of(self, event: Any) -> Tuple[Any, ...]:
        """The value, alone in a tuple, of a call in which nothing changes between executions.

        A metric object, or numbers and host tensors, which are frozen.
        """
        if not isinstance(event, LoggedCall):
            return ()
        given = leaves_of((event.value, event.options.get("batch_size")))
        if any(isinstance(leaf, CHANGING) for leaf in given):
            return ()
        reduction = _reducer_of(event.options)
        return (map_leaves(event.value, lambda leaf: self._host_value(leaf, reduction)),)

    def _options_of(self, event: Any) -> Dict[str, Any]:
        """The call's options, its `batch_size` counted for the whole execution."""
        options = dict(event.options)
        size = options.get("batch_size")
        if isinstance(size, (int, torch.Tensor)):
            options["batch_size"] = int(size) * self._geometry.micro_batches
        return options

    def _replay_results(self, event: LoggedResults, results: Results, log: LogFunction) -> None:
        """Log the entries of a dict that a metric call returned, those that are wanted."""
        reduction = _reducer_of(event.options)
        for key in results[event.result.number][0]:
            if event.selects(key):
                values = _stacked(results[event.result.number], key)
                log(key, self._reduce(values, reduction), **self._options_of(event))

    def _reduced_columns(
        self, returned: Returned, is_float: bool, reduction: str
    ) -> Sequence[torch.Tensor]:
        if is_float and self._geometry.micro_batches == 1:
            # Nothing to reduce. Views and lengths of tensors would take 7 us of the 50 us that
            # Lightning takes for one key; one key alone, `[1]`, is what its `self.log` squeezes.
            return returned.tensors if self._single_float else returned.tensors[0].unbind(0)
        if is_float and self._single_float:
            # one key alone: two views less, 5 us
            if self._means_of_few and reduction == "mean":
                # right after an execution `Tensor.mean` takes 18 us, this and a new tensor 8 us
                numbers = returned.tensors[0].tolist()
                return (sum(numbers) / len(numbers),)
            return (self._reduced_floats(returned.tensors[0], reduction),)
        if is_float:
            return self._reduced_floats(returned.floats, reduction).unbind(0)
        return self._reduce(returned.integers, reduction).unbind(0)

    def _reduced_floats(self, block: torch.Tensor, reduction: str) -> torch.Tensor:
        if reduction == "mean" and not self._sums_arrive:
            return block.mean(0)  # float32, however many rows: nothing that `_reduce` looks at
        return self._reduce(block, reduction)

    def _reduce(self, values: torch.Tensor, reduction: str) -> torch.Tensor:
        """Reduce `[results, ...]` over dimension 0."""
        if not values.is_floating_point():
            values = values.long() if reduction != "mean" else values.double()
        elif values.dtype in (torch.float16, torch.bfloat16):
            values = values.float()
        summed = self._geometry.micro_batches_per_result
        rows = values.shape[0]
        if rows == 1 and self._geometry.results > 1 and reduction == "sum":
            # made of constants only: it came back once, for every micro-batch
            values = values[0] * self._geometry.micro_batches
        elif rows > 1 or summed > 1:
            values = _REDUCTIONS[reduction](values)
            if reduction == "mean" and summed > 1:
                values = values / summed
        else:
            values = values[0]
        return values.to(torch.get_default_dtype()) if values.dtype == torch.double else values

    def _value(
        self, event: LoggedCall, returned: Returned, results: Results
    ) -> Tuple[Any, Optional[int]]:
        """A logged call's value for one execution, and its weight where a tensor gives it."""
        reduction = _reducer_of(event.options)
        count = self._geometry.results
        weights: Optional[torch.Tensor] = None
        size = event.options.get("batch_size")
        if isinstance(size, AnchoredOutput):
            weights = returned.of(size, count).reshape(count)

        def of(leaf: Any) -> Any:
            values = self._micro_batches(leaf, returned, results)
            if values is None:
                return self._host_value(leaf, reduction)
            if weights is not None and reduction == "mean" and int(weights.sum()) > 0:
                values = values.to(torch.get_default_dtype()) * weights
                return values.sum() / weights.sum()
            return self._reduce(values, reduction)

        value = map_leaves(event.value, of)
        if isinstance(size, LiveValue):
            return value, int(size.function()) * self._geometry.micro_batches
        return value, None if weights is None else int(weights.sum())

    def _host_value(self, leaf: Any, reduction: str) -> Any:
        """A value that was not computed on the device: the same in every micro-batch."""
        value = leaf.function() if isinstance(leaf, LiveValue) else leaf
        is_number = isinstance(value, (Number, torch.Tensor))
        # a CPU run adds it up once a micro-batch
        return value * self._geometry.micro_batches if is_number and reduction == "sum" else value

    def _micro_batches(
        self, leaf: Any, returned: Returned, results: Results
    ) -> Optional[torch.Tensor]:
        """A logged value's results, `[results]`, where it has one for each micro-batch."""
        if isinstance(leaf, AnchoredOutput):
            return returned.of(leaf, self._geometry.results).reshape(self._geometry.results)
        if isinstance(leaf, MetricResult):
            return _stacked(results[leaf.number], leaf.key)
        return None


def _stacked(values: List[Any], key: Optional[str]) -> torch.Tensor:
    """One metric call's results over the micro-batches, `[results, ...]`."""
    picked = [value if key is None else value[key] for value in values]
    return torch.stack([torch.as_tensor(value).detach() for value in picked])


def _check_output_mode(record: StepRecord, geometry: Geometry) -> None:
    """Refuse what `Sum` cannot give: anything but means and sums of scalars."""
    if geometry.micro_batches_per_result == 1:
        return
    step = f"{record.owner}.{record.step}"
    for event in record.events:
        if isinstance(event, LoggedCall):
            weighted = isinstance(event.options.get("batch_size"), AnchoredOutput)
            reduction = reduction_of(event.options)
            if reduction in ("mean", "sum") and not weighted:
                continue
            call = f"`self.log('{event.name}', ..., reduce_fx='{reduction}')` in `{step}`"
            if weighted:
                call = f"`self.log('{event.name}', ..., batch_size=tensor)` in `{step}`"
        elif isinstance(event, (LoggedCollection, LoggedResults)):
            continue
        elif isinstance(event, AnchoredCall):
            if event.edges:
                continue  # counts add up
            call = f"`anchor('{event.name}', ...)` in `{step}`"
        else:
            call = f"`self.{event.path}.{event.method}(...)` in `{step}`"
        raise OutputModeError(
            report(
                f"{call} needs every micro-batch, received their sum",
                where=str(event.site),
                received="poptorch.OutputMode.Sum, with output_mode='keep'",
                expected="poptorch.OutputMode.All",
                why="the device adds the micro-batches up; only means and sums survive that",
                fix="IPULogCallback(..., output_mode='auto')",
            )
        )
