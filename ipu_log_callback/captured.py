"""What was captured in each step, told to a person: `callback.captured`.

A summary of step records that is text and numbers only: it outlives the run, the module and the
executors.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Dict, Iterator, Mapping, Tuple

from .errors import UnknownKeyError, bytes_text, counted, names_text, report
from .tables import Table

if TYPE_CHECKING:
    from .record import CallSite

__all__ = ["Captured", "CapturedCall", "CapturedStep"]


@dataclass(frozen=True)
class CapturedCall:
    """One call that a step made when it was compiled.

    Args:
        key: The key of `self.log`, the attribute path of a metric, or the name of an anchor.
        call: What was called, e.g. `"self.log"`; `"activation"` for a submodule's output.
        value: What it was given, e.g. `"float32 []"` for a tensor of the device.
        options: The options that differ from Lightning's defaults, as typed; of an anchor, to what
            it was reduced.
        bytes: What its tensors add to one execution; a tensor that an earlier call has brought to
            the host already adds nothing.
        site: Where in the user's file.
    """

    key: str
    call: str
    value: str
    options: str
    bytes: int
    site: "CallSite"


@dataclass(frozen=True)
class CapturedStep:
    """What one compiled step called.

    Args:
        owner: Class name of the LightningModule.
        step: The step's name.
        calls: In the order they were made.
        dropped: Keys that were logged and not selected.
        results: Results of each tensor that one execution brings to the host.
        outputs: Output tensors that anchoring added to the step.
    """

    owner: str
    step: str
    calls: Tuple[CapturedCall, ...]
    dropped: Tuple[str, ...]
    results: int
    outputs: int

    @property
    def bytes(self) -> int:
        """Bytes that the calls' tensors add to one execution; `callback.cost` has the rest too."""
        return sum(call.bytes for call in self.calls)

    def __str__(self) -> str:
        return str(self.table())

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()

    def table(self) -> Table:
        """One row a call."""
        rows = [
            (
                call.key,
                call.call,
                call.value,
                call.options,
                bytes_text(call.bytes) if call.bytes else "-",
                str(call.site),
            )
            for call in self.calls
        ]
        told = (
            f"{counted(len(rows), 'call')}, {bytes_text(self.bytes)} per execution in "
            f"{counted(self.outputs, 'output tensor')} of {counted(self.results, 'result')}"
        )
        return Table(
            f"{self.owner}.{self.step}: {told if rows else 'no calls'}",
            ("key", "call", "value", "options", ">per execution", "where"),
            rows,
            f"logged and not selected: {names_text(self.dropped)}" if self.dropped else "",
        )


class Captured(Mapping[str, CapturedStep]):
    """Step name to what was captured when the step was compiled."""

    def __init__(self) -> None:
        self._steps: Dict[str, CapturedStep] = {}

    def __getitem__(self, step: str) -> CapturedStep:
        if step not in self._steps:
            raise UnknownKeyError(
                report(
                    f"`callback.captured` has no {step!r}",
                    compiled=names_text(self._steps) or "nothing yet",
                    why="a step is captured when it is compiled, at its first execution",
                )
            )
        return self._steps[step]

    def __iter__(self) -> Iterator[str]:
        return iter(self._steps)

    def __len__(self) -> int:
        return len(self._steps)

    def __repr__(self) -> str:
        counts = ", ".join(f"{len(s.calls)} in {name}" for name, s in self._steps.items())
        return f"<Captured: {counts or 'nothing yet'}>"

    def __str__(self) -> str:
        return "\n".join(map(str, list(self._steps.values()))) or "nothing captured yet"

    def _repr_html_(self) -> str:
        parts = [step._repr_html_() for step in list(self._steps.values())]
        return "".join(parts) or "<p>nothing captured yet</p>"

    def add(self, step: CapturedStep) -> None:
        """A step was compiled."""
        self._steps[step.step] = step

    def clear(self) -> None:
        """Forget all steps."""
        self._steps.clear()
