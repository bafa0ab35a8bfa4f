"""Whatever reads metrics decides on the IPU what it decides on the CPU, at the same moment."""

import itertools

import pytest
import torch

from .bench import ONE_TO_ONE, Net, Setting, check_parity, pl

LEVELS = {"on_step": True, "on_epoch": True}
FLAT = Setting(iterations=1, accumulation=2, replicas=2, executions=3)


class Monitored(Net):
    """Logs every kind of key that a monitor can name."""

    def logs(self, stage, x, loss):
        self.log(f"{stage}_step_only", loss, on_step=True, on_epoch=False)
        self.log(f"{stage}_epoch_only", loss, on_step=False, on_epoch=True)
        self.log(f"{stage}_forked", loss, prog_bar=True, **LEVELS)
        self.log(f"{stage}_max", x.amax(), reduce_fx="max", on_step=False, on_epoch=True)


KEYS = [
    "train_epoch_only", "train_forked", "train_forked_epoch", "train_forked_step",
    "train_step_only", "train_max", "val_epoch_only", "val_forked", "val_forked_epoch", "val_max",
]  # fmt: skip


def epochs(count=4, **options):
    """A fit of that many epochs."""
    return lambda run: run.trainer(max_epochs=count, **options).fit(
        run.module, run.loader(), run.loader(seed=1)
    )


def callback_of(run, kind):
    """The callback of a kind that the last trainer had."""
    return next(c for c in run.trainers[-1].callbacks if isinstance(c, kind))


@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize("key", [key for key in KEYS if "step" not in key])
def test_early_stopping_stops_in_the_same_epoch(key, mode):
    """The epoch that it stops in, its best score and its patience are the CPU run's."""
    stopping = pl.callbacks.EarlyStopping

    def state(run):
        found = callback_of(run, stopping)
        return (
            found.stopped_epoch,
            found.best_score,
            found.wait_count,
            run.trainers[-1].current_epoch,
        )

    check_parity(
        Monitored,
        epochs(5),
        FLAT,
        callbacks=lambda: [stopping(monitor=key, mode=mode, patience=1)],
        state=state,
    )


def test_early_stopping_on_the_training_epoch():
    """`check_on_train_epoch_end` reads the epoch's training value."""
    stopping = pl.callbacks.EarlyStopping
    check_parity(
        Monitored,
        epochs(5),
        callbacks=lambda: [
            stopping("train_forked", mode="max", patience=0, check_on_train_epoch_end=True)
        ],
        state=lambda run: callback_of(run, stopping).stopped_epoch,
    )


def checkpoints(run):
    """What a `ModelCheckpoint` decided; names without the side's directory."""
    found = callback_of(run, pl.callbacks.ModelCheckpoint)
    name = lambda path: str(path).rsplit("/", 1)[-1]  # noqa: E731
    return {
        "best": name(found.best_model_path),
        "score": found.best_model_score,
        "kept": {name(path): score for path, score in found.best_k_models.items()},
        "last": name(found.last_model_path),
    }


@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize("key", KEYS)
def test_model_checkpoint_keeps_the_same_epochs(key, mode, tmp_path):
    """Which files it keeps, their names with the metric in them, and their scores."""

    def program(run):
        saving = pl.callbacks.ModelCheckpoint(
            tmp_path / str(run.ipu),
            filename="{epoch}-{step}-{" + key + ":.3f}",
            monitor=key,
            mode=mode,
            save_top_k=2,
            save_last=True,
        )
        trainer = run.trainer(max_epochs=4, callbacks=[saving], enable_checkpointing=True)
        trainer.fit(run.module, run.loader(), run.loader(seed=1))

    # with a step-only key the CPU's last micro-batch would decide: one micro-batch an execution
    setting = ONE_TO_ONE if "step" in key else FLAT
    check_parity(Monitored, program, setting, state=checkpoints)


def test_model_checkpoint_every_n_train_steps_reads_the_executions_value(tmp_path):
    """A checkpoint in the middle of an epoch is named and judged by this execution's value."""

    def program(run):
        saving = pl.callbacks.ModelCheckpoint(
            tmp_path / str(run.ipu),
            filename="{step}-{train_step_only:.4f}",
            monitor="train_step_only",
            save_top_k=3,
            every_n_train_steps=1,
        )
        trainer = run.trainer(max_epochs=2, callbacks=[saving], enable_checkpointing=True)
        trainer.fit(run.module, run.loader(), run.loader())

    check_parity(Monitored, program, ONE_TO_ONE, state=checkpoints)


def test_a_monitor_whose_key_is_missing_fails_as_on_the_cpu():
    """A key that is not selected is missing for monitors, and their own error says so."""
    with pytest.raises(Exception, match="val_epoch_only"):
        check_parity(
            Monitored,
            epochs(1),
            Setting(keys=["train_*"]),
            callbacks=lambda: [pl.callbacks.EarlyStopping("val_epoch_only")],
        )


class Scheduled(Monitored):
    """Has a scheduler."""

    def __init__(self, make, **config):
        super().__init__()
        self.make, self.config = make, config

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": self.make(optimizer), **self.config},
        }


def rate(run):
    """The learning rate at the end."""
    return run.trainers[-1].optimizers[0].param_groups[0]["lr"]


def plateau(optimizer):
    """A scheduler that watches a key."""
    return torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimizer, patience=0, factor=0.5, threshold=0.5
    )


@pytest.mark.parametrize("key", KEYS)
def test_reduce_on_plateau_reads_the_same_values(key):
    """The learning rate is reduced in the same epochs, and the weights follow."""
    setting = ONE_TO_ONE if "step" in key else FLAT
    check_parity(
        lambda: Scheduled(plateau, monitor=key), epochs(5), setting, state=rate, tolerance=1e-4
    )


@pytest.mark.parametrize("key", ["train_step_only", "train_forked", "train_forked_step"])
def test_reduce_on_plateau_on_every_step_is_never_late(key):
    """With `interval="step"` the scheduler reads this execution's value, not the last one's."""
    check_parity(
        lambda: Scheduled(plateau, monitor=key, interval="step"), epochs(2), ONE_TO_ONE, state=rate
    )


@pytest.mark.parametrize("interval", ["step", "epoch"])
def test_step_schedulers_advance_once_an_execution(interval):
    """A scheduler that reads no metric steps as the trainer counts."""
    check_parity(
        lambda: Scheduled(
            lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.7),
            interval=interval,
        ),
        epochs(3),
        FLAT,
        state=rate,
    )


class OwnSchedule(Scheduled):
    """Steps its scheduler by what `callback_metrics` says, as Lightning lets a module do."""

    def lr_scheduler_step(self, scheduler, *args):
        self.read.append(float(self.trainer.callback_metrics["train_forked"]))
        scheduler.step()

    read: list


def test_a_modules_own_scheduler_step_reads_the_current_values():
    """`lr_scheduler_step` runs before the batch ends, and sees what the step has logged."""

    def make():
        module = OwnSchedule(
            lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1), interval="step"
        )
        module.read = []
        return module

    check_parity(make, epochs(2), ONE_TO_ONE, state=lambda run: run.module.read)


HOOKS = [
    "on_before_backward", "on_after_backward", "on_before_optimizer_step", "on_before_zero_grad",
    "on_train_batch_end", "on_validation_batch_end", "on_validation_epoch_end",
    "on_train_epoch_end", "on_validation_end", "on_train_end",
]  # fmt: skip


class ReadsInHooks(pl.Callback):
    """Reads metrics in every hook that the trainer calls after a step."""

    def __init__(self):
        self.read = []


def _reading(hook):
    def read(self, trainer, *_):
        views = (trainer.callback_metrics, trainer.logged_metrics)
        self.read.append((hook, *({k: float(v) for k, v in view.items()} for view in views)))

    return read


for _hook in HOOKS:
    setattr(ReadsInHooks, _hook, _reading(_hook))


def test_every_hook_after_a_step_sees_what_the_step_logged():
    """A hook that both sides call reads the same metrics on both."""

    def state(run):
        found = callback_of(run, ReadsInHooks).read
        return [entry for entry in found if entry[0] not in OFF_THE_IPU]

    check_parity(Monitored, epochs(2), ONE_TO_ONE, callbacks=lambda: [ReadsInHooks()], state=state)


# backward and zero_grad happen on the device: the strategy calls no hooks around them
OFF_THE_IPU = {"on_before_backward", "on_after_backward", "on_before_zero_grad"}


class ReadsInStepHooks(pl.Callback):
    """Keeps `callback_metrics` of a batch-end hook."""

    def __init__(self, number):
        self.number = number
        self.read = []

    def on_train_batch_end(self, trainer, *_):
        self.read.append({k: float(v) for k, v in trainer.callback_metrics.items()})

    @property
    def state_key(self):
        return f"reads{self.number}"


@pytest.mark.parametrize("order", list(itertools.permutations(range(3)))[::2], ids=str)
def test_callbacks_read_the_same_in_any_order(order):
    """No callback is a batch late, wherever it stands in the list."""

    def state(run):
        found = [c for c in run.trainers[-1].callbacks if isinstance(c, ReadsInStepHooks)]
        return [callback.read for callback in found]

    check_parity(
        Monitored,
        epochs(1),
        ONE_TO_ONE,
        callbacks=lambda: [ReadsInStepHooks(number) for number in order],
        state=state,
    )


@pytest.mark.parametrize("interval", ["step", "epoch", None])
def test_the_learning_rate_monitor_logs_the_same_rows(interval):
    """`LearningRateMonitor` writes its own rows beside those of the steps."""
    check_parity(
        lambda: Scheduled(lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1)),
        epochs(3),
        ONE_TO_ONE,
        callbacks=lambda: [pl.callbacks.LearningRateMonitor(interval)],
    )


class KeepsBar(pl.callbacks.TQDMProgressBar):
    """A TQDM bar that keeps what it shows."""

    def __init__(self, **options):
        super().__init__(**options)
        self.shown = []

    def get_metrics(self, trainer, pl_module):
        items = super().get_metrics(trainer, pl_module)
        items.pop("v_num", None)
        self.shown.append({k: float(v) for k, v in items.items()})
        return items


@pytest.mark.parametrize("refresh_rate", [1, 2, 5])
def test_the_tqdm_bar_shows_the_same_numbers(refresh_rate, capsys):
    """Whenever the bar is refreshed it shows this execution's values."""
    check_parity(
        Monitored,
        epochs(2, enable_progress_bar=True),
        ONE_TO_ONE,
        callbacks=lambda: [KeepsBar(refresh_rate=refresh_rate)],
        state=lambda run: callback_of(run, KeepsBar).shown,
        tolerance=1e-2,
    )


class KeepsRich(pl.callbacks.RichProgressBar):
    """A Rich bar that keeps what it shows."""

    def __init__(self, **options):
        super().__init__(**options)
        self.shown = []

    def get_metrics(self, trainer, pl_module):
        items = super().get_metrics(trainer, pl_module)
        items.pop("v_num", None)
        self.shown.append({k: float(v) for k, v in items.items()})
        return items


@pytest.mark.parametrize("refresh_rate", [1, 3])
def test_the_rich_bar_shows_the_same_numbers(refresh_rate, capsys):
    """The same for the bar of `rich`."""
    pytest.importorskip("rich")
    check_parity(
        Monitored,
        epochs(2, enable_progress_bar=True),
        ONE_TO_ONE,
        callbacks=lambda: [KeepsRich(refresh_rate=refresh_rate)],
        state=lambda run: callback_of(run, KeepsRich).shown,
        tolerance=1e-2,
    )
