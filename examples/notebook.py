# %% [markdown]
# # Look into a model that trains on IPUs
#
# On an IPU a step's Python runs once, when PopTorch compiles it: `self.log` inside it logs nothing.
# `IPULogCallback` makes it work. In a notebook it also keeps what was logged, draws it, and shows
# what was captured. This notebook runs, looks, changes what is logged, and runs again.
#
# Without an IPU the emulator stands in for PopTorch: values are right, timings mean nothing.
#
# `notebook.ipynb` is made from `notebook.py` by `python examples/make_notebook.py`.

# %%
import logging
import warnings

import pytorch_lightning as pl
import torch
import torchmetrics
from pytorch_lightning.strategies import IPUStrategy
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from ipu_log_callback import IPULogCallback, emulator

try:
    import poptorch
except ImportError:
    emulator.install()
    import poptorch

logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", ".*does not have many workers.*")

# %% [markdown]
# ## A LightningModule, as for a CPU
#
# Two spirals, a network of three layers. It logs in its steps, and logs a torchmetrics object.


# %%
class Spirals(pl.LightningModule):
    """Tells two spirals apart."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(
            nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 2)
        )
        self.accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=2)

    def training_step(self, batch, batch_idx):
        points, arms = batch
        logits = self.network(points)
        loss = F.cross_entropy(logits, arms)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        self.log("train_sure", logits.detach().softmax(dim=1).amax(dim=1).mean())
        return loss

    def validation_step(self, batch, batch_idx):
        points, arms = batch
        logits = self.network(points)
        self.accuracy.update(logits, arms)
        self.log("val_loss", F.cross_entropy(logits, arms))
        self.log("val_accuracy", self.accuracy)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


# %% [markdown]
# ## Run
#
# An execution is one trainer batch: here 4 device iterations times 2 gradient accumulations, so 8
# micro-batches in training. `history=True` keeps the values of each.


# %%
def spirals(count, seed):
    """Points of two spirals, `[count, 2]`, and which of them each belongs to."""
    generator = torch.Generator().manual_seed(seed)
    arms = torch.arange(count) % 2
    turn = 3 * torch.rand(count, generator=generator).sqrt()
    angle = 2 * turn + torch.pi * arms
    points = torch.stack([turn * angle.cos(), turn * angle.sin()], dim=1)
    return TensorDataset(points + 0.05 * torch.randn(points.shape, generator=generator), arms)


def fit(callback, epochs=8):
    """Train a fresh model with a callback, and return it."""
    training, inference = poptorch.Options(), poptorch.Options()
    training.deviceIterations(4)
    training.Training.gradientAccumulation(2)
    inference.deviceIterations(4)
    torch.manual_seed(1)
    trainer = pl.Trainer(
        accelerator="ipu",
        devices=1,
        strategy=IPUStrategy(training_opts=training, inference_opts=inference),
        max_epochs=epochs,
        callbacks=[callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Spirals()
    trainer.fit(
        model,
        DataLoader(spirals(1024, seed=0), batch_size=16),
        DataLoader(spirals(512, seed=1), batch_size=16),
    )
    return model


# %%
callback = IPULogCallback(keys=["train_loss", "val_*"], history=True)
model = fit(callback)

# %% [markdown]
# The warning above says what the module logs and nobody asked for, what it would cost, and what to
# type. Nothing travels from the device to the host unless it is selected.
#
# ## Look
#
# The callback shows what it captured in each step: what was called, with which options, what it
# costs, and where it stands. `print(callback.captured)` says the same without a notebook.

# %%
callback

# %% [markdown]
# Micro-batch values are faint, executions solid, validation hollow. It works while training runs
# (from a callback of yours) and after an interrupt, too.

# %%
callback.plot("train_loss", "val_loss", "val_accuracy")

# %% [markdown]
# The values themselves are in `callback.history`: by key, or as a table of pandas.

# %%
print(callback.history)
last = callback.history["train_loss"][-2]
print(f"\n{last.step} execution {last.execution}: {last.value:.4f}, the mean of", end=" ")
print([round(value, 3) for value in last.micro_batches.tolist()])

# %%
callback.history.to_pandas().tail()

# %% [markdown]
# ## Change what is logged, and run again
#
# Other keys are another compilation, so the model is trained afresh. `"*"` is everything that the
# steps log.

# %%
callback = IPULogCallback(keys="*", history=True)
model = fit(callback)
callback.plot("train_sure", "val_accuracy")

# %% [markdown]
# ## Gradients
#
# PopTorch can bring gradients and weights back as well, by parameter name. Here their norms are
# logged, one value an execution, under `grad/<parameter>/norm`.

# %%
callback = IPULogCallback(keys="train_loss", gradients="network.*.weight", history=True)
model = fit(callback, epochs=4)
norms = [key for key in callback.history if key.startswith("grad/")]
callback.plot(*norms)

# %% [markdown]
# What looking costs, in bytes per execution:

# %%
callback.cost
