"""What the emulator's tests share."""

from typing import Any, Iterator

import pytest

from ipu_log_callback import emulator


@pytest.fixture
def poptorch() -> Iterator[Any]:
    """The module that a program gets from `import poptorch`."""
    emulator.install()
    import poptorch

    yield poptorch
    emulator.uninstall()
