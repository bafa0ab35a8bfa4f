"""PopTorch's dispatcher, without `opts.Jit.traceModel(True)`.

The dispatcher leaves the module's device on the IPU after every compile. What Lightning and users
do with that device later fails, until the callback puts it back.
"""

import pytest
import torch
import torchmetrics
from lightning_in_use import QUIET, IPUStrategy
from parity.bench import FEATURES, MICRO_BATCH, Net, observe, pl

from ipu_log_callback import IPULogCallback

# What Lightning has to say of itself differs from version to version.
pytestmark = pytest.mark.filterwarnings("ignore")

NO_DISPATCH = "There is no active dispatch"

#: Up to Lightning 1.6 the strategy moves every batch to the module's device, also to an IPU.
BATCHES_ARE_MOVED = "batch_to_device" not in vars(IPUStrategy)


class Simple(pl.LightningModule):
    """A module that logs nothing: it needs no callback for its own sake."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(FEATURES, 1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return torch.nn.functional.mse_loss(self.layer(x).squeeze(-1), y)

    def validation_step(self, batch, batch_idx):
        return self.training_step(batch, batch_idx)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


class Logging(Simple):
    """The same, with a key in each step."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        stage = "train" if self.trainer.training else "val"
        self.log(f"{stage}_loss", loss, on_epoch=True)
        return loss


def fit(module, *callbacks):
    """Two epochs with validation, with the user's own `poptorch.DataLoader`s and options."""
    import poptorch

    training, inference = poptorch.Options(), poptorch.Options()
    training.deviceIterations(3)
    training.Training.gradientAccumulation(2)
    inference.deviceIterations(3)
    x = torch.randn(4 * 6 * MICRO_BATCH, FEATURES, generator=torch.Generator().manual_seed(0))
    data = torch.utils.data.TensorDataset(x, x.sum(1))
    loaders = [poptorch.DataLoader(opts, data, MICRO_BATCH) for opts in (training, inference)]
    trainer = pl.Trainer(
        accelerator="ipu",
        devices=1,
        strategy=IPUStrategy(training_opts=training, inference_opts=inference),
        max_epochs=2,
        num_sanity_val_steps=0,
        log_every_n_steps=1,
        callbacks=list(callbacks),
        logger=False,
        **QUIET,
    )
    trainer.fit(module, *loaders)
    return trainer


def test_without_the_callback_lightning_1_6_fails_at_the_second_batch():
    """Batch transfer uses the module's device; Lightning from 1.7 on transfers nothing."""
    if not BATCHES_ARE_MOVED:
        assert fit(Simple()).global_step > 0
        return
    with pytest.raises(Exception, match=NO_DISPATCH) as caught:
        fit(Simple())
    assert any(entry.name == "batch_to_device" for entry in caught.traceback)


@pytest.mark.parametrize("keys", [(), "*"], ids=["no keys", "all keys"])
@pytest.mark.parametrize("module", [Simple, Logging])
def test_with_the_callback_every_version_fits(module, keys):
    """With or without keys, and whether or not the module logs."""
    trainer = fit(module(), IPULogCallback(keys))
    assert trainer.current_epoch == 2
    logged = module is Logging and keys == "*"
    assert ("val_loss" in trainer.callback_metrics) == logged
    assert ("train_loss_epoch" in trainer.callback_metrics) == logged


class LogsInHooks(Simple):
    """Logs in host hooks, as one does where `self.log` in a step is no option."""

    def on_train_batch_end(self, outputs, *_):
        loss = outputs["loss"] if isinstance(outputs, dict) else outputs
        self.log("hooked", loss.mean())

    def on_validation_batch_end(self, outputs, *_):
        self.log("val_hooked", torch.as_tensor(outputs).mean())


def test_self_log_in_the_users_own_hooks():
    """`self.log` moves its value to the module's device: fails alone, works with the callback."""
    with pytest.raises(Exception, match=NO_DISPATCH):
        fit(LogsInHooks())
    trainer = fit(LogsInHooks(), IPULogCallback())
    assert {"hooked", "val_hooked"} <= set(trainer.callback_metrics)


class MeasuresInHooks(Simple):
    """Has a metric that only the host uses, and a metric in a submodule that nobody uses."""

    def __init__(self):
        super().__init__()
        self.seen = torchmetrics.MeanMetric()
        self.body = torch.nn.Module()
        self.body.unused = torchmetrics.SumMetric()

    def on_validation_batch_end(self, outputs, *_):
        self.seen.update(torch.as_tensor(outputs))

    def on_validation_epoch_end(self):
        self.epochs = [*getattr(self, "epochs", ()), self.seen.compute().item()]
        self.seen.reset()


@pytest.mark.parametrize("keys", [(), "*"], ids=["no keys", "all keys"])
def test_metrics_of_the_host_stay_on_the_host(keys):
    """States, defaults and caches of metrics do not go to the device with the module."""
    module = MeasuresInHooks()
    fit(module, IPULogCallback(keys))
    assert len(module.epochs) == 2
    for metric in (module.seen, module.body.unused):
        assert metric.device.type == "cpu"
        metric.update(torch.tensor(1.0))
        assert metric.compute() == 1


def test_teardown_moves_the_module_to_the_cpu():
    """Lightning's teardown calls `module.cpu()`, which fails in a metric that is on the device."""
    with pytest.raises(Exception, match=NO_DISPATCH):
        fit(MeasuresInHooks())
    module = MeasuresInHooks()
    fit(module, IPULogCallback())
    module.cpu()
    assert module.device.type == "cpu"
    assert {tensor.device.type for tensor in module.state_dict().values()} == {"cpu"}
    assert module.layer(torch.ones(1, FEATURES)).shape == (1, 1)


def test_devices_of_submodules_that_are_lightning_modules_too():
    """A LightningModule inside the module has a device of its own; it is put back as well."""

    class Outer(Net):
        def __init__(self):
            super().__init__()
            self.inner = Net()

        def logs(self, stage, x, loss):
            self.log(f"{stage}_loss", loss)

        def on_train_batch_end(self, *_):
            self.devices = {self.device.type, self.inner.device.type}

    assert observe(True, Outer).run.module.devices == {"cpu"}
