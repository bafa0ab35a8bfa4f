"""Torchmetrics in a step end an epoch as they do on the CPU, in value and in state."""

import pytest
import torch
import torchmetrics
from torchmetrics import (
    CatMetric,
    MaxMetric,
    MeanMetric,
    Metric,
    MetricCollection,
    MinMetric,
    SumMetric,
)

from .bench import Net, Setting, check_parity, observe, test_only, validate_only

REPLICAS = Setting(iterations=2, accumulation=1, replicas=2)
LEVELS = {"on_step": True, "on_epoch": True}


# -- what metrics are fed -----------------------------------------------------------------------


def scores(x):
    """Class probabilities, `[batch, 3]`."""
    return torch.softmax(x * 2, dim=-1)


def classes(x):
    """Class of each sample, 0 to 2."""
    return (x[:, 0] > 0).long() + (x[:, 1] > 0.5).long()


def multiclass(x):
    """Probabilities and class numbers."""
    return scores(x), classes(x)


def binary(x):
    """Probabilities and zeros and ones."""
    return torch.sigmoid(x[:, 0] * 2), (x[:, 1] > 0).long()


def multilabel(x):
    """Probabilities and zeros and ones, `[batch, 3]`."""
    return torch.sigmoid(x), (x.roll(1, 1) > 0).long()


def regression(x):
    """Predictions and targets that depend on each other."""
    return x[:, 0] + x[:, 1], x[:, 0] * 2


def positive(x):
    """Predictions and targets above zero."""
    return x[:, 0].abs() + 0.1, x[:, 1].abs() + 0.1


def distributions(x):
    """Two distributions a sample."""
    return scores(x), scores(x.flip(1))


def scalar(x):
    """One number."""
    return (x.sum(),)


def vector(x):
    """Several numbers."""
    return (x.flatten(),)


def images(x):
    """Two images a sample, `[batch, 1, 12, 12]`."""
    grid = (
        (x[:, None, :, None] * x[:, None, None, :]).repeat_interleave(4, 2).repeat_interleave(4, 3)
    )
    return torch.sigmoid(grid), torch.sigmoid(grid.flip(2))


def tokens(x):
    """Logits `[batch, 3, 4]` and token numbers `[batch, 3]`."""
    logits = x[:, :, None] * torch.arange(4.0, device=x.device)
    return logits, (x > 0).long() + 1


THREE = {"task": "multiclass", "num_classes": 3}
KERNEL = {"kernel_size": 3, "sigma": 0.5, "data_range": 1.0}
# name, arguments of the constructor, what it is fed
METRICS = [
    ("Accuracy", THREE, multiclass),
    ("Accuracy", {"task": "binary"}, binary),
    ("Accuracy", {"task": "multilabel", "num_labels": 3}, multilabel),
    ("Accuracy", {**THREE, "average": "macro"}, multiclass),
    ("Accuracy", {**THREE, "top_k": 2}, multiclass),
    ("Precision", {**THREE, "average": "macro"}, multiclass),
    ("Recall", {**THREE, "average": "weighted"}, multiclass),
    ("F1Score", {**THREE, "average": "macro"}, multiclass),
    ("Specificity", THREE, multiclass),
    ("CohenKappa", THREE, multiclass),
    ("MatthewsCorrCoef", THREE, multiclass),
    ("JaccardIndex", THREE, multiclass),
    ("AUROC", THREE, multiclass),
    ("AUROC", {"task": "binary"}, binary),
    ("AUROC", {"task": "binary", "thresholds": 5}, binary),
    ("AveragePrecision", {"task": "binary"}, binary),
    ("CalibrationError", {"task": "binary", "n_bins": 4}, binary),
    ("HingeLoss", THREE, multiclass),
    ("HammingDistance", {"task": "multilabel", "num_labels": 3}, multilabel),
    ("MeanSquaredError", {}, regression),
    ("MeanSquaredError", {"squared": False}, regression),
    ("MeanAbsoluteError", {}, regression),
    ("MeanAbsolutePercentageError", {}, positive),
    ("MeanSquaredLogError", {}, positive),
    ("ExplainedVariance", {}, regression),
    ("R2Score", {}, regression),
    ("PearsonCorrCoef", {}, regression),
    ("SpearmanCorrCoef", {}, regression),
    ("CosineSimilarity", {}, distributions),
    ("KLDivergence", {}, distributions),
    ("TweedieDevianceScore", {"power": 1.5}, positive),
    ("MeanMetric", {}, scalar),
    ("SumMetric", {}, scalar),
    ("MaxMetric", {}, vector),
    ("MinMetric", {}, vector),
    ("image.PeakSignalNoiseRatio", {"data_range": 1.0}, images),
    ("image.StructuralSimilarityIndexMeasure", KERNEL, images),
    ("image.UniversalImageQualityIndex", {"kernel_size": (3, 3), "sigma": (0.5, 0.5)}, images),
    ("image.TotalVariation", {}, lambda x: images(x)[:1]),
    ("text.Perplexity", {}, tokens),
]
grid = pytest.mark.parametrize(
    ("name", "arguments", "feed"),
    METRICS,
    ids=[
        f"{name} {' '.join(map(str, arguments.values()))}".strip() for name, arguments, _ in METRICS
    ],
)


def metric_of(name, arguments):
    """A metric, if this torchmetrics has it."""
    owner = torchmetrics
    for part in name.split("."):
        owner = getattr(owner, part, None)
        if owner is None:
            pytest.skip(f"this torchmetrics has no {name}")
    return owner(**arguments)


class Measured(Net):
    """Feeds a metric in every step and logs it as `logged` says."""

    def __init__(self, metric, feed, use):
        super().__init__()
        self.metric, self.feed, self.use = metric, feed, use

    def validation_step(self, batch, batch_idx):
        self.loss(batch)
        self.use(self, self.metric, self.feed(batch[0]))


def updated(self, metric, fed):
    """Feed the metric, log the object."""
    metric.update(*fed)
    self.log("m", metric)


def forwarded(self, metric, fed):
    """Call the metric, log the object."""
    metric(*fed)
    self.log("m", metric, **LEVELS)


def batch_values(self, metric, fed):
    """Log what calling the metric returns."""
    self.log("m", metric(*fed), **LEVELS)


EXECUTIONS = Setting(executions=4)


@grid
def test_a_metric_that_is_updated_and_logged_has_the_epochs_value(name, arguments, feed):
    """`metric.update(...)` and `self.log(name, metric)`."""
    check_parity(
        lambda: Measured(metric_of(name, arguments), feed, updated),
        validate_only,
        EXECUTIONS,
        tolerance=1e-4,
    )


@grid
def test_a_metric_that_is_called_and_logged_has_step_and_epoch_values(name, arguments, feed):
    """`metric(...)` and `self.log(name, metric, on_step=True, on_epoch=True)`."""
    check_parity(
        lambda: Measured(metric_of(name, arguments), feed, forwarded),
        validate_only,
        EXECUTIONS,
        tolerance=1e-4,
    )


@pytest.mark.parametrize(
    ("name", "arguments", "feed"),
    [METRICS[n] for n in (0, 2, 7, 19, 31, 32, 35, 39)],
    ids=lambda v: getattr(v, "__name__", str(v)[:30]),
)
def test_a_metrics_batch_values_are_reduced_like_any_other(name, arguments, feed):
    """`self.log(name, metric(...))` gives the mean of the micro-batches' own values."""
    check_parity(
        lambda: Measured(metric_of(name, arguments), feed, batch_values),
        validate_only,
        REPLICAS,
        tolerance=1e-4,
    )


# -- where metrics live -------------------------------------------------------------------------


class PerStage(Net):
    """The metrics of a usual module: one each stage, in training and evaluation."""

    def __init__(self):
        super().__init__()
        self.train_acc = torchmetrics.Accuracy(**THREE)
        self.val_acc = torchmetrics.Accuracy(**THREE)
        self.test_acc = torchmetrics.Accuracy(**THREE)

    def logs(self, stage, x, loss):
        metric = {"train": self.train_acc, "val": self.val_acc, "test": self.test_acc}[stage]
        metric(*multiclass(x))
        self.log(f"{stage}_acc", metric, on_step=stage == "train", on_epoch=True)


class InModuleDict(Net):
    """Metrics of all stages in a `ModuleDict` of `MetricCollection`s."""

    def __init__(self):
        super().__init__()
        collection = MetricCollection(
            [torchmetrics.Accuracy(**THREE), torchmetrics.F1Score(**THREE, average="macro")]
        )
        self.scores = torch.nn.ModuleDict(
            {f"{s}_scores": collection.clone(prefix=f"{s}_") for s in ("train", "val", "test")}
        )

    def logs(self, stage, x, loss):
        self.scores[f"{stage}_scores"].update(*multiclass(x))
        self.log_dict(self.scores[f"{stage}_scores"], on_step=False, on_epoch=True)


class InModuleList(Net):
    """Metrics in a `ModuleList`, logged in a loop."""

    def __init__(self):
        super().__init__()
        self.all = torch.nn.ModuleList([MeanMetric(), MaxMetric(), MinMetric()])

    def validation_step(self, batch, batch_idx):
        for number, metric in enumerate(self.all):
            metric.update(batch[0].sum())
            self.log(f"metric_{number}", metric)


class InSubmodule(Net):
    """A metric below a plain module."""

    class Head(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.metric = MeanMetric()

        def forward(self, x):
            self.metric.update(x.sum())
            return x

    def __init__(self):
        super().__init__()
        self.head = self.Head()

    def validation_step(self, batch, batch_idx):
        self.head(batch[0])
        self.log("mean", self.head.metric)


class EpochEnd(Net):
    """`compute()` and `reset()` in the epoch hooks, without a `self.log` in the step."""

    def __init__(self):
        super().__init__()
        self.acc = torchmetrics.Accuracy(**THREE)
        self.train_mean = MeanMetric()

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.train_mean.update(loss.detach())
        return loss

    def on_train_epoch_end(self):
        self.log("train_mean", self.train_mean.compute())
        self.train_mean.reset()

    def validation_step(self, batch, batch_idx):
        self.acc.update(*multiclass(batch[0]))

    def on_validation_epoch_end(self):
        self.log("acc", self.acc.compute(), prog_bar=True)
        self.acc.reset()


class ComputesInBatchEnd(Net):
    """`compute()` in a batch-end hook."""

    def __init__(self):
        super().__init__()
        self.total = SumMetric()

    def validation_step(self, batch, batch_idx):
        self.total.update(batch[0].sum())

    def on_validation_epoch_end(self):
        self.log("total", self.total.compute())
        self.total.reset()


class CollectionBatchValues(Net):
    """`log_dict(collection(...))`: the batch values of a collection."""

    def __init__(self):
        super().__init__()
        self.pair = MetricCollection(
            {"a": torchmetrics.Accuracy(**THREE), "f": torchmetrics.F1Score(**THREE)},
            prefix="val_",
            postfix="_p",
        )

    def validation_step(self, batch, batch_idx):
        self.log_dict(self.pair(*multiclass(batch[0])), **LEVELS)


class CalledCollection(Net):
    """A collection that is called and logged as a whole, on the step as well."""

    def __init__(self):
        super().__init__()
        self.pair = MetricCollection(
            {"a": torchmetrics.Accuracy(**THREE), "f": torchmetrics.F1Score(**THREE)}
        )

    def validation_step(self, batch, batch_idx):
        self.pair(*multiclass(batch[0]))
        self.log_dict(self.pair, **LEVELS)


class ComputeGroups(Net):
    """A collection whose members share their states."""

    def __init__(self):
        super().__init__()
        self.group = MetricCollection(
            {
                "precision": torchmetrics.Precision(**THREE, average="macro"),
                "recall": torchmetrics.Recall(**THREE, average="macro"),
                "f1": torchmetrics.F1Score(**THREE, average="macro"),
            },
            compute_groups=True,
        )

    def validation_step(self, batch, batch_idx):
        self.group.update(*multiclass(batch[0]))
        self.log_dict(self.group)


class Shared(Net):
    """One metric that two stages use."""

    def __init__(self):
        super().__init__()
        self.mean = MeanMetric()

    def validation_step(self, batch, batch_idx):
        self.mean.update(self.loss(batch))
        self.log("val_mean", self.mean)

    def test_step(self, batch, batch_idx):
        self.mean.update(self.loss(batch))
        self.log("test_mean", self.mean)


class Arguments(Net):
    """Keyword arguments and arguments that are no tensors."""

    def __init__(self):
        super().__init__()
        self.mean = MeanMetric()
        self.acc = torchmetrics.Accuracy(**THREE)

    def validation_step(self, batch, batch_idx):
        x, _ = batch
        self.mean.update(value=x.sum(), weight=2.0)
        self.mean.update(3.0)
        self.acc.update(preds=scores(x), target=classes(x))
        self.log("mean", self.mean)
        self.log("acc", self.acc)


class Twice(Net):
    """A metric that is fed twice in a step."""

    def __init__(self):
        super().__init__()
        self.total = SumMetric()

    def validation_step(self, batch, batch_idx):
        self.total.update(batch[0].sum())
        self.total.update(batch[0].amax())
        self.log("total", self.total)


class FullState(Metric):
    """A metric of the user's own whose update depends on what it holds."""

    full_state_update = True

    def __init__(self):
        super().__init__()
        self.add_state("last", torch.tensor(0.0), dist_reduce_fx="sum")

    def update(self, value):
        self.last = self.last / 2 + value

    def compute(self):
        return self.last


class Lists(Net):
    """List states: every sample is kept until the epoch ends."""

    def __init__(self):
        super().__init__()
        self.cat = CatMetric()

    def validation_step(self, batch, batch_idx):
        self.cat.update(batch[0].sum(1))

    def on_validation_epoch_end(self):
        self.log("median", self.cat.compute().median())
        self.cat.reset()


class OwnMetric(Net):
    """A metric with `full_state_update`, called and logged."""

    def __init__(self):
        super().__init__()
        self.own = FullState()

    def validation_step(self, batch, batch_idx):
        self.own(batch[0].sum())
        self.log("own", self.own)


class TwoNames(Net):
    """A submodule with a metric under two names, and a name without a submodule."""

    def __init__(self):
        super().__init__()
        self.part = torch.nn.ModuleDict({"mean": MeanMetric()})
        self.same = self.part
        self.register_module("nothing", None)

    def validation_step(self, batch, batch_idx):
        self.same["mean"].update(self.loss(batch))
        self.log("mean", self.part["mean"])


MODULES = [
    PerStage, InModuleDict, InModuleList, InSubmodule, EpochEnd, ComputesInBatchEnd,
    CollectionBatchValues, CalledCollection, ComputeGroups, Shared, Arguments, Twice, Lists,
    OwnMetric, TwoNames,
]  # fmt: skip


def everything(run):
    """Two epochs of fit, a validation and a test on one trainer."""
    trainer = run.trainer(max_epochs=2)
    trainer.fit(run.module, run.loader(), run.loader())
    run.results += trainer.validate(run.module, run.loader(seed=1), verbose=False)
    run.results += trainer.test(run.module, run.loader(seed=2), verbose=False)


@pytest.mark.parametrize("setting", [Setting(), REPLICAS], ids=["accumulation", "replicas"])
@pytest.mark.parametrize("module", MODULES)
def test_metrics_wherever_they_live_are_those_of_the_cpu_run(module, setting):
    """Attributes, dicts, lists, collections, hooks: values, and the states that are left."""
    check_parity(module, everything, setting, tolerance=1e-4)


# -- wrappers -----------------------------------------------------------------------------------


def wrapped(name, *arguments, **options):
    """A wrapper of torchmetrics, made late: an older one lacks some."""

    def make():
        wrapper = getattr(torchmetrics, name, getattr(torchmetrics.wrappers, name, None))
        if wrapper is None:
            pytest.skip(f"this torchmetrics has no {name}")
        return wrapper(*(a() for a in arguments), **options)

    make.__name__ = name
    return make


WRAPPERS = [
    (wrapped("MinMaxMetric", lambda: torchmetrics.Accuracy(**THREE)), multiclass),
    (wrapped("ClasswiseWrapper", lambda: torchmetrics.Accuracy(**THREE, average=None)), multiclass),
    (wrapped("MultioutputWrapper", torchmetrics.MeanSquaredError, lambda: 3), lambda x: (x, x * 2)),
    (wrapped("Running", SumMetric, window=3), scalar),
    (wrapped("RunningMean", window=3), scalar),
    (wrapped("MetricTracker", MeanMetric, maximize=True), scalar),
    (wrapped("BootStrapper", MeanMetric, num_bootstraps=3), vector),
]


class Wrapped(Net):
    """Feeds a wrapper in the step and computes it at the end of the epoch."""

    def __init__(self, make, feed):
        super().__init__()
        self.wrapper, self.feed = make(), feed

    def on_validation_epoch_start(self):
        if hasattr(self.wrapper, "increment"):
            self.wrapper.increment()

    def validation_step(self, batch, batch_idx):
        self.wrapper.update(*self.feed(batch[0]))

    def on_validation_epoch_end(self):
        value = self.wrapper.compute()
        values = value if isinstance(value, dict) else {"value": value}
        self.log_dict({key: item.float().mean() for key, item in values.items()})


@pytest.mark.parametrize(("make", "feed"), WRAPPERS, ids=[make.__name__ for make, _ in WRAPPERS])
def test_a_wrapper_works_or_is_refused_by_name(make, feed):
    """What a wrapper computes is the CPU run's; where it cannot be, an error names it."""
    if make.__name__ == "BootStrapper":
        # it draws at random: both sides agree on the names, and it is fed the epoch's data
        cpu, ipu = (
            observe(side, lambda: Wrapped(make, feed), validate_only) for side in (False, True)
        )
        assert set(cpu.final[0]) == set(ipu.final[0])
        return
    check_parity(lambda: Wrapped(make, feed), validate_only, EXECUTIONS, tolerance=1e-4)


class ClassByClass(Net):
    """`log_dict(wrapper(...))`: a dict whose keys only the call itself knows."""

    def __init__(self, options):
        super().__init__()
        self.by_class = torchmetrics.ClasswiseWrapper(
            torchmetrics.Accuracy(**THREE, average=None), labels=["a", "b", "c"]
        )
        self.options = options

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch))
        self.log_dict(self.by_class(*multiclass(batch[0])), **self.options)


@pytest.mark.parametrize("reduce_fx", ["mean", "max", "sum"])
@pytest.mark.parametrize("setting", [Setting(iterations=1), REPLICAS], ids=["one", "several"])
def test_a_wrappers_batch_values_are_logged_under_the_names_it_gives(setting, reduce_fx):
    """What `log_dict` is given is a dict on the host only; each entry is a `self.log`."""
    options = {**LEVELS, "reduce_fx": reduce_fx, "batch_size": 3}
    seen = check_parity(lambda: ClassByClass(options), validate_only, setting)
    assert any("multiclassaccuracy_a" in key for key in seen.final[0])


@pytest.mark.parametrize(("keys", "logged"), [("*accuracy_b", {"b"}), ((), set())])
def test_of_a_wrappers_batch_values_those_selected_are_logged(keys, logged):
    """A glob picks the entries on the host, as they are named there."""
    options = {"on_step": False, "on_epoch": True}
    every = observe(False, lambda: ClassByClass(options), validate_only).final[0]
    some = observe(True, lambda: ClassByClass(options), validate_only, Setting(keys=keys)).final[0]
    wanted = {k: float(v) for k, v in every.items() if "accuracy" in k and k[-1] in logged}
    assert {key: float(value) for key, value in some.items()} == pytest.approx(wanted)


# -- selection ----------------------------------------------------------------------------------


@pytest.mark.parametrize("keys", [["acc"], ["train_mean", "acc"], "*"])
def test_a_metric_is_anchored_by_its_attribute_path(keys):
    """For `compute()` at the end of an epoch the path is the name to select."""
    seen = observe(True, EpochEnd, validate_only, Setting(keys=keys))
    cpu = observe(False, EpochEnd, validate_only)
    assert seen.results[0]["acc"] == pytest.approx(cpu.results[0]["acc"])


def test_of_a_collection_those_selected_are_logged():
    """Metrics that share their states, too."""
    cpu = observe(False, ComputeGroups, validate_only).final[0]
    ipu = observe(True, ComputeGroups, validate_only, Setting(keys=["recall", "f?"])).final[0]
    assert set(cpu) == {"precision", "recall", "f1"}
    wanted = {key: float(cpu[key]) for key in ("recall", "f1")}
    assert {key: float(value) for key, value in ipu.items()} == pytest.approx(wanted)


@pytest.mark.parametrize("keys", [(), ["loss"]])
def test_a_metric_that_is_not_selected_stays_as_it_was(keys):
    """Nothing is selected: the metric holds nothing, and compilation does not fail."""

    class Updates(Net):
        def __init__(self):
            super().__init__()
            self.mean = MeanMetric()

        def validation_step(self, batch, batch_idx):
            loss = self.loss(batch)
            self.mean.update(loss)
            self.log("mean", self.mean)
            self.log("loss", loss)

    seen = observe(True, Updates, validate_only, Setting(keys=keys))
    assert "mean" not in seen.final[0]
    assert all(float(state) == 0 for state in seen.metrics["mean"].values())


def test_metrics_are_left_where_a_cpu_run_leaves_them():
    """States, update counts and device of every metric after a test."""

    def state(run):
        metric = run.module.test_acc
        return [str(metric.device), metric._update_count, metric.training]

    check_parity(PerStage, test_only, state=state)
