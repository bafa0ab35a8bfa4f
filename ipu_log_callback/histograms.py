"""Histograms in the loggers that take them: TensorBoard and Weights & Biases."""

from typing import Any, List

import torch

from .errors import report, warn
from .tensor_statistics import Histogram

__all__ = ["HistogramLogger"]

_BINS = 64


class HistogramLogger:
    """Hands tensors to a trainer's loggers as histograms.

    Args:
        trainer: The trainer. Loggers are known by their class's name: neither TensorBoard nor
            W&B needs to be installed.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._loggers: List[Any] = [
            logger
            for logger in trainer.loggers
            if _is(logger, "TensorBoardLogger") or _is(logger, "WandbLogger")
        ]
        if not self._loggers:
            received = ", ".join(type(logger).__name__ for logger in trainer.loggers)
            warn(
                report(
                    "`IPULogCallback(histograms=True)` found no logger that takes histograms",
                    received=received or "no logger",
                    expected="TensorBoardLogger or WandbLogger",
                    fix="Trainer(logger=TensorBoardLogger('logs')); `callback.anchored` has the "
                    "tensors in any case",
                )
            )

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Log a tensor's elements; those that are not finite are left out."""
        flat = tensor.detach().reshape(-1).double()
        flat = flat[torch.isfinite(flat)]
        if not flat.numel():
            return
        low, high = float(flat.min()), float(flat.max())
        # counted here: the writer of torch 1.13 does it by a call that NumPy 1.24 refuses
        counts = torch.histc(flat, _BINS, low, high)
        spread = 0.0 if high > low else 1.0  # as `histc` does
        edges = torch.linspace(low - spread, high + spread, _BINS + 1, dtype=torch.double)
        self._log(name, counts, edges, flat, torch.ones_like(flat))

    def add_counts(self, name: str, histogram: Histogram) -> None:
        """Log what was counted on the device; elements outside the range are left out."""
        counts, edges = histogram.counts.double(), histogram.edges.double()
        if counts.sum():
            self._log(name, counts, edges, (edges[1:] + edges[:-1]) / 2, counts)

    def _log(
        self,
        name: str,
        counts: torch.Tensor,
        edges: torch.Tensor,
        values: torch.Tensor,
        weights: torch.Tensor,
    ) -> None:
        step = self._trainer.global_step
        for logger in self._loggers:
            if _is(logger, "TensorBoardLogger"):
                logger.experiment.add_histogram_raw(
                    name,
                    min=float(edges[0]),
                    max=float(edges[-1]),
                    num=int(counts.sum()),
                    sum=float((values * weights).sum()),
                    sum_squares=float((values * values * weights).sum()),
                    bucket_limits=edges[1:].tolist(),
                    bucket_counts=counts.tolist(),
                    global_step=step,
                )
            else:
                import wandb

                pair = (counts.long().numpy(), edges.numpy())
                logger.log_metrics({name: wandb.Histogram(np_histogram=pair)}, step)


def _is(logger: object, name: str) -> bool:
    return any(base.__name__ == name for base in type(logger).__mro__)
