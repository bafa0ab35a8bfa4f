"""What every parity test needs: PopTorch, played by the emulator."""

import warnings
from typing import Iterator

import pytest
from hypothesis import settings

settings.register_profile("everyday", max_examples=200, deadline=None, database=None)
settings.register_profile("thorough", max_examples=5000, deadline=None)
settings.load_profile("everyday")

with warnings.catch_warnings():
    # what Lightning's own import warns of differs from version to version
    warnings.simplefilter("ignore")
    from ipu_log_callback import emulator


@pytest.fixture(scope="session", autouse=True)
def _poptorch_is_emulated() -> Iterator[None]:
    """The IPU strategy finds a `poptorch` for as long as this suite runs."""
    mine = not emulator.is_installed()
    if mine:
        emulator.install()
    yield
    if mine:
        emulator.uninstall()
