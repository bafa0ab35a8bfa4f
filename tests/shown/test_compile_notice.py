import io
import logging
import re

import pytest
import torch

from ipu_log_callback import IPULogCallback

from .runs import Net, fit, loader, pl, quiet, trainer

BARS = pl.callbacks
LOGGERS = ("pytorch_lightning", "lightning.pytorch", "lightning_fabric", "lightning.fabric")


class Watching(Net):
    """Reads the bar's description while its steps are compiled, when their Python runs."""

    def __init__(self, description):
        super().__init__()
        self.description = description
        self.read = []

    def look(self, step):
        self.read.append((step, self.description(self.trainer)))

    def training_step(self, batch, batch_idx):
        self.look("training_step")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self.look("validation_step")
        return super().validation_step(batch, batch_idx)

    def test_step(self, batch, batch_idx):
        self.look("test_step")
        return super().test_step(batch, batch_idx)


def tqdm_descriptions(trainer):
    """Descriptions of the bars that are shown now."""
    bar = trainer.progress_bar_callback
    bars = [v for v in vars(bar).values() if hasattr(v, "set_description") and not v.disable]
    return [tqdm.desc for tqdm in bars]


def rich_descriptions(trainer):
    """Descriptions of the tasks that are shown now, without their styles."""
    tasks = trainer.progress_bar_callback.progress.tasks
    return [re.sub(r"\[.*?\]", "", task.description) for task in tasks if task.visible]


def rich_bar():
    """A Rich bar on a terminal of its own."""
    pytest.importorskip("rich", reason="RichProgressBar needs it")
    console = {"file": io.StringIO(), "force_terminal": True, "width": 200}
    return BARS.RichProgressBar(console_kwargs=console)


@pytest.fixture(autouse=True)
def _console_put_back():
    """The Rich bar reconfigures the console of the whole process."""
    yield
    try:
        import rich
    except ImportError:
        return
    rich.reconfigure()


@pytest.fixture(
    params=[(BARS.TQDMProgressBar, tqdm_descriptions), (rich_bar, rich_descriptions)],
    ids=["tqdm", "rich"],
)
def bar(request):
    """A bar, and what reads its descriptions."""
    make, descriptions = request.param
    return make(), descriptions


def test_the_bar_says_which_step_is_compiled_and_then_its_own_again(bar, capsys):
    """While a step's Python runs, the visible bar's description names it; afterwards it is back."""
    shown, descriptions = bar
    after = []

    class Reads(pl.Callback):
        def on_train_batch_end(self, trainer, *_, **__):
            after.extend(descriptions(trainer))

    module = Watching(descriptions)
    callback = IPULogCallback("*")
    made = trainer(callback, enable_progress_bar=True, callbacks=[shown, Reads()], max_epochs=1)
    with quiet():
        made.fit(module, loader(), loader(2))
        made.test(module, loader(2), verbose=False)
    assert [step for step, _ in module.read] == ["validation_step", "training_step", "test_step"]
    for step, read in module.read:
        assert any(text.rstrip(": ").endswith(f", compiling {step}") for text in read), read
    assert any(text.startswith("Epoch 0") for text in after)
    assert not any("compiling" in text for text in after)


class Lines(logging.Handler):
    """Keeps the lines about compiling."""

    def __init__(self):
        super().__init__(logging.INFO)
        self.lines = []

    def emit(self, record):
        if "ompil" in record.getMessage():
            self.lines.append(record.getMessage())


@pytest.fixture
def lines():
    """What Lightning's loggers, which pass nothing on in some versions, say about compiling."""
    handler = Lines()
    loggers = [logging.getLogger(name) for name in LOGGERS]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
    yield handler.lines
    for logger, level in zip(loggers, levels):
        logger.removeHandler(handler)
        logger.setLevel(level)


def test_the_log_says_it_in_two_lines(lines):
    """Before: which step is compiled, and that it can take long. After: how long it took."""
    fit(IPULogCallback("*"))
    assert [line.split()[:2] for line in lines] == [
        ["Compiling", "`Net.validation_step`"],
        ["Compiled", "`Net.validation_step`"],
        ["Compiling", "`Net.training_step`"],
        ["Compiled", "`Net.training_step`"],
    ]
    assert re.search(r"in \d+\.\d s\.$", lines[-1])


@pytest.mark.parametrize("refresh_rate", [0, 5])
def test_a_bar_that_draws_nothing_or_little_does_not_matter(refresh_rate, capsys):
    """A disabled bar and one that is drawn rarely are left alone."""
    fit(
        IPULogCallback("*"),
        enable_progress_bar=True,
        callbacks=[BARS.TQDMProgressBar(refresh_rate=refresh_rate)],
    )


def test_a_broken_bar_of_the_users_breaks_nothing():
    """Whatever a bar does when it is asked to show something, training goes on."""
    bases = BARS.ProgressBar if hasattr(BARS, "ProgressBar") else BARS.ProgressBarBase

    class Broken(bases):
        is_enabled = True

        @property
        def progress(self):
            raise RuntimeError("no")

        def disable(self):
            pass

        def enable(self):
            pass

    ran = fit(IPULogCallback("*"), enable_progress_bar=True, callbacks=[Broken()])
    assert "train_loss" in ran.callback_metrics


def test_a_failed_compilation_gives_the_description_back(capsys):
    """After an error in the step, the bar has its own description."""
    shown = BARS.TQDMProgressBar()

    class Fails(Net):
        def training_step(self, batch, batch_idx):
            raise ValueError("in the step")

    with pytest.raises(ValueError, match="in the step"):
        fit(IPULogCallback("*"), module=Fails, enable_progress_bar=True, callbacks=[shown])
    attributes = [v for v in vars(shown).values() if hasattr(v, "set_description")]
    assert not any("compiling" in (tqdm.desc or "") for tqdm in attributes if not tqdm.disable)


def test_module_is_not_touched():
    """The notice only shows: values are those of a run without a bar."""
    with_bar, without = IPULogCallback("*", history=True), IPULogCallback("*", history=True)
    fit(with_bar, enable_progress_bar=True, callbacks=[BARS.TQDMProgressBar(refresh_rate=2)])
    fit(without)
    values = [
        torch.tensor([entry.value for entry in made.history["train_loss"]])
        for made in (with_bar, without)
    ]
    assert torch.equal(*values)
