"""Modules in which the doctor must find what each line's `# finds:` comment says, and no more.

`# remarks:` names what differs without failing.
"""

import datetime
import logging
import random
import time
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # as everybody writes it
import torchmetrics
import torchmetrics.functional as TF  # as everybody writes it
from torch import nn

from .clean_modules import CLASSES, Base

logger = logging.getLogger(__name__)
SEEN = []


class Trained(Base):
    """The rest of a module whose one fault is elsewhere."""

    def step(self, batch):
        x, y = batch
        logits = self(x)
        return logits, y, F.cross_entropy(logits, y)


class ReadsItem(Trained):
    def training_step(self, batch, batch_idx):
        logits, y, loss = self.step(batch)
        acc = (logits.argmax(-1) == y).float().mean()
        self.log("acc", acc.item())  # finds: value-read
        self.log("loss", float(loss))  # finds: value-read
        return loss


class MovesToHost(Trained):
    def training_step(self, batch, batch_idx):
        logits, y, loss = self.step(batch)
        preds = logits.argmax(-1).detach().cpu().numpy()  # finds: host-move
        right = y.tolist()  # finds: host-move
        array = np.asarray(logits.detach())  # finds: host-move
        share = (preds == np.array(right)).mean() * array.shape[1]
        self.log("share", share)  # remarks: frozen-log
        return loss


class Branches(Trained):
    def training_step(self, batch, batch_idx):
        _, _, loss = self.step(batch)
        if torch.isnan(loss):  # finds: tensor-branch
            return None
        assert loss < 1e9  # finds: tensor-branch
        while loss > 1e9:  # finds: tensor-branch
            loss = loss / 2
        return loss * (1 if loss > 0 else 2)  # finds: tensor-branch  # remarks: loss-arithmetic


class UsesBatchIdx(Trained):
    def training_step(self, batch, batch_idx):
        _, _, loss = self.step(batch)
        if batch_idx % 50 == 0:  # finds: batch-index
            self.log("sometimes", loss)
        for _ in range(batch_idx + 1):  # finds: batch-index
            loss = loss * 1.0  # remarks: loss-arithmetic
        return loss

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        _, _, loss = self.step(batch)
        self.log(["first", "second"][dataloader_idx], loss)  # finds: batch-index


class BuildsKeys(Trained):
    def training_step(self, batch, batch_idx):
        _, _, loss = self.step(batch)
        self.log(f"loss_{batch_idx}", loss)  # finds: tensor-key
        return loss

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        _, _, loss = self.step(batch)
        self.log_dict({f"val_{dataloader_idx}/loss": loss})  # finds: tensor-key


class Formats(Trained):
    def training_step(self, batch, batch_idx):
        _, _, loss = self.step(batch)
        print(f"loss {loss:.3f}")  # finds: tensor-format  # remarks: print
        return loss


class Prints(Trained):
    def training_step(self, batch, batch_idx):
        _, _, loss = self.step(batch)
        print("loss", loss)  # remarks: print
        logger.info("a step of %s", type(self).__name__)  # remarks: print
        self.print("once")  # remarks: print
        return loss


class KeepsTensors(Trained):
    def __init__(self) -> None:
        super().__init__()
        self.losses = []
        self.by_name = {"loss": []}

    def training_step(self, batch, batch_idx):
        _, _, loss = self.step(batch)
        self.losses.append(loss.detach())  # finds: tensor-kept
        losses = self.by_name["loss"]
        losses.append({"loss": loss})  # finds: tensor-kept
        self.last = loss  # finds: tensor-kept
        return loss

    def on_train_epoch_end(self):
        self.log("mean", torch.stack(self.losses).mean() + self.last)
        self.log("other", len(self.by_name))
        self.losses.clear()


class SideEffects(Trained):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.totals = {"steps": 0}

    def training_step(self, batch, batch_idx):
        _, _, loss = self.step(batch)
        self.count += 1  # remarks: side-effect
        self.totals["steps"] += 1  # remarks: side-effect
        SEEN.append(len(batch))  # remarks: side-effect
        self.remember("seen")
        return loss

    def remember(self, name):
        self.totals.setdefault(name, 1)  # remarks: side-effect


class CallsLogger(Trained):
    def training_step(self, batch, batch_idx):
        _, _, loss = self.step(batch)
        now = self.global_step  # remarks: frozen-value
        self.logger.log_metrics({"loss": loss}, step=now)  # finds: logger-call-tensor
        writer = self.logger.experiment
        writer.add_text("note", "hello")  # remarks: logger-call
        return loss


class Freezes(Trained):
    def __init__(self) -> None:
        super().__init__()
        self.beta = 0.0
        self.phase = "warm-up"
        self.alpha = 0.4

    def on_train_epoch_start(self):
        self.beta = min(1.0, self.current_epoch / 10)
        if self.current_epoch > 3:
            self.phase = "main"

    def anneal(self):
        return min(1.0, self.global_step / 1000)  # remarks: frozen-value

    def training_step(self, batch, batch_idx):
        logits, _, loss = self.step(batch)
        self.log("beta", self.beta)  # remarks: frozen-log
        self.log(name="epoch", value=self.current_epoch)  # remarks: frozen-log
        self.log("lr", self.optimizers().param_groups[0]["lr"])  # remarks: frozen-log
        if self.phase == "main":  # remarks: frozen-value
            loss = loss * 2
        if self.current_epoch < 5:  # remarks: frozen-value
            loss = loss * 3  # remarks: loss-arithmetic
        return loss * self.anneal() + self.alpha * logits.mean()

    def validation_step(self, batch, batch_idx):
        if self.trainer.sanity_checking:  # remarks: frozen-value
            return
        self.log("val_loss", self.step(batch)[2])


class Draws(Trained):
    def training_step(self, batch, batch_idx):
        _, _, loss = self.step(batch)
        mix = np.random.beta(0.4, 0.4)  # remarks: frozen-random
        if random.random() < 2:  # remarks: frozen-random
            loss = loss * mix  # remarks: loss-arithmetic
        started = time.time()  # remarks: frozen-value
        self.log("seconds", time.perf_counter() - started)  # remarks: frozen-log
        day = datetime.datetime.now().day  # remarks: frozen-value
        return loss * (day / day)


class MetricsElsewhere(Trained):
    def __init__(self) -> None:
        super().__init__()
        self.holder = Holder()

    def training_step(self, batch, batch_idx):
        logits, y, loss = self.step(batch)
        self.holder.acc.update(logits, y)  # finds: metric-on-device
        return loss


class Holder:
    def __init__(self) -> None:
        self.acc = torchmetrics.Accuracy(task="multiclass", num_classes=CLASSES)


class FunctionalMetric(Trained):
    def training_step(self, batch, batch_idx):
        logits, y, loss = self.step(batch)
        preds = logits.argmax(-1)
        acc = TF.accuracy(preds, y, task="multiclass", num_classes=CLASSES)  # finds: dynamic-shape
        self.log("acc", acc)
        return loss


class MetricValues(Trained):
    def __init__(self) -> None:
        super().__init__()
        self.acc = torchmetrics.Accuracy(task="multiclass", num_classes=CLASSES)

    def training_step(self, batch, batch_idx):
        logits, y, loss = self.step(batch)
        acc = self.acc(logits, y)
        self.log("error", 1 - acc)  # finds: metric-value
        if acc > 0.5:  # finds: metric-value
            self.log("good", acc)
        return loss


class LogsLoss(Trained):
    def training_step(self, batch, batch_idx):
        logits, y, loss = self.step(batch)
        target = F.one_hot(y, CLASSES).float()
        self.log("mae", F.l1_loss(logits, target))  # finds: second-loss
        mse = F.mse_loss(logits, target)
        self.log("rmse", mse.sqrt())  # finds: second-loss
        self.log("twice", loss * 2)
        return loss


class ReturnsLosses(Trained):
    def training_step(self, batch, batch_idx):
        logits, y, loss = self.step(batch)
        mse = F.mse_loss(logits.sum(-1), y.float())  # finds: second-loss
        return {"loss": loss, "mse": mse.detach()}


class JoinsLosses(Trained):
    def training_step(self, batch, batch_idx):
        logits, y, loss = self.step(batch)
        other = F.mse_loss(logits.sum(-1), y.float())  # finds: several-losses
        return loss + 0.5 * other


class ReturnsNothing(Trained):
    def training_step(self, batch, batch_idx):  # finds: no-loss
        self.step(batch)


class OwnLoss(Trained):
    def training_step(self, batch, batch_idx):
        logits, y, _ = self.step(batch)
        return ((logits.sum(-1) - y) ** 2).mean()  # finds: no-loss


class Optimizes(Trained):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False  # finds: manual-optimization

    def training_step(self, batch, batch_idx):
        _, _, loss = self.step(batch)
        loss.backward()  # finds: autograd
        return loss


class Adversarial(Trained):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False  # finds: manual-optimization

    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        self.toggle_optimizer(first)
        _, _, loss = self.step(batch)
        first.zero_grad()
        self.manual_backward(loss)  # finds: autograd
        first.step()
        self.untoggle_optimizer(first)
        second.step()
        self.log("loss", loss.item())  # finds: value-read
        return loss

    def configure_optimizers(self) -> Any:  # finds: trainer-setting
        return [torch.optim.SGD(self.net[i].parameters(), 0.1) for i in (0, 2)], []


class Hooks(Trained):
    def training_step(self, batch, batch_idx):
        return self.step(batch)[2]

    def optimizer_zero_grad(self, *args):  # remarks: hook-ignored
        pass

    def backward(self, loss, *args):  # remarks: hook-ignored
        loss.backward(retain_graph=True)

    def on_after_backward(self):  # remarks: hook-ignored
        self.log("norm", sum(p.grad.norm() for p in self.parameters()))

    def on_after_batch_transfer(self, batch, dataloader_idx):  # finds: hook-refused
        return batch


class WarmsUp(Trained):
    """A learning rate that is changed right before the update."""

    def training_step(self, batch, batch_idx):
        return self.step(batch)[2]

    def optimizer_step(self, *args, **kwargs):  # remarks: hook-late
        self.optimizers().param_groups[0]["lr"] = 0.1 * (self.global_step + 1)
        super().optimizer_step(*args, **kwargs)


class TwoOptimizers(Trained):
    def training_step(self, batch, batch_idx):
        return self.step(batch)[2]

    def configure_optimizers(self) -> Any:  # finds: trainer-setting
        return [
            torch.optim.SGD(self.net[0].parameters(), 0.1),
            torch.optim.SGD(self.net[2].parameters(), 0.1),
        ]


class DynamicShapes(Trained):
    def training_step(self, batch, batch_idx):
        logits, y, loss = self.step(batch)
        chosen = logits[y == 1]  # finds: dynamic-shape
        where = torch.nonzero(y)  # finds: dynamic-shape
        kinds = torch.unique(y)  # finds: dynamic-shape
        self.log("sizes", chosen.sum() + where.sum() + kinds.sum())
        return loss


class Buffers(Trained):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(()))
        self.weights = torch.ones(CLASSES)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self(x), y, weight=self.weights)  # finds: host-tensor
        self.average = 0.9 * self.average + 0.1 * loss.detach()  # finds: buffer-reassigned
        return loss


class UsesOtherStep(Trained):
    def __init__(self) -> None:
        super().__init__()
        self.center = None

    def training_step(self, batch, batch_idx):
        logits, _, loss = self.step(batch)
        self.center = logits.mean(0).detach()
        return loss

    def validation_step(self, batch, batch_idx):
        logits, _, _ = self.step(batch)
        self.log("distance", (logits - self.center).abs().mean())  # finds: step-tensor-used


class Submodule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, CLASSES)
        self.calls = 0

    def forward(self, x):
        self.calls += 1  # remarks: side-effect
        if x.abs().max() > 1e6:  # finds: tensor-branch
            x = x / 2
        return normalised(self.layer(x))


def normalised(x):
    return x / x.detach().norm().item()  # finds: value-read


class InHelpers(Trained):
    """Faults in a submodule and in a function of the user's."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Submodule()

    def training_step(self, batch, batch_idx):
        return self.step(batch)[2]


class LogsShapes(Trained):
    def training_step(self, batch, batch_idx):
        logits, _, loss = self.step(batch)
        self.log("logits", logits)  # finds: log-shape
        return loss


class NotReached(Trained):
    def __init__(self) -> None:
        super().__init__()
        self.debug = False
        self.images = []

    def training_step(self, batch, batch_idx):
        logits, y, loss = self.step(batch)
        if self.debug:
            print(loss.item())  # remarks: print, value-read
            self.logger.experiment.add_images("x", batch[0])  # remarks: logger-call
            self.images.append(y)  # remarks: side-effect
        return loss


class CarriesState(Trained):
    """What one batch leaves for the next, as in truncated backpropagation through time."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = None

    def training_step(self, batch, batch_idx):
        x, y = batch
        if self.memory is None:
            self.memory = (torch.zeros_like(x), torch.zeros_like(x))
        old = self.memory[0].detach()  # remarks: state-carried
        x = x + 0.1 * old
        self.memory = (x, x.abs())
        return F.cross_entropy(self(x), y)

    def on_train_epoch_end(self):
        self.memory = None


class CachesConstant(Trained):
    """A constant of the training step, used in validation as well."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = None

    def step(self, batch):
        x, y = batch
        if self.weights is None:
            self.weights = torch.arange(1.0, CLASSES + 1, device=x.device)
        logits = self(x) * self.weights  # finds: step-tensor-used
        return logits, y, F.cross_entropy(logits, y)

    def training_step(self, batch, batch_idx):
        return self.step(batch)[2]

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.step(batch)[2])


class Pair(nn.Module):
    def forward(self, x):
        x = x * 2
        return x, x.mean()


class KeepsPart(Trained):
    """A tensor kept on the line that called a submodule."""

    def __init__(self) -> None:
        super().__init__()
        self.pair = Pair()

    def training_step(self, batch, batch_idx):
        x, y = batch
        x, self.size = self.pair(x)  # finds: tensor-kept
        return F.cross_entropy(self(x), y)

    def on_train_epoch_end(self):
        self.log("size", self.size + 1)


class KeepsDevice(Trained):
    """The device of a batch, for a hook that runs on the host."""

    def training_step(self, batch, batch_idx):
        self.where = batch[0].device  # finds: device-kept
        return self.step(batch)[2]

    def on_train_epoch_end(self):
        self.log("norm", self(torch.ones(1, 8).to(self.where)).sum())


class AddsPenalty(Trained):
    def training_step(self, batch, batch_idx):
        _, _, loss = self.step(batch)
        norm = sum(p.pow(2).sum() for p in self.parameters())
        total = loss + 0.01 * norm  # remarks: loss-arithmetic
        self.log("total", total)
        return total


class DividesLoss(Trained):
    def training_step(self, batch, batch_idx):
        _, y, loss = self.step(batch)
        loss /= len(y)  # remarks: loss-arithmetic
        return loss


class Smooths(Trained):
    def __init__(self) -> None:
        super().__init__()
        self.criterion = nn.CrossEntropyLoss(label_smoothing=0.1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return self.criterion(self(x), y)  # finds: loss-form


class WeighsElements(Trained):
    def training_step(self, batch, batch_idx):
        x, y = batch
        each = F.cross_entropy(self(x), y, reduction="none")  # finds: loss-form
        return (each * torch.ones_like(each)).mean()


class ReplacesData(Trained):
    """A moving average of weights, as many write it."""

    def __init__(self) -> None:
        super().__init__()
        self.slow = nn.Linear(8, 6)

    def training_step(self, batch, batch_idx):
        for fast, slow in zip(self.net[0].parameters(), self.slow.parameters()):
            slow.data = slow.data * 0.9 + fast.data * 0.1  # finds: data-replaced
        x, y = batch
        return F.cross_entropy(self.net[2](self.net[0](x) + self.slow(x)), y)


class ComesBack(Trained):
    """A tensor moved to the host and used with others again: one fault."""

    def training_step(self, batch, batch_idx):
        logits, y, _ = self.step(batch)
        logits = logits + logits.detach().cpu()  # finds: host-move
        logits = logits.cuda()  # finds: host-move
        weight = torch.tensor(2.0).to("cpu")  # finds: host-move
        return F.cross_entropy(logits * weight, y)


class ChecksOptimizer(Trained):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False  # finds: manual-optimization

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        assert isinstance(optimizer, torch.optim.Optimizer)
        _, _, loss = self.step(batch)
        self.manual_backward(loss)  # finds: autograd
        norm = self.net[0].weight.grad.norm()
        optimizer.step()
        self.log("norm", norm)


class TakesOptimizerIndex(Trained):
    def training_step(self, batch, batch_idx, optimizer_idx):
        if optimizer_idx == 0:
            return self.step(batch)[2]
        return None

    def configure_optimizers(self) -> Any:  # finds: trainer-setting
        return [torch.optim.SGD(self.net[i].parameters(), 0.1) for i in (0, 2)], []


class Sharpened(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heat = 1.0

    def forward(self, x):
        return x * self.heat  # remarks: frozen-value


class FreezesInPart(Trained):
    """An attribute of a submodule that a hook of the module changes."""

    def __init__(self) -> None:
        super().__init__()
        self.sharpened = Sharpened()

    def on_train_epoch_start(self):
        self.sharpened.heat = 1.0 + self.current_epoch

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self.sharpened(self(x)), y)


class Heat:
    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 1.0


class FreezesElsewhere(Trained):
    """Attributes that are not in the module's `__dict__`: of its class, and in slots."""

    phase = "warm-up"

    def __init__(self) -> None:
        super().__init__()
        self.heat = Heat()

    def on_train_epoch_start(self):
        self.phase = "main"
        self.heat.value = 0.5

    def training_step(self, batch, batch_idx):
        x, y = batch
        if self.phase == "main":  # remarks: frozen-value
            x = x * 2
        return F.cross_entropy(self(x * self.heat.value), y)  # remarks: frozen-value


class DrawsForLogger(Trained):
    def training_step(self, batch, batch_idx):
        x, _ = batch
        writer = self.logger.experiment
        writer.add_scalar("size", 1, self.current_epoch)  # remarks: logger-call
        writer.add_images("x", x, self.global_step)  # finds: logger-call-tensor
        return self.step(batch)[2]


class FollowsOnHost(Trained):
    """A moving average of weights, kept by a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.slow = nn.Linear(8, 6)

    def training_step(self, batch, batch_idx):
        x, y = batch
        hidden = self.net[0](x) + self.slow(x)
        self.log("slow", self.slow.weight.detach().norm())
        return F.cross_entropy(self.net[2](hidden), y)

    def on_train_batch_end(self, *args):
        follow(self.net[0], self.slow)


def follow(fast, slow):
    with torch.no_grad():
        for weight, average in zip(fast.parameters(), slow.parameters()):
            average.mul_(0.9).add_(weight, alpha=0.1)  # remarks: host-weights


class ShrinksOnHost(Trained):
    """Weights shrunk through `.data`, in a hook with a decorator."""

    def training_step(self, batch, batch_idx):
        return self.step(batch)[2]

    @torch.no_grad()
    def on_train_batch_end(self, *args):
        for weight in self.parameters():
            weight.data *= 0.99  # remarks: host-weights


class DecoratesHook(Trained):
    """A tensor of the step that only a hook with a decorator looks at."""

    def training_step(self, batch, batch_idx):
        logits, _, loss = self.step(batch)
        self.logits = logits  # finds: tensor-kept
        return loss

    @torch.no_grad()
    def on_train_epoch_end(self):
        self.log("mean", self.logits.mean())


FAULTY = [
    ReadsItem,
    MovesToHost,
    Branches,
    UsesBatchIdx,
    BuildsKeys,
    Formats,
    Prints,
    KeepsTensors,
    SideEffects,
    CallsLogger,
    Freezes,
    Draws,
    MetricsElsewhere,
    FunctionalMetric,
    MetricValues,
    LogsLoss,
    ReturnsLosses,
    JoinsLosses,
    ReturnsNothing,
    OwnLoss,
    Optimizes,
    Adversarial,
    Hooks,
    WarmsUp,
    TwoOptimizers,
    DynamicShapes,
    Buffers,
    UsesOtherStep,
    InHelpers,
    LogsShapes,
    NotReached,
    CarriesState,
    CachesConstant,
    KeepsPart,
    KeepsDevice,
    AddsPenalty,
    DividesLoss,
    Smooths,
    WeighsElements,
    ReplacesData,
    ComesBack,
    ChecksOptimizer,
    TakesOptimizerIndex,
    FreezesInPart,
    FreezesElsewhere,
    DrawsForLogger,
    FollowsOnHost,
    ShrinksOnHost,
    DecoratesHook,
]
