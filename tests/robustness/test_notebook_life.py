"""What people do in notebooks: interrupt, edit, run again, nest, copy, search."""

import copy
import importlib
import pickle
import subprocess
import sys

import pytest
import torch
from lightning_in_use import NO_INFERENCE_MODE, apart_from_its_trainer

from ipu_log_callback import IPULogCallback

from .runs import PROGRAMS, Net, loader, numbers_of, one_run, pl, quiet, run, trainer
from .snapshot import leftovers

MODULE = f"""
import torch
import {pl.__name__} as pl

FACTOR = 1.0

class Edited(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)
        self.norm = torch.nn.BatchNorm1d(1)

    def training_step(self, batch, batch_idx):
        loss = torch.nn.functional.mse_loss(self.norm(self.layer(batch[0])).squeeze(-1), batch[1])
        self.log("value", loss * 0 + FACTOR)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
"""


class Watcher(pl.Callback):
    """Calls a function in one hook, once."""

    def __init__(self, hook, function):
        def once(trainer, module, *args):
            if not self.results:
                self.results.append(function(trainer, module))

        self.results = []
        setattr(self, hook, once)


class Interrupting(pl.Callback):
    """Ctrl-C in the second batch."""

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if batch_idx == 1:
            raise KeyboardInterrupt


@pytest.fixture(scope="module")
def right():
    """What each program logs in a run of its own."""
    return {program: numbers_of(one_run(Net(), program=program)) for program in PROGRAMS}


def reset(module):
    """The module as it was made."""
    module.load_state_dict(Net().state_dict())
    for metric in module.modules():
        if hasattr(metric, "reset"):
            metric.reset()


def test_a_cell_is_interrupted_edited_and_run_again(tmp_path, monkeypatch):
    """The new class of a reloaded module is what is captured; the callback is the old object."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    (tmp_path / "edited_cell.py").write_text(MODULE)
    cell = importlib.import_module("edited_cell")
    callback = IPULogCallback("value")
    run(trainer([callback, Interrupting()]), "fit", cell.Edited(), loader(2, 4))
    (tmp_path / "edited_cell.py").write_text(MODULE.replace("1.0", "5.0"))
    importlib.reload(cell)
    made = trainer([callback])
    run(made, "fit", cell.Edited(), loader(2, 4))
    assert numbers_of(made) == {"value": 5.0}


def test_imports_in_alphabetical_order():
    """This package's first, then Lightning's own: the callback is still one of the trainer's."""
    script = (
        "import warnings; warnings.simplefilter('ignore')\n"
        "from ipu_log_callback import IPULogCallback\n"
        f"import {pl.__name__} as pl\n"
        "pl.Trainer(accelerator='cpu', logger=False, callbacks=[IPULogCallback('*')])\n"
        "assert issubclass(IPULogCallback, pl.Callback)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_class_is_redefined_under_the_same_module_object(right):
    """`module.__class__ = Redefined`, as autoreload does it, and the step is the new one."""

    class Redefined(Net):
        def test_step(self, batch, batch_idx):
            self.log("test_new", batch[0].sum() * 0 + 7)

    module = Net()
    callback = IPULogCallback("*")
    made = trainer([callback])
    run(made, "test", module)
    assert numbers_of(made) == pytest.approx(right["test"])
    module.__class__ = Redefined
    run(made, "test", module)
    assert numbers_of(made) == {"test_new": 7.0}


@pytest.mark.parametrize("shared", ["callback", "module"])
def test_two_trainers_take_turns(shared, right):
    """With one callback object, or one module, in both."""
    callbacks = [IPULogCallback("*") for _ in range(2)]
    modules = [Net() for _ in range(2)]
    if shared == "callback":
        callbacks[1] = callbacks[0]
    else:
        modules[1] = modules[0]
    trainers = [trainer([callback]) for callback in callbacks]
    for program in ("fit", "validate", "fit", "test"):
        for made, module in zip(trainers, modules):
            reset(module)
            made.fit_loop.epoch_progress.reset()
            run(made, program, module)
            if program != "fit" or made.global_step <= 2:
                assert numbers_of(made) == pytest.approx(right[program])
            assert leftovers(made, module) == []


def test_a_module_brings_the_callback_itself(right):
    """By `configure_callbacks`, in both runs of a trainer."""

    class Bringing(Net):
        def configure_callbacks(self):
            return [IPULogCallback("*")]

    made = trainer()
    for program in ("test", "validate"):
        module = Bringing()
        run(made, program, module)
        assert numbers_of(made) == pytest.approx(right[program])


def pickled(value):
    """What is left of a value in a file."""
    return pickle.loads(pickle.dumps(value))  # noqa: S301 - our own object


# torch cannot deepcopy the buffers that PopTorch wraps while a model trains
@pytest.mark.parametrize(
    ("how", "program"),
    [
        (pickled, "fit"),
        *((copy.deepcopy, p) for p in PROGRAMS[1:]),
        *((pickled, p) for p in PROGRAMS[1:]),
    ],
)
def test_a_module_is_copied_in_the_middle_of_a_run_and_after_it(how, program, right):
    """The copy is a plain module on the CPU that runs by itself; the original runs on."""
    hook = {"fit": "on_train_epoch_end", "validate": "on_validation_batch_end"}

    def copy_of(_, module):
        with apart_from_its_trainer(module):
            return how(module)

    watcher = Watcher(hook.get(program, "on_test_batch_end"), copy_of)
    module = Net()
    made = trainer([IPULogCallback("*"), watcher], **NO_INFERENCE_MODE)
    run(made, program, module)
    assert numbers_of(made) == pytest.approx(right[program])
    for copied in (*watcher.results, copy_of(made, module)):
        assert leftovers(made, copied) == []
        copied._metric_attributes = None  # Lightning finds metrics by the identities of these
        reset(copied)
        assert numbers_of(one_run(copied, program=program)) == pytest.approx(right[program])


def test_an_executor_is_copied_in_the_middle_of_a_run(right):
    """The copy is PopTorch's own executor; one that is compiled already ignores another compile."""

    def copy_of(made, _):
        executor = made.strategy.poptorch_models["test"]
        executor.compile(next(iter(loader(1))), torch.zeros(1))
        return type(copy.copy(executor)), type(executor).__mro__[1]

    watcher = Watcher("on_test_batch_end", copy_of)
    made = trainer([IPULogCallback("*"), watcher], **NO_INFERENCE_MODE)
    run(made, "test", Net())
    assert numbers_of(made) == pytest.approx(right["test"])
    for copied, plain in watcher.results:
        assert copied is plain


@pytest.mark.parametrize("how", [copy.deepcopy, copy.copy, pickled])
def test_a_callback_is_copied_in_the_middle_of_a_run_and_after_it(how, right):
    """The copy knows no run, and serves another trainer while the original goes on."""
    callback = IPULogCallback("*", history=True)
    inner = []

    def copy_and_use(*_):
        copied = how(callback)
        assert copied._runs == {}
        assert repr(copied) == repr(callback)
        inner.append(numbers_of(one_run(Net(), callback=copied, program="test")))

    watcher = Watcher("on_train_batch_end", copy_and_use)
    made = trainer([callback, watcher])
    run(made, "fit", Net())
    assert numbers_of(made) == pytest.approx(right["fit"])
    assert inner == [pytest.approx(right["test"])]
    assert list(how(callback).history) == list(callback.history)


@pytest.mark.parametrize("when", ["in the middle", "after"])
def test_checkpoints_load_where_this_package_is_not_installed(when, tmp_path):
    """A checkpoint, and the module's own pickle, hold nothing of ours."""
    (tmp_path / "plain_net.py").write_text(MODULE)
    probe = (
        "import sys; sys.modules['ipu_log_callback'] = sys.modules['poptorch'] = None\n"
        "import warnings; warnings.simplefilter('ignore')\n"
        "import torch, plain_net\n"
        f"checkpoint = torch.load({str(tmp_path / 'it.ckpt')!r})\n"
        "module = plain_net.Edited()\n"
        "module.load_state_dict(checkpoint['state_dict'])\n"
        f"saved = torch.load({str(tmp_path / 'module.pt')!r}, **(dict(weights_only=False) if "
        "torch.__version__ >= '2' else {}))\n"
        "assert torch.equal(saved.layer.weight, module.layer.weight)\n"
        "assert type(saved.layer.weight) is torch.nn.Parameter\n"
    )
    sys.path.insert(0, str(tmp_path))
    try:
        from plain_net import Edited  # type: ignore[import-not-found]

        def save(trainer, module):
            trainer.save_checkpoint(tmp_path / "it.ckpt")
            with apart_from_its_trainer(module):
                torch.save(module, tmp_path / "module.pt")
            return True

        watcher = Watcher("on_train_batch_end", save)
        callbacks = [IPULogCallback("*", history=True)]
        made = trainer([*callbacks, watcher] if when == "in the middle" else callbacks)
        module = Edited()
        run(made, "fit", module, loader(2, 4))
        if when == "after":
            save(made, module)
    finally:
        sys.path.remove(str(tmp_path))
        sys.modules.pop("plain_net", None)
    done = subprocess.run(
        [sys.executable, "-c", probe], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("shared", [True, False])
def test_a_run_within_a_hook_of_another(program, shared, right):
    """With the outer run's callback object and with one of its own; both runs are right."""
    callback = IPULogCallback("*")
    own = callback if shared else IPULogCallback("*")
    watcher = Watcher(
        "on_train_batch_end",
        lambda *_: numbers_of(one_run(Net(), callback=own, program=program)),
    )
    made = trainer([callback, watcher])
    run(made, "fit", Net())
    assert watcher.results == [pytest.approx(right[program])]
    assert numbers_of(made) == pytest.approx(right["fit"])


with_finders = pytest.mark.skipif(
    not hasattr(pl.callbacks, "LearningRateFinder"),
    reason="the finder of Lightning 1.6 takes all callbacks away before it sets anything up",
)


@with_finders
def test_the_learning_rate_finder(right, tmp_path):
    """The search runs with the callback aside, and the fit after it is right."""
    module = Net()
    module.lr = 0.05
    made = trainer([IPULogCallback("*")], max_epochs=1, default_root_dir=tmp_path)
    with quiet():
        if hasattr(pl, "tuner") and hasattr(pl.tuner, "Tuner"):
            found = pl.tuner.Tuner(made).lr_find(module, num_training=4, update_attr=False)
        else:
            found = made.tuner.lr_find(module, num_training=4)
    assert len(found.results["loss"]) > 0
    assert leftovers(made, module) == []
    reset(module)
    run(made, "fit", module)
    assert numbers_of(made) == pytest.approx(right["fit"])


@with_finders
def test_the_batch_size_finder(right, tmp_path):
    """PopTorch compiles for one batch size: its refusal arrives, and the next fit is right."""

    class Scaled(Net):
        batch_size = 2

        def train_dataloader(self):
            return torch.utils.data.DataLoader(loader(8).dataset, batch_size=self.batch_size)

    module = Scaled()
    finder = pl.callbacks.BatchSizeFinder(max_trials=2, steps_per_trial=1)
    made = trainer([IPULogCallback("*"), finder], default_root_dir=tmp_path)
    with pytest.raises(Exception, match="Shape mismatch"):
        run(made, "fit", module)
    assert leftovers(made, module) == []
    assert numbers_of(one_run(Net())) == pytest.approx(right["fit"])


@with_finders
def test_the_learning_rate_finder_interrupted(right, tmp_path):
    """After Ctrl-C in a search, of which no callback hears, another trainer's fit is right."""

    class Interrupted(Net):
        searching = True

        def on_train_batch_start(self, batch, batch_idx):
            if self.searching and batch_idx == 1:
                raise KeyboardInterrupt

    module = Interrupted()
    module.lr = 0.05
    finder = pl.callbacks.LearningRateFinder(num_training_steps=4)
    interrupted = trainer([IPULogCallback("*"), finder], default_root_dir=tmp_path)
    run(interrupted, "fit", module)
    assert interrupted.interrupted
    module.searching = False
    reset(module)
    assert numbers_of(one_run(module)) == pytest.approx(right["fit"])
    assert leftovers(interrupted, module) == []
