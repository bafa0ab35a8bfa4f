"""Say what a module's steps will do differently once they are compiled.

On an IPU a step's Python runs once, when it is compiled. `check` runs the steps of a
LightningModule once on the emulator, without training, and reports with file and line what would
fail or behave differently, and what to type instead.
``python -m ipu_log_callback.doctor train.py ARGS`` does so for the module that a script trains,
with one batch of each of its loaders. Neither needs an IPU or PopTorch.

What a run cannot show (values that freeze, code that this batch does not reach) is read in the
source of the functions that the steps call.
"""

from ipu_log_callback.doctor.diagnosis import Diagnosis, check
from ipu_log_callback.doctor.findings import Finding

__all__ = ["Diagnosis", "Finding", "check"]
