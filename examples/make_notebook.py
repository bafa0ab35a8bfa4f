"""Make `notebook.ipynb` from `notebook.py`, cell by cell.

    python examples/make_notebook.py            # write it
    python examples/make_notebook.py --check    # exit code 1 if it is not what would be written

A line that starts with `# %%` begins a cell, `# %% [markdown]` one of text, written as comments.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence

SCRIPT = Path(__file__).with_name("notebook.py")
NOTEBOOK = SCRIPT.with_suffix(".ipynb")
MARK = "# %%"


def notebook_of(script: str) -> Dict[str, Any]:
    """A notebook, format 4.5, without outputs, of a script's cells."""
    cells: List[Dict[str, Any]] = []
    for number, part in enumerate(f"\n{script}".split(f"\n{MARK}")[1:]):
        head, _, body = part.partition("\n")
        lines = body.strip("\n").splitlines(keepends=True)
        cell: Dict[str, Any] = {"cell_type": "code", "id": f"cell-{number}", "metadata": {}}
        if head.strip() == "[markdown]":
            cell["cell_type"] = "markdown"
            lines = [line[2:] if line.startswith("# ") else line.lstrip("#") for line in lines]
        else:
            cell.update(execution_count=None, outputs=[])
        cells.append({**cell, "source": lines})
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Write or check the notebook; returns the exit code."""
    parser = argparse.ArgumentParser(description="Make notebook.ipynb from notebook.py.")
    parser.add_argument("--check", action="store_true", help="only say whether it is up to date")
    check = parser.parse_args(argv).check
    made = json.dumps(notebook_of(SCRIPT.read_text()), indent=1, ensure_ascii=False) + "\n"
    if check:
        if NOTEBOOK.is_file() and NOTEBOOK.read_text() == made:
            return 0
        print(f"{NOTEBOOK.name} is not made of {SCRIPT.name} as it is: run {Path(__file__).name}")
        return 1
    NOTEBOOK.write_text(made)
    return 0


if __name__ == "__main__":
    sys.exit(main())
