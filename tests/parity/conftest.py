"""Which of PopTorch's two front ends compiles the steps."""

import pytest

from . import bench

#: What both front ends must give.
CORE = ("test_geometry", "test_returns", "test_values")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run the suite's core in trace mode as well."""
    if metafunc.module.__name__.rpartition(".")[2] in CORE:
        metafunc.parametrize("_front_end", ["dispatcher", "trace"], indirect=True)


@pytest.fixture(autouse=True)
def _front_end(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The dispatcher, but for the suite's core."""
    monkeypatch.setattr(bench, "TRACED", getattr(request, "param", "dispatcher") == "trace")
