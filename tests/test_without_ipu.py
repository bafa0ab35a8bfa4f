"""Off the IPU the callback is importable and invisible, on every Lightning."""

import copy

import pytest
import torch
from lightning_in_use import QUIET, pl

from ipu_log_callback import IPULogCallback


class Net(pl.LightningModule):
    """Logs, and keeps the rows that it sees."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)

    def training_step(self, batch, batch_idx):
        loss = self.layer(batch[0]).square().mean()
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log(f"val_{batch_idx}", self.layer(batch[0]).mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trained(*callbacks, **options):
    """Two epochs on the CPU; returns the trainer."""
    torch.manual_seed(0)
    module = Net()
    x = torch.randn(8, 3, generator=torch.Generator().manual_seed(1))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x), batch_size=2)
    trainer = pl.Trainer(
        accelerator="cpu", max_epochs=2, callbacks=list(callbacks), logger=False, **QUIET, **options
    )
    trainer.fit(module, loader, loader)
    return trainer


def fit(*callbacks):
    """Metrics and weights of a run on the CPU, and what is in the module's place."""
    trainer = trained(*callbacks)
    module = trainer.lightning_module
    shown = {key: float(value) for key, value in trainer.callback_metrics.items()}
    own = {name for name in vars(module) if not name.startswith("_")}
    return shown, {name: tensor.tolist() for name, tensor in module.state_dict().items()}, own


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "options", [{}, {"keys": "*"}, {"keys": "*", "history": True, "gradients": "*"}], ids=str
)
def test_a_cpu_run_with_the_callback_is_the_run_without(options):
    """Same metrics, same weights, nothing added to the module."""
    assert fit(IPULogCallback(**options)) == fit()


class Counting(IPULogCallback):
    """A subclass with a hook that the callback itself has no use for."""

    seen = 0

    def on_before_zero_grad(self, *args):
        super().on_before_zero_grad(*args)
        self.seen += 1


def hooks_of_each_batch(callback):
    """Names of the hooks for which Lightning opened a profile at least once a batch."""
    durations = trained(callback, profiler="simple").profiler.recorded_durations
    name = type(callback).__name__
    often = [key for key, seconds in durations.items() if name in key and len(seconds) >= 8]
    return {key.rpartition(".")[2] for key in often}


@pytest.mark.filterwarnings("ignore")
def test_lightning_passes_over_hooks_that_the_callback_has_no_use_for():
    """Each of them would cost a profile in every batch."""
    needed = {"on_train_batch_start", "on_train_batch_end", "on_validation_batch_end"}
    of_lightning_1_6 = {"on_batch_start", "on_batch_end"}
    assert hooks_of_each_batch(IPULogCallback("*")) <= needed | of_lightning_1_6


@pytest.mark.filterwarnings("ignore")
def test_a_subclass_gets_every_hook_that_it_defines():
    """Also one that the callback has no use for, and also a copy of it."""
    for callback in (Counting(), copy.deepcopy(Counting())):
        assert "on_before_zero_grad" in hooks_of_each_batch(callback)
        assert callback.seen == 8
