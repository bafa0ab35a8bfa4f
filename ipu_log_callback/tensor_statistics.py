"""Numbers that say how a large tensor is doing.

Written as plain reductions, so that the same lines run on the host over what came back, and on the
device inside a captured step, where only the numbers then travel. Every operation is one that
PopTorch has (user guide, "PyTorch operations"): `torch.histc` and `torch.isfinite` are not.
"""

from typing import Dict, NamedTuple, Sequence, Tuple

import torch

__all__ = [
    "REDUCTIONS",
    "STATISTICS",
    "Histogram",
    "bin_edges",
    "counts_of",
    "histogram_of",
    "statistics_of",
]

#: Statistic to the `reduce_fx` by which its values over micro-batches or updates become one.
REDUCTIONS: Dict[str, str] = {
    "norm": "mean",
    "mean": "mean",
    "std": "mean",
    "min": "min",
    "max": "max",
    "abs_max": "max",
    "nonfinite": "mean",
}

#: Every statistic, in the order in which a device computes them.
STATISTICS: Tuple[str, ...] = tuple(REDUCTIONS)


class Histogram(NamedTuple):
    """A tensor's elements counted in bins.

    Attributes:
        counts: Elements in each bin, `[bins]`; a bin has its left edge, the last both.
        edges: `[bins + 1]`.
        below: Elements left of the first edge.
        above: Elements right of the last edge. NaN is counted nowhere.
    """

    counts: torch.Tensor
    edges: torch.Tensor
    below: torch.Tensor
    above: torch.Tensor


def statistics_of(rows: torch.Tensor, names: Sequence[str] = STATISTICS) -> torch.Tensor:
    """Statistics of each row.

    Args:
        rows: `[rows, elements]`; halves and integers are widened to float32.
        names: Which, of `STATISTICS`. `norm` is Euclidean; `std` has n - 1 below the line, and is
            0 for a single element; `nonfinite` is the fraction of NaN and infinities.

    Returns:
        `[rows, len(names)]`.
    """
    if rows.dtype not in (torch.float32, torch.float64):
        rows = rows.to(torch.float32)
    columns = [_FUNCTIONS[name](rows) for name in names]
    return torch.stack(columns, 1)


def _std(rows: torch.Tensor) -> torch.Tensor:
    deviation = rows - rows.mean(1, keepdim=True)
    return ((deviation * deviation).sum(1) / max(rows.shape[1] - 1, 1)).sqrt()


def _nonfinite(rows: torch.Tensor) -> torch.Tensor:
    # a comparison with NaN is false
    finite = rows.abs() <= torch.finfo(rows.dtype).max
    return 1.0 - finite.to(rows.dtype).mean(1)


_FUNCTIONS = {
    "norm": lambda rows: (rows * rows).sum(1).sqrt(),
    "mean": lambda rows: rows.mean(1),
    "std": _std,
    "min": lambda rows: rows.amin(1),
    "max": lambda rows: rows.amax(1),
    "abs_max": lambda rows: rows.abs().amax(1),
    "nonfinite": _nonfinite,
}


def bin_edges(bins: int, low: float, high: float) -> Tuple[float, ...]:
    """Edges of `bins` equal bins from `low` to `high`."""
    return (*(low + (high - low) * index / bins for index in range(bins)), high)


def counts_of(tensor: torch.Tensor, edges: Sequence[float]) -> torch.Tensor:
    """Count a tensor's elements in bins.

    One comparison and sum an edge: more operations than a scatter, but no memory beyond one mask.

    Returns:
        `[bins + 2]` int32: below the first edge, in each bin, above the last edge.
    """
    flat = tensor.reshape(-1)
    if flat.dtype not in (torch.float32, torch.float64):
        flat = flat.to(torch.float32)
    left = [(flat < edge).to(torch.int32).sum().to(torch.int32) for edge in edges[:-1]]
    left.append((flat <= edges[-1]).to(torch.int32).sum().to(torch.int32))
    above = (flat > edges[-1]).to(torch.int32).sum().to(torch.int32)
    inner = [right - before for before, right in zip(left, left[1:])]
    return torch.stack([left[0], *inner, above])


def histogram_of(counts: torch.Tensor, edges: Tuple[float, ...]) -> Histogram:
    """Read counts `[bins + 2]` as a histogram."""
    return Histogram(counts[1:-1], torch.tensor(edges), counts[0], counts[-1])
