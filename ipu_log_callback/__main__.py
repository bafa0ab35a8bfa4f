"""`python -m ipu_log_callback`: which version this is, what it found, and where to go on."""

import argparse
import platform
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Optional, Sequence

__all__ = ["main"]

_ABOUT = """\
self.log inside the steps of a LightningModule that PopTorch compiles for an IPU:

  trainer = pl.Trainer(..., callbacks=[IPULogCallback(keys=["train_loss", "val_*"])])

programs of this package:
  python -m ipu_log_callback.doctor train.py ARGS    what in a script will differ on an IPU
  python -m ipu_log_callback.emulator train.py ARGS  run an IPU script without an IPU
"""


def _found(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "not installed"


def _versions() -> str:
    names = (
        *("ipu-log-callback", "torch", "torchmetrics"),
        *("pytorch-lightning", "lightning", "lightning-graphcore"),
    )
    lines = [f"{name:<20} {_found(name)}" for name in names]
    poptorch = "installed" if find_spec("poptorch") else "not installed: the emulator can stand in"
    return "\n".join([*lines, f"{'poptorch':<20} {poptorch}", f"{'Python':<20} " + _python()])


def _python() -> str:
    return f"{platform.python_version()} on {platform.machine()}"


def main(argv: Optional[Sequence[str]] = None) -> None:
    """Print the help, or the versions of this package and of what it works with."""
    parser = argparse.ArgumentParser(
        prog="python -m ipu_log_callback",
        description=_ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--version", action="version", version=_versions(), help="versions, as a report needs them"
    )
    parser.parse_args(argv)
    parser.print_help()


if __name__ == "__main__":
    main()
