"""Any tensor of a step, and the outputs of submodules."""

import copy
import re
import warnings

import pytest
import torch
from lightning_in_use import QUIET
from torch.testing import assert_close

from ipu_log_callback import IPULogCallback, IPULogError, IPULogWarning, anchor

from .bench import GRID, ONE, SAMPLES, Counts, Net, data, fit, fit_quietly, pl


class Hidden(Net):
    """Anchors what its encoder returns, with the keyword arguments that it was given."""

    def __init__(self, **how):
        super().__init__()
        self.how = how
        self.seen = torch.nn.Identity()

    def training_step(self, batch, batch_idx):
        hidden = self.encoder(batch[0])
        anchor("hidden", self.seen(hidden), **self.how)
        return torch.nn.functional.cross_entropy(self.head(hidden), batch[1])


def frozen(net):
    """A copy of a net that does not learn, so that every micro-batch sees the same weights."""
    net.make_optimizer = lambda parameters: torch.optim.SGD(parameters, lr=0.0)
    return net


def hidden_of(net, counts, execution):
    """What the encoder returns for each micro-batch of an execution."""
    x, _ = data(counts, execution + 1)
    with torch.no_grad():
        return net.encoder(x).reshape(-1, SAMPLES, 3)[execution * counts.total :]


@pytest.mark.parametrize("counts", GRID, ids=str)
def test_an_anchored_tensor_comes_back_for_every_micro_batch(counts):
    """`[iterations x accumulation x replicas, *shape]`, in the order in which the data came."""
    net = frozen(Hidden())
    callback = IPULogCallback(output_mode="all")
    fit(copy.deepcopy(net), callback, counts)
    assert_close(callback.anchored["hidden"], hidden_of(net, counts, 1))
    assert not callback.anchored["hidden"].requires_grad


def test_statistics_are_computed_on_the_device():
    """With `reduce="stats"` only numbers travel, and they are those of the whole tensor."""
    counts, net = Counts(2, 1, 2), frozen(Hidden(reduce="stats"))
    callback = IPULogCallback(statistics=["norm", "std", "max"], output_mode="all")
    rows = fit(copy.deepcopy(net), callback, counts)
    hidden = hidden_of(net, counts, 1)
    found = callback.anchored["hidden"]
    assert_close(found["norm"], hidden.flatten(1).norm(dim=1))
    assert_close(found["std"], hidden.flatten(1).std(dim=1))
    assert_close(found["abs_max"], hidden.flatten(1).abs().amax(1))
    assert_close(found["nonfinite"], torch.zeros(counts.total))
    assert_close(torch.tensor(rows[-1]["anchored/hidden/norm"]), found["norm"].mean())
    assert_close(torch.tensor(rows[-1]["anchored/hidden/max"]), hidden.max())
    assert "anchored/hidden/min" not in rows[-1]
    assert callback.cost.extra_streams() == 1


def test_a_histogram_is_counted_on_the_device():
    """Counts are those of `numpy.histogram` over all micro-batches, with what lies outside."""
    numpy = pytest.importorskip("numpy")
    how = {"reduce": "histogram", "bins": 6, "range": (-0.5, 0.5)}
    counts, net = Counts(2, 2, 1), frozen(Hidden(**how))
    callback = IPULogCallback(output_mode="all")
    fit(copy.deepcopy(net), callback, counts)
    hidden = hidden_of(net, counts, 1)
    expected, edges = numpy.histogram(hidden.numpy(), 6, (-0.5, 0.5))
    histogram = callback.anchored["hidden"]
    assert histogram.counts.tolist() == expected.tolist()
    assert_close(histogram.edges, torch.tensor(edges, dtype=torch.float32))
    assert int(histogram.below) == int((hidden < -0.5).sum())
    assert int(histogram.above) == int((hidden > 0.5).sum())


class Halved(torch.nn.Module):
    """What an encoder in half precision would return."""

    def forward(self, x):
        return x.half()


def test_halves_are_counted_as_numbers_of_32_bits():
    """Edges that a half cannot hold still tell them apart; under `Sum` counts add up."""
    import poptorch

    edge = 1 / 3
    counts, net = Counts(2, 1, 1), frozen(Hidden(reduce="histogram", bins=2, range=(-edge, edge)))
    net.seen = Halved()
    callback = IPULogCallback(output_mode="keep")
    with pytest.warns(IPULogWarning, match="gets 1 of 2 micro-batches"):
        fit(
            copy.deepcopy(net),
            callback,
            counts,
            edit=lambda options: options.outputMode(poptorch.OutputMode.Sum),
        )
    hidden = hidden_of(net, counts, 1).half().float()
    histogram = callback.anchored["hidden"]
    assert int(histogram.below) == int((hidden < -edge).sum())
    assert int(histogram.above) == int((hidden > edge).sum())
    assert int(histogram.counts.sum()) == hidden.numel() - int((hidden.abs() > edge).sum())


@pytest.mark.parametrize("how", [{}, {"reduce": "stats"}], ids=str)
def test_off_the_ipu_the_value_is_stored(how):
    """An eager step's last value is in `anchored` as it is; nothing is logged."""
    net, callback = Hidden(**how), IPULogCallback()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's: an IPU is there and not used
        trainer = pl.Trainer(
            accelerator="cpu", callbacks=[callback], max_epochs=1, logger=False, **QUIET
        )
    fit_quietly(trainer, frozen(net), ONE)
    expected = hidden_of(net, ONE, 1)[0]
    if how:
        assert_close(callback.anchored["hidden"]["norm"], expected.norm().reshape(1))
    else:
        assert_close(callback.anchored["hidden"], expected)


def test_without_a_trainer_it_is_an_identity():
    """`anchor` returns its tensor, and nobody else hears of it."""
    callback = IPULogCallback()
    tensor = torch.ones(2, requires_grad=True)
    assert anchor("t", tensor) is tensor
    assert callback.anchored == {}


def test_a_disabled_callback_anchors_nothing():
    """`enabled=False` makes `anchor` a no-op in a compiled step."""
    callback = IPULogCallback(enabled=False, gradients="*", activations="*")
    fit(Hidden(), callback)
    assert callback.anchored == {}
    assert len(callback.cost) == 0


def test_other_callbacks_find_it_in_the_outputs_of_a_step_that_returns_a_dict():
    """With the shape that the user's own output mode gives to every output."""
    seen = {}

    class Returning(Net):
        def training_step(self, batch, batch_idx):
            hidden = self.encoder(batch[0])
            anchor("hidden", hidden)
            return {"loss": torch.nn.functional.cross_entropy(self.head(hidden), batch[1])}

    class Reader(pl.Callback):
        def on_train_batch_end(self, trainer, module, outputs, *args):
            seen.update(outputs)

    counts = Counts(2, 1, 2)
    callback = IPULogCallback(activations="head")
    fit(frozen(Returning()), callback, counts, others=(Reader(),))
    last = callback.anchored["hidden"][-counts.replicas :]
    assert_close(seen["hidden"], last.flatten(0, 1))
    assert seen["head"].shape == (counts.replicas * SAMPLES, 2)


def test_too_few_micro_batches_are_told():
    """Where the user's own output mode holds, a warning says how many of them come back."""
    callback = IPULogCallback()
    with pytest.warns(IPULogWarning, match="gets 1 of 3 micro-batches"):
        fit(Hidden(), callback, Counts(3, 1, 1))
    assert callback.anchored["hidden"].shape == (1, SAMPLES, 3)


def test_in_place_changes_after_the_call_do_not_show():
    """The value is that of the moment of the call."""

    class Changing(Net):
        def training_step(self, batch, batch_idx):
            x = batch[0] * 1.0
            anchor("before", x)
            x.mul_(0.0)
            return self.loss((x, batch[1]))

    callback = IPULogCallback()
    fit(Changing(), callback)
    assert_close(callback.anchored["before"][0], data(ONE, 2)[0][SAMPLES:])


@pytest.mark.parametrize("reduce", [None, "stats"])
def test_outputs_of_submodules_are_anchored_by_name(reduce):
    """`activations` needs no change of the module, and leaves no hook on it."""
    counts, net = Counts(2, 1, 2), frozen(Net())
    twin = copy.deepcopy(net)
    callback = IPULogCallback(activations=["encoder.*"], reduce_activations=reduce)
    rows = fit(twin, callback, counts)
    expected = hidden_of(net, counts, 1)
    if reduce is None:
        assert_close(callback.anchored["encoder.1"], expected)
    norms = expected.flatten(1).norm(dim=1)
    assert_close(torch.tensor(rows[-1]["activation/encoder.1/norm"]), norms.mean())
    assert "activation/encoder.0/norm" in rows[-1]
    assert "activation/head/norm" not in rows[-1]
    assert not any(module._forward_hooks for module in twin.modules())


def test_a_submodule_called_twice_is_stacked():
    """The calls of one step are a dimension before the output's own."""

    class Twice(Net):
        def loss(self, batch):
            both = self.encoder(batch[0]) + self.encoder(-batch[0])
            return torch.nn.functional.cross_entropy(self.head(both), batch[1])

    callback = IPULogCallback(activations="encoder")
    fit(Twice(), callback, Counts(2, 1, 1))
    assert callback.anchored["encoder"].shape == (2, 2, SAMPLES, 3)


def test_validation_has_activations_too():
    """A step that is not training logs over the epoch, as `self.log` does there."""

    class Validated(Net):
        def validation_step(self, batch, batch_idx):
            self.loss(batch)

        def val_dataloader(self):
            from torch.utils.data import DataLoader, TensorDataset

            return DataLoader(TensorDataset(*data(ONE, 2)), batch_size=SAMPLES)

    net = frozen(Validated())
    callback = IPULogCallback(activations="head", statistics="max")
    logged = {}

    class Reader(pl.Callback):
        def on_validation_end(self, trainer, module):
            logged.update(trainer.callback_metrics)

    fit(net, callback, others=(Reader(),), num_sanity_val_steps=0)
    with torch.no_grad():
        expected = net.head(net.encoder(data(ONE, 2)[0])).max()
    assert_close(logged["activation/head/max"], expected)


def test_only_every_nth_execution_is_looked_at():
    """Executions 0, n, 2n...; logged keys are replayed each time, and nothing recompiles."""
    from ipu_log_callback import emulator

    seen = []

    class Logging(Hidden):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            self.log("loss", loss)
            return loss

    class Reader(pl.Callback):
        def on_train_batch_end(self, trainer, *args):
            seen.append(callback.anchored.pop("hidden", None) is not None)

    emulator.counters.reset()
    callback = IPULogCallback("loss", every_n_executions=2)
    rows = fit(Logging(), callback, executions=5, others=(Reader(),))
    assert seen == [True, False, True, False, True]
    assert len({row["loss"] for row in rows}) == 5
    assert emulator.counters.compiles == 1


# -- bad input ----------------------------------------------------------------------------------


def test_a_name_used_twice_is_an_error_before_the_compile():
    """One name stands for one tensor of a step; both lines are named."""

    class Double(Net):
        def training_step(self, batch, batch_idx):
            anchor("x", batch[0])
            anchor("x", batch[0] * 2)
            return self.loss(batch)

    with pytest.raises(
        IPULogError, match=r"`anchor\('x', \.\.\.\)` in `Double.training_step`"
    ) as caught:
        fit(Double(), IPULogCallback())
    lines = re.search(r"test_anchor\.py:(\d+), first in test_anchor\.py:(\d+)", str(caught.value))
    assert int(lines.group(1)) == int(lines.group(2)) + 1


@pytest.mark.parametrize("arguments", [{"tensors": {"hidden": "input"}}])
def test_a_name_of_tensors_is_taken(arguments):
    """`tensors` and `anchor` share one dictionary."""
    with pytest.raises(IPULogError, match="received a name used before"):
        fit(Hidden(), IPULogCallback(**arguments))


def test_a_submodule_that_returns_no_tensor_is_an_error():
    """Raised while the step is captured; names the submodule and its class."""

    class Counting(torch.nn.Module):
        def forward(self, x):
            return len(x)

    class Net2(Net):
        def __init__(self):
            super().__init__()
            self.count = Counting()

        def loss(self, batch):
            self.count(batch[0])
            return super().loss(batch)

    with pytest.raises(
        IPULogError, match=r"activations=\['count'\].*`Counting`, which returned no"
    ):
        fit(Net2(), IPULogCallback(activations="count"))


def test_a_submodule_whose_shape_changes_between_calls_is_an_error():
    """Outputs of one step that cannot be stacked are refused, with both shapes."""

    class Net2(Net):
        def loss(self, batch):
            self.encoder(batch[0][:1])
            return super().loss(batch)

    with pytest.raises(IPULogError, match=r"float32\[2, 3\] after float32\[1, 3\]"):
        fit(Net2(), IPULogCallback(activations="encoder"))


@pytest.mark.parametrize(
    ("name", "tensor", "how", "text"),
    [
        (1, torch.ones(1), {}, "as name"),
        ("x", 1.0, {}, "expected a tensor"),
        ("x", torch.ones(1), {"reduce": "median"}, "reduce='median'"),
        ("x", torch.ones(1), {"reduce": "histogram"}, "range=None"),
        ("x", torch.ones(1), {"reduce": "histogram", "range": (1.0, 0.0)}, "the left one first"),
        ("x", torch.ones(1), {"reduce": "histogram", "range": 4.0}, "range=4.0"),
        ("x", torch.ones(1), {"reduce": "histogram", "range": (0, 1), "bins": 0}, "bins=0"),
    ],
)
def test_arguments_of_anchor_are_checked_everywhere(name, tensor, how, text):
    """Also off the IPU, so that a step is not found wanting on the device only."""
    with pytest.raises(IPULogError, match=text):
        anchor(name, tensor, **how)


def test_an_anchored_loss_is_explained():
    """A torch loss that is not the step's own is named as a second loss, with `anchor`."""

    class Second(Net):
        def training_step(self, batch, batch_idx):
            anchor("mae", torch.nn.functional.l1_loss(self.encoder(batch[0]), batch[0][:, :3]))
            return self.loss(batch)

    with pytest.raises(IPULogError, match=r"`anchor\('mae', \.\.\.\)`"):
        fit(Second(), IPULogCallback())
