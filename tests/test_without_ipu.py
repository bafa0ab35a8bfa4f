"""Off the IPU the callback is importable and invisible, on every Lightning."""

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


def fit(*callbacks):
    """Two epochs on the CPU; returns metrics and weights, and what is in the module's place."""
    torch.manual_seed(0)
    module = Net()
    x = torch.randn(8, 3, generator=torch.Generator().manual_seed(1))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x), batch_size=2)
    trainer = pl.Trainer(
        accelerator="cpu", max_epochs=2, callbacks=list(callbacks), logger=False, **QUIET
    )
    trainer.fit(module, loader, loader)
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
