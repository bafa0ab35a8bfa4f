"""Every option of `self.log` and `self.log_dict` means on the IPU what it means on the CPU."""

import pytest
import torch
from torchmetrics import MeanMetric, MetricCollection

from .bench import (
    ONE_TO_ONE,
    Net,
    Setting,
    check_parity,
    fit,
    observe,
    test_only,
    two_loaders,
    validate_only,
)

REPLICAS = Setting(iterations=2, accumulation=1, replicas=2)
PROGRAMS = {"fit": fit, "validate": validate_only, "test": test_only}


def logging(**options):
    """A module that logs its loss under one key a stage, with these options."""
    return lambda: Net(lambda self, stage, x, loss: self.log(f"{stage}_loss", loss, **options))


@pytest.mark.parametrize("setting", [Setting(), REPLICAS], ids=["accumulation", "replicas"])
@pytest.mark.parametrize("levels", [(True, False), (False, True), (True, True)])
def test_on_step_and_on_epoch_choose_the_same_rows_and_names(levels, setting):
    """Each level has its value; a key with both is forked into `_step` and `_epoch`."""
    on_step, on_epoch = levels
    seen = check_parity(logging(on_step=on_step, on_epoch=on_epoch), setting=setting)
    names = set().union(*(row.metrics for row in seen.rows))
    assert ("train_loss_step" in names) == ("train_loss_epoch" in names) == (on_step and on_epoch)


@pytest.mark.parametrize("program", PROGRAMS)
def test_defaults_of_the_levels_depend_on_the_stage(program):
    """Without options a training step logs on the step, an evaluation step on the epoch."""
    seen = check_parity(logging(), PROGRAMS[program])
    hooks = {key: row.hook for row in seen.rows for key in row.metrics if key != "epoch"}
    expected = {"fit": {"train_loss": "train", "val_loss": "epoch"}}
    assert hooks == expected.get(
        program,
        {f"{program[:3]}_loss": "epoch"} if program == "validate" else {"test_loss": "epoch"},
    )


@pytest.mark.parametrize("given", [{"on_step": True}, {"on_epoch": True}])
def test_one_level_given_keeps_the_default_of_the_other(given):
    """`on_step=True` alone forks a key of an evaluation step, `on_epoch=True` one of training."""
    check_parity(logging(**given))


def test_neither_level_is_lightnings_own_error():
    """`on_step=False, on_epoch=False` is refused as on the CPU, before anything is compiled."""
    for ipu in (False, True):
        with pytest.raises(Exception, match="is not useful"):
            observe(ipu, logging(on_step=False, on_epoch=False))


REDUCTIONS = [
    "mean", "sum", "min", "max", "MEAN", "Sum", "avg",
    torch.mean, torch.sum, torch.min, torch.max, sum, min, max,
]  # fmt: skip


@pytest.mark.parametrize(
    "reduce_fx",
    REDUCTIONS,
    ids=lambda r: r if isinstance(r, str) else f"{r.__module__}.{r.__name__}",
)
def test_reduce_fx_reduces_micro_batches_and_executions(reduce_fx):
    """Names in any case and the functions that have them: over an execution, and over the epoch."""
    check_parity(logging(reduce_fx=reduce_fx, on_step=True, on_epoch=True), setting=REPLICAS)


@pytest.mark.parametrize("reduce_fx", ["median", torch.prod, lambda values: values[0]])
def test_an_unsupported_reduce_fx_is_lightnings_own_error_at_once(reduce_fx):
    """The text is Lightning's, and it is raised while the step is captured."""
    messages = []
    for ipu in (False, True):
        with pytest.raises(Exception, match=r"are (currently )?supported") as caught:
            observe(ipu, logging(reduce_fx=reduce_fx))
        messages.append((type(caught.value), str(caught.value)))
    assert messages[0] == messages[1]


@pytest.mark.parametrize(
    "options",
    [
        {"prog_bar": True},
        {"prog_bar": True, "on_step": True, "on_epoch": True},
        {"prog_bar": True, "logger": False},
        {"logger": False},
        {"logger": False, "on_step": True, "on_epoch": True},
        {"logger": True},
        {"enable_graph": True},
        {"enable_graph": True, "on_step": True, "on_epoch": True},
        {"sync_dist": True},
        {"sync_dist": True, "on_step": True, "on_epoch": True, "reduce_fx": "sum"},
        {"sync_dist": True, "rank_zero_only": True},
        {"rank_zero_only": True},
        {"add_dataloader_idx": False},
        {"batch_size": 2},
        {"batch_size": 7, "on_step": True, "on_epoch": True},
        {"batch_size": 1, "reduce_fx": "sum"},
    ],
    ids=" ".join,
)
def test_an_option_goes_where_the_cpu_run_sends_it(options):
    """Which of logger, progress bar and callbacks get the key, and with which value."""
    check_parity(logging(**options), setting=REPLICAS)


def test_sync_dist_group_is_passed_on():
    """With one process a group changes nothing."""
    check_parity(logging(sync_dist=True, sync_dist_group=None, on_epoch=True))


@pytest.mark.parametrize(
    "levels", [{}, {"on_step": True, "on_epoch": True}, {"on_step": True, "on_epoch": False}]
)
def test_with_several_loaders_a_key_gets_each_loaders_suffix(levels):
    """`/dataloader_idx_N` is appended to the key, and to both names of a forked one."""
    seen = check_parity(lambda: TwoLoaders(**levels), two_loaders)
    assert all("/dataloader_idx_" in name for result in seen.results for name in result)


class TwoLoaders(Net):
    """Logs one key in the step that several loaders share."""

    def __init__(self, **options):
        super().__init__()
        self.options = options

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.log("val", self.loss(batch), **self.options)


def test_add_dataloader_idx_false_keeps_the_key_of_a_single_loader():
    """Without a second loader the option changes nothing."""
    check_parity(lambda: TwoLoaders(add_dataloader_idx=False), validate_only)


def test_add_dataloader_idx_false_under_one_key_is_lightnings_own_error():
    """Two loaders cannot share a key: Lightning says so on both sides."""
    messages = []
    for ipu in (False, True):
        with pytest.raises(Exception, match="twice in") as caught:
            observe(ipu, lambda: TwoLoaders(add_dataloader_idx=False), two_loaders)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


def test_batch_size_as_int_is_that_of_the_micro_batch():
    """A weight given for a micro-batch weighs an execution as much as all of its own."""

    class Weighted(Net):
        def validation_step(self, batch, batch_idx):
            self.log("val", self.loss(batch), batch_size=len(batch[0]))

    check_parity(Weighted, validate_only)


@pytest.mark.parametrize("setting", [Setting(), ONE_TO_ONE, REPLICAS])
def test_batch_size_as_tensor_weighs_each_micro_batch(setting):
    """A weight that the batch decides, e.g. a count of valid tokens, is that of its micro-batch."""

    class Weighted(Net):
        def validation_step(self, batch, batch_idx):
            x, _ = batch
            valid = (x > 0).sum()
            self.log("val", x.sum(), batch_size=valid)

    check_parity(Weighted, validate_only, setting=setting)


def test_batch_size_as_tensor_of_zeros_gives_nan_as_on_the_cpu():
    """An epoch whose weights are all zero has no mean."""

    class Weighted(Net):
        def validation_step(self, batch, batch_idx):
            self.log("val", self.loss(batch), batch_size=(batch[0] > 99).sum())

    check_parity(Weighted, validate_only)


def test_metric_attribute_names_a_metric_that_lightning_cannot_find():
    """A metric in a plain list is logged under the attribute that the call names."""

    class Named(Net):
        def __init__(self):
            super().__init__()
            self.mean = MeanMetric()

        def validation_step(self, batch, batch_idx):
            self.mean.update(self.loss(batch))
            self.log("val", self.mean, metric_attribute="mean")

    check_parity(Named, validate_only)


def test_options_may_be_given_by_position():
    """`self.log(name, value, prog_bar, logger, on_step, on_epoch, reduce_fx)`."""
    check_parity(
        lambda: Net(
            lambda self, stage, x, loss: self.log(f"{stage}_l", loss, True, True, True, True, "max")
        )
    )


def test_name_and_value_may_be_given_by_name():
    """`self.log(value=..., name=...)`."""
    check_parity(
        lambda: Net(lambda self, stage, x, loss: self.log(value=loss, name=f"{stage}_loss"))
    )


@pytest.mark.parametrize(
    "options",
    [{}, {"on_step": True, "on_epoch": True}, {"prog_bar": True, "reduce_fx": "max"}],
    ids=lambda options: " ".join(options) or "default",
)
def test_log_dict_logs_each_entry_with_the_calls_options(options):
    """`self.log_dict(dict)` is one `self.log` an entry."""

    def logs(self, stage, x, loss):
        self.log_dict({f"{stage}_a": loss, f"{stage}_b": x.sum()}, **options)

    check_parity(lambda: Net(logs))


def test_log_dict_by_position():
    """`self.log_dict(dictionary, prog_bar, logger, on_step, on_epoch)`."""

    def logs(self, stage, x, loss):
        self.log_dict({f"{stage}_a": loss, f"{stage}_b": x.sum()}, True, True, True, True)

    check_parity(lambda: Net(logs))


def test_log_of_a_dict_under_one_name_is_as_on_the_cpu():
    """What Lightning makes of `self.log(name, {...})` is the same on both sides."""
    outcomes = []
    for ipu in (False, True):
        try:
            seen = observe(
                ipu,
                lambda: Net(
                    lambda self, stage, x, loss: self.log(f"{stage}", {"a": loss, "b": x.sum()})
                ),
                validate_only,
            )
            outcomes.append(sorted(seen.final[0]))
        except Exception as error:  # noqa: BLE001, PERF203 - whatever the CPU run raises
            outcomes.append(type(error))
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("options", [{}, {"on_step": True, "on_epoch": True}, {"prog_bar": True}])
def test_log_dict_of_a_metric_collection_logs_each_member(options):
    """Keys carry the collection's prefix and postfix; values are those of the epoch."""

    class Collected(Net):
        def __init__(self):
            super().__init__()
            self.scores = MetricCollection(
                {"one": MeanMetric(), "two": MeanMetric()}, prefix="val_", postfix="_m"
            )

        def validation_step(self, batch, batch_idx):
            self.scores.update(self.loss(batch))
            self.log_dict(self.scores, **options)

    if options.get("on_step"):
        pytest.skip("see test_metrics.py for on_step values of metrics")
    check_parity(Collected)
