"""The private names of other libraries that `_compat` knows still mean what it takes them for."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torchmetrics
from lightning_in_use import QUIET, STRATEGIES, pl

from ipu_log_callback import _compat, emulator

REPOSITORY = Path(__file__).parents[1]
INSTALLED = [
    tree
    for tree in ("pytorch_lightning", "lightning.pytorch")
    if importlib.util.find_spec(tree.split(".", maxsplit=1)[0]) is not None
]


class Net(pl.LightningModule):
    """Calls back from inside its steps."""

    def __init__(self, called_in_step):
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)
        self.called_in_step = called_in_step

    def training_step(self, batch, batch_idx):
        loss = self.layer(batch[0]).square().mean()
        self.log("before", loss.detach())
        self.called_in_step(self)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def loader(self):
        return torch.utils.data.DataLoader(
            torch.utils.data.TensorDataset(torch.ones(2, 3)), batch_size=2
        )


class Validated(Net):
    """The same with validation."""

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.log("val", self.layer(batch[0]).mean())
        self.called_in_step(self)


def run(called_in_step, validation_loaders=0, of=Net):
    """One epoch on the CPU, in training or of each validation loader; returns the trainer."""
    trainer = pl.Trainer(accelerator="cpu", max_epochs=1, logger=False, **QUIET)
    if validation_loaders:
        module = Validated(called_in_step)
        loaders = [module.loader() for _ in range(validation_loaders)]
        trainer.validate(module, loaders, verbose=False)
    else:
        module = of(called_in_step)
        trainer.fit(module, module.loader())
    return trainer


def _callback_is_one_of(imports, tree):
    """Whether the callback is one for trainers of `tree`, in a fresh interpreter that imports."""
    program = f"""
import sys
{imports}
sys.exit(not issubclass(ipu_log_callback.IPULogCallback, sys.modules["{tree}"].Callback))
"""
    command = [sys.executable, "-W", "ignore", "-c", program]
    run = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert run.stderr == ""
    return run.returncode == 0


@pytest.mark.parametrize("tree", INSTALLED)
def test_the_lightning_that_was_imported_first_is_in_use(tree):
    """Where both distributions are installed, whichever the user imported."""
    assert _callback_is_one_of(f"import {tree}, ipu_log_callback", tree)


def test_the_lightning_with_an_ipu_strategy_is_in_use_where_none_was_imported():
    """The callback may be imported first: it is one for the trainers that can train on an IPU."""
    assert _callback_is_one_of(f"import ipu_log_callback, {pl.__name__}", pl.__name__)


def test_a_trial_logs_nothing():
    """What is logged in a trial does not reach the trainer; what was logged before stays."""

    def trial(module):
        with _compat.trial_results(module.trainer):
            module.log("tried", torch.tensor(1.0))
        module.log("after", torch.tensor(2.0))

    assert set(run(trial).callback_metrics) == {"before", "after"}


def test_a_trial_changes_no_value_that_is_being_accumulated():
    """An epoch's values are the same with trials of the same keys in every step, and without."""

    class Epoch(Net):
        def training_step(self, batch, batch_idx):
            self.log("mean", batch_idx + 1.0, on_step=True, on_epoch=True)
            self.called_in_step(self)
            self.log("sum", batch_idx + 1.0, reduce_fx="sum", on_step=False, on_epoch=True)
            return self.layer(batch[0]).square().mean()

        def loader(self):
            return torch.utils.data.DataLoader(
                torch.utils.data.TensorDataset(torch.ones(3, 3)), batch_size=1
            )

    def trial(module):
        with _compat.trial_results(module.trainer):
            module.log("mean", 100.0, on_step=True, on_epoch=True)
            module.log("sum", 100.0, reduce_fx="sum", on_step=False, on_epoch=True)

    shown = run(trial, of=Epoch).callback_metrics
    assert {key: float(value) for key, value in shown.items()} == {
        "mean": 2,
        "mean_epoch": 2,
        "mean_step": 3,
        "sum": 6,
    }


def test_a_trial_checks_as_lightning_does():
    """One key twice with other options, and a `reduce_fx` that Lightning lacks, are refused."""
    refused = []

    def trial(module):
        with _compat.trial_results(module.trainer):
            module.log("twice", torch.tensor(1.0), on_step=True)
            with pytest.raises(Exception, match="twice") as error:
                module.log("twice", torch.tensor(1.0), on_step=False, on_epoch=True)
            refused.append(type(error.value).__name__)
            with pytest.raises(Exception, match="reduce_fx") as error:
                module.log("median", torch.tensor(1.0), reduce_fx=torch.median)
            refused.append(type(error.value).__name__)

    run(trial)
    assert refused == ["MisconfigurationException"] * 2


def test_values_are_filed_under_another_hook():
    """The trainer's current hook is told, replaced for a block, and put back."""
    hooks = []

    def note(module):
        hooks.append(_compat.current_hook(module))
        with _compat.filed_under(module, "on_train_batch_end"):
            hooks.append(_compat.current_hook(module))
            module.log("filed", torch.tensor(1.0))
        hooks.append(_compat.current_hook(module))

    trainer = run(note)
    assert hooks == ["training_step", "on_train_batch_end", "training_step"]
    assert "filed" in trainer.callback_metrics


@pytest.mark.parametrize("loaders", [1, 2])
def test_the_suffix_is_that_of_lightnings_own_keys(loaders):
    """With several loaders a key ends in the loader's number."""
    suffixes = []
    trainer = run(
        lambda module: suffixes.append(_compat.dataloader_suffix(module.trainer)), loaders
    )
    assert {"val" + suffix for suffix in suffixes} == set(trainer.callback_metrics)


@pytest.mark.skipif(not STRATEGIES, reason="no IPU strategy from Lightning 2.1 on")
@pytest.mark.parametrize("origin", list(STRATEGIES))
def test_a_strategy_has_other_options_for_a_block(origin):
    """The strategy shows the replacement, then the user's own options again."""
    emulator.install()
    try:
        import poptorch

        own, other = poptorch.Options(), poptorch.Options()
        strategy = STRATEGIES[origin](training_opts=own, inference_opts=poptorch.Options())
        with _compat.options_replaced(strategy, {"training_opts": other}):
            assert strategy.training_opts is other
        assert strategy.training_opts is own
    finally:
        emulator.uninstall()


def test_joined_updates_leave_a_metric_as_single_ones():
    """A metric's count, its lists and its states can be read, and its count raised."""
    one, joined = torchmetrics.CatMetric(), torchmetrics.CatMetric()
    for value in (1.0, 2.0, 3.0):
        one.update(torch.tensor([value]))
    joined.update(torch.tensor([1.0, 2.0, 3.0]))
    assert _compat.metric_lists(one) == {"value": 3}
    assert _compat.metric_lists(joined) == {"value": 1}
    _compat.count_updates(joined, 2)
    assert _compat.update_count(joined) == _compat.update_count(one) == 3
    assert "value" in _compat.metric_attributes(one)


def test_lightning_logs_the_last_value_that_a_metric_shows():
    """`on_step` Lightning logs what `forward` returned last, or what stands in its place."""
    metric = torchmetrics.MeanMetric()

    def log_another(module):
        metric(torch.tensor(1.0))
        assert float(_compat.shown_value(metric)) == 1
        with _compat.last_value(metric, torch.tensor(5.0)):
            module.metric = metric
            module.log("metric", metric, on_step=True, on_epoch=False)
        assert float(_compat.shown_value(metric)) == 1

    assert float(run(log_another).callback_metrics["metric"]) == 5


def test_a_child_that_is_taken_out_is_seen_by_nobody():
    """A submodule that steps aside is no submodule meanwhile."""
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
    aside = _compat.submodules(module).pop("1")
    assert [name for name, _ in module.named_children()] == ["0"]
    _compat.submodules(module)["1"] = aside
    assert [name for name, _ in module.named_children()] == ["0", "1"]
