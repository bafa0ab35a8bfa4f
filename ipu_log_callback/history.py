"""What was replayed, kept: `callback.history`.

One row an execution, and one an epoch for what is logged `on_epoch`; the last `keep` rows of each
step. A row holds numbers and small host tensors only, so a history outlives its run, an interrupt,
and the module.
"""

import difflib
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Deque, Dict, Iterator, List, Mapping, Optional, Tuple, Union

import torch
from torchmetrics import Metric

from . import _compat
from .errors import (
    KeySelectionError,
    MissingExtraError,
    UnknownKeyError,
    counted,
    names_text,
    report,
)
from .tables import Table

if TYPE_CHECKING:
    from pandas import DataFrame

__all__ = ["ExecutionRow", "History", "HistoryEntry"]

#: Executions of a step that `history=True` keeps.
_KEPT = 10_000

Item = Tuple[str, float, Optional[torch.Tensor]]


@dataclass(frozen=True)
class HistoryEntry:
    """One value of one key.

    Args:
        step: The step that logged it, e.g. `"training_step"`.
        epoch: `trainer.current_epoch`.
        global_step: `trainer.global_step` as hooks see it after the execution.
        execution: Number of the step's execution, from 0; `None` for a value of a whole epoch.
        value: Of the execution, or of the epoch.
        micro_batches: Values of the execution's micro-batches, `[results]`, in the order
            iterations, accumulation, replicas; `None` where there are none.
    """

    step: str
    epoch: int
    global_step: int
    execution: Optional[int]
    value: float
    micro_batches: Optional[torch.Tensor] = None

    @property
    def is_epoch(self) -> bool:
        """Whether the value stands for a whole epoch."""
        return self.execution is None


class History(Mapping[str, List[HistoryEntry]]):
    """Key to entries, oldest first.

    Args:
        keep: How many executions of each step to keep; True for the last 10,000, False for none.

    Raises:
        KeySelectionError: `keep` is neither a bool nor a positive int.

    Example:
        >>> History(keep=100)
        <History: nothing yet>
    """

    def __init__(self, keep: Union[bool, int] = False) -> None:
        if not isinstance(keep, int) or keep < 0:
            raise KeySelectionError(
                report(
                    f"`IPULogCallback(history={keep!r})` received {type(keep).__name__}, expected "
                    "a bool or how many executions to keep",
                    fix="history=True, or history=10_000",
                )
            )
        self.keep = _KEPT if keep is True else int(keep)
        self._executions: Dict[str, Deque[_Row]] = {}
        self._epochs: Dict[str, Deque[_Row]] = {}
        self._counts: Dict[str, int] = {}
        self._rows = 0
        self._on_epoch: Dict[str, Dict[str, None]] = {}
        self._starting = True

    # -- a mapping --------------------------------------------------------------------------

    def __getitem__(self, key: str) -> List[HistoryEntry]:
        found = [
            HistoryEntry(row.step, row.epoch, row.global_step, row.execution, value, micro_batches)
            for row in self._ordered()
            for name, value, micro_batches in row.items
            if name == key
        ]
        if not found:
            raise self._unknown(key)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter({name: None for row in self._ordered() for name, _, _ in row.items})

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __repr__(self) -> str:
        if not len(self):
            return "<History: nothing yet>" if self.keep else "<History: off>"
        executions = ", ".join(f"{n} of {step}" for step, n in self._counts.items())
        return f"<History of {names_text(self)}: executions {executions}>"

    def __str__(self) -> str:
        return str(self._table())

    def _repr_html_(self) -> str:
        return self._table()._repr_html_()

    def to_pandas(self, *, micro_batches: bool = False) -> "DataFrame":
        """The entries as a table.

        Args:
            micro_batches: One row a micro-batch instead of one an entry; entries without
                micro-batch values, those of epochs among them, are left out.

        Returns:
            Columns `key`, `step`, `epoch`, `global_step`, `execution` (missing for a value of an
            epoch), `micro_batch` if asked for, `value`.

        Raises:
            MissingExtraError: pandas is not installed.
        """
        try:
            import pandas as pd
        except ImportError as error:
            raise MissingExtraError("callback.history.to_pandas()", "pandas", "notebook") from error
        rows: List[Tuple[Any, ...]] = []
        for key in self:
            for entry in self[key]:
                place = (key, entry.step, entry.epoch, entry.global_step, entry.execution)
                if not micro_batches:
                    rows.append((*place, entry.value))
                elif entry.micro_batches is not None:
                    values = enumerate(entry.micro_batches.tolist())
                    rows.extend((*place, number, float(value)) for number, value in values)
        extra = ("micro_batch",) if micro_batches else ()
        columns = ["key", "step", "epoch", "global_step", "execution", *extra, "value"]
        return pd.DataFrame(rows, columns=columns).astype({"execution": "Int64", "value": float})

    # -- what a run tells -------------------------------------------------------------------

    def begin(self) -> None:
        """A run begins. It starts anew if its `global_step` does not go on from the last one."""
        self._starting = True

    def execution(self, trainer: Any, step: str) -> "Optional[ExecutionRow]":
        """What to tell of the execution that is going to be replayed; `None` if it is not kept."""
        if not self.keep or trainer.sanity_checking:
            return None
        if step == "training_step" and self._starting:
            before = self._executions.get(step)
            if not before or trainer.global_step < before[-1].global_step:
                self._clear()
            self._starting = False
        return ExecutionRow(self, trainer, step)

    def epoch_over(self, trainer: Any, step: str) -> None:
        """Keep what Lightning made of a step's `on_epoch` values, once its epoch is over."""
        names, rows = self._on_epoch.pop(step, {}), self._executions.get(step)
        if not names or not rows:
            return
        metrics = trainer.callback_metrics
        items: List[Item] = []
        for name in names:
            value = as_number(metrics.get(name))
            if value is not None:
                items.append((name, value, None))
        last = rows[-1]
        self._keep_row(self._epochs, step, last.epoch, last.global_step, None, items)

    def keep_execution(self, trainer: Any, step: str, items: List[Item], names: List[str]) -> None:
        """Keep an execution's values, and which of its keys are logged `on_epoch`."""
        number = self._counts.get(step, 0)
        self._counts[step] = number + 1
        self._on_epoch.setdefault(step, {}).update(dict.fromkeys(names))
        epoch, global_step = int(trainer.current_epoch), int(trainer.global_step)
        self._keep_row(self._executions, step, epoch, global_step, number, items)

    def _keep_row(self, rows: Dict[str, Deque["_Row"]], step: str, *row: Any) -> None:
        self._rows += 1
        kept = rows.setdefault(step, deque(maxlen=self.keep))
        kept.append(_Row(self._rows, step, *row))

    def _clear(self) -> None:
        for kept in (self._executions, self._epochs, self._counts, self._on_epoch):
            kept.clear()

    def _ordered(self) -> "List[_Row]":
        # `list(deque)` is one operation: a plot may be drawn while another thread trains
        kept = (*self._executions.values(), *self._epochs.values())
        return sorted((row for rows in kept for row in list(rows)), key=lambda row: row.number)

    # -- how it is shown --------------------------------------------------------------------

    def _table(self) -> Table:
        rows = []
        for key in self:
            entries = self[key]
            single = [entry for entry in entries if not entry.is_epoch]
            counts = [0 if e.micro_batches is None else len(e.micro_batches) for e in single]
            rows.append(
                (
                    key,
                    ", ".join(dict.fromkeys(entry.step for entry in entries)),
                    str(len(single)),
                    str(sum(counts)),
                    str(len(entries) - len(single)),
                    f"{entries[-1].value:.6g}",
                )
            )
        columns = ("key", "step", ">executions", ">micro-batches", ">epochs", ">last value")
        return Table(f"history of {counted(len(rows), 'key')}", columns, rows, self._note())

    def _note(self) -> str:
        if not self.keep:
            return "off: IPULogCallback(..., history=True) keeps what is replayed"
        if self.keep == 1:
            return "the last execution of each step is kept"
        return f"the last {self.keep:,} executions of each step are kept"

    def _unknown(self, key: str) -> UnknownKeyError:
        known = list(self)
        return UnknownKeyError(
            report(
                f"`callback.history` has nothing of {key!r}",
                nearest=names_text(difflib.get_close_matches(str(key), known)),
                kept=names_text(known) if known else "nothing yet",
                fix="" if self.keep else "IPULogCallback(..., history=True)",
            )
        )


class ExecutionRow:
    """One execution's values on their way into the history: told while they are replayed."""

    def __init__(self, history: History, trainer: Any, step: str) -> None:
        self._history = history
        self._trainer = trainer
        self._step = step
        self._items: List[Item] = []
        self._on_epoch: List[str] = []

    def logged(self, name: str, value: Any, options: Mapping[str, Any]) -> None:
        """A key was replayed, with its value for the execution."""
        if options.get("add_dataloader_idx", True):
            name += _compat.dataloader_suffix(self._trainer)
        training = self._step == "training_step"
        # Lightning's defaults: `on_step` in training, `on_epoch` elsewhere
        if _given(options, "on_epoch", not training):
            self._on_epoch.append(name)
        if isinstance(value, Metric):
            # an object that was not called in this execution shows an older value
            value = _compat.shown_value(value) if _given(options, "on_step", training) else None
        number = as_number(value)
        if number is not None:
            self._items.append((name, number, None))

    def micro_batches(self, values: torch.Tensor) -> None:
        """The micro-batch values, `[results]`, of the key that was replayed last."""
        if self._items:
            name, value, _ = self._items[-1]
            self._items[-1] = (name, value, values.detach().clone())

    def keep(self) -> None:
        """The execution was replayed."""
        self._history.keep_execution(self._trainer, self._step, self._items, self._on_epoch)


@dataclass(frozen=True)
class _Row:
    number: int
    step: str
    epoch: int
    global_step: int
    execution: Optional[int]
    items: List[Item]


def as_number(value: Any) -> Optional[float]:
    """One number as a float; `None` for anything else."""
    if isinstance(value, torch.Tensor):
        return float(value) if value.numel() == 1 else None
    return float(value) if isinstance(value, (bool, int, float)) else None


def _given(options: Mapping[str, Any], name: str, default: bool) -> bool:
    value = options.get(name)
    return default if value is None else bool(value)
