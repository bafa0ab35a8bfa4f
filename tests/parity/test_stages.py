"""Every way through the trainer logs what a CPU run logs."""

import pytest
import torch

from .bench import (
    ONE_TO_ONE,
    Net,
    Setting,
    check_parity,
    fit,
    observe,
    pl,
    test_only,
    validate_only,
)

LEVELS = {"on_step": True, "on_epoch": True}


class Logs(Net):
    """The loss on both levels and in the progress bar, and a sum, in every step."""

    def logs(self, stage, x, loss):
        self.log(f"{stage}_loss", loss, prog_bar=True, **LEVELS)
        self.log(f"{stage}_sum", x.sum(), reduce_fx="sum", on_epoch=True)

    def predict_step(self, batch, batch_idx):
        return self(batch[0])


def sanity_check(run):
    """A fit that starts with a sanity check."""
    run.trainer(num_sanity_val_steps=run.batches(1, training=False)).fit(
        run.module, run.loader(), run.loader()
    )


def sanity_check_of_everything(run):
    """The whole validation as sanity check."""
    run.trainer(num_sanity_val_steps=-1).fit(run.module, run.loader(), run.loader())


def without_validation(run):
    """A fit that has no validation loader."""
    run.trainer(max_epochs=2).fit(run.module, run.loader())


def validation_every_n_batches(run):
    """A validation after every execution."""
    run.trainer(val_check_interval=run.batches(1)).fit(run.module, run.loader(), run.loader())


def validation_twice_an_epoch(run):
    """A validation at every half of the epoch."""
    run.trainer(val_check_interval=0.5).fit(run.module, run.loader(), run.loader())


def validation_every_second_epoch(run):
    """A validation every other epoch."""
    run.trainer(max_epochs=4, check_val_every_n_epoch=2).fit(run.module, run.loader(), run.loader())


def several_epochs(run):
    """More epochs than anything else needs."""
    run.trainer(max_epochs=5).fit(run.module, run.loader(), run.loader())


def fit_twice(run):
    """Two fits of one trainer."""
    trainer = run.trainer()
    trainer.fit(run.module, run.loader(), run.loader())
    trainer.fit_loop.max_epochs = 2
    trainer.fit(run.module, run.loader(seed=1), run.loader())


def fit_by_two_trainers(run):
    """Two trainers, one after the other."""
    run.trainer().fit(run.module, run.loader(), run.loader())
    run.trainer().fit(run.module, run.loader(seed=1), run.loader())


def fit_then_validate_then_test(run):
    """All of it on one trainer."""
    trainer = run.trainer()
    trainer.fit(run.module, run.loader(), run.loader())
    run.results += trainer.validate(run.module, run.loader(seed=1), verbose=False)
    run.results += trainer.test(run.module, run.loader(seed=2), verbose=False)


def validate_then_fit(run):
    """A baseline before the training."""
    trainer = run.trainer()
    run.results += trainer.validate(run.module, run.loader(), verbose=False)
    trainer.fit(run.module, run.loader(), run.loader())


def validate_twice(run):
    """The same validation again, and one of another data set."""
    trainer = run.trainer()
    run.results += trainer.validate(run.module, run.loader(), verbose=False)
    run.results += trainer.validate(run.module, run.loader(), verbose=False)
    run.results += trainer.validate(run.module, run.loader(seed=1), verbose=False)


def fast_dev_run(run):
    """One execution of everything."""
    run.trainer(fast_dev_run=run.batches(1)).fit(run.module, run.loader(), run.loader())


def limited(run):
    """Fewer executions than the loaders have."""
    run.trainer(
        max_epochs=2,
        limit_train_batches=run.batches(1),
        limit_val_batches=run.batches(1, training=False),
    ).fit(run.module, run.loader(), run.loader())


def limited_by_share(run):
    """Half of each loader."""
    run.trainer(limit_train_batches=0.5, limit_val_batches=0.5).fit(
        run.module, run.loader(), run.loader()
    )


def limited_test(run):
    """Half of the test's loader."""
    run.results += run.trainer(limit_test_batches=0.5).test(run.module, run.loader(), verbose=False)


def no_validation_batches(run):
    """`limit_val_batches=0` switches validation off."""
    run.trainer(limit_val_batches=0).fit(run.module, run.loader(), run.loader())


def max_steps(run):
    """A run that ends within its second epoch."""
    run.trainer(max_epochs=-1, max_steps=run.updates(3)).fit(run.module, run.loader(), run.loader())


def no_logger(run):
    """`logger=False`: callbacks still get everything."""
    run.trainer(max_epochs=2, logger=False).fit(run.module, run.loader(), run.loader())


def loaders_of_the_module(run):
    """Loaders that the module's own methods make."""
    run.module.train_dataloader = run.loader
    run.module.val_dataloader = run.loader
    run.trainer().fit(run.module)


def loaders_of_a_data_module(run):
    """Loaders of a `LightningDataModule`."""

    class Data(pl.LightningDataModule):
        def train_dataloader(self):
            return run.loader()

        def val_dataloader(self):
            return [run.loader(), run.loader(part=0.5)]

        def test_dataloader(self):
            return run.loader(seed=1)

    trainer = run.trainer()
    run.module.__class__ = LogsWithLoader
    trainer.fit(run.module, datamodule=Data())
    run.results += trainer.test(run.module, datamodule=Data(), verbose=False)


class LogsWithLoader(Logs):
    """The same for several validation loaders."""

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        return super().validation_step(batch, batch_idx)


PROGRAMS = [
    fit,
    validate_only,
    test_only,
    sanity_check,
    sanity_check_of_everything,
    without_validation,
    validation_every_n_batches,
    validation_twice_an_epoch,
    validation_every_second_epoch,
    several_epochs,
    fit_twice,
    fit_by_two_trainers,
    fit_then_validate_then_test,
    validate_then_fit,
    validate_twice,
    fast_dev_run,
    limited,
    limited_by_share,
    limited_test,
    no_validation_batches,
    max_steps,
    no_logger,
    loaders_of_the_module,
    loaders_of_a_data_module,
]


@pytest.mark.parametrize("setting", [Setting(), ONE_TO_ONE], ids=["several", "one"])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_a_program_logs_what_it_logs_on_the_cpu(program, setting):
    """Rows, metrics, results and weights are those of the CPU run, whatever the program does."""
    if program is fast_dev_run:
        setting = Setting(accumulation=1)
    if program in (validation_twice_an_epoch, limited_by_share) and setting is ONE_TO_ONE:
        setting = Setting(iterations=1, accumulation=1, executions=4)
    check_parity(Logs, program, setting)


@pytest.mark.parametrize("every", [1, 2, 3])
def test_log_every_n_steps_counts_executions(every):
    """The trainer counts one step an execution, and the logger gets every n-th."""
    check_parity(
        Logs,
        lambda run: run.trainer(max_epochs=2, log_every_n_steps=every).fit(
            run.module, run.loader(), run.loader()
        ),
        Setting(executions=3),
    )


@pytest.mark.parametrize("count", [2, 3])
def test_several_loaders_of_each_kind(count):
    """Each validation and test loader has keys of its own."""

    class Several(Net):
        def validation_step(self, batch, batch_idx, dataloader_idx=0):
            self.log("val", self.loss(batch), prog_bar=True, **LEVELS)
            self.log("n", batch[0].sum(), reduce_fx="sum")

        def test_step(self, batch, batch_idx, dataloader_idx=0):
            self.log("test", self.loss(batch))

    def program(run):
        loaders = [run.loader(seed=seed, part=1.0 if seed else 0.5) for seed in range(count)]
        trainer = run.trainer(num_sanity_val_steps=run.batches(1, training=False))
        trainer.fit(run.module, run.loader(), loaders)
        run.results += trainer.validate(run.module, loaders, verbose=False)
        run.results += trainer.test(run.module, loaders, verbose=False)

    check_parity(Several, program)


class LogsInPredict(Net):
    """Logs where Lightning does not allow it."""

    def predict_step(self, batch, batch_idx):
        out = self(batch[0])
        self.log("predicted", out.mean())
        return out


def predict(run):
    """One prediction."""
    run.results += run.trainer().predict(run.module, run.loader())


def test_logging_in_predict_is_lightnings_own_error():
    """Class and text are those of the CPU run."""
    messages = []
    for ipu in (False, True):
        with pytest.raises(Exception, match="predict") as caught:
            observe(ipu, LogsInPredict, predict)
        messages.append((type(caught.value), str(caught.value)))
    assert messages[0] == messages[1]


def test_predictions_are_those_of_the_cpu_run():
    """The callback leaves a prediction alone."""
    cpu, ipu = (observe(side, Logs, predict) for side in (False, True))
    torch.testing.assert_close(torch.cat(ipu.results), torch.cat(cpu.results))


def test_barebones_runs_without_logging():
    """`barebones=True` switches logging off, as on the CPU."""
    if not hasattr(pl.Trainer(max_epochs=1, logger=False, enable_checkpointing=False), "barebones"):
        pytest.skip("new in Lightning 2.0")
    check_parity(
        Logs,
        lambda run: run.trainer(barebones=True).fit(run.module, run.loader(), run.loader()),
    )


def test_a_run_resumes_from_a_checkpoint(tmp_path):
    """Half of a run, its checkpoint, and the other half by another trainer."""

    def program(run):
        path = tmp_path / f"{run.ipu}.ckpt"
        first = run.trainer(max_epochs=1)
        first.fit(run.module, run.loader(), run.loader())
        first.save_checkpoint(path)
        run.module = Logs()
        run.trainer(max_epochs=3).fit(run.module, run.loader(), run.loader(), ckpt_path=str(path))

    check_parity(Logs, program, ONE_TO_ONE)


def test_a_checkpoint_of_the_cpu_is_validated_on_the_ipu(tmp_path):
    """Weights, not runs, are what the sides exchange."""
    torch.manual_seed(0)
    path = tmp_path / "cpu.ckpt"

    def train(run):
        trainer = run.trainer()
        trainer.fit(run.module, run.loader(), run.loader())
        trainer.save_checkpoint(path)

    observe(False, Logs, train)
    check_parity(
        Logs,
        lambda run: run.results.extend(
            run.trainer().validate(run.module, run.loader(), ckpt_path=str(path), verbose=False)
        ),
    )


def test_the_trainers_own_accumulation_is_the_executors():
    """With options of the strategy's own making, `accumulate_grad_batches` is the device's."""

    def program(run):
        run.trainer().fit(run.module, run.loader(), run.loader())

    check_parity(Logs, program, Setting(iterations=1, accumulation=4))


def test_a_second_run_after_an_error_is_clean():
    """A run that raised in a hook leaves nothing behind for the next one."""

    class Fails(Logs):
        fail = True

        def on_train_batch_end(self, *_):
            if self.fail:
                self.fail = False
                raise RuntimeError("in a hook")

    def program(run):
        with pytest.raises(RuntimeError, match="in a hook"):
            run.trainer().fit(run.module, run.loader(), run.loader())
        run.seen.moments.clear()
        run.seen.rows.clear()
        run.module = Logs()
        run.trainer().fit(run.module, run.loader(), run.loader())

    check_parity(Fails, program, ONE_TO_ONE)
