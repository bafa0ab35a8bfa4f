"""PopTorch, played by the emulator."""

import warnings
from typing import Iterator

import pytest

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


def _without_ipu_strategy() -> bool:
    try:
        import pytorch_lightning as pl
    except ImportError:
        return False
    return not hasattr(pl.strategies, "IPUStrategy")


# Lightning 2.1 and later has no IPU strategy: there is no inside to look at.
collect_ignore_glob = ["test_*.py"] if _without_ipu_strategy() else []
