"""`precision=16` and `"16-true"`, as the strategies define them."""

import dataclasses
import importlib

import pytest
import torch
import torchmetrics
from lightning_in_use import STRATEGIES, pl
from parity.bench import Net, Setting, observe

#: Lightning 2.0 takes `"16-true"`.
NAMES_PRECISIONS = not hasattr(pl.LightningModule, "validation_epoch_end")
#: Up to Lightning 1.6 a strategy looks for `torch.FloatTensor`s in the step, which device tensors
#: are not; Graphcore's halves for `"16-mixed"` alone.
BATCHES_ARE_HALVED = {
    "built-in": hasattr(STRATEGIES["built-in"], "_convert_to_poptorch_loader")
    and "batch_to_device" in vars(STRATEGIES["built-in"]),
    "lightning-graphcore": False,
}


def half(name):
    """Trainer options for half precision on one of the strategies."""
    if name == "lightning-graphcore" and NAMES_PRECISIONS:
        return {"plugins": importlib.import_module("lightning_graphcore").IPUPrecision("16-true")}
    return {"precision": 16}


CUT = Setting(iterations=2, accumulation=2)


class Halves(Net):
    """Logs what is half and what is not, in training and validation."""

    def __init__(self):
        super().__init__()
        self.mean = torchmetrics.MeanMetric()
        self.dtypes = {}

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)

    def loss(self, batch):
        # what a strategy leaves as it is; the others have done it
        return super().loss([part.half() for part in batch])

    def logs(self, stage, x, loss):
        self.dtypes[stage] = (x.dtype, loss.dtype)
        x = x.half()
        self.log(f"{stage}_loss", loss, on_step=True, on_epoch=True)
        self.log(f"{stage}_sum", x.sum(), reduce_fx="sum", on_epoch=True)
        # more than a half can hold, once it is summed over micro-batches
        self.log(f"{stage}_large", x[0, 0] * 0 + 30000, reduce_fx="sum", on_epoch=True)
        self.log(f"{stage}_small", x[0, 0] * 0 + 1e-4, on_epoch=True)

    def validation_step(self, batch, batch_idx):
        loss = super().validation_step(batch, batch_idx)
        self.mean.update(batch[0])
        self.log("val_metric", self.mean)
        return loss


def run(name):
    """Two epochs in half precision on the IPU, whose weights stay as they are."""

    def program(run):
        trainer = run.trainer(max_epochs=2, **half(name))
        trainer.fit(run.module, run.loader(), run.loader())

    setting = dataclasses.replace(CUT, strategy=STRATEGIES[name])
    # Graphcore's plugin turns the weights into halves as well
    make = Halves if "plugins" in half(name) else lambda: Halves().half()
    return observe(True, make, program, setting)


@pytest.mark.parametrize("name", STRATEGIES)
def test_logged_halves_arrive_as_float32_means(name):
    """Widened before anything is summed: no overflow, and a half's accuracy for each value."""
    seen = run(name)
    half = (torch.half if BATCHES_ARE_HALVED[name] else torch.float, torch.half)
    assert seen.run.module.dtypes == {"train": half, "val": half}
    final = seen.final[0]
    assert {value.dtype for value in final.values()} == {torch.float32}
    batches = list(seen.run.loader())
    x = torch.cat([batch[0] for batch in batches]).half().float()
    weight, bias = (seen.weights[f"layer.{name}"].half().float() for name in ("weight", "bias"))
    targets = torch.cat([batch[1] for batch in batches]).half().float()
    loss = ((x @ weight.T + bias).squeeze(-1) - targets).square().mean()
    for stage, sums, small in (
        ("train", "train_sum_epoch", "train_small_epoch"),
        ("val", "val_sum", "val_small"),
    ):
        assert final[f"{stage}_loss_epoch"] == pytest.approx(float(loss), rel=5e-3)
        assert final[sums] == pytest.approx(float(x.sum()), abs=2e-2)
        assert final[small] == pytest.approx(1e-4, rel=1e-3)
    count = len(batches)
    assert final["train_large_epoch"] == final["val_large"] == 30000 * count
    assert final["val_metric"] == pytest.approx(float(x.mean()), abs=1e-3)


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_rows_on_step_value_is_the_float32_mean_of_its_execution(name):
    """Halves that are averaged in float32 are averaged exactly."""
    rows = [row.metrics for row in run(name).rows if row.hook == "train"]
    assert rows
    for row in rows:
        assert row["train_large_step"] == 30000 * CUT.micro_batches(training=True)
        assert row["train_small_step"] == pytest.approx(1e-4, rel=1e-3)
