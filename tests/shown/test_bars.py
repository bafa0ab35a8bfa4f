import io
import re

import pytest

from ipu_log_callback import IPULogCallback

from .runs import fit, pl

BARS = pl.callbacks
SHOWN = re.compile(r"(\w+)(?:=|: )(-?\d+(?:\.\d+)?(?:e-?\d+)?)")


class Tqdm:
    """TQDM's bar: what it shows is its line as it would be printed now."""

    def __init__(self, refresh_rate):
        self.bar = BARS.TQDMProgressBar(refresh_rate=refresh_rate)

    def line(self):
        # Lightning 1 calls it the main bar
        bar = getattr(self.bar, "train_progress_bar", None) or self.bar.main_progress_bar
        return str(bar)


class Rich:
    """Rich's bar: what it shows is the last that it printed."""

    def __init__(self, refresh_rate):
        pytest.importorskip("rich", reason="RichProgressBar needs it")
        self.file = io.StringIO()
        console = {"file": self.file, "force_terminal": True, "width": 250}
        self.bar = BARS.RichProgressBar(refresh_rate=refresh_rate, console_kwargs=console)

    def line(self):
        text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.file.getvalue())
        return text[text.rindex("Epoch") :]


def shown(callback, kind, refresh_rate, **options):
    """What the bar shows at the end of every batch of training: the step, and key to value."""
    shows = kind(refresh_rate)
    found = []

    class Looks(pl.Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx, *_):
            if (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
                # of what stands there twice, the last is the newest
                values = {key: float(text) for key, text in SHOWN.findall(shows.line())}
                known = {k: v for k, v in values.items() if k.startswith(("train_", "val_"))}
                found.append((trainer.global_step, known))

    fit(callback, enable_progress_bar=True, callbacks=[shows.bar, Looks()], **options)
    return found


@pytest.fixture(autouse=True)
def _console_put_back():
    """The Rich bar reconfigures the console of the whole process."""
    yield
    try:
        import rich
    except ImportError:
        return
    rich.reconfigure()


@pytest.mark.parametrize("refresh_rate", [1, 2, 3])
@pytest.mark.parametrize("kind", [Tqdm, Rich])
def test_a_bar_shows_what_it_shows_in_a_cpu_run(kind, refresh_rate, capsys):
    """At every step, whatever the refresh rate, the bar has the CPU run's keys and values."""
    ipu = shown(IPULogCallback("*"), kind, refresh_rate)
    cpu = shown(None, kind, refresh_rate)
    assert {"train_loss_step", "train_loss_epoch", "val_loss"} <= set(ipu[-1][1])
    assert len(ipu) == 6
    for (ipu_step, of_ipu), (cpu_step, of_cpu) in zip(ipu, cpu):
        assert ipu_step == cpu_step
        assert of_ipu == pytest.approx(of_cpu, abs=2e-3)


@pytest.mark.parametrize("kind", [Tqdm, Rich])
def test_an_on_step_value_stands_for_an_execution(kind, capsys):
    """With several micro-batches, the bar has the execution's value; epoch values are the CPU's."""
    callback = IPULogCallback("*", history=True)
    ipu = shown(callback, kind, 1, accumulation=2)
    cpu = shown(None, kind, 1, accumulation=2)
    values = [e.value for e in callback.history["train_loss"] if not e.is_epoch]
    assert [found["train_loss_step"] for _, found in ipu] == pytest.approx(values, abs=1e-2)
    for key in ("train_loss_epoch", "val_loss"):
        assert ipu[-1][1][key] == pytest.approx(cpu[-1][1][key], abs=1e-2)
