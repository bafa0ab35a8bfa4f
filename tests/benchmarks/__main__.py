"""`python -m tests.benchmarks`: one table, and the same as JSON.

Every figure is a ratio, or is compared with another one, of this run on this machine; medians over
repetitions. The device is emulated: nothing here says anything about time on an IPU, only about
host time and traffic.
"""

import argparse
import json
import logging
import platform
import sys
from pathlib import Path
from typing import List, Optional, Sequence

import torch

from ipu_log_callback import emulator
from ipu_log_callback.tables import Table

from .measures import Row

__all__ = ["main"]


def main(argv: Optional[Sequence[str]] = None) -> List[Row]:
    """Measure, print the table, write the JSON file.

    Returns:
        The rows of the table.
    """
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    parser.add_argument("--json", type=Path, default=Path("runs/benchmarks.json"))
    parser.add_argument("--only", default="", help="measure only what has this in its name")
    parser.add_argument("--quick", action="store_true", help="few repetitions: a trial, no figures")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    emulator.install()
    # what it says of each of some hundred runs
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    from .measures import MEASURES

    rows: List[Row] = []
    for name, measure in MEASURES.items():
        if options.only in name:
            print(f"measuring: {name}", file=sys.stderr)
            rows += measure(quick=options.quick)
    table = Table(
        f"benchmarks ({platform.machine()}, Python {platform.python_version()}, "
        f"torch {torch.__version__}, emulated device, one thread)",
        ("what", ">measured", ">wanted", ""),
        [row.cells for row in rows],
        "ratios and counts of this run; host time and traffic only, never IPU time",
    )
    print(table)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps([row.data for row in rows], indent=2) + "\n")
    print(f"written to {options.json}")
    return rows


if __name__ == "__main__":
    main()
