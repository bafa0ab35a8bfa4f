"""Models that were compiled before, elsewhere, or again.

Where PopTorch runs a step's Python the step record is made anew; where it does not, a run with keys
ends in an error that says what to do.
"""

import pytest
import torch
from lightning_in_use import IPUStrategy, apart_from_its_trainer
from parity.bench import FEATURES, MICRO_BATCH, Net, Run, Setting, check_parity, observe, pl

from ipu_log_callback import errors

CUT = Setting(iterations=2, accumulation=1)


class Logs(Net):
    """One key in each step; notes how often its Python ran."""

    def __init__(self):
        super().__init__()
        self.runs = []

    def logs(self, stage, x, loss):
        self.runs.append(stage)
        self.log(f"{stage}_loss", loss, on_step=True, on_epoch=True)


def executor_of(trainer, stage="train"):
    """The strategy's executor of a stage."""
    for key, executor in trainer.strategy.poptorch_models.items():
        if str(getattr(key, "value", key)) == stage:
            return executor
    raise KeyError(stage)


def arguments(executor_batches):
    """What a strategy calls the training executor with: a batch and its index, one each result."""
    x = torch.randn(executor_batches * MICRO_BATCH, FEATURES)
    return (x, x.sum(1)), torch.zeros(executor_batches, dtype=torch.long)


class Exports(pl.Callback):
    """Compiles the training step into a file, in one of the hooks before the first batch."""

    def __init__(self, hook, filename, with_module=False):
        self.filename = filename
        self.with_module = with_module
        setattr(self, hook, self.prepare)

    def prepare(self, trainer, pl_module):
        if isinstance(trainer.strategy, IPUStrategy):
            batch, index = arguments(CUT.micro_batches(training=True))
            with apart_from_its_trainer(pl_module):
                executor_of(trainer).compileAndExport(
                    self.filename, batch, index, export_model=self.with_module
                )


class Loads(Exports):
    """Loads the file instead."""

    def __init__(self, hook, filename):
        super().__init__(hook, filename)
        self.runs = []

    def prepare(self, trainer, pl_module):
        if isinstance(trainer.strategy, IPUStrategy):
            executor_of(trainer).loadExecutable(self.filename)
            self.runs.append(pl_module.runs[-1])


@pytest.mark.parametrize("with_module", [False, True])
@pytest.mark.parametrize(
    ("hook", "times"), [("on_fit_start", 1), ("on_train_start", 1), ("on_train_epoch_start", 2)]
)
def test_compile_and_export_then_load_the_executable(hook, times, with_module, tmp_path):
    """The Python runs again at load: the step record comes from there, and the rows are right."""
    filename = str(tmp_path / "step.poptorch")
    check_parity(
        Logs, setting=CUT, callbacks=lambda: [Exports("on_train_start", filename, with_module)]
    )
    loads = Loads(hook, filename)
    check_parity(Logs, setting=CUT, callbacks=lambda: [loads])
    assert loads.runs == ["train"] * times


def test_executable_caching_options(tmp_path):
    """With a cache the Python still runs once a run: every run has its record."""
    directory = tmp_path / "cache"

    def strategy(training_opts, inference_opts):
        for options in (training_opts, inference_opts):
            options.enableExecutableCaching(str(directory))
        return IPUStrategy(training_opts=training_opts, inference_opts=inference_opts)

    for _ in range(2):
        check_parity(Logs, setting=Setting(strategy=strategy))


class Destroys(pl.Callback):
    """Destroys the training executor in the middle of the run, and has it made anew."""

    def __init__(self):
        self.compiled = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx == 0 and isinstance(trainer.strategy, IPUStrategy):
            executor = executor_of(trainer, "validate")
            self.compiled.append(executor.isCompiled())
            executor.destroy()


def test_destroy_and_compile_again_in_the_middle_of_a_run():
    """A new compile is a new step record, and nothing else."""
    destroys = Destroys()
    seen = check_parity(Logs, setting=CUT, callbacks=lambda: [destroys])
    assert destroys.compiled == [False, True]  # in the second epoch there was one to destroy
    assert seen.run.module.runs == ["train", "val", "val"]


def test_another_input_shape():
    """A validation of other micro-batches needs another run, and gets another record."""

    def program(run):
        trainer = run.trainer()
        for size in (MICRO_BATCH, 2 * MICRO_BATCH):
            loader = run.loader(samples=8 * size, size=size)
            run.results += trainer.validate(run.module, loader, verbose=False)

    check_parity(Logs, program, CUT)


class Feeds(pl.Callback):
    """Feeds the training executor a batch of the user's own, of another size."""

    def on_train_batch_end(self, trainer, *_):
        batch, index = arguments(2 * CUT.micro_batches(training=True))
        executor_of(trainer)(batch, index)


def test_an_input_of_another_shape_after_compiling_is_poptorchs_own_error():
    """The last, smaller batch: refused as without the callback."""

    def program(run):
        loader = run.loader(samples=5 * MICRO_BATCH, size=MICRO_BATCH)
        run.trainer(callbacks=[Feeds()]).fit(run.module, loader, loader)

    with pytest.raises(Exception, match="inputs passed at runtime don't match") as caught:
        observe(True, Logs, program, CUT)
    assert not isinstance(caught.value, errors.IPULogError)


class CompiledBefore(pl.Callback):
    """Has the executor compiled behind the callback's back: no Python of the step is seen."""

    def on_train_start(self, trainer, pl_module):
        executor = executor_of(trainer)
        listening = type(executor)
        executor.__class__ = listening.__mro__[1]
        batch, index = arguments(CUT.micro_batches(training=True))
        log = pl_module.__dict__["log"] = lambda *_, **__: None
        try:
            executor.compile(batch, index)
        finally:
            assert pl_module.__dict__.pop("log") is log
            executor.__class__ = listening
        for module in pl_module.trainer.strategy.model.modules():
            if hasattr(module, "_device"):
                module._device = torch.device("cpu")


def run_compiled_before(keys):
    """Fit a module whose training step was compiled unseen."""
    run = Run(True, Setting(iterations=2, accumulation=1, keys=keys), Logs(), list)
    trainer = run.trainer(callbacks=[CompiledBefore()])
    trainer.fit(run.module, run.loader(), run.loader())
    return trainer


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ("", "compiled step of `Logs`"),
        ("why", "from that run of its Python"),
        ("fix", "loadExecutable("),
    ],
)
def test_a_compiled_step_without_a_record_is_an_error_that_says_how_to_load_it(row, says):
    """Not wrong numbers: headline, reason and what to type."""
    with pytest.raises(errors.MissingStepRecordError) as caught:
        run_compiled_before("*")
    headline, *rows = str(caught.value).splitlines()
    if not row:
        assert says in headline
        return
    rest = "\n".join(rows)
    assert f"    {row}" in rest
    assert says in rest


@pytest.mark.filterwarnings("ignore")
def test_without_keys_a_step_compiled_unseen_runs_on():
    """Nothing was asked for, so nothing is missing."""
    assert run_compiled_before(()).callback_metrics == {}
