"""What the doctor says comes true: on the IPU strategy, with everything logged."""

import warnings

import pytest
import torch

from ipu_log_callback import IPULogCallback, _compat, doctor

from .clean_modules import CLASSES, CLEAN, NamedOutputs
from .faulty_modules import FAULTY

NAMES = {"lightning": "lightning.pytorch", "pytorch_lightning": "pytorch_lightning"}
pl = pytest.importorskip(NAMES[_compat.NAMESPACE])


class Rows(torch.utils.data.Dataset):
    """Eight rows, as the module under test wants them."""

    def __init__(self, as_dict):
        self.as_dict = as_dict

    def __len__(self):
        return 8

    def __getitem__(self, index):
        x, y = torch.randn(8), torch.tensor(index % CLASSES)
        return {"x": x, "y": y} if self.as_dict else (x, y)


def fit(module):
    """Train two executions of two micro-batches on the IPU strategy, and validate one."""
    rows = Rows(as_dict=isinstance(module, NamedOutputs))
    loaders = [torch.utils.data.DataLoader(rows, batch_size=2) for _ in range(2)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = pl.Trainer(
            accelerator="ipu",
            devices=1,
            max_epochs=1,
            limit_val_batches=1,
            callbacks=[IPULogCallback("*")],
            logger=pl.loggers.CSVLogger("unused"),
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, *loaders)


@pytest.mark.parametrize("module_class", CLEAN, ids=lambda cls: cls.__name__)
def test_what_the_doctor_passes_trains(module_class, tmp_path, monkeypatch):
    """A module without a finding trains and validates on the IPU strategy, everything anchored."""
    monkeypatch.chdir(tmp_path)
    fit(module_class())


@pytest.mark.parametrize("module_class", FAULTY, ids=lambda cls: cls.__name__)
def test_what_the_doctor_says_fails_does_fail(module_class, tmp_path, monkeypatch):
    """A module trains on the IPU strategy if and only if no finding says that it would fail."""
    monkeypatch.chdir(tmp_path)
    batch = [torch.randn(2, 8), torch.tensor([0, 1])]
    if doctor.check(module_class(), batch).exit_code:
        with pytest.raises(Exception):  # noqa: B017, PT011  # of many kinds, from many places
            fit(module_class())
    else:
        fit(module_class())
