"""What looking costs: bytes and output streams that anchoring adds to an execution."""

from dataclasses import dataclass
from typing import Dict, Iterator, List, Optional, Sequence, Tuple

from .errors import bytes_text, counted, shortened
from .tables import Table

__all__ = ["Cost", "CostEntry"]


@dataclass(frozen=True)
class CostEntry:
    """The price of one anchored thing.

    Args:
        step: The step.
        name: A key, a metric's path, or the name of an anchored tensor; several that share one
            tensor are joined. One entry may be for the step's own outputs: what it takes to get
            every micro-batch of them.
        shape: Shape of one result, if known.
        dtype: Its dtype; empty for the step's own outputs.
        bytes: Bytes that travel to the host in one execution; `None` until a first execution tells.
        streams: Output streams of its own; 0 for scalars, which share one for each kind of number,
            and for the step's own outputs, which have theirs in any case.
    """

    step: str
    name: str
    shape: Optional[Tuple[int, ...]]
    dtype: str
    bytes: Optional[int]
    streams: int


class Cost:
    """What anchoring adds to the executions of the compiled steps.

    `print(callback.cost)` is a table; a notebook shows one as well. Iterating gives the entries,
    `len` their number.

    Args:
        entries: The price of each thing.
        packed: Output streams that a step's scalars share.
    """

    def __init__(
        self, entries: Sequence[CostEntry] = (), packed: Optional[Dict[str, int]] = None
    ) -> None:
        self.entries = tuple(entries)
        self._packed = dict(packed or {})

    def __iter__(self) -> Iterator[CostEntry]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def steps(self) -> Tuple[str, ...]:
        """The compiled steps."""
        return tuple(dict.fromkeys(entry.step for entry in self.entries))

    def bytes_per_execution(self, step: Optional[str] = None) -> int:
        """Bytes that one execution of a step, or of every step, brings to the host in addition."""
        return sum(entry.bytes or 0 for entry in self.entries if step in (None, entry.step))

    def extra_streams(self, step: Optional[str] = None) -> int:
        """Output streams in addition to the step's own."""
        own = sum(entry.streams for entry in self.entries if step in (None, entry.step))
        return own + sum(n for name, n in self._packed.items() if step in (None, name))

    def packed(self, step: str) -> int:
        """Output streams that the step's scalars share."""
        return self._packed.get(step, 0)

    def share(self, entry: CostEntry) -> float:
        """An entry's part of what its step costs, 0 to 1."""
        total = self.bytes_per_execution(entry.step)
        return (entry.bytes or 0) / total if total else 0.0

    def largest(self, step: Optional[str] = None) -> Optional[CostEntry]:
        """The most expensive entry."""
        entries = [entry for entry in self.entries if step in (None, entry.step)]
        return max(entries, key=lambda entry: entry.bytes or 0, default=None)

    def replaced(self, step: str, entries: Sequence[CostEntry], packed: int) -> "Cost":
        """The same with another price of one step."""
        others = [entry for entry in self.entries if entry.step != step]
        return Cost([*others, *entries], {**self._packed, step: packed})

    def __str__(self) -> str:
        if not self.entries:
            return "nothing is anchored"
        return str(self._table())

    def __repr__(self) -> str:
        total = bytes_text(self.bytes_per_execution())
        return f"<Cost of {counted(len(self.entries), 'anchored thing')}: {total} per execution>"

    def _repr_html_(self) -> str:
        return self._table()._repr_html_() if self.entries else f"<p>{self}</p>"

    def _table(self) -> Table:
        return Table(f"anchored: {len(self)}", _TITLES, self._rows(), "\n".join(self._totals()))

    def _rows(self) -> List[Tuple[str, ...]]:
        return [
            (
                entry.step,
                shortened(entry.name, 60),
                _shape_text(entry),
                entry.dtype or "-",
                "?" if entry.bytes is None else f"{entry.bytes:,}",
                f"{self.share(entry):.1%}",
                str(entry.streams) if entry.streams or not entry.dtype else "shared",
            )
            for entry in sorted(self.entries, key=lambda e: (e.step, -(e.bytes or 0)))
        ]

    def _totals(self) -> List[str]:
        return [
            f"{step}: {self.bytes_per_execution(step):,} bytes per execution, "
            f"{counted(self.extra_streams(step), 'extra output stream')}"
            for step in sorted(self.steps)
        ]


def _shape_text(entry: CostEntry) -> str:
    if entry.shape is not None:
        return str(list(entry.shape))
    return "?" if entry.dtype else "-"


_TITLES = ("step", "anchored", "shape", "dtype", ">bytes per execution", ">share", ">streams")
