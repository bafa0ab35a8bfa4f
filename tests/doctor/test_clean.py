"""The doctor on modules that run on an IPU as they do on a CPU."""

import pytest
import torch

from ipu_log_callback import doctor

from .clean_modules import CLASSES, CLEAN, NamedOutputs


def batch_for(module):
    """A batch as the module's loader would give it."""
    x, y = torch.randn(4, 8), torch.randint(CLASSES, (4,))
    return {"x": x, "y": y} if isinstance(module, NamedOutputs) else [x, y]


@pytest.mark.parametrize("module_class", CLEAN, ids=lambda cls: cls.__name__)
def test_nothing_is_found_in_a_clean_module(module_class):
    """A module that logs, feeds metrics and returns values as one may gives no finding."""
    module = module_class()
    diagnosis = doctor.check(module, batch_for(module))
    assert [str(found) for found in diagnosis.findings] == []
    assert diagnosis.notes == ()
    assert diagnosis.exit_code == 0
