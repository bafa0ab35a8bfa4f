"""Trace mode, half precision, runs without training, and what is left behind."""

import copy
import pickle
import warnings

import pytest
import torch
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

from ipu_log_callback import IPULogCallback, IPULogError, anchor

from .bench import GRID, ONE, SAMPLES, Counts, Net, data, fit, plain, trainer_of


def test_trace_mode_anchors_the_same():
    """`torch.jit.trace` takes flat tuples only; what comes back is the same."""

    class Traced(Net):
        def training_step(self, batch, batch_idx):
            hidden = self.encoder(batch[0])
            anchor("hidden", hidden)
            anchor("stats", hidden, reduce="stats")
            return torch.nn.functional.cross_entropy(self.head(hidden), batch[1])

    def anchored(edit):
        callback = IPULogCallback(gradients="head.*", activations="encoder.0")
        torch.manual_seed(3)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the tracer's own
            fit(Traced(), callback, Counts(2, 1, 2), edit=edit)
        return callback.anchored

    traced = anchored(lambda options: options.Jit.traceModel(True))
    dispatched = anchored(None)
    assert traced.keys() == dispatched.keys()
    for name, value in dispatched.items():
        assert_close(traced[name], value)


def test_half_precision_parameters_travel_as_halves():
    """Two bytes an element; statistics are computed in float32."""

    class Halved(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = torch.nn.Parameter(torch.ones(2, dtype=torch.float16))

        def forward(self, x):
            return (x * self.scale.float()).half()

    class Half(Net):
        def __init__(self):
            super().__init__()
            self.halved = Halved()

        def loss(self, batch):
            logits = self.halved(self.head(self.encoder(batch[0])))
            return torch.nn.functional.cross_entropy(logits.float(), batch[1])

    net = Half()
    history = plain(copy.deepcopy(net))
    callback = IPULogCallback(gradients="halved.scale", activations="halved")
    rows = fit(net, callback)
    entries = {entry.name: entry for entry in callback.cost}
    gradient, output = entries["grad/halved.scale"], entries["halved"]
    assert (gradient.dtype, gradient.bytes) == ("float16", 4)
    assert (output.dtype, output.bytes) == ("float16", 8)
    expected = history[-1][-1].gradients["halved.scale"].float().norm()
    found = torch.tensor(rows[-1]["grad/halved.scale/norm"])
    assert_close(found, expected, rtol=1e-2, atol=1e-3)


def test_a_run_without_training_has_tensors():
    """In a validation the model that is compiled there is asked."""

    class Validated(Net):
        def validation_step(self, batch, batch_idx):
            self.log("val_loss", self.loss(batch))

    callback = IPULogCallback(tensors={"x": "input"}, statistics="max")
    x, y = data(ONE, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = trainer_of([callback])
        loader = DataLoader(TensorDataset(x, y), batch_size=SAMPLES)
        (metrics,) = trainer.validate(Validated(), loader, verbose=False)
    assert_close(callback.anchored["x"][0], x[SAMPLES:])
    assert metrics["tensor/x/max"] == pytest.approx(float(x.max()))


def test_predictions_are_watched_and_not_logged():
    """Lightning has no `self.log` in `predict_step`; tensors are stored all the same."""

    class Predicting(Net):
        def predict_step(self, batch, batch_idx, dataloader_idx=0):
            return self.head(self.encoder(batch[0]))

    callback = IPULogCallback(activations="head")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = trainer_of([callback])
        loader = DataLoader(TensorDataset(*data(ONE, 2)), batch_size=SAMPLES)
        predictions = trainer.predict(Predicting(), loader)
    assert_close(callback.anchored["head"][0], predictions[-1])


def test_a_second_run_starts_anew():
    """The same callback and options watch another net with another trainer."""
    counts = GRID[1]
    callback = IPULogCallback(gradients="head.*")
    fit(Net(), callback, counts)
    net = Net()
    history = plain(copy.deepcopy(net), counts)
    fit(net, callback, counts)
    expected = torch.stack([update.gradients["head.bias"] for update in history[-1]])
    assert_close(callback.anchored["grad/head.bias"], expected)


def test_no_hook_survives_an_error_in_the_step():
    """The activations' hooks go with the capture, however it ends."""

    class Failing(Net):
        def loss(self, batch):
            super().loss(batch)
            raise KeyError("mine")

    net = Failing()
    with pytest.raises(KeyError, match="mine"):
        fit(net, IPULogCallback(activations="*"))
    assert not any(module._forward_hooks for module in net.modules())


def test_the_callback_can_be_pickled_and_copied():
    """With its results, and without its run."""
    callback = IPULogCallback(gradients="head.*", measure_cost=True)
    fit(Net(), callback)
    for twin in (pickle.loads(pickle.dumps(callback)), copy.deepcopy(callback)):  # noqa: S301
        assert repr(twin) == repr(callback)
        assert str(twin.cost) == str(callback.cost)
        assert_close(twin.anchored["grad/head.bias"], callback.anchored["grad/head.bias"])


def test_repr_is_what_a_user_would_type():
    """Only what differs from the defaults."""
    assert repr(IPULogCallback(gradients="a", cost_warning=None, every_n_executions=3)) == (
        "IPULogCallback(gradients=['a'], every_n_executions=3, cost_warning=None)"
    )


def test_names_before_a_compile_are_an_error():
    """`tensor_names()` knows nothing until the step is compiled, and says when it does."""
    with pytest.raises(IPULogError, match="before the step was compiled"):
        IPULogCallback().tensor_names()
