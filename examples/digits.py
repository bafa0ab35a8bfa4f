"""Train a small classifier of handwritten digits on IPUs, logging as on a CPU.

The LightningModule below is written as for a CPU: it calls `self.log` and `self.log_dict` in its
steps and logs a torchmetrics object. `IPULogCallback` is the only addition. Without an IPU the same
program runs on the emulator; with one, on hardware.

    python examples/digits.py                  # 4 device iterations, accumulation 2, 2 replicas
    python examples/digits.py --cpu            # same module, data and micro-batches; no callback
    python examples/digits.py --iterations 8 --replicas 1 --epochs 3

Epoch values of the first two agree to float tolerance. What `train_loss_step` stands for differs:
on the IPU the trainer sees one batch per execution, so that a value is the mean over its
micro-batches; on the CPU it is one micro-batch's.
"""

import argparse
import csv
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple

import pytorch_lightning as pl
import torch
import torchmetrics
from pytorch_lightning.callbacks import EarlyStopping, ModelCheckpoint
from pytorch_lightning.loggers import CSVLogger, TensorBoardLogger
from pytorch_lightning.strategies import IPUStrategy  # type: ignore[attr-defined]  # not in its `__all__`
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

from ipu_log_callback import IPULogCallback, emulator

WANTED_ACCURACY = 0.95


class DigitsClassifier(pl.LightningModule):
    """Two convolutions and a linear layer over images of 8 x 8 pixels.

    Args:
        learning_rate: Adam's.
    """

    def __init__(self, learning_rate: float = 3e-3) -> None:
        super().__init__()
        self.learning_rate = learning_rate
        self.network = nn.Sequential(
            nn.Conv2d(1, 16, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(32 * 4 * 4, 10),
        )
        self.val_accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=10)

    def training_step(self, batch: Tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Log the loss of every step and of the epoch, and how sure and how right the model is."""
        images, labels = batch
        logits = self.network(images)
        loss = F.cross_entropy(logits, labels)
        probabilities = logits.detach().softmax(dim=1)
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log_dict(
            {
                "train_accuracy": (probabilities.argmax(dim=1) == labels).float().mean(),
                "train_confidence": probabilities.amax(dim=1).mean(),
            },
            on_step=False,
            on_epoch=True,
        )
        return loss

    def validation_step(self, batch: Tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Log the loss, and the accuracy as a torchmetrics object."""
        images, labels = batch
        logits = self.network(images)
        loss = F.cross_entropy(logits, labels)
        self.val_accuracy.update(logits, labels)
        self.log("val_loss", loss, prog_bar=True)
        self.log("val_accuracy", self.val_accuracy, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam, which PopTorch takes as it is."""
        return torch.optim.Adam(self.parameters(), lr=self.learning_rate)


class StepValues(pl.Callback):
    """Keep a key's value after every trainer batch, as any callback may.

    Args:
        key: The key, of a call with `on_step=True`.
    """

    def __init__(self, key: str) -> None:
        self.key = key
        self.values: List[float] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        """Read the value that the step has just logged."""
        self.values.append(float(trainer.callback_metrics[self.key]))


@dataclass(frozen=True)
class Measured:
    """What a run of this program logged.

    Attributes:
        device: Where it ran.
        micro_batches: Micro-batches that a value of `steps` stands for.
        epochs: For each epoch, key to value.
        steps: `train_loss_step` of each trainer batch.
        best_accuracy: The best `val_accuracy`, as `ModelCheckpoint` saw it.
        log_dir: Where CSV and TensorBoard logs and the checkpoint lie.
    """

    device: str
    micro_batches: int
    epochs: List[Dict[str, float]]
    steps: List[float]
    best_accuracy: float
    log_dir: Path

    @property
    def good_enough(self) -> bool:
        """Whether the run kept what this example promises."""
        return self.best_accuracy > WANTED_ACCURACY


def main(argv: Optional[Sequence[str]] = None) -> Measured:
    """Train as the arguments say, print what was logged, and return it."""
    args = _parse(argv)
    device = "the CPU" if args.cpu else _find_ipu()
    # The digits are few: fetching them takes no time, whatever Lightning advises about workers.
    warnings.filterwarnings("ignore", ".*does not have many workers.*")
    torch.manual_seed(args.seed)
    train_loader, val_loader = _loaders(args)

    csv_logger = CSVLogger(args.log_dir, name="digits")
    tensorboard_logger = TensorBoardLogger(
        args.log_dir, name="digits", version=csv_logger.version, default_hp_metric=False
    )
    log_dir = Path(csv_logger.log_dir)
    checkpoint = ModelCheckpoint(log_dir / "checkpoints", monitor="val_accuracy", mode="max")
    steps = StepValues("train_loss_step")
    callbacks = [checkpoint, EarlyStopping(monitor="val_loss", patience=3), steps]
    if not args.cpu:
        callbacks.append(IPULogCallback(keys=["train_*", "val_*"]))
    trainer = pl.Trainer(
        max_epochs=args.epochs,
        logger=[csv_logger, tensorboard_logger],
        callbacks=callbacks,
        log_every_n_steps=1,
        enable_progress_bar=sys.stderr.isatty(),
        enable_model_summary=False,
        **(_on_cpu(args) if args.cpu else _on_ipu(args)),
    )
    trainer.fit(DigitsClassifier(), train_loader, val_loader)

    measured = Measured(
        device=device,
        micro_batches=1 if args.cpu else args.iterations * args.accumulation * args.replicas,
        epochs=_read_epochs(log_dir / "metrics.csv"),
        steps=steps.values,
        best_accuracy=float(checkpoint.best_model_score or 0.0),
        log_dir=log_dir,
    )
    _print_measured(measured)
    return measured


def _parse(argv: Optional[Sequence[str]]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a classifier of handwritten digits.")
    parser.add_argument("--cpu", action="store_true", help="plain CPU, without the callback")
    parser.add_argument("--epochs", type=int, default=10, help="at most (default %(default)s)")
    counts = {
        "iterations": (4, "device iterations"),
        "accumulation": (2, "gradient accumulation"),
        "replicas": (2, "replicas, each on an IPU of its own"),
        "micro-batch": (8, "samples in a micro-batch"),
    }
    for name, (default, meaning) in counts.items():
        parser.add_argument(
            f"--{name}", type=int, default=default, help=f"{meaning} (default %(default)s)"
        )
    parser.add_argument("--seed", type=int, default=0, help="of weights and data order")
    parser.add_argument("--log-dir", default="runs", help="for logs (default %(default)s)")
    return parser.parse_args(argv)


def _find_ipu() -> str:
    """Say which IPU there is, after making one up where there is none."""
    try:
        import poptorch

        if poptorch.ipuHardwareIsAvailable() and not emulator.is_installed():
            return "the IPU"
    except ImportError:
        pass
    emulator.install(force=True)
    return "the emulator"


def _on_ipu(args: argparse.Namespace) -> Dict[str, Any]:
    """Trainer arguments for IPUs.

    The gradient accumulation is an option of PopTorch's: given as the trainer's
    `accumulate_grad_batches`, it would be counted by Lightning a second time.
    """
    import poptorch

    training, inference = poptorch.Options(), poptorch.Options()
    for options in (training, inference):
        options.deviceIterations(args.iterations)
        options.replicationFactor(args.replicas)
    training.Training.gradientAccumulation(args.accumulation)
    strategy = IPUStrategy(training_opts=training, inference_opts=inference)
    return {"accelerator": "ipu", "devices": args.replicas, "strategy": strategy}


def _on_cpu(args: argparse.Namespace) -> Dict[str, Any]:
    """Trainer arguments for the same weight updates on a CPU."""
    updates_after = args.accumulation * args.replicas
    return {"accelerator": "cpu", "devices": 1, "accumulate_grad_batches": updates_after}


def _loaders(args: argparse.Namespace) -> "Tuple[DataLoader[Any], DataLoader[Any]]":
    """Loaders of micro-batches; PopTorch makes whole executions of them.

    Both sets are cut to whole executions, so that a CPU run sees exactly the same samples.
    """
    digits = load_digits()
    images = torch.from_numpy(digits.images).float().unsqueeze(1) / 16
    labels = torch.from_numpy(digits.target).long()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(1797))
    held_out = len(order) // 5
    # validation has no gradients to accumulate
    val_execution = args.micro_batch * args.iterations * args.replicas
    train_execution = val_execution * args.accumulation
    train = order[held_out:][: (len(order) - held_out) // train_execution * train_execution]
    val = order[:held_out][: held_out // val_execution * val_execution]
    if not len(train) or not len(val):
        raise SystemExit(
            f"An execution would hold {train_execution} samples in training and {val_execution} in "
            f"validation, of {len(order) - held_out} and {held_out}: make a count smaller."
        )
    train_set = TensorDataset(images[train], labels[train])
    val_set = TensorDataset(images[val], labels[val])
    shuffled = RandomSampler(train_set, generator=torch.Generator().manual_seed(args.seed))
    return (
        DataLoader(train_set, batch_size=args.micro_batch, sampler=shuffled, drop_last=True),
        DataLoader(val_set, batch_size=args.micro_batch, drop_last=True),
    )


def _read_epochs(path: Path) -> List[Dict[str, float]]:
    """Read a CSV log: key to value for each epoch."""
    epochs: Dict[int, Dict[str, float]] = {}
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            values = {key: float(text) for key, text in row.items() if text}
            epoch = epochs.setdefault(int(values.pop("epoch")), {})
            epoch.update((k, v) for k, v in values.items() if not k.endswith("step"))
    return [epochs[epoch] for epoch in sorted(epochs)]


def _print_measured(measured: Measured) -> None:
    keys = sorted({key for epoch in measured.epochs for key in epoch})
    print(f"\nLogged on {measured.device}:\n")
    print("  ".join(["epoch", *keys]))
    for number, epoch in enumerate(measured.epochs):
        cells = (f"{epoch[key]:{len(key)}.4f}" if key in epoch else " " * len(key) for key in keys)
        print("  ".join([f"{number:5}", *cells]))
    stands_for = (
        f"an execution: the mean over its {measured.micro_batches} micro-batches"
        if measured.micro_batches > 1
        else "a micro-batch"
    )
    print(f"\ntrain_loss_step: {len(measured.steps)} values, each of {stands_for};")
    print(f"    the first is {measured.steps[0]:.4f}, the last {measured.steps[-1]:.4f}")
    print(f"logs: {measured.log_dir / 'metrics.csv'}, tensorboard --logdir {measured.log_dir}")
    verdict = "as wanted" if measured.good_enough else "NOT enough"
    print(
        f"best val_accuracy: {measured.best_accuracy:.4f}, {verdict} (above {WANTED_ACCURACY:.2f})"
    )


if __name__ == "__main__":
    sys.exit(0 if main().good_enough else 1)
