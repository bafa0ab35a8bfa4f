"""`doctor.check`: what it returns, and that it leaves a module as it was."""

import importlib
import importlib.util
import json
import random
import re
import sys
import time
import warnings
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from ipu_log_callback import IPULogError, _compat, doctor
from ipu_log_callback.doctor.findings import KINDS

from .clean_modules import CLASSES, Base, Plain
from .faulty_modules import KeepsTensors, ReadsItem, Sharpened, SideEffects, Trained

NAMES = {"lightning": "lightning.pytorch", "pytorch_lightning": "pytorch_lightning"}
pl = pytest.importorskip(NAMES[_compat.NAMESPACE])


@pytest.fixture
def batch():
    """A micro-batch for the modules of the corpus."""
    return [torch.randn(4, 8), torch.randint(CLASSES, (4,))]


def test_a_finding_answers_what_a_reader_asks(batch):
    """Headline with code and step, then the rows where, why and fix."""
    first = doctor.check(ReadsItem(), batch).findings[0]
    headline, where, why, *fix = str(first).splitlines()
    assert headline == (
        'fails: `self.log("acc", acc.item())` in `ReadsItem.training_step` '
        "reads the value of a device tensor"
    )
    assert where.split() == ["where", f"faulty_modules.py:{first.site.line}"]
    assert why.split()[0] == "why"
    assert fix[0].split()[0] == "fix"
    assert "self.log(name, tensor)" in fix[0]


def test_the_text_ends_in_a_summary(batch):
    """The last line counts what fails and what differs."""
    text = str(doctor.check(ReadsItem(), batch))
    assert text.splitlines()[-1] == "ReadsItem: 2 would fail, in training_step"
    text = str(doctor.check(SideEffects(), batch))
    assert text.splitlines()[-1] == "SideEffects: 4 would behave differently, in training_step"


def test_json_holds_every_finding(batch):
    """The JSON says the same as the text, with whole paths."""
    diagnosis = doctor.check(ReadsItem(), batch)
    data = json.loads(diagnosis.to_json())
    assert [f["headline"] for f in data["findings"]] == [f.headline for f in diagnosis.findings]
    assert data["findings"][0]["file"] == diagnosis.findings[0].site.file
    assert data["findings"][0]["code"] == 'self.log("acc", acc.item())'


def test_a_notebook_shows_the_text_escaped():
    """Code in a finding cannot become markup."""

    class Compares(Trained):
        def training_step(self, batch, batch_idx):
            loss = self.step(batch)[2]
            return loss if loss < 9 else None

    shown = doctor.check(Compares(), [torch.randn(2, 8), torch.tensor([0, 1])])._repr_html_()
    assert "loss &lt; 9" in shown


@pytest.mark.parametrize("module_class", [Plain, KeepsTensors, SideEffects])
def test_the_module_is_left_as_it_was(module_class, batch):
    """Attributes, lists, weights, mode, trainer and random states are untouched."""
    module = module_class().eval()
    before = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    lists = {name: list(v) for name, v in before.items() if isinstance(v, (list, dict))}
    weights = {name: value.clone() for name, value in module.state_dict().items()}
    torch.manual_seed(3)
    random.seed(3)
    doctor.check(module, batch)
    assert (torch.rand(()).item(), random.getrandbits(32)) == _first_draws(3)
    assert {n: v for n, v in vars(module).items() if not n.startswith("_")} == before
    assert {n: list(before[n]) for n in lists} == lists
    assert not module.training
    assert _trainer_of(module) is None
    assert all(torch.equal(value, weights[name]) for name, value in module.state_dict().items())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # no trainer to log to
        module.train().training_step(batch, 0).backward()


def _first_draws(seed):
    torch.manual_seed(seed)
    random.seed(seed)
    return torch.rand(()).item(), random.getrandbits(32)


def _trainer_of(module):
    try:
        return module.trainer
    except RuntimeError:
        return None


def test_a_step_that_raises_is_a_finding():
    """An error of the user's own is told with its line, and what was found before it is kept."""

    class Broken(Base):
        def training_step(self, batch, batch_idx):
            batch[0].mean().item()
            return self.nothing

    first, second = doctor.check(Broken(), [torch.randn(2, 8)]).findings
    assert {first.kind, second.kind} == {"value-read", "step-raises"}
    assert "AttributeError" in second.headline
    assert second.site.line == first.site.line + 1


def test_a_step_that_wants_another_batch_is_noted_only(batch):
    """`predict_step` may want another batch than the one for all steps: that is no fault of it."""

    class Predicts(Plain):
        def predict_step(self, batch, batch_idx):
            return self(batch)

    diagnosis = doctor.check(Predicts(), batch)
    assert diagnosis.findings == ()
    assert diagnosis.notes[0].startswith("not diagnosed: predict_step, which raises TypeError")
    assert diagnosis.steps == ("training_step", "validation_step")
    asked = doctor.check(Predicts(), batch, steps=["predict_step"])
    assert [found.kind for found in asked.findings] == ["step-raises"]


def test_texts_in_a_batch_are_found(batch):
    """A str becomes part of the compiled step, and the next batch is refused."""

    class Named(Trained):
        def training_step(self, batch, batch_idx):
            return self.step(batch[:2])[2]

    (found,) = doctor.check(Named(), [*batch, ["a", "b", "c", "d"]]).findings
    assert (found.kind, found.fails) == ("batch-value", True)


@pytest.mark.parametrize("steps", [["train"], "training_step", ["training_step", "fit"]])
def test_a_name_that_is_no_steps_is_refused(steps, batch):
    """It is no fault of the module, and the error lists the steps that there are."""
    with pytest.raises(IPULogError, match="'validation_step'") as caught:
        doctor.check(Plain(), batch, steps=steps)
    assert f"steps={steps!r}" in str(caught.value).splitlines()[0]


def test_only_a_lightning_module_is_diagnosed(batch):
    """A plain module has no steps."""
    with pytest.raises(IPULogError, match="received a Linear, expected a LightningModule"):
        doctor.check(torch.nn.Linear(1, 1), batch)


def test_a_finding_of_several_steps_is_told_once(batch):
    """A shared function is reported with all steps that reach it."""

    class Shared(Trained):
        def common(self, batch):
            logits, _, loss = self.step(batch)
            self.log("mean", logits.mean().item())
            return loss

        def training_step(self, batch, batch_idx):
            return self.common(batch)

        def validation_step(self, batch, batch_idx):
            self.common(batch)

    (found,) = doctor.check(Shared(), batch).findings
    assert found.steps == ("training_step", "validation_step")
    assert "in training_step, validation_step" in str(found)


def test_a_step_attached_to_the_instance_is_run(batch):
    """A step may be an attribute of the module."""
    module = Plain()

    def training_step(batch, batch_idx):
        loss = torch.nn.functional.cross_entropy(module(batch[0]), batch[1])
        print(loss)
        return loss

    module.training_step = training_step
    kinds = [found.kind for found in doctor.check(module, batch).findings]
    assert kinds == ["print"]
    assert module.training_step is training_step


def test_every_kind_says_why_and_what_to_type():
    """No kind of finding leaves the reader without a reason and a way out."""
    assert all(kind.why and kind.fix for kind in KINDS.values())


def test_the_core_does_not_import_the_doctor():
    """Nothing outside the doctor's own folder imports it."""
    package = Path(doctor.__file__).parents[1]
    importing = re.compile(r"^\s*(from|import)\b.*\bdoctor\b", re.MULTILINE)
    sources = [path for path in package.rglob("*.py") if "doctor" not in path.parts]
    assert len(sources) > 10
    assert [path for path in sources if importing.search(path.read_text(encoding="utf-8"))] == []


def test_findings_come_in_order_of_lines(tmp_path, monkeypatch, batch):
    """Line 9 comes before line 10."""
    body = ["self.log('a', loss)", "print(loss)", "print(loss)", "return loss"]
    lines = [
        "import torch.nn.functional as F",
        "from .clean_modules import Base",
        "class Long(Base):",
        "    def training_step(self, batch, batch_idx):",
        "        x, y = batch",
        "        loss = F.cross_entropy(self(x), y)",
        *[f"        {line}" for line in body],
    ]
    path = tmp_path / "long_module.py"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    spec = importlib.util.spec_from_file_location(f"{__package__}.long_module", path)
    loaded = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, loaded)
    spec.loader.exec_module(loaded)
    assert [found.site.line for found in doctor.check(loaded.Long(), batch).findings] == [8, 9]


def test_the_fix_names_the_hook_of_the_step(batch):
    """What a validation step should do on the host belongs in the hook of validation."""

    class Validates(Plain):
        def validation_step(self, batch, batch_idx):
            self.log("mean", self(batch[0]).mean().item())

    (found,) = doctor.check(Validates(), batch).findings
    assert "`on_validation_batch_end(self, outputs, ...)`" in found.fix


def test_the_fix_for_a_frozen_number_names_the_hook_of_the_step(batch):
    """What a validation step computes on the host is logged in the hook of validation."""

    class Validates(Plain):
        def validation_step(self, batch, batch_idx):
            started = time.perf_counter()
            self.log("seconds", started)

    diagnosis = doctor.check(Validates(), batch)
    (found,) = (found for found in diagnosis.findings if found.kind == "frozen-log")
    assert "`on_validation_batch_end` and the like" in found.fix


def test_a_step_that_lacks_an_argument_is_shown_where_it_is_defined(batch):
    """An error without a line of the user's still has one: the step's own."""

    class Wants(Base):
        def training_step(self, batch, batch_idx, more):
            return None

    (found,) = doctor.check(Wants(), batch).findings
    assert found.headline.startswith(
        "`def training_step` in `Wants.training_step` raises TypeError"
    )
    assert found.site.line == Wants.training_step.__code__.co_firstlineno


class Sample:
    """A batch type of a user's own, without a parser."""

    def __init__(self, x, y):
        self.x, self.y = x, y


def test_a_batch_that_poptorch_cannot_take_apart_is_found(batch):
    """Its tensors would stay on the host; that is said once, and not at every use."""

    class TakesSample(Trained):
        def training_step(self, batch, batch_idx):
            return self.step((batch.x, batch.y))[2]

    (found,) = doctor.check(TakesSample(), Sample(*batch)).findings
    assert (found.kind, found.fails) == ("batch-object", True)
    assert "gets a batch with a Sample, `batch`" in found.headline


def test_what_a_callback_changes_is_known(batch):
    """An attribute that a callback of the trainer changes freezes like one that a hook changes."""

    class Ramp(pl.Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            pl_module.sharpened.heat = 0.5

    class Sharpens(Trained):
        def __init__(self):
            super().__init__()
            self.sharpened = Sharpened()

        def training_step(self, batch, batch_idx):
            return self.step((self.sharpened(batch[0]), batch[1]))[2]

    module = Sharpens()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module.trainer = pl.Trainer(
            accelerator="cpu", callbacks=[Ramp()], logger=False, enable_checkpointing=False
        )
    (found,) = doctor.check(module, batch).findings
    assert (found.kind, found.received) == (
        "frozen-value",
        "`Ramp.on_train_epoch_start` changes it",
    )


def test_code_of_a_library_is_not_the_users(tmp_path, monkeypatch, batch):
    """What a library does is reported at the line that calls it, wherever it is installed."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    source = "def halved(x):\n    return x / 2 if x.max() > 9 else x\n"
    (folder / "some_library.py").write_text(source, encoding="utf-8")
    monkeypatch.syspath_prepend(folder)
    library = importlib.import_module("some_library")

    class Calls(Trained):
        def training_step(self, batch, batch_idx):
            library.halved(batch[0])
            return self.step(batch)[2]

    (found,) = doctor.check(Calls(), batch).findings
    assert found.kind == "tensor-branch"
    assert found.site.file == __file__


def test_parts_of_torch_that_look_at_values_are_named(batch):
    """A distribution made in `__init__` holds tensors of the host."""

    class Prior(Trained):
        def __init__(self):
            super().__init__()
            self.prior = torch.distributions.Normal(0.0, 1.0)

        def training_step(self, batch, batch_idx):
            logits, _, loss = self.step(batch)
            self.log("prior", self.prior.log_prob(logits).mean())
            return loss

    (found,) = doctor.check(Prior(), batch).findings
    assert found.kind == "host-tensor"
    assert found.received.startswith("in torch.distributions.normal, line ")
    assert found.fix == "make the distribution in the step, from tensors on the device"


@pytest.mark.parametrize(
    "wrapped",
    [
        lambda *optimizers: optimizers,
        lambda *optimizers: [{"optimizer": optimizer} for optimizer in optimizers],
        lambda *optimizers: (list(optimizers), []),
    ],
    ids=["tuple", "dicts", "with schedulers"],
)
def test_more_than_one_optimizer_is_found_in_whatever_it_comes(wrapped, batch):
    """PopTorch has one optimizer: the doctor counts them as Lightning does."""

    class TwoOptimizers(Trained):
        def training_step(self, batch, batch_idx):
            return self.step(batch)[2]

        def configure_optimizers(self):
            made = [torch.optim.SGD(self.parameters(), lr=0.1) for _ in range(2)]
            return wrapped(*made)

    (found,) = doctor.check(TwoOptimizers(), batch).findings
    assert (found.kind, found.fails) == ("trainer-setting", True)
    assert "2 optimizers" in found.headline


def test_an_optimizer_that_calls_the_step_again_is_found(batch):
    """A compiled step includes its update: LBFGS cannot call it for another look."""

    class Again(Trained):
        def training_step(self, batch, batch_idx):
            return self.step(batch)[2]

        def configure_optimizers(self):
            return {"optimizer": torch.optim.LBFGS(self.parameters())}

    (found,) = doctor.check(Again(), batch).findings
    assert "LBFGS" in found.headline
    assert "poptorch.optim" in str(found)


def test_texts_about_a_diagnosis(batch):
    """In a prompt a diagnosis is its summary."""
    diagnosis = doctor.check(ReadsItem(), batch)
    assert repr(diagnosis) == f"<Diagnosis of {diagnosis.summary}>"


def test_a_batch_arrives_as_lightning_gives_it():
    """Lists become tuples, numbers tensors of one element; other types keep theirs."""

    class Pair(NamedTuple):
        x: torch.Tensor
        scale: float

    class Takes(Trained):
        def training_step(self, batch, batch_idx):
            assert isinstance(batch["pairs"], tuple)
            pair = batch["pairs"][0]
            assert isinstance(pair, Pair)
            assert pair.scale.shape == (1,)
            return torch.nn.functional.cross_entropy(self(pair.x * pair.scale), batch["y"])

    batch = {"pairs": [Pair(torch.randn(4, 8), 2.0)], "y": torch.tensor([0, 1, 2, 1])}
    assert str(doctor.check(Takes(), batch)).startswith("Takes: nothing found")
