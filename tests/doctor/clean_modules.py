"""Modules in which the doctor must find nothing."""

import math
from typing import Any, Dict, List, NamedTuple

import torch
import torch.nn.functional as F  # as everybody writes it
import torchmetrics
from torch import nn

from ipu_log_callback import _compat, live

CLASSES = 3


class Base(_compat.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, CLASSES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Plain(Base):
    """The module of every tutorial."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        self.log("val_loss", F.cross_entropy(logits, y))
        self.log("val_acc", (logits.argmax(-1) == y).float().mean())


class SharedStep(Base):
    """One function for all stages, told which by a str."""

    def __init__(self) -> None:
        super().__init__()
        self.criterion = nn.CrossEntropyLoss(label_smoothing=0.0)
        self.save_hyperparameters()

    def _shared_step(self, batch, batch_idx, mode="train"):
        x, y = batch
        logits = self(x)
        loss = self.criterion(logits, y)
        acc = torch.mean((torch.argmax(logits, dim=-1) == y).float())
        self.log_dict(
            {mode + "_loss": loss, f"{mode}_acc": acc}, on_step=mode == "train", on_epoch=True
        )
        return {"loss": loss}

    def training_step(self, train_batch, batch_idx):
        return self._shared_step(train_batch, batch_idx)

    def validation_step(self, val_batch, batch_idx):
        return self._shared_step(val_batch, batch_idx, mode="val")

    def test_step(self, test_batch, batch_idx):
        return self._shared_step(test_batch, batch_idx, mode="test")


class MetricObjects(Base):
    """Metrics as objects: fed, logged as objects, as values, and at epoch end."""

    def __init__(self) -> None:
        super().__init__()
        self.acc = torchmetrics.Accuracy(task="multiclass", num_classes=CLASSES)
        self.f1 = torchmetrics.F1Score(task="multiclass", num_classes=CLASSES, average="macro")
        self.mean_loss = torchmetrics.MeanMetric()
        self.per_stage = nn.ModuleDict(
            {"val": torchmetrics.Accuracy(task="multiclass", num_classes=CLASSES)}
        )

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        loss = F.cross_entropy(logits, y)
        self.acc(logits, y)
        self.log("train_acc", self.acc, on_step=False, on_epoch=True)
        self.log("train_f1", self.f1(logits, y))
        self.mean_loss.update(loss.detach())
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.per_stage["val"].update(self(x), y)

    def on_validation_epoch_end(self):
        self.log("val_acc", self.per_stage["val"].compute())
        self.per_stage["val"].reset()


class Collections(Base):
    """A `MetricCollection` a stage, logged as a whole and by its values."""

    def __init__(self) -> None:
        super().__init__()
        metrics = torchmetrics.MetricCollection(
            {
                "acc": torchmetrics.Accuracy(task="multiclass", num_classes=CLASSES),
                "f1": torchmetrics.F1Score(task="multiclass", num_classes=CLASSES),
            }
        )
        self.train_metrics = metrics.clone(prefix="train_")
        self.val_metrics = metrics.clone(prefix="val_")

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        self.log_dict(self.train_metrics(logits, y))
        return F.cross_entropy(logits, y)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.val_metrics.update(self(x), y)
        self.log_dict(self.val_metrics, on_epoch=True)


class DictReturns(Base):
    """Dicts, tuples and lists out of the steps, collected on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.predictions: List[torch.Tensor] = []

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        loss = F.cross_entropy(logits, y)
        return {"loss": loss, "logits": logits.detach(), "wrong": (logits.argmax(-1) != y).sum()}

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        return {"preds": logits.argmax(-1), "target": y, "parts": [logits, (x, y)]}

    def on_validation_batch_end(self, outputs, *args):
        self.predictions.append(outputs["preds"].cpu())
        print(self.predictions[-1].numpy().tolist())

    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        x, _ = batch
        return self(x).softmax(-1)


class SeveralLoaders(Base):
    """More than one validation loader; the index is left to Lightning."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self(x), y)

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        x, y = batch
        self.log("val_loss", F.cross_entropy(self(x), y), add_dataloader_idx=True)


class LocalLists(Base):
    """Lists, dicts and loops that live in the step alone."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        parts = []
        sizes: Dict[str, int] = {}
        for index, layer in enumerate(self.net):
            x = layer(x)
            parts.append(x.abs().mean())
            sizes[f"layer{index}"] = x.shape[-1]
        if x.shape[0] > 1 and len(parts) == 3:
            x = x / math.sqrt(sizes["layer2"])
        loss = F.cross_entropy(x, y)
        self.log("activity", torch.stack(parts).mean())
        return loss


class Output(NamedTuple):
    logits: torch.Tensor
    loss: torch.Tensor


class NamedOutputs(Base):
    """A NamedTuple from `forward`, and a batch that is a dict."""

    def forward(self, batch):
        logits = self.net(batch["x"])
        return Output(logits=logits, loss=F.cross_entropy(logits, batch["y"]))

    def training_step(self, batch, batch_idx):
        outputs = self(batch)
        self.log("train_loss", outputs.loss.detach(), batch_size=len(batch["y"]))
        return outputs.loss


class Autoencoder(Base):
    """Noise from the device, a mask that keeps the shape, an auxiliary number as arithmetic."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = nn.Linear(CLASSES, 8)
        self.register_buffer("scale", torch.full((8,), 2.0))
        self.register_buffer("average", torch.zeros(()))

    def training_step(self, batch, batch_idx):
        x, _ = batch
        noisy = x + 0.1 * torch.randn_like(x) + torch.rand(x.shape[0], 1, device=x.device)
        rebuilt = self.decoder(self(noisy)) * self.scale
        mask = (x > 0).float()
        self.log("mae", (rebuilt - x).abs().mean())
        self.log("masked", ((rebuilt - x).abs() * mask).sum() / mask.sum().clamp(min=1))
        self.log("clipped", torch.where(rebuilt > 1, torch.ones_like(rebuilt), rebuilt).mean())
        loss = F.mse_loss(rebuilt, x)
        self.average.mul_(0.9).add_(0.1 * loss.detach())
        self.log("average", self.average)
        return loss


class LiveValues(Base):
    """What lives on the host is logged live; counters are kept by hooks on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def training_step(self, batch, batch_idx):
        x, y = batch
        self.log("epoch", live(lambda: float(self.current_epoch)))
        self.log("lr", live(lambda: self.optimizers().param_groups[0]["lr"]))
        self.log("seen", live(lambda: self.seen))
        return F.cross_entropy(self(x), y)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.seen += len(batch[0])
        if batch_idx % 50 == 0:
            print(f"{outputs['loss'].item():.3f} after {self.seen}")
        self.logger.log_metrics({"seen": self.seen})


class Norms(Base):
    """Dropout, batch norm, attention and a recurrent layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.drop = nn.Dropout(0.3)

    def training_step(self, batch, batch_idx):
        x, y = batch
        x = self.drop(self.norm(x)).unsqueeze(1)
        x, _ = self.attention(x, x, x, need_weights=False)
        loss = F.cross_entropy(self(x.squeeze(1)), y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", F.cross_entropy(self(self.norm(x)), y))


class Features(Base):
    """Values handed on through attributes of the module, inside one run of the step."""

    def __init__(self) -> None:
        super().__init__()
        self.features = None

    def encode(self, x):
        self.features = self.net[0](x)
        self.width = self.features.shape[-1]

    def training_step(self, batch, batch_idx):
        x, y = batch
        self.encode(x)
        loss = F.cross_entropy(self.net[2](self.net[1](self.features)) / self.width, y)
        self.log("train_loss", loss)
        return loss


class Contrastive(Base):
    """Tensors made in the step, on the module's own device."""

    def training_step(self, batch, batch_idx):
        x, _ = batch
        features = self(torch.cat([x, x + 0.01 * torch.randn_like(x)]))
        similarity = F.cosine_similarity(features[:, None], features[None], dim=-1)
        count = similarity.shape[0]
        itself = torch.eye(count, dtype=torch.bool, device=similarity.device)
        similarity = similarity.masked_fill(itself, -1e9)
        labels = (torch.arange(count, device=self.device) + count // 2) % count
        loss = F.cross_entropy(similarity / 0.1, labels)
        rank = similarity.argsort(dim=-1, descending=True)
        self.log("top1", (rank[:, 0] == labels).float().mean())
        return loss


class WeightedSum(Base):
    """Two torch losses, joined as PopTorch wants it."""

    def training_step(self, batch, batch_idx):
        import poptorch  # only there when the emulator is installed

        x, y = batch
        logits = self(x)
        first = F.cross_entropy(logits, y)
        second = F.mse_loss(logits.sum(-1), y.float())
        self.log_dict({"first": first, "second": second})
        return poptorch.identity_loss(first + 0.1 * second, reduction="mean")


class HandsOnLoss(Base):
    """A loss that is handed on as it is; what is only logged may be computed from it."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self(x), y, label_smoothing=0.0)
        self.log("perplexity", loss.exp())
        loss = loss.unsqueeze(0).mean()
        return {"loss": loss, "log": {"train_loss": loss}}


class CachedConstant(Base):
    """A constant that the one step makes when it first runs."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = None

    def training_step(self, batch, batch_idx):
        x, y = batch
        if self.weights is None:
            self.weights = torch.arange(1.0, CLASSES + 1, device=x.device)
        return F.cross_entropy(self(x) * self.weights, y)


class PairOfFeatures(Base):
    """A tuple that every step makes anew; of the last step's only the shape is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.pair = None

    def encode(self, x):
        if self.pair is not None and self.pair[0].size(-1) != 6:
            raise ValueError
        self.pair = (self.net[0](x), x)
        return self.net[2](self.net[1](self.pair[0]))

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.encode(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", F.cross_entropy(self.encode(batch[0]), batch[1]))


class LogsConstants(Base):
    """Numbers that are the same in every step of a CPU run as well."""

    def __init__(self) -> None:
        super().__init__()
        self.alpha = 0.5

    def training_step(self, batch, batch_idx):
        x, y = batch
        size = x.size(0)
        self.log("one", 1.0)
        self.log("size", float(size))
        self.log("rows", len(x) / 2, batch_size=size)
        self.log_dict({"alpha": self.alpha, "width": x.shape[-1], "classes": float(CLASSES)})
        return F.cross_entropy(self(x), y)


class StepsScheduler(Base):
    """Hooks of the optimizer that first do what the device does."""

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        self.warm_up = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        return optimizer

    def optimizer_step(self, *args, **kwargs):
        """Count updates."""
        super().optimizer_step(*args, **kwargs)
        self.warm_up.step()

    def optimizer_zero_grad(self, *args):
        self.optimizers().zero_grad(set_to_none=True)


class RemembersShape(Base):
    """A shape and a pair of numbers that every step sets again, to the same."""

    def __init__(self) -> None:
        super().__init__()
        self.shape = None

    def encode(self, x):
        self.shape = x.shape
        self.grid = (x.shape[0], 2)
        return self(x)

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.encode(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", F.cross_entropy(self.encode(batch[0]), batch[1]))


class MaskedWeights(Base):
    """Weights that are masked in place, through `.data`."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(6, 8).tril())

    def training_step(self, batch, batch_idx):
        x, y = batch
        self.net[0].weight.data *= self.mask
        return F.cross_entropy(self(x), y)


class Reparameterized(Base):
    """A distribution made in the step: PopTorch leaves its arguments unchecked."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        noise = torch.distributions.Normal(x, x.abs() + 1).rsample()
        return F.cross_entropy(self(x + 0.01 * noise), y)


CLEAN = [
    Plain,
    SharedStep,
    MetricObjects,
    Collections,
    DictReturns,
    SeveralLoaders,
    LocalLists,
    NamedOutputs,
    Autoencoder,
    LiveValues,
    Norms,
    Features,
    Contrastive,
    WeightedSum,
    HandsOnLoss,
    CachedConstant,
    PairOfFeatures,
    LogsConstants,
    StepsScheduler,
    RemembersShape,
    MaskedWeights,
    Reparameterized,
]
