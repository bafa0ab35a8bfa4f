import subprocess
import sys

import pytest

from ipu_log_callback import IPULogCallback
from ipu_log_callback.errors import MissingExtraError, UnknownKeyError

from .runs import Net, fit, loader, quiet, trainer

pytest.importorskip("matplotlib", reason="the pictures are matplotlib's")


@pytest.fixture(scope="module")
def callback():
    """A callback after a run of 2 x 3 executions of 4 micro-batches."""
    made = IPULogCallback("*", history=True)
    fit(made, iterations=2, accumulation=2)
    return made


def drawn(panel):
    """Label to line."""
    return {line.get_label(): line for line in panel.get_lines() if line.get_label()[0] != "_"}


def test_executions_are_solid_micro_batches_faint_and_validation_hollow(callback):
    """One panel tells the three apart without colour, and the legend names them."""
    panel, *rest = callback.plot("train_loss", "val_loss").axes
    lines = drawn(panel)
    execution = lines["train_loss, training execution"]
    micro_batch = lines["train_loss, training micro-batch"]
    validation = lines["val_loss, validation epoch"]
    assert rest == []
    assert execution.get_linestyle() == "-"
    assert micro_batch.get_linestyle() == "None"
    assert micro_batch.get_alpha() < 0.5
    assert validation.get_markerfacecolor() == "white"
    assert {text.get_text() for text in panel.get_legend().get_texts()} == set(lines)


def test_what_is_drawn_is_the_history(callback):
    """Lines go through the history's values; an execution ends at its global step."""
    lines = drawn(callback.plot("train_loss").axes[0])
    entries = [entry for entry in callback.history["train_loss"] if not entry.is_epoch]
    execution = lines["train_loss, training execution"]
    assert execution.get_xdata().tolist() == [entry.global_step for entry in entries]
    assert execution.get_ydata().tolist() == [entry.value for entry in entries]
    x, y = lines["train_loss, training micro-batch"].get_data()
    assert y.tolist() == [v for entry in entries for v in entry.micro_batches.tolist()]
    assert x.tolist()[:4] == [0.25, 0.5, 0.75, 1.0]


def test_axes_say_what_they_count(callback):
    """Both axes are labelled, the lower one with what an execution holds, the upper with epochs."""
    panel = callback.plot("train_loss").axes[0]
    assert panel.get_xlabel() == "global step (executions, 4 micro-batches each)"
    assert panel.get_ylabel().startswith("train_loss")
    epochs = panel.child_axes[0]
    assert [label.get_text() for label in epochs.get_xticklabels()] == ["0", "1"]


def test_keys_of_different_kinds_have_panels_of_their_own(callback):
    """A loss and an accuracy do not share a scale; two losses do."""
    assert len(callback.plot("train_loss", "val_accuracy").axes) == 2
    assert len(callback.plot("train_loss", "val_loss").axes) == 1
    assert len(callback.plot().axes) == 3


def test_without_training_the_axis_counts_executions():
    """A test run is drawn over its executions, with the epoch's value as a level line."""
    made = IPULogCallback("*", history=True)
    with quiet():
        trainer(made, iterations=2).test(Net(), loader(3, 2), verbose=False)
    panel = made.plot("test_loss").axes[0]
    assert panel.get_xlabel() == "execution (count, 2 micro-batches each)"
    assert drawn(panel)["test_loss, test execution"].get_xdata().tolist() == [1, 2, 3]
    assert "test_loss, test epoch" in drawn(panel)


def test_a_notebook_shows_it_and_a_file_holds_it(callback, tmp_path):
    """The figure shows itself as a PNG, and `savefig` writes one; `pyplot` has no part in it."""
    figure = callback.plot("train_loss")
    assert figure._repr_png_().startswith(b"\x89PNG")
    figure.savefig(tmp_path / "loss.png")
    assert (tmp_path / "loss.png").stat().st_size > 0


def test_an_unknown_key_and_an_empty_history_are_errors(callback):
    """A key that was not logged, and a history that holds nothing, say what to do."""
    with pytest.raises(UnknownKeyError, match="val_accuracy"):
        callback.plot("val_acuracy")
    with pytest.raises(UnknownKeyError, match="history=True"):
        IPULogCallback("*").plot()


def test_no_matplotlib_is_an_error_that_names_the_extra(callback, monkeypatch):
    """Without matplotlib, `plot` says what to install."""
    monkeypatch.setitem(sys.modules, "matplotlib.axes", None)
    monkeypatch.delitem(sys.modules, "ipu_log_callback.plot", raising=False)
    with pytest.raises(MissingExtraError, match=r"pip install 'ipu-log-callback\[plot\]'"):
        callback.plot("train_loss")


def test_importing_the_package_does_not_import_what_draws():
    """What needs matplotlib is imported when a picture is asked for."""
    # not matplotlib itself: torchmetrics imports that where it finds it
    probe = "import sys, ipu_log_callback; sys.exit('ipu_log_callback.plot' in sys.modules)"
    ran = subprocess.run([sys.executable, "-W", "ignore", "-c", probe], check=False)
    assert ran.returncode == 0


def test_what_is_logged_of_every_parameter_shares_a_panel():
    """Norms of the parameters' gradients are drawn together, each in a colour of its own."""
    made = IPULogCallback("*", gradients="*", history=True)
    fit(made)
    norms = [key for key in made.history if key.startswith("grad/layer")]
    (panel,) = made.plot(*norms).axes
    lines = drawn(panel)
    assert set(lines) == {f"{key}, training execution" for key in norms}
    assert len({line.get_color() for line in lines.values()}) == len(norms) == 2
