"""Small runs on the IPU strategy, of a module that does a little of everything."""

import logging
import os
import warnings
from contextlib import contextmanager
from typing import Any, Dict, Iterator, Sequence

import torch
import torchmetrics
from lightning_in_use import QUIET, IPUStrategy, pl
from torch.utils.data import DataLoader, TensorDataset

from ipu_log_callback import IPULogCallback, IPULogWarning, live

for _name in ("pytorch_lightning", "lightning.pytorch", "lightning"):
    logging.getLogger(_name).setLevel(logging.ERROR)

__all__ = [
    "FULL",
    "PROGRAMS",
    "QUIET",
    "IPUStrategy",
    "Net",
    "loader",
    "numbers_of",
    "pl",
    "quiet",
    "run",
    "trainer",
]

#: Whether everything that can be enumerated is tried, or a sample of it.
FULL = os.environ.get("ROBUSTNESS") == "full"
#: What a harness runs: a method of the trainer each.
PROGRAMS = ("fit", "validate", "test")
ITERATIONS, ACCUMULATION, MICRO_BATCH = 2, 2, 2


class Body(torch.nn.Module):
    """A part of the module that has a metric of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)
        self.norm = torch.nn.BatchNorm1d(1)
        self.size = torchmetrics.MaxMetric()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.norm(self.layer(x)).squeeze(-1)
        self.size.update(out)
        return out


class Net(pl.LightningModule):
    """Parameters, buffers, metrics at two depths, and every kind of logged call."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.body = Body()
        self.means = torch.nn.ModuleDict(
            {f"of_{stage}": torchmetrics.MeanMetric() for stage in ("train", "val", "test")}
        )
        self.errors = torchmetrics.MetricCollection(
            {"mae": torchmetrics.MeanAbsoluteError(), "mse": torchmetrics.MeanSquaredError()},
            prefix="error_",
        )

    def _step(self, batch: Any, stage: str) -> torch.Tensor:
        x, y = batch
        out = self.body(x)
        loss = torch.nn.functional.mse_loss(out, y)
        self.log(f"{stage}_loss", loss, on_step=True, on_epoch=True)
        self.log(f"{stage}_count", (out > 0).sum(), reduce_fx="sum", on_step=False, on_epoch=True)
        self.log(f"{stage}_live", live(lambda: 2.0), on_epoch=True)
        self.means[f"of_{stage}"].update(out)
        self.log(f"{stage}_mean", self.means[f"of_{stage}"], on_step=False, on_epoch=True)
        self.log_dict({f"{stage}_a": out.mean(), f"{stage}_b": out.amax()}, on_epoch=True)
        return loss

    def training_step(self, batch: Any, batch_idx: Any) -> Any:
        return self._step(batch, "train")

    def validation_step(self, batch: Any, batch_idx: Any) -> Any:
        loss = self._step(batch, "val")
        self.errors.update(batch[0].sum(-1) * 0.5, batch[1])
        self.log_dict(self.errors)
        self.log("val_size", self.body.size, on_step=False, on_epoch=True)
        return {"loss": loss}

    def test_step(self, batch: Any, batch_idx: Any) -> Any:
        self._step(batch, "test")
        self.log("test_forward", self.means["of_test"](batch[0].sum(-1)))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    def train_dataloader(self) -> Any:
        return loader(2, ITERATIONS * ACCUMULATION)

    def val_dataloader(self) -> Any:
        return loader(2, ITERATIONS, seed=1)

    def test_dataloader(self) -> Any:
        return loader(2, ITERATIONS, seed=2)


def loader(executions: int, micro_batches: int = 1, seed: int = 0, **options: Any) -> Any:
    """Micro-batches for that many executions, in order."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(executions * micro_batches * MICRO_BATCH, 3, generator=generator)
    return DataLoader(TensorDataset(x, x.sum(1)), batch_size=MICRO_BATCH, **options)


def options_of(
    iterations: int = ITERATIONS,
    accumulation: int = ACCUMULATION,
    replicas: int = 1,
    traced: bool = False,
) -> Dict[str, Any]:
    """`training_opts` and `inference_opts` of a strategy."""
    import poptorch

    made = {}
    for name in ("training_opts", "inference_opts"):
        options = poptorch.Options()
        options.deviceIterations(iterations)
        options.replicationFactor(replicas)
        if traced:
            options.Jit.traceModel(True)
        if name == "training_opts":
            options.Training.gradientAccumulation(accumulation)
        made[name] = options
    return made


def trainer(
    callbacks: Sequence[Any] = (),
    iterations: int = ITERATIONS,
    accumulation: int = ACCUMULATION,
    replicas: int = 1,
    traced: bool = False,
    **given: Any,
) -> Any:
    """A quiet trainer on the IPU strategy."""
    made: Dict[str, Any] = {"max_epochs": 1, "logger": False, "log_every_n_steps": 1, **QUIET}
    made.update(given)
    strategy = IPUStrategy(**options_of(iterations, accumulation, replicas, traced))
    with quiet():
        return pl.Trainer(
            accelerator="ipu",
            devices=replicas,
            strategy=strategy,
            callbacks=list(callbacks),
            **made,
        )


def run(trainer: Any, program: str, module: Any, *args: Any) -> Any:
    """`trainer.fit(module)` and the like."""
    options = {} if program == "fit" else {"verbose": False}
    with quiet():
        return getattr(trainer, program)(module, *args, **options)


def numbers_of(trainer: Any) -> Dict[str, float]:
    """All that the run logged, as numbers."""
    return {name: float(value) for name, value in sorted(trainer.callback_metrics.items())}


def one_run(
    module: Any, *args: Any, callback: Any = None, program: str = "fit", **given: Any
) -> Any:
    """A run with everything selected; returns its trainer."""
    made = trainer([callback or IPULogCallback("*")], **given)
    run(made, program, module, *args)
    return made


@contextmanager
def quiet() -> Iterator[None]:
    """Lightning's own warnings, which differ with every version, are not ours to test."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", IPULogWarning)
        yield
