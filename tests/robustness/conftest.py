"""What every robustness test needs: PopTorch, played by the emulator.

Everyday runs take a sample of what can be enumerated; `ROBUSTNESS=full` takes all of it.
"""

import os
import warnings
from typing import Iterator

import pytest

with warnings.catch_warnings():
    # what Lightning's own import warns of differs from version to version
    warnings.simplefilter("ignore")
    from ipu_log_callback import emulator

FULL = os.environ.get("ROBUSTNESS") == "full"


@pytest.fixture(scope="session", autouse=True)
def _poptorch_is_emulated() -> Iterator[None]:
    """The IPU strategy finds a `poptorch` for as long as this suite runs."""
    mine = not emulator.is_installed()
    if mine:
        emulator.install()
    yield
    if mine:
        emulator.uninstall()
