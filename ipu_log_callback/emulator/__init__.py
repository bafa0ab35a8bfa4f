"""A CPU stand-in for PopTorch and the IPU, for machines that have neither.

`install` makes `import poptorch` give the emulator, so that Lightning's IPU strategies and plain
PopTorch programs run on it unchanged; ``python -m ipu_log_callback.emulator train.py`` does so for
a whole program. `counters` tells what would have cost time on hardware.

It keeps PopTorch's rules: a step's Python runs once, when it is compiled; batches are cut into
micro-batches; outputs come back as the output mode says; weights live on the device; mistakes raise
PopTorch's errors. It does *not* emulate time, memory, or the device's own rounding and random
numbers.
"""

from ipu_log_callback.emulator.counters import counters
from ipu_log_callback.emulator.installation import install, is_installed, uninstall

__all__ = ["counters", "install", "is_installed", "uninstall"]
