import contextlib
import copy
import pickle
import sys

import pytest
import torch

from ipu_log_callback import IPULogCallback, IPULogError
from ipu_log_callback.errors import KeySelectionError, MissingExtraError, UnknownKeyError
from ipu_log_callback.history import History

from .runs import Net, fit, loader, pl, quiet, trainer


class MicroBatches(pl.Callback):
    """Keeps a key's value after every batch of a CPU run."""

    def __init__(self, key):
        self.key = key
        self.values = []

    def on_train_batch_end(self, trainer, *_, **__):
        self.values.append(float(trainer.callback_metrics[self.key]))


def kept(**options):
    """The history of one fit."""
    callback = IPULogCallback("*", history=True)
    fit(callback, **options)
    return callback.history


def executions(entries):
    """The entries of single executions."""
    return [entry for entry in entries if not entry.is_epoch]


def test_micro_batch_values_are_those_of_a_cpu_run():
    """The history holds, execution by execution, what a CPU run logs batch by batch."""
    cpu = MicroBatches("train_loss_step")
    fit(None, accumulation=2, executions=3, callbacks=[cpu])
    history = kept(accumulation=2, executions=3)
    entries = executions(history["train_loss"])
    values = torch.cat([entry.micro_batches for entry in entries])
    torch.testing.assert_close(values, torch.tensor(cpu.values))
    assert [entry.execution for entry in entries] == list(range(6))


@pytest.mark.parametrize(
    ("key", "reduced"), [("train_loss", torch.mean), ("train_peak", torch.max)]
)
def test_an_executions_value_is_its_micro_batches_reduced(key, reduced):
    """An entry's value is the call's own `reduce_fx` over its micro-batch values."""
    entries = executions(kept(iterations=3, accumulation=2)[key])
    assert [len(entry.micro_batches) for entry in entries] == [6] * 6
    for entry in entries:
        assert entry.value == pytest.approx(float(reduced(entry.micro_batches)))


def test_entries_say_when():
    """An entry has the trainer's epoch and global step, as hooks see them after the execution."""
    entries = executions(kept()["train_loss"])
    assert [(e.epoch, e.global_step) for e in entries] == [
        (0, 1), (0, 2), (0, 3), (1, 4), (1, 5), (1, 6),
    ]  # fmt: skip
    assert {e.step for e in entries} == {"training_step"}


def test_epoch_values_are_those_that_lightning_reports():
    """What is logged `on_epoch` has one more entry an epoch, with Lightning's own value."""
    callback = IPULogCallback("*", history=True)
    ran = fit(callback, iterations=2)
    for key, reported in (
        ("train_loss", "train_loss_epoch"),
        ("val_loss", "val_loss"),
        ("val_accuracy", "val_accuracy"),
    ):
        epochs = [entry for entry in callback.history[key] if entry.is_epoch]
        assert [(entry.epoch, entry.global_step) for entry in epochs] == [(0, 3), (1, 6)]
        assert epochs[-1].value == float(ran.callback_metrics[reported])


def test_the_sanity_check_leaves_nothing():
    """As in loggers, the first validation executions of a run are those of its first epoch."""
    entries = executions(kept(num_sanity_val_steps=2)["val_loss"])
    assert entries[0].global_step == 3


def test_several_loaders_have_the_loggers_names():
    """With two validation loaders, keys have Lightning's suffix."""
    callback = IPULogCallback("*", history=True)
    made = trainer(callback, max_epochs=1)
    with quiet():
        made.fit(Net(), loader(), [loader(2), loader(3, seed=1)])
    losses = {name: found for name, found in callback.history.items() if "val_loss" in name}
    assert {name: len(entries) for name, entries in losses.items()} == {
        "val_loss/dataloader_idx_0": 3,
        "val_loss/dataloader_idx_1": 4,
    }


def test_memory_is_bounded():
    """`history=n` keeps the last n executions of each step, and says which they are."""
    callback = IPULogCallback("*", history=2)
    fit(callback)
    assert [entry.execution for entry in executions(callback.history["train_loss"])] == [4, 5]
    assert len(callback.history["val_accuracy"]) == 2


def test_off_keeps_nothing():
    """Without `history=` nothing is kept, and asking for a key says what to type."""
    callback = IPULogCallback("*")
    fit(callback)
    assert len(callback.history) == 0
    with pytest.raises(UnknownKeyError) as caught:
        callback.history["train_loss"]
    assert "history=True" in str(caught.value)


def test_an_interrupt_leaves_what_was_replayed():
    """After Ctrl-C in the middle of an epoch the history ends with the last execution."""

    class Interrupts(pl.Callback):
        def on_train_batch_end(self, trainer, *_, **__):
            if trainer.global_step == 4:
                raise KeyboardInterrupt

    callback = IPULogCallback("*", history=True)
    with contextlib.suppress(KeyboardInterrupt):  # newer versions raise it again
        fit(callback, callbacks=[Interrupts()])
    steps = [entry.global_step for entry in executions(callback.history["train_loss"])]
    assert steps == [1, 2, 3, 4]
    assert "train_loss" in callback.captured["training_step"].table()._repr_html_()


def test_readable_while_training_runs():
    """A callback of the user's finds the execution that has just ended."""
    seen = []
    callback = IPULogCallback("*", history=True)

    class Looks(pl.Callback):
        def on_train_batch_end(self, *_, **__):
            seen.append(callback.history["train_loss"][-1].execution)

        def on_validation_end(self, *_, **__):
            if callback.history:
                seen.append(f"{callback.history['val_accuracy'][-1].epoch}")

    fit(callback, callbacks=[Looks()], num_sanity_val_steps=0)
    assert seen == [0, 1, 2, "0", 3, 4, 5, "1"]


def test_the_next_fit_starts_anew_and_a_continued_one_goes_on():
    """A fit from global step 0 forgets the last one's; one that goes on is appended to it."""
    callback = IPULogCallback("*", history=True)
    fit(callback)
    made = trainer(callback, max_epochs=1)
    module = Net()
    with quiet():
        made.fit(module, loader(), loader(2, seed=1))
    steps = [entry.global_step for entry in executions(callback.history["train_loss"])]
    assert steps == [1, 2, 3]
    made.fit_loop.max_epochs = 2
    with quiet():
        made.fit(module, loader(), loader(2, seed=1))
    entries = executions(callback.history["train_loss"])
    assert [entry.global_step for entry in entries] == [1, 2, 3, 4, 5, 6]
    with quiet():
        made.test(module, loader(2), verbose=False)
    assert "train_loss" in callback.history
    assert "test_loss" in callback.history


def test_an_unknown_key_names_its_nearest():
    """A misspelt key is a KeyError that says which keys there are."""
    with pytest.raises(KeyError) as caught:
        kept()["trian_loss"]
    assert isinstance(caught.value, IPULogError)
    first, *rows = str(caught.value).splitlines()
    assert "'trian_loss'" in first
    assert any("nearest" in row and "'train_loss'" in row for row in rows)


def test_pandas_has_a_row_for_every_entry():
    """`to_pandas()` holds what the mapping holds, and micro-batches when asked."""
    pytest.importorskip("pandas", reason="the table view is pandas'")
    history = kept(iterations=2)
    table = history.to_pandas()
    assert len(table) == sum(len(entries) for entries in history.values())
    loss = table[(table.key == "train_loss") & table.execution.notna()]
    assert loss.value.tolist() == [e.value for e in executions(history["train_loss"])]
    single = history.to_pandas(micro_batches=True)
    grouped = single[single.key == "train_loss"].groupby("execution").value.mean()
    assert grouped.tolist() == pytest.approx(loss.value.tolist())


def test_no_pandas_is_an_error_that_names_the_extra(monkeypatch):
    """Without pandas, `to_pandas()` says what to install; the rest works."""
    history = kept()
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'ipu-log-callback\[notebook\]'"):
        history.to_pandas()
    assert "train_loss" in str(history)


def test_the_table_counts():
    """`print(callback.history)` tells executions, micro-batches and epochs of each key."""
    rows = {line.split()[0]: line.split()[1:] for line in str(kept(iterations=2)).splitlines()}
    assert rows["train_loss"][:4] == ["training_step", "6", "12", "2"]
    assert rows["val_accuracy"][:4] == ["validation_step", "0", "0", "2"]


@pytest.mark.parametrize("value", [-1, "yes", 2.5, None])
def test_a_wrong_argument_is_refused(value):
    """`history=` takes a bool or a count, and says so in the constructor."""
    with pytest.raises(KeySelectionError, match="a bool or how many executions"):
        IPULogCallback("*", history=value)


def test_it_survives_a_copy_and_a_pickle():
    """A copied or pickled callback has its history with it."""
    callback = IPULogCallback("*", history=True)
    fit(callback)
    for other in (copy.deepcopy(callback), pickle.loads(pickle.dumps(callback))):  # noqa: S301
        assert str(other.history) == str(callback.history)
        assert str(other.captured) == str(callback.captured)


def test_repr_says_what_is_there():
    """`repr` tells off, empty and filled apart."""
    assert repr(History()) == "<History: off>"
    assert repr(History(5)) == "<History: nothing yet>"
    assert "6 of training_step" in repr(kept())
