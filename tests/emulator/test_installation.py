import contextlib
import importlib
import importlib.util
import logging
import pickle
import sys
from types import ModuleType

import pytest

from ipu_log_callback import emulator
from ipu_log_callback.emulator import installation
from ipu_log_callback.emulator.errors import NotEmulatedError


@pytest.fixture(autouse=True)
def _uninstalled():
    """No test here starts or ends with the emulator in place."""
    emulator.uninstall()
    yield
    emulator.uninstall()


@pytest.fixture
def lightning():
    """The module of an IPU accelerator, from whichever of Lightning's distributions has one."""
    with contextlib.suppress(ImportError):
        return importlib.import_module("pytorch_lightning.accelerators.ipu")
    return pytest.importorskip("lightning.pytorch.accelerators.ipu", reason="no IPU accelerator")


def answers():
    """What Lightning's loaded modules believe about PopTorch and the IPU."""
    names = ("_POPTORCH_AVAILABLE", "_IPU_AVAILABLE", "poptorch")
    return {
        (name, answer): vars(module)[answer]
        for name, module in sys.modules.items()
        if name.startswith(("pytorch_lightning", "lightning.", "lightning_graphcore"))
        for answer in names
        if answer in vars(module)
    }


def test_import_gives_the_emulator_and_its_parts():
    """`import poptorch`, its submodules and a search for it all find the emulator."""
    emulator.install()
    assert emulator.is_installed()
    import poptorch
    import poptorch.optim
    from poptorch.options import Options

    assert poptorch.Options is Options
    assert poptorch.optim.SGD.__module__.startswith("ipu_log_callback.emulator")
    assert poptorch.ipuHardwareIsAvailable(16)
    assert importlib.util.find_spec("poptorch") is not None


def test_everything_that_is_exported_exists():
    """`from poptorch import *` works."""
    from ipu_log_callback.emulator import poptorch

    assert [name for name in poptorch.__all__ if not hasattr(poptorch, name)] == []


def test_lightning_that_was_imported_before_sees_an_ipu(lightning):
    """Lightning asked before the emulator was there; its answers are corrected in every module."""
    assert not lightning.IPUAccelerator.is_available()
    emulator.install()
    assert lightning.IPUAccelerator.is_available()
    assert all(answers().values())


def test_uninstalling_leaves_no_trace(lightning):
    """Lightning's answers and the loaded modules are afterwards what they were."""
    before = answers()
    emulator.install()
    emulator.uninstall()
    assert not emulator.is_installed()
    assert answers() == before
    assert [name for name in sys.modules if name.split(".")[0] == "poptorch"] == []
    assert importlib.util.find_spec("poptorch") is None


def test_modules_imported_meanwhile_are_corrected_too(monkeypatch):
    """A module of Lightning's that was imported while the emulator was there does not keep it."""
    emulator.install()
    late = ModuleType("pytorch_lightning._late")
    late._POPTORCH_AVAILABLE = late._IPU_AVAILABLE = True
    late.poptorch = sys.modules["poptorch"]
    monkeypatch.setitem(sys.modules, late.__name__, late)
    emulator.uninstall()
    assert (late._POPTORCH_AVAILABLE, late._IPU_AVAILABLE, late.poptorch) == (False, False, None)


def test_other_packages_with_such_names_are_left_alone(monkeypatch):
    """Only Lightning's modules are corrected."""
    other = ModuleType("lightning_bolts")
    other._IPU_AVAILABLE = False
    monkeypatch.setitem(sys.modules, other.__name__, other)
    emulator.install()
    assert other._IPU_AVAILABLE is False


def test_a_remembered_answer_is_forgotten():
    """What `lightning_utilities` remembers about PopTorch is true again each time."""
    imports = pytest.importorskip("lightning_utilities.core.imports")
    assert not imports.package_available("poptorch")
    emulator.install()
    assert imports.package_available("poptorch")
    emulator.uninstall()
    assert not imports.package_available("poptorch")


@pytest.fixture
def real_poptorch(tmp_path, monkeypatch):
    """A package called `poptorch` that can be imported."""
    (tmp_path / "poptorch").mkdir()
    (tmp_path / "poptorch" / "__init__.py").write_text("real = True")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    yield
    sys.modules.pop("poptorch", None)


@pytest.mark.parametrize("imported", [False, True])
def test_a_real_poptorch_is_not_replaced(real_poptorch, imported):
    """Where PopTorch is installed, the emulator refuses and says how to insist."""
    if imported:
        importlib.import_module("poptorch")
    with pytest.raises(RuntimeError, match=r"emulator\.install\(force=True\)"):
        emulator.install()
    assert not emulator.is_installed()


@pytest.mark.parametrize("imported", [False, True])
def test_a_real_poptorch_can_be_hidden_and_comes_back(real_poptorch, imported):
    """With `force` the emulator takes PopTorch's place until it is uninstalled."""
    real = importlib.import_module("poptorch") if imported else None
    emulator.install(force=True)
    assert not hasattr(importlib.import_module("poptorch"), "real")
    emulator.uninstall()
    back = importlib.import_module("poptorch")
    assert back.real
    assert real in (None, back)


def test_a_directory_called_poptorch_is_not_poptorch(tmp_path, monkeypatch):
    """A folder of that name without a package in it does not count as PopTorch."""
    (tmp_path / "poptorch").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    emulator.install()
    assert emulator.is_installed()


def test_there_is_no_hardware_to_have_a_version():
    """PopTorch's word for an unknown one, -1."""
    emulator.install()
    import poptorch

    assert poptorch.ipuHardwareVersion() == -1


def test_errors_cross_processes():
    """What is not emulated is told as well by another process."""
    error = NotEmulatedError("this", "for a reason")
    again = pickle.loads(pickle.dumps(error))  # noqa: S301  # our own object
    assert type(again) is NotEmulatedError
    assert str(again) == str(error)


@pytest.mark.parametrize(
    ("level", "shown"), [(4, False), ("ERR", False), (1, True), ("WARN", True)]
)
def test_the_log_level_is_a_name_or_its_older_number(level, shown, caplog):
    """What is below it is not printed.

    PopTorch 3.4 `_logging.py`.
    """
    emulator.install()
    import poptorch

    before = logging.getLogger("poptorch::python").level
    try:
        poptorch.setLogLevel(level)
        logging.getLogger("poptorch::python").warning("a warning")
    finally:
        logging.getLogger("poptorch::python").setLevel(before)
    assert ("a warning" in caplog.text) is shown


def test_it_is_said_once_that_results_are_emulated(monkeypatch, caplog):
    """One line, on PopTorch's logger, however often the emulator is installed."""
    monkeypatch.setattr(installation, "_said", False)
    for _ in range(2):
        emulator.install()
        emulator.install()
        emulator.uninstall()
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "emulated on the CPU" in record.message
    assert "timings" in record.message
