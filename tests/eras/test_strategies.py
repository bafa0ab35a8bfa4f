"""Strategies that users wrote, and options however they are given.

The callback needs nothing of a strategy but its public step methods.
"""

import dataclasses

import pytest
import torch
from lightning_in_use import STRATEGIES
from parity.bench import (
    FEATURES,
    MICRO_BATCH,
    Net,
    Setting,
    check_parity,
    fit,
    observe,
    pl,
    test_only,
    validate_only,
)

CUT = Setting(iterations=2, accumulation=2, replicas=2)


class Logs(Net):
    """Every step logs at both levels."""

    def logs(self, stage, x, loss):
        self.log(f"{stage}_loss", loss, on_step=True, on_epoch=True)
        self.log(f"{stage}_max", x.amax(), reduce_fx="max", on_epoch=True)


@pytest.fixture(params=STRATEGIES)
def base(request):
    """Lightning's own strategy, and Graphcore's where it is installed."""
    return STRATEGIES[request.param]


def check(strategy, make=Logs, program=fit, setting=CUT):
    """Assert parity with the CPU run, with this strategy on the IPU's side."""
    return check_parity(make, program, dataclasses.replace(setting, strategy=strategy))


@pytest.mark.parametrize("program", [fit, test_only, validate_only])
def test_each_distributions_strategy_logs_what_the_cpu_run_logs(base, program):
    """Built in, and of `lightning-graphcore`, as they are."""
    check(base, program=program)


def test_a_strategy_that_overrides_private_step(base):
    """`_step` prepares the arguments in its own way and calls the model itself."""

    class OwnStep(base):
        calls = 0

        def _step(self, stage, *args, **kwargs):
            type(self).calls += 1
            return self.poptorch_models[stage](*self._prepare_input(args), **kwargs)

    check(OwnStep)
    assert OwnStep.calls > 0


def test_a_strategy_that_overrides_the_public_step_methods(base):
    """It sees what the step returned, and what it returns goes on to the hooks."""

    class Doubles(base):
        seen = []

        def training_step(self, *args, **kwargs):
            output = super().training_step(*args, **kwargs)
            self.seen.append(output)
            return {"loss": output, "more": 1}

        def validation_step(self, *args, **kwargs):
            return {"doubled": 2 * super().validation_step(*args, **kwargs)}

    received = []

    class Collects(Logs):
        def on_validation_batch_end(self, outputs, *_):
            received.append(outputs)

    observe(True, Collects, fit, dataclasses.replace(CUT, strategy=Doubles))
    assert all(isinstance(output, torch.Tensor) for output in Doubles.seen)
    assert len(Doubles.seen[0]) == CUT.replicas  # the training default is `Final`
    ipu = [output for output in received if "doubled" in output]
    assert len(ipu) == len(received) > 0


def test_a_strategy_that_overrides_batch_to_device(base):
    """What the step receives is what `batch_to_device` returned."""

    class Scales(base):
        def batch_to_device(self, batch, device=None, dataloader_idx=0):
            return [item * 2 for item in super().batch_to_device(batch, device, dataloader_idx)]

    class Scaled(Net):
        def loss(self, batch):
            # on the CPU the module scales for itself
            ipu = isinstance(self.trainer.strategy, base)
            return super().loss(batch if ipu else [item * 2 for item in batch])

        def logs(self, stage, x, loss):
            self.log(f"{stage}_loss", loss, on_epoch=True)

    check(Scales, Scaled)


def test_a_strategy_that_converts_loaders_itself(base):
    """A conversion that makes `poptorch.DataLoader`s of its own."""
    import poptorch

    class OwnLoaders(base):
        made = 0

        def _convert_to_poptorch_loader(self, dataloader, sampler, mode=None):
            type(self).made += 1
            training = getattr(mode, "value", mode) == "train"
            options = self.training_opts if training else self.inference_opts
            return poptorch.DataLoader(
                options, dataloader.dataset, batch_size=dataloader.batch_size, drop_last=True
            )

    check(OwnLoaders)
    assert OwnLoaders.made > 0


# -- the shape of a public graph learning project -----------------------------------------------


def test_a_strategy_that_passes_a_dict_batch_by_keyword(base):
    """A dict batch becomes the step's keyword arguments; steps return dicts with `loss`."""

    class Keywords(base):
        def _step(self, stage, *args, **kwargs):
            (batch, *_) = self._prepare_input(args)
            return self.poptorch_models[stage](**batch)

    class Rows(torch.utils.data.Dataset):
        def __init__(self, run):
            self.rows = run.loader().dataset

        def __len__(self):
            return len(self.rows)

        def __getitem__(self, index):
            x, y = self.rows[index]
            return {"features": x, "labels": y}

    def program(run):
        loader = torch.utils.data.DataLoader(Rows(run), batch_size=MICRO_BATCH)
        run.trainer(max_epochs=2).fit(run.module, loader, loader)

    class Predictor(pl.LightningModule):
        """Steps without a batch index: `features` and `labels` are all that they take."""

        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(FEATURES, 1)

        def shared(self, stage, features, labels):
            import poptorch

            out = self.layer(features).squeeze(-1)
            loss = ((out - labels) ** 2).mean()
            if stage == "train":
                loss = poptorch.identity_loss(loss, reduction="mean")
            self.log(f"{stage}_loss", loss, on_step=True, on_epoch=True)
            self.log(f"{stage}_mae", (out - labels).abs().mean(), on_epoch=True)
            return {"loss": loss, "preds": out.detach()}

        def training_step(self, features, labels):
            return self.shared("train", features, labels)

        def validation_step(self, features, labels):
            return self.shared("val", features, labels)

        def on_train_batch_end(self, outputs, batch, batch_idx):
            outputs["loss"] = outputs["loss"].mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.05)

    setting = dataclasses.replace(CUT, strategy=Keywords)
    seen = observe(True, Predictor, program, setting)
    # the CPU strategy passes the batch as it is: compare with the same steps on a tuple batch

    class OnTuples(Predictor):
        def training_step(self, batch, batch_idx):
            return self.shared("train", *batch)

        def validation_step(self, batch, batch_idx):
            return self.shared("val", *batch)

    expected = observe(False, OnTuples, fit, CUT)
    for name in ("train_loss_epoch", "train_mae_epoch", "val_loss_epoch", "val_mae"):
        assert seen.final[0][name] == pytest.approx(float(expected.final[0][name]), rel=1e-4)
    for name, weight in expected.weights.items():
        torch.testing.assert_close(seen.weights[name], weight)


# -- batches of the user's own type -------------------------------------------------------------


class Graph:
    """A batch type that PyTorch knows nothing of."""

    def __init__(self, nodes, sums, name):
        self.nodes, self.sums, self.name = nodes, sums, name

    def to(self, *args, **kwargs):
        return Graph(self.nodes.to(*args, **kwargs), self.sums.to(*args, **kwargs), self.name)


def as_graph(rows):
    """Rows of the run's data set, put together."""
    nodes, sums = zip(*rows)
    return Graph(torch.stack(nodes), torch.stack(sums), "graph")


def test_a_batch_type_with_a_parser_of_its_own(base):
    """`poptorch.registerCustomArgParser`: the step gets the type, and may return it."""
    import poptorch

    class Parser(poptorch.ICustomArgParser):
        def yieldTensors(self, struct):
            yield struct.nodes
            yield struct.sums

        def reconstruct(self, original_structure, tensor_iterator):
            nodes, sums = next(tensor_iterator), next(tensor_iterator)
            return Graph(nodes, sums, original_structure.name)

    poptorch.registerCustomArgParser(Graph, Parser())

    class OnGraphs(Logs):
        returned = []

        def loss(self, batch):
            return super().loss((batch.nodes, batch.sums) if isinstance(batch, Graph) else batch)

        def validation_step(self, batch, batch_idx):
            loss = self.loss(batch)
            self.log("val_loss", loss, batch_size=MICRO_BATCH)
            return batch

        def on_validation_batch_end(self, outputs, *_):
            self.returned.append(outputs)

        def training_step(self, batch, batch_idx):
            loss = self.loss(batch)
            self.log("train_loss", loss, on_epoch=True, batch_size=MICRO_BATCH)
            return loss

    def program(run):
        count = run.setting.micro_batches if run.ipu else lambda training: 1

        def batches(training):
            size = MICRO_BATCH * count(training)
            return torch.utils.data.DataLoader(run.loader().dataset, size, collate_fn=as_graph)

        loaders = batches(True), batches(False)
        run.trainer(max_epochs=2).fit(run.module, *loaders)

    class AsTheyAre(base):
        """Batches are whole executions already."""

        def _convert_to_poptorch_loader(self, dataloader, sampler, mode=None):
            return dataloader

        def batch_to_device(self, batch, device=None, dataloader_idx=0):
            return batch

    check(AsTheyAre, OnGraphs, program)
    assert all(type(one) is Graph and one.name == "graph" for one in OnGraphs.returned)


# -- options ------------------------------------------------------------------------------------


def run_with(strategy, devices):
    """Two epochs on the IPU with this strategy; returns the trainer."""
    setting = Setting(iterations=2, accumulation=1, replicas=devices, strategy=lambda **_: strategy)
    return observe(True, Logs, fit, setting).run.trainers[0]


@pytest.mark.parametrize("devices", [1, 2])
def test_options_that_the_strategy_creates(base, devices):
    """Without options of the user's: replication from `devices`, iterations from the strategy."""
    strategies = []

    def create(**_):
        strategies.append(base(device_iterations=2))
        return strategies[-1]

    check(create, setting=Setting(iterations=2, accumulation=1, replicas=devices))
    (strategy,) = strategies
    assert strategy.inference_opts.device_iterations == 2
    assert strategy.training_opts.replication_factor == devices


@pytest.mark.parametrize("given", ["training_opts", "inference_opts"])
def test_one_of_the_options_given_and_the_other_created(base, given):
    """The created ones take the replicas of the given ones."""
    import poptorch

    options = poptorch.Options()
    options.deviceIterations(2).replicationFactor(2)
    trainer = run_with(base(device_iterations=2, **{given: options}), devices=1)
    assert trainer.strategy.training_opts.replication_factor == 2
    assert getattr(trainer.strategy, given) is options
    assert {"train_loss_epoch", "val_loss_epoch"} <= set(trainer.callback_metrics)


def test_the_users_options_are_not_changed(base):
    """Not in what they say, and not in what object the strategy has after the run."""
    import poptorch

    given = {}
    for name in ("training_opts", "inference_opts"):
        given[name] = poptorch.Options().deviceIterations(2)
    before = {name: repr(options) for name, options in given.items()}
    trainer = run_with(base(**given), devices=1)
    for name, options in given.items():
        assert getattr(trainer.strategy, name) is options
        assert repr(options) == before[name]


def test_lightnings_accumulation_reaches_options_that_the_strategy_creates(base):
    """`accumulate_grad_batches` with created options: every micro-batch is logged once."""

    class Counts(Net):
        def logs(self, stage, x, loss):
            self.log(
                f"{stage}_rows", torch.ones_like(x[:, 0]).sum(), reduce_fx="sum", on_epoch=True
            )

    def program(run):
        trainer = run.trainer(accumulate_grad_batches=2)
        trainer.fit(run.module, run.loader(), run.loader())

    setting = Setting(strategy=lambda **_: base(device_iterations=2))
    seen = observe(True, Counts, program, setting)
    assert seen.final[0]["train_rows_epoch"] == setting.samples
    assert seen.final[0]["val_rows"] == setting.samples
