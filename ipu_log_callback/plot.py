"""Pictures of a history, with matplotlib. Imported by `callback.plot` only.

No `pyplot`: a figure made here belongs to whoever asked for it, and nothing piles up when one is
drawn every epoch.
"""

import io
import re
from typing import Dict, List, Sequence, Tuple

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from .errors import UnknownKeyError, report
from .history import History, HistoryEntry

__all__ = ["Picture", "draw"]

# Okabe and Ito's colours: told apart by colour-blind readers; the markers tell in grey
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_MARKERS = ("o", "s", "D", "^", "v", "P")
# what is logged of every parameter or submodule: `grad/<parameter>/norm`
_OF_MANY = re.compile(r"^(grad|weight|optim|activation|anchored)/.+/([^/]+)$")
_STAGES = re.compile(r"^(train(ing)?|val(id(ation)?)?|test(ing)?|pred(ict(ion)?)?)[_/.-]")


class Picture(Figure):
    """A figure that a notebook shows without `%matplotlib`."""

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.savefig(buffer, format="png")
        return buffer.getvalue()


def draw(history: History, keys: Sequence[str]) -> Picture:
    """Draw keys over `trainer.global_step`, or over executions where nothing was trained.

    Args:
        history: What to draw from.
        keys: Keys of it; those that differ in the step's name only share a panel.

    Raises:
        UnknownKeyError: The history has nothing of a key, or nothing at all.
    """
    if not keys:
        raise UnknownKeyError(
            report(
                "`callback.plot()` has nothing to draw: the history is empty",
                fix=""
                if history.keep
                else "IPULogCallback(..., history=True) keeps what is replayed",
            )
        )
    series = {key: history[key] for key in dict.fromkeys(keys)}
    panels: Dict[str, List[str]] = {}
    for key in series:
        panels.setdefault(_panel_of(key), []).append(key)
    trained = any(e.step == "training_step" for entries in series.values() for e in entries)
    figure = Picture(
        figsize=(9, 0.9 + (2.6 if len(panels) < 4 else 1.9) * len(panels)),
        dpi=110,
        layout="constrained",
    )
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    colours = iter(_colours(len(series)))
    for panel, (label, names) in zip(axes, panels.items()):
        for number, name in enumerate(names):
            marker = _MARKERS[number % len(_MARKERS)]
            _draw_key(panel, name, series[name], trained, next(colours), marker)
        title = label if len(names) > 1 else names[0]
        panel.set_ylabel(f"{title if len(title) <= 24 else '…' + title[-23:]}\n(as logged)")
        panel.grid(alpha=0.25, linewidth=0.6)
        panel.spines[["top", "right"]].set_visible(False)
        panel.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize="small")
    axes[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
    entries = [entry for found in series.values() for entry in found]
    axes[-1].set_xlabel(_x_label(entries, trained))
    if trained:
        _mark_epochs(list(axes), entries)
    return figure


def _panel_of(key: str) -> str:
    """What keys that are drawn in one panel have in common."""
    of_many = _OF_MANY.match(key)
    return f"{of_many[1]}/…/{of_many[2]}" if of_many else _STAGES.sub("", key)


def _colours(count: int) -> List[str]:
    if count <= len(_COLOURS):
        return list(_COLOURS[:count])
    return [to_hex(colormaps["viridis"](number / count)) for number in range(count)]


def _draw_key(
    panel: Axes,
    name: str,
    entries: Sequence[HistoryEntry],
    trained: bool,
    colour: str,
    marker: str,
) -> None:
    for step in dict.fromkeys(entry.step for entry in entries):
        mine = [entry for entry in entries if entry.step == step]
        single = [entry for entry in mine if not entry.is_epoch]
        epochs = [entry for entry in mine if entry.is_epoch]
        training = step == "training_step"
        label = f"{name}, {step.replace('_step', '')}"
        places = _places(single, trained)
        points = _micro_batch_points(single, places)
        if points:
            panel.plot(
                *zip(*points), ".", color=colour, alpha=0.4, markersize=5, markeredgewidth=0,
                label=f"{label} micro-batch", zorder=1,
            )  # fmt: skip
        along = training or not trained
        if single and (along or not epochs):
            panel.plot(
                [end for _, end in places], [entry.value for entry in single],
                "-" if along else "x",
                color=colour, linewidth=1.6, marker="." if len(single) < 40 and along else None,
                label=f"{label} execution", zorder=2,
            )  # fmt: skip
        if epochs:
            _draw_epochs(panel, epochs, colour, marker, label, training, trained, single)


def _draw_epochs(
    panel: Axes,
    epochs: Sequence[HistoryEntry],
    colour: str,
    marker: str,
    label: str,
    training: bool,
    trained: bool,
    single: Sequence[HistoryEntry],
) -> None:
    """A value of a whole epoch: a marker where the epoch ended, hollow for validation and test."""
    values = [entry.value for entry in epochs]
    if not trained and single:
        for value in values:
            panel.axhline(
                value, color=colour, linestyle="--", linewidth=1.2, label=f"{label} epoch"
            )
        return
    panel.plot(
        [entry.global_step if trained else entry.epoch for entry in epochs], values,
        linestyle=":" if training else "--", color=colour, marker=marker, markersize=6,
        markerfacecolor=colour if training else "white", markeredgewidth=1.5,
        label=f"{label} epoch", zorder=3,
    )  # fmt: skip


def _places(entries: Sequence[HistoryEntry], trained: bool) -> List[Tuple[float, float]]:
    """From where to where on the x axis each execution reaches."""
    places: List[Tuple[float, float]] = []
    for number, entry in enumerate(entries):
        if not trained:
            places.append((float(number), float(number + 1)))
        elif entry.step != "training_step":
            places.append((float(entry.global_step), float(entry.global_step)))
        else:
            end = float(entry.global_step)
            before = places[-1][1] if places else end - 1
            places.append((before if before < end else end - 1, end))
    return places


def _micro_batch_points(
    entries: Sequence[HistoryEntry], places: Sequence[Tuple[float, float]]
) -> List[Tuple[float, float]]:
    points: List[Tuple[float, float]] = []
    for entry, (start, end) in zip(entries, places):
        if entry.micro_batches is None or len(entry.micro_batches) < 2:
            continue
        width = (end - start) / len(entry.micro_batches)
        for number, value in enumerate(entry.micro_batches.tolist(), start=1):
            points.append((start + number * width, float(value)))
    return points


def _x_label(entries: Sequence[HistoryEntry], trained: bool) -> str:
    counts = {
        len(entry.micro_batches)
        for entry in entries
        if entry.micro_batches is not None and (entry.step == "training_step" or not trained)
    }
    each = f", {counts.pop()} micro-batches each" if len(counts) == 1 else ""
    return f"global step (executions{each})" if trained else f"execution (count{each})"


def _mark_epochs(axes: Sequence[Axes], entries: Sequence[HistoryEntry]) -> None:
    """Lines where training epochs end, numbered above the first panel."""
    ends: Dict[int, int] = {}
    for entry in entries:
        if entry.step == "training_step":
            ends[entry.epoch] = max(entry.global_step, ends.get(entry.epoch, 0))
    for panel in axes:
        for end in ends.values() if len(ends) <= 40 else ():
            panel.axvline(end, color="0.8", linewidth=0.8, zorder=0)
    above = axes[0].secondary_xaxis("top")
    shown = list(ends.items())[:: max(1, len(ends) // 10)]
    above.set_xticks([end for _, end in shown], [str(epoch) for epoch, _ in shown])
    above.set_xlabel("end of epoch (number)")
    above.spines["top"].set_visible(False)
