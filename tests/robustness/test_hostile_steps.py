"""Steps, keys and loaders that do what nobody should, as somebody will."""

import copy
import warnings

import pytest
import torch
import torchmetrics

from ipu_log_callback import IPULogCallback, IPULogError

from .runs import QUIET, loader, numbers_of, pl, run, trainer

KEYS = {
    "slashes": "a/b//c/",
    "spaces": "  loss of  all ",
    "unicode": "потеря→λ\u200b🙂",
    "brackets": "acc[top-1]{x}(y)",
    "globs": "w*?[!a]",
    "backslash": "a\\b\n\t'\"",
    "long": "k" * 10_000,
    "attribute": "layer",
    "method": "training_step",
    "log": "log",
    "own output": "loss",
    "dunder": "__class__",
    "dot": "a.b.",
    "html": "<script>alert(1)</script>",
    "percent": "%s %d {0}",
}


class Stepping(pl.LightningModule):
    """All of its steps are one function of the module, the batch, and the key's first part."""

    def __init__(self, step, **attributes):
        super().__init__()
        torch.manual_seed(5)
        self.layer = torch.nn.Linear(3, 1)
        self.step = step
        self.seen = []
        for name, value in attributes.items():
            setattr(self, name, copy.deepcopy(value))

    def loss(self, batch):
        return torch.nn.functional.mse_loss(self.layer(batch[0]).squeeze(-1), batch[1])

    def training_step(self, batch, batch_idx):
        return self.step(self, batch)

    def test_step(self, batch, batch_idx):
        return self.step(self, batch)

    def on_test_batch_end(self, outputs, *_):
        self.seen.append(outputs)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


def cpu_trainer():
    """A quiet trainer that makes the same updates from single micro-batches."""
    return pl.Trainer(
        accelerator="cpu", logger=False, max_epochs=1, accumulate_grad_batches=2, **QUIET
    )


def both(step, program="test", traced=False, **attributes):
    """What a step logs on the IPU strategy and on the CPU; the modules as well."""
    modules = [Stepping(step, **attributes) for _ in range(2)]
    on_ipu = trainer([IPULogCallback("*", history=True)], traced=traced)
    on_cpu = cpu_trainer()
    run(on_ipu, program, modules[0], loader(2, 4))
    run(on_cpu, program, modules[1], loader(2, 4))
    return numbers_of(on_ipu), numbers_of(on_cpu), *modules


def assert_same(step, program="test", traced=False, **attributes):
    """The IPU strategy logs what the CPU logs over the epoch, and something at all."""
    on_ipu, on_cpu, *_ = both(step, program, traced, **attributes)
    assert on_ipu == pytest.approx(on_cpu, nan_ok=True)
    assert on_ipu


@pytest.mark.parametrize("key", KEYS.values(), ids=KEYS)
@pytest.mark.parametrize("program", ["fit", "test"])
def test_any_key_that_lightning_takes(key, program):
    """Alone and beside another; selected by itself, whatever characters it has."""

    def step(module, batch):
        loss = module.loss(batch)
        module.log(key, loss, on_step=False, on_epoch=True)
        module.log("other", loss * 2, on_step=False, on_epoch=True)
        return loss

    assert_same(step, program)
    callback = IPULogCallback([key, "other"], history=True)
    made = trainer([callback])
    run(made, program, Stepping(step), loader(2, 4))
    found = numbers_of(made)
    assert list(found) == sorted([key, "other"])
    assert key in callback.history
    for view in (callback.captured, callback.history):
        assert "<script>" not in view._repr_html_()
        assert str(view)


# -- tensors that change after they were given away ---------------------------------------------


def logged_then_changed(module, batch):
    """A number is changed after it was logged."""
    value = batch[0].mean()
    module.log("before", value)
    value.add_(1)
    module.log("after", value)


def a_view_of_what_is_changed(module, batch):
    """An element is logged, then the whole is changed."""
    x = batch[0] * 1
    module.log("first", x[0, 0])
    x.mul_(3)
    module.log("first_later", x[0, 0])


def the_batch_itself(module, batch):
    """The step's own argument is changed."""
    module.log("sum", batch[0].sum())
    batch[0].zero_()
    module.log("zeroed", batch[0].sum())


def a_metric_then_changed(module, batch):
    """A metric's argument is changed after the update."""
    x = batch[0] * 1
    module.metric.update(x)
    x.fill_(9)
    module.log("metric", module.metric)
    module.metric2.update(x)
    module.log("metric2", module.metric2)


def by_setitem(module, batch):
    """An element is assigned."""
    x = batch[0] * 1
    module.log("a", x.sum())
    total = x.sum(0)
    module.log("t", total[0])
    total[0] = 4.0
    module.log("t2", total[0])


def one_tensor_under_two_keys_changed_between(module, batch):
    """A tensor is logged, changed, and logged again."""
    total = batch[0].sum()
    module.log("one", total)
    total += 1
    module.log("two", total)
    total.copy_(batch[0].amax())
    module.log("three", total)


@pytest.mark.parametrize(
    "step",
    [
        logged_then_changed,
        a_view_of_what_is_changed,
        the_batch_itself,
        a_metric_then_changed,
        by_setitem,
        one_tensor_under_two_keys_changed_between,
    ],
)
@pytest.mark.parametrize("traced", [False, True])
def test_a_value_is_logged_as_it_was_at_the_call(step, traced):
    """In-place changes after `self.log` or a metric's update do not reach what they were given."""
    if traced and step is the_batch_itself:
        pytest.skip("PopTorch's trace runs on the user's own tensors")
    assert_same(
        step, traced=traced, metric=torchmetrics.MeanMetric(), metric2=torchmetrics.SumMetric()
    )


def shares_storage(module, batch):
    """Outputs that are views of each other."""
    x = batch[0] * 2
    module.log("x", x[0, 0])
    module.log("mean", x.mean())
    return {"x": x, "view": x[0], "again": x, "mean": x.mean()}


def returns_what_it_logs(module, batch):
    """The logged tensor itself is returned, three times."""
    loss = module.loss(batch)
    module.log("loss", loss)
    return {"loss": loss, "twice": [loss, loss]}


@pytest.mark.parametrize("step", [shares_storage, returns_what_it_logs])
def test_outputs_may_share_storage_with_what_is_logged(step):
    """Both are right, and a hook that changes an output changes no logged value."""

    def spoil(self, outputs, *_):
        for value in outputs.values():
            for tensor in value if isinstance(value, (list, tuple)) else [value]:
                tensor.fill_(-1)

    class Spoiling(Stepping):
        on_test_batch_end = spoil

    assert_same(step)
    callback = IPULogCallback("*", history=True)
    made = trainer([callback])
    run(made, "test", Spoiling(step), loader(2, 4))
    assert numbers_of(made) == pytest.approx(both(step)[1])
    for entries in callback.history.values():
        assert all(not torch.all(e.micro_batches == -1) for e in entries if not e.is_epoch)


def test_a_returned_dict_that_the_step_keeps_and_changes_later():
    """The callback keeps nothing of what the step returned."""
    kept = {}

    def step(module, batch):
        kept.clear()
        kept["x"] = batch[0]
        module.log("x", batch[0].mean())
        return kept

    def step_on_cpu(module, batch):
        module.log("x", batch[0].mean())
        return {"x": batch[0]}

    made = trainer([IPULogCallback("*")])
    module = Stepping(step)

    class Clearing(pl.Callback):
        def on_test_batch_end(self, trainer, pl_module, *_):
            kept.clear()
            kept["y"] = object()

    made.callbacks.append(Clearing())
    run(made, "test", module, loader(2, 4))
    assert numbers_of(made) == pytest.approx(both(step_on_cpu)[1])
    assert all(set(outputs) == {"x"} for outputs in module.seen)


# -- a user's own `log` -------------------------------------------------------------------------


def test_a_log_that_renames_and_logs_more():
    """An override is called once a captured call; what it makes of it is what is logged."""

    class Renaming(Stepping):
        def log(self, name, value, **options):
            super().log(f"mine/{name}", value, **options)
            if name != "extra":
                self.log("extra", value * 2)

    def step(module, batch):
        module.log("x", batch[0].mean())

    found = []
    for made in (trainer([IPULogCallback("*")]), cpu_trainer()):
        run(made, "test", Renaming(step), loader(2, 4))
        found.append(numbers_of(made))
    assert set(found[0]) == {"mine/x", "mine/extra"}
    assert found[0] == pytest.approx(found[1])


def test_a_log_that_raises():
    """Its exception is the user's, unchanged."""

    class Refusing(Stepping):
        def log(self, name, value, **options):
            raise LookupError("not today")

    made = trainer([IPULogCallback("*")])
    with pytest.raises(LookupError, match="not today"):
        run(made, "test", Refusing(lambda module, batch: module.log("x", 1.0)), loader(2, 4))


def test_a_log_that_swallows():
    """What an override drops is not logged, and nobody complains about it."""

    class Silent(Stepping):
        def log(self, name, value, **options):
            if not name.startswith("private"):
                super().log(name, value, **options)

    def step(module, batch):
        module.log("private_x", batch[0].mean())
        module.log("y", batch[0].amax())

    made = trainer([IPULogCallback("*")])
    run(made, "test", Silent(step), loader(2, 4))
    assert set(numbers_of(made)) == {"y"}


def test_library_code_that_replaces_log_without_its_signature():
    """Somebody's patch of `LightningModule.log` with `*args` is called, and does no harm."""
    plain, calls = pl.LightningModule.log, []

    def patched(*args, **kwargs):
        calls.append(args[1] if len(args) > 1 else kwargs["name"])
        return plain(*args, **kwargs)

    pl.LightningModule.log = patched
    try:
        assert_same(lambda module, batch: module.log("x", batch[0].mean()))
    finally:
        pl.LightningModule.log = plain
    assert set(calls) == {"x"}


# -- loaders and batches ------------------------------------------------------------------------


class Data(torch.utils.data.Dataset):
    """Ten rows whose last ones do something else."""

    def __init__(self, last):
        self.last = last

    def __len__(self):
        return 16

    def __getitem__(self, index):
        if index >= 12:
            return self.last()
        return torch.full((3,), float(index)), torch.tensor(float(index))


def fails():
    """What a data set raises."""
    raise OSError("disk on fire")


def test_a_loader_that_raises():
    """Its exception arrives, and the next run is right."""
    made = trainer([IPULogCallback("*")])
    module = Stepping(lambda module, batch: module.log("x", batch[0].mean()))
    with pytest.raises(OSError, match="disk on fire"):
        run(made, "test", module, torch.utils.data.DataLoader(Data(fails), batch_size=2))
    run(made, "test", module, loader(2, 4))
    again = both(module.step)[1]
    assert numbers_of(made) == pytest.approx(again)


def test_a_loader_that_ends_early():
    """What came before the end counts."""

    class Ending(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter([(torch.ones(3), torch.tensor(1.0))] * 5)

    module = Stepping(lambda module, batch: module.log("x", batch[0].mean()))
    made = trainer([IPULogCallback("*")])
    run(made, "test", module, torch.utils.data.DataLoader(Ending(), batch_size=2))
    assert numbers_of(made) == {"x": 1.0}


def outcome(callbacks, step, program, data):
    """What a run ends with: the error's type and text, or nothing."""
    try:
        run(trainer(callbacks), program, Stepping(step), data)
    except Exception as error:  # noqa: BLE001 - compared by the tests
        return type(error), str(error)
    return None


def test_a_loader_that_yields_none():
    """PyTorch's own error."""
    data = torch.utils.data.DataLoader(Data(lambda: None), batch_size=2)
    with pytest.raises(TypeError) as own:
        list(data)
    found = outcome([IPULogCallback()], lambda module, batch: None, "test", data)
    assert found == (TypeError, str(own.value))


def test_a_training_step_that_returns_nothing():
    """PopTorch's own error, or Lightning's rule, with the callback as without."""
    without, with_it = (
        outcome(callbacks, lambda module, batch: None, "fit", loader(2, 4))
        for callbacks in ([], [IPULogCallback()])
    )
    assert without == with_it


class Liar(torch.Tensor):
    """Says that it is somewhere else."""

    where = "cpu"

    @property
    def device(self):
        return torch.device(self.where)


class SaysIpu(Liar):
    where = "ipu"


@pytest.mark.parametrize("kind", [Liar, SaysIpu])
@pytest.mark.parametrize("made_of", ["host", "device"])
def test_values_that_lie_about_their_device(kind, made_of):
    """Right, or an error that says what was received; never a wrong number without a word."""
    host = torch.tensor(2.5).as_subclass(kind)

    def step(module, batch):
        if made_of == "host":
            module.log("x", host)
        else:
            module.log("x", (batch[0] * 0 + 2.5).mean().as_subclass(kind))

    made = trainer([IPULogCallback("*")])
    failed = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            made.test(Stepping(step), loader(2, 4), verbose=False)
        except (IPULogError, RuntimeError, TypeError) as error:
            failed = str(error)
    if failed is None:
        assert numbers_of(made) == {"x": 2.5}
    else:
        assert any(word in failed.lower() for word in ("'x'", "ipu", "subclass", "device"))
