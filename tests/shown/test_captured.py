import pickle
import warnings

import pytest
import torch
from torchmetrics import Accuracy, ClasswiseWrapper, MeanMetric, MetricCollection

from ipu_log_callback import IPULogCallback, anchor, live
from ipu_log_callback.errors import UnknownKeyError
from ipu_log_callback.tables import Table

from .runs import Net, fit, loader, quiet, trainer


class Logs(Net):
    """Logs one of each kind."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = torch.nn.functional.cross_entropy(self.layer(x), y)
        self.log("loss", loss, prog_bar=True, reduce_fx=torch.mean)
        self.log("again", loss)
        self.log("lr", live(lambda: 0.1))
        self.log("a<b & 'c'", loss * 2)
        self.log("unwanted", loss)
        return loss


@pytest.fixture(scope="module")
def callback():
    """A callback after a run of `Logs`, one key not selected."""
    made = IPULogCallback(["loss", "again", "lr", "a<*", "accuracy", "val_accuracy"])
    made_by = trainer(made, iterations=2, accumulation=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the key that is not selected on purpose
        made_by.fit(Logs(), loader(3, 4), loader(2, 2))
    return made


def test_each_call_is_told_with_its_options_value_and_place(callback):
    """A row has the key, what was called, what it was given, the options as typed, and the line."""
    loss, again, lr, *_ = callback.captured["training_step"].calls
    assert (loss.key, loss.call, loss.value) == ("loss", "self.log", "float32 []")
    assert loss.options == "prog_bar=True, reduce_fx=mean"
    assert str(loss.site).startswith("test_captured.py:")
    assert again.site.line == loss.site.line + 1
    assert lr.value == "live"


def test_bytes_are_those_that_travel(callback):
    """A tensor logged twice travels once; the sum is what the emulator sees in addition."""
    step = callback.captured["training_step"]
    assert [call.bytes for call in step.calls] == [16, 0, 0, 16]
    assert step.bytes == 32
    assert step.bytes == callback.cost.bytes_per_execution("training_step") - own_outputs(callback)


def own_outputs(callback):
    """What returning every micro-batch of the step's own outputs costs."""
    entries = [e for e in callback.cost if e.step == "training_step" and "own" in e.name]
    return sum(entry.bytes for entry in entries)


def test_metrics_and_what_was_dropped_are_told(callback):
    """Metric calls have rows; keys that were not selected are named."""
    calls = {call.key: call for call in callback.captured["validation_step"].calls}
    assert calls["accuracy"].call == "self.accuracy.update"
    assert calls["accuracy"].value == "float32 [2, 3], int32 [2]"
    assert calls["val_accuracy"].value == "MulticlassAccuracy"
    assert callback.captured["training_step"].dropped == ("unwanted",)
    assert "'unwanted'" in str(callback.captured)


class LogsDicts(Net):
    """Logs a whole collection, and the dict that a wrapper's call returns."""

    def __init__(self):
        super().__init__()
        self.means = MetricCollection({"one": MeanMetric(), "two": MeanMetric()}, prefix="mean_")
        self.by_class = ClasswiseWrapper(Accuracy(task="multiclass", num_classes=3, average=None))

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log_dict(self.means, prog_bar=True)
        self.log_dict(self.by_class(self.layer(x), y), on_epoch=True)


def test_a_log_dict_of_metrics_is_one_row():
    """With the keys that are known, what was given, the options as typed, and the line."""
    made = IPULogCallback("*")
    with quiet():
        trainer(made).validate(LogsDicts(), loader(2), verbose=False)
    first, called, second = made.captured["validation_step"].calls
    assert (first.key, first.call, first.value) == (
        "mean_one, mean_two",
        "self.log_dict",
        "MetricCollection",
    )
    assert (called.key, called.call) == ("by_class", "self.by_class")
    assert (second.key, second.call, second.value) == ("*", "self.log_dict", "a metric's dict")
    assert (first.options, second.options) == ("prog_bar=True", "on_epoch=True")
    assert str(first.site).startswith("test_captured.py:")
    assert second.site.line == called.site.line == first.site.line + 1


def test_text_and_html_say_the_same(callback):
    """Every cell of the text is in the HTML, escaped; neither has colour."""
    html = callback._repr_html_()
    assert "a&lt;b &amp; &#x27;c&#x27;" in html
    assert "a<b" not in html
    assert "color" not in html
    for call in callback.captured["training_step"].calls:
        for text in (call.call, call.value, str(call.site)):
            assert text in html
            assert text in str(callback.captured)
    assert "IPULogCallback(keys=" in html


def test_it_outlives_the_run_and_holds_nothing_of_it():
    """The summary stays after the run: text and numbers, no tensor and no module."""
    made = IPULogCallback("*")
    fit(made)
    assert set(made.captured) == {"training_step", "validation_step"}
    assert len(made.captured) == 2
    assert repr(made.captured) == "<Captured: 3 in validation_step, 2 in training_step>"
    held = pickle.dumps(made.captured)
    assert b"torch" not in held.replace(b"torchmetrics", b"")
    assert str(pickle.loads(held)) == str(made.captured)  # noqa: S301 - pickled a line above


class LogsADict(Net):
    """Logs by `log_dict`, and anchors numbers."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = torch.nn.functional.cross_entropy(self.layer(x), y)
        anchor("numbers", x, reduce="stats")
        self.log_dict({"mean": x.mean(), "peak": x.max()}, on_epoch=True, logger=False)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("only", batch[0].mean(), on_epoch=None)

    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        return self.layer(batch[0])


class Silent(Net):
    """Logs nothing."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        return torch.nn.functional.cross_entropy(self.layer(x), y)

    def validation_step(self, batch, batch_idx):
        self.layer(batch[0])


def test_options_are_those_that_the_user_chose():
    """Not the defaults that Lightning's `log_dict` hands on; an anchor shows its statistics."""
    made = IPULogCallback("*")
    fit(made, module=LogsADict)
    numbers, *logged = made.captured["training_step"].calls
    assert (numbers.call, numbers.value) == ("anchor", "7 of float32 []")
    assert numbers.options.startswith("norm, mean, ")
    assert [call.key for call in logged] == ["mean", "peak"]
    for call in logged:
        assert sorted(call.options.split(", ")) == ["logger=False", "on_epoch=True"]
    (only,) = made.captured["validation_step"].calls
    assert only.options == ""


def test_a_single_statistic_is_told_as_its_number():
    """What travels of an activation of which one statistic is wanted is one number."""
    made = IPULogCallback(activations="layer", reduce_activations="stats", cost_warning=None)
    fit(made, module=Silent)
    (norm,) = made.captured["training_step"].calls
    assert (norm.call, norm.value, norm.options) == ("activation", "float32 []", "norm")


def test_a_step_is_headed_by_what_it_called():
    """One of a thing is told in the singular; a step without calls says so."""
    made = IPULogCallback("*")
    fit(made, module=LogsADict)
    headline = str(made.captured["validation_step"]).splitlines()[0]
    assert headline == (
        "LogsADict.validation_step: 1 call, 4 B per execution in 1 output tensor of 1 result"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer(made).predict(LogsADict(), loader())
    assert str(made.captured["predict_step"]) == "LogsADict.predict_step: no calls"


def test_before_a_run_there_is_nothing_and_it_says_so():
    """An empty summary is readable, and asking it for a step says when there will be one."""
    made = IPULogCallback("*")
    assert str(made.captured) == "nothing captured yet"
    assert repr(made.captured) == "<Captured: nothing yet>"
    assert "nothing captured yet" in made._repr_html_()
    with pytest.raises(UnknownKeyError, match="first execution"):
        made.captured["training_step"]


def test_a_table_aligns_its_columns():
    """Columns start at one place; those marked with `>` end at one."""
    table = Table("t", ("key", ">n"), [("a", "1"), ("long", "100")], "note")
    title, head, first, second, note = str(table).splitlines()
    assert (title, note) == ("t", "    note")
    assert len(head) == len(first) == len(second)
    assert first.index("a") == second.index("long") == head.index("key")
