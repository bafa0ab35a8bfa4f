"""Compiled models in files: what `PoplarExecutor.save` writes, and how it is read.

PopTorch 3.4 `_poptorch_data.py`.

A file holds what compiling again needs, not machine code: loading one runs the step's Python again.
"""

import dataclasses
import os
import pickle
from pathlib import Path
from typing import Any, List, Optional

from ipu_log_callback.emulator.arguments import Arguments
from ipu_log_callback.emulator.console import logger
from ipu_log_callback.emulator.enums import ConnectionType

__all__ = ["SavedModel", "read", "write"]

VERSION = "3.4.0+emulator"


@dataclasses.dataclass
class SavedModel:
    """Content of a file.

    Attributes:
        arguments: The arguments that the model was compiled for.
        options: Its options.
        training: Whether it is a training model; ``None`` if the module was not exported.
        model: The module, with the weights that it had when it was saved.
        optimizer: The optimizer of a training model.
        optimizer_state: Its state.
        rng_state: Seed and state of the device's random numbers.
        version: Version of the software that wrote the file.
    """

    arguments: Arguments
    options: Any
    training: Optional[bool] = None
    model: Any = None
    optimizer: Any = None
    optimizer_state: Any = None
    rng_state: Optional[List[int]] = None
    version: str = VERSION


def write(filename: str, saved: SavedModel) -> None:
    """Write `saved`, making directories as needed; a directory gets a file ``model.poptorch``."""
    path = Path(filename)
    folder = path.parent
    if os.path.lexists(folder):
        assert folder.is_dir(), f"Destination folder {folder} is not a directory"
    folder.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        logger.warning(
            "save(): %s is a directory, saving model to %s", path, path / "model.poptorch"
        )
        path = path / "model.poptorch"
    path.write_bytes(pickle.dumps(saved, protocol=4))


def read(filename: str) -> SavedModel:
    """Read what `write` wrote.

    Raises:
        AssertionError: If the file is not one of ours or was written by another version.
    """
    try:
        saved = pickle.loads(Path(filename).read_bytes())  # noqa: S301  # the user's own file
    except (pickle.UnpicklingError, EOFError, ValueError) as err:
        msg = f"Invalid file {filename}: not a compiled model"
        raise AssertionError(msg) from err
    assert isinstance(saved, SavedModel), f"Invalid file {filename}: not a compiled model"
    assert saved.version == VERSION, (
        f"Invalid file {filename}: PopTorch version mismatch: File was created with version: "
        f"{saved.version}"
        f" and this is version {VERSION}"
    )
    saved.options._unfreeze()
    saved.options.deleteIfExists("ipu_version")
    if saved.options.connection_type == ConnectionType.Never:
        saved.options.connectionType(ConnectionType.Always)
    return saved
