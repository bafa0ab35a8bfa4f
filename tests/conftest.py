"""What the whole suite shares: Lightning's distribution, the emulator, hypothesis' examples."""

from typing import Iterator

import pytest
import torch
from hypothesis import settings
from lightning_in_use import STRATEGIES

from ipu_log_callback import emulator

settings.register_profile("everyday", max_examples=200, deadline=None)
settings.register_profile("thorough", max_examples=5000, deadline=None)
# `--hypothesis-profile` is read after this file
settings.load_profile("everyday")

#: Suites whose modules train on the IPU strategy, or import `poptorch` in their steps.
ON_THE_EMULATOR = [
    *("doctor", "eras", "inspection", "parity", "processes", "robustness", "shown"),
    "test_messages.py",
]

# Lightning from 2.1 on has no IPU strategy: nothing of these can run.
NEED_A_STRATEGY = [*(name for name in ON_THE_EMULATOR if name != "doctor"), "doctor/test_truth.py"]
collect_ignore = [] if STRATEGIES else NEED_A_STRATEGY


def pytest_runtest_setup(item: pytest.Item) -> None:
    """The same random numbers every time: sums near zero break a tolerance once in a thousand."""
    torch.manual_seed(0)


@pytest.fixture(scope="module", autouse=True)
def _poptorch_is_emulated(request: pytest.FixtureRequest) -> Iterator[None]:
    """One module of tests at a time: others test installing, or need a machine without PopTorch."""
    if not set(ON_THE_EMULATOR).intersection(request.path.parts):
        yield
        return
    emulator.install()
    yield
    emulator.uninstall()
