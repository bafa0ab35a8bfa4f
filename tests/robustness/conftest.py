"""Everyday runs take a sample of what can be enumerated; `ROBUSTNESS=full` takes all of it."""

import os

FULL = os.environ.get("ROBUSTNESS") == "full"
