"""Small runs on the CPU and on the IPU strategy, over the same micro-batches in the same order."""

import importlib
import logging
import warnings
from contextlib import contextmanager
from typing import Any, Callable, Dict, Iterator, Optional

import torch
import torchmetrics
from lightning_in_use import QUIET, IPUStrategy
from torch.utils.data import DataLoader, TensorDataset

from ipu_log_callback import IPULogCallback, IPULogWarning, _compat

pl: Any = importlib.import_module(
    "lightning.pytorch" if _compat.NAMESPACE == "lightning" else "pytorch_lightning"
)
for _name in ("pytorch_lightning", "lightning.pytorch", "lightning"):
    logging.getLogger(_name).setLevel(logging.ERROR)

__all__ = ["Net", "fit", "loader", "pl", "quiet", "trainer"]

MICRO_BATCH = 2


class Net(pl.LightningModule):
    """A linear classifier of three classes that logs every kind of key."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.layer = torch.nn.Linear(4, 3)
        self.accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=3)

    def training_step(self, batch: Any, batch_idx: Any) -> Any:
        x, y = batch
        loss = torch.nn.functional.cross_entropy(self.layer(x), y)
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("train_peak", x.detach().max(), reduce_fx="max")
        return loss

    def validation_step(self, batch: Any, batch_idx: Any, dataloader_idx: Any = 0) -> None:
        x, y = batch
        logits = self.layer(x)
        self.accuracy.update(logits, y)
        self.log("val_loss", torch.nn.functional.cross_entropy(logits, y), prog_bar=True)
        self.log("val_accuracy", self.accuracy)

    def test_step(self, batch: Any, batch_idx: Any) -> None:
        x, y = batch
        self.log("test_loss", torch.nn.functional.cross_entropy(self.layer(x), y))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def loader(executions: int = 3, micro_batches: int = 1, seed: int = 0) -> Any:
    """Micro-batches for that many executions, in order."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(executions * micro_batches * MICRO_BATCH, 4, generator=generator)
    return DataLoader(TensorDataset(x, x[:, :3].argmax(1)), batch_size=MICRO_BATCH)


def trainer(
    callback: Optional[IPULogCallback], iterations: int = 1, accumulation: int = 1, **options: Any
) -> Any:
    """A quiet trainer: on the IPU strategy with a callback, on the CPU with `None`."""
    given: Dict[str, Any] = {
        "max_epochs": 2,
        "logger": False,
        **QUIET,
        "log_every_n_steps": 1,
    }
    given.update(options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _trainer(callback, iterations, accumulation, given)


def _trainer(
    callback: Optional[IPULogCallback], iterations: int, accumulation: int, given: Dict[str, Any]
) -> Any:
    if callback is None:
        given.update(accelerator="cpu", accumulate_grad_batches=accumulation)
        return pl.Trainer(**given)
    # last on purpose: it has to put itself first
    given["callbacks"] = [*given.get("callbacks", []), callback]
    strategy = IPUStrategy(
        training_opts=_options(iterations, accumulation), inference_opts=_options(iterations, 1)
    )
    return pl.Trainer(accelerator="ipu", devices=1, strategy=strategy, **given)


def fit(
    callback: Optional[IPULogCallback] = None,
    iterations: int = 1,
    accumulation: int = 1,
    executions: int = 3,
    module: Callable[[], Any] = Net,
    **options: Any,
) -> Any:
    """Two epochs of training with a validation each; returns the trainer."""
    made = trainer(callback, iterations, accumulation, **options)
    training = loader(executions, iterations * accumulation)
    with quiet():
        made.fit(module(), training, loader(2, iterations, seed=1))
    return made


@contextmanager
def quiet() -> Iterator[None]:
    """Lightning's own warnings, which differ with every version, are not ours to test."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", IPULogWarning)
        yield


def _options(iterations: int, accumulation: int) -> Any:
    import poptorch

    made = poptorch.Options()
    made.deviceIterations(iterations)
    if accumulation > 1:
        made.Training.gradientAccumulation(accumulation)
    return made
