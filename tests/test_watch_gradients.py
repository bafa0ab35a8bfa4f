"""The example that watches gradients, small."""

import importlib.util
import sys
from pathlib import Path

import pytest

from ipu_log_callback import emulator

SCRIPT = Path(__file__).parents[1] / "examples" / "watch_gradients.py"


def _load():
    spec = importlib.util.spec_from_file_location("watch_gradients", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # a dataclass looks its module up
    try:
        spec.loader.exec_module(module)
    except ImportError:  # Lightning without an IPU strategy of its own
        return None
    return module


example = _load()
pytestmark = pytest.mark.skipif(
    example is None, reason="written for pytorch-lightning with its own IPU strategy"
)


@pytest.mark.filterwarnings("ignore")
def test_gradients_vanish_in_one_net_and_flow_in_the_other(tmp_path):
    """The claim that its prose makes, on the executions of three epochs; the picture is written."""
    pytest.importorskip("matplotlib")
    mine = not emulator.is_installed()
    try:
        seen = example.main(["--epochs=3", f"--out={tmp_path / 'gradients.png'}"])
    finally:
        if mine:
            emulator.uninstall()
    assert seen["sigmoid"].first_to_last < example.VANISHED
    assert seen["repaired"].first_to_last > 0.01
    executions = 3 * 512 // (example.MICRO_BATCH * example.ITERATIONS * example.REPLICAS)
    assert all(len(norms) == executions for norms in seen["sigmoid"].norms.values())
    assert len(seen["sigmoid"].norms) == 9
    assert (tmp_path / "gradients.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.filterwarnings("ignore")
def test_norms_shrink_layer_by_layer_in_the_sigmoid_net(tmp_path):
    """From the last layer to the first, each gradient is smaller than the one after it."""
    pytest.importorskip("matplotlib")
    mine = not emulator.is_installed()
    try:
        seen = example.main(["--epochs=1", "--depth=5", f"--out={tmp_path / 'g.png'}"])
    finally:
        if mine:
            emulator.uninstall()
    firsts = [norms[0] for norms in seen["sigmoid"].norms.values()]
    assert firsts[1:] == sorted(firsts[1:])
