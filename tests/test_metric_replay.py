"""Metric calls replayed on the host leave metric objects as a run on the CPU leaves them."""

import copy

import pytest
import torch
import torchmetrics as tm

from ipu_log_callback.geometry import Geometry
from ipu_log_callback.metric_replay import MetricReplay
from ipu_log_callback.record import AnchoredOutput, CallSite, LoggedCall, MetricCall, StepRecord
from ipu_log_callback.wire import pack

SITE = CallSite("here.py", 1)
MICRO_BATCHES, EXECUTIONS, SAMPLES = 3, 3, 4


def classes():
    """Probabilities of three classes, and the true ones."""
    return torch.randn(SAMPLES, 3).softmax(-1), torch.randint(0, 3, (SAMPLES,))


def labels():
    """Three labels at a time."""
    return torch.rand(SAMPLES, 3), torch.randint(0, 2, (SAMPLES, 3))


def binary():
    """Probabilities of one class, and the truth."""
    return torch.rand(SAMPLES), torch.randint(0, 2, (SAMPLES,))


def numbers():
    """Two columns of positive numbers."""
    return torch.rand(SAMPLES) + 0.1, torch.rand(SAMPLES) + 0.1


def scalar():
    """One number."""
    return (torch.randn(()),)


def images():
    """Two small images, twice."""
    return torch.rand(2, 1, 16, 16), torch.rand(2, 1, 16, 16)


def tokens():
    """Logits of five tokens, and the true ones."""
    return torch.randn(2, 4, 5), torch.randint(0, 5, (2, 4))


MULTI = {"task": "multiclass", "num_classes": 3}
METRICS = {
    "accuracy": (lambda: tm.Accuracy(**MULTI), classes),
    "accuracy, samplewise": (
        lambda: tm.Accuracy(task="multilabel", num_labels=3, multidim_average="global"),
        labels,
    ),
    "f1, macro": (lambda: tm.F1Score(average="macro", **MULTI), classes),
    "precision": (lambda: tm.Precision(average="macro", **MULTI), classes),
    "recall": (lambda: tm.Recall(task="binary"), binary),
    "specificity": (lambda: tm.Specificity(task="binary"), binary),
    "auroc without thresholds": (lambda: tm.AUROC(task="binary"), binary),
    "auroc with thresholds": (lambda: tm.AUROC(task="binary", thresholds=5), binary),
    "average precision": (lambda: tm.AveragePrecision(**MULTI), classes),
    "calibration error": (lambda: tm.CalibrationError(task="binary"), binary),
    "cohen kappa": (lambda: tm.CohenKappa(**MULTI), classes),
    "confusion matrix": (lambda: tm.ConfusionMatrix(**MULTI), classes),
    "matthews": (lambda: tm.MatthewsCorrCoef(**MULTI), classes),
    "jaccard": (lambda: tm.JaccardIndex(**MULTI), classes),
    "hamming": (lambda: tm.HammingDistance(task="binary"), binary),
    "mean squared error": (tm.MeanSquaredError, numbers),
    "mean absolute error": (tm.MeanAbsoluteError, numbers),
    "mean absolute percentage error": (tm.MeanAbsolutePercentageError, numbers),
    "r2": (tm.R2Score, numbers),
    "explained variance": (tm.ExplainedVariance, numbers),
    "pearson": (tm.PearsonCorrCoef, numbers),
    "spearman": (tm.SpearmanCorrCoef, numbers),
    "cosine similarity": (tm.CosineSimilarity, labels),
    "mean": (tm.MeanMetric, scalar),
    "sum": (tm.SumMetric, scalar),
    "min": (tm.MinMetric, scalar),
    "max": (tm.MaxMetric, scalar),
    "cat": (tm.CatMetric, scalar),
    "ssim": (lambda: tm.StructuralSimilarityIndexMeasure(data_range=1.0), images),
    "ssim, range of each update": (tm.StructuralSimilarityIndexMeasure, images),
    "psnr": (lambda: tm.PeakSignalNoiseRatio(data_range=1.0), images),
    "perplexity": (tm.text.Perplexity, tokens),
    "collection": (
        lambda: tm.MetricCollection(
            {
                "acc": tm.Accuracy(**MULTI),
                "f1": tm.F1Score(**MULTI),
                "cm": tm.ConfusionMatrix(**MULTI),
            }
        ),
        classes,
    ),
    "running mean": (lambda: tm.RunningMean(window=2), scalar),
    "min and max of accuracy": (lambda: tm.MinMaxMetric(tm.Accuracy(**MULTI)), classes),
}


def members(metric):
    """The metrics of a collection, or the metric itself."""
    return list(metric.values()) if isinstance(metric, tm.MetricCollection) else [metric]


def states(metric):
    """Everything that the next update, compute or reset depends on."""
    return [
        (m.update_count, {name: getattr(m, name) for name in m._defaults}) for m in members(metric)
    ]


def equal(one, other):
    """Whether two states are the same, tensor by tensor."""
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(equal, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[k], other[k]) for k in one)
    if isinstance(one, torch.Tensor):
        same = torch.allclose(one.double(), other.double(), rtol=1e-4, atol=1e-6, equal_nan=True)
        return one.shape == other.shape and same
    return one == other


def executions(batches, metric, method, logged=()):
    """Replay `batches`, `[executions][micro_batches][arguments]`, as a compiled step's."""
    anchored = [AnchoredOutput(i, tuple(t.shape), t.dtype) for i, t in enumerate(batches[0][0])]
    call = MetricCall(metric, "metric", method, tuple(anchored), {}, 0, SITE)
    record = StepRecord("validation_step", "Net", (call, *logged))
    replay = MetricReplay(record, MICRO_BATCHES)
    geometry = Geometry(MICRO_BATCHES, 1, 1)
    for execution in batches:
        packed = [pack(None, anchored, dict(enumerate(arguments)), True) for arguments in execution]
        columns = zip(*[tensors for (_, tensors), _ in packed])
        _, returned = packed[0][1].unpack(
            (None, tuple(map(torch.cat, columns))), geometry, geometry
        )
        replay(returned)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("method", ["update", "forward"])
@pytest.mark.parametrize("case", METRICS, ids=str)
def test_a_metric_is_left_as_after_one_call_a_micro_batch(case, method):
    """States, their lists' entries and the number of updates are those of a run on the CPU."""
    make, arguments = METRICS[case]
    torch.manual_seed(0)
    batches = [[arguments() for _ in range(MICRO_BATCHES)] for _ in range(EXECUTIONS)]
    metric = make()
    expected = copy.deepcopy(metric)
    for execution in batches:
        for values in execution:
            expected(*values) if method == "forward" else expected.update(*values)

    executions(batches, metric, method)

    assert equal(states(metric), states(expected))
    assert equal(metric.compute(), expected.compute())


class CountsItsUpdates(tm.MeanMetric):
    """A user's metric that keeps a count of its own."""

    def update(self, value):
        super().update(value)
        self.calls = getattr(self, "calls", 0) + 1


def test_a_users_own_metric_sees_every_micro_batch_by_itself():
    """Only torchmetrics' own classes may take a whole execution at once."""
    metric = CountsItsUpdates()
    executions([[scalar() for _ in range(MICRO_BATCHES)]] * EXECUTIONS, metric, "update")
    assert metric.calls == MICRO_BATCHES * EXECUTIONS


def test_most_metrics_take_an_execution_at_once():
    """After the first execution, which is tried both ways, one update serves all micro-batches."""
    metric = tm.Accuracy(**MULTI)
    sizes = []
    update = metric.update
    metric.update = lambda *args: (sizes.append(len(args[0])), update(*args))
    executions([[classes() for _ in range(MICRO_BATCHES)]] * EXECUTIONS, metric, "update")
    assert sizes == [SAMPLES] * MICRO_BATCHES + [SAMPLES * MICRO_BATCHES] * (EXECUTIONS - 1)


def test_a_metric_logged_on_step_is_called_once_a_micro_batch():
    """Its last value is asked for, and stands for a micro-batch."""
    metric = tm.Accuracy(**MULTI)
    logged = LoggedCall("acc", metric, {"on_step": True}, SITE)
    calls = []
    metric.register_forward_hook(lambda *_: calls.append(1))
    batches = [[classes() for _ in range(MICRO_BATCHES)]] * EXECUTIONS
    executions(batches, metric, "forward", [logged])
    assert len(calls) == MICRO_BATCHES * EXECUTIONS
