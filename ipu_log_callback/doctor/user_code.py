"""Which code is the user's own, and where in it something happens."""

import linecache
import site
import sys
import sysconfig
from types import CodeType, FrameType
from typing import Any, Dict, List, Optional, Tuple

from ipu_log_callback.record import CallSite

__all__ = ["UserCode"]

#: Packages whose code is never the user's, wherever they are installed.
_LIBRARIES = frozenset(
    (
        "ipu_log_callback",
        "lightning",
        "lightning_fabric",
        "lightning_graphcore",
        "lightning_utilities",
        "numpy",
        "poptorch",
        "pytorch_lightning",
        "torch",
        "torchmetrics",
        "torchvision",
    )
)


def _library_folders() -> Tuple[str, ...]:
    folders = {
        sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")
    }
    folders.update(site.getsitepackages() if hasattr(site, "getsitepackages") else ())
    folders.add(site.getusersitepackages())
    return tuple(sorted(folders))


class UserCode:
    """Tells the user's code from that of libraries.

    The package that the LightningModule comes from is the user's, even if it is installed.

    Args:
        module: The LightningModule.
    """

    def __init__(self, module: Any) -> None:
        self._packages = {
            base.__module__.split(".", maxsplit=1)[0]
            for base in type(module).__mro__
            if base.__module__ not in ("builtins", "abc", "typing")
        } - _LIBRARIES
        self._folders = _library_folders()
        self._answers: Dict[Tuple[str, str], bool] = {}

    def owns(self, code: CodeType, module_name: str) -> bool:
        """Whether a function of the module called `module_name` is the user's."""
        key = (code.co_filename, module_name)
        if key not in self._answers:
            self._answers[key] = self._decide(*key)
        return self._answers[key]

    def _decide(self, filename: str, module_name: str) -> bool:
        package = module_name.split(".", maxsplit=1)[0]
        if package in self._packages:
            return bool(linecache.getlines(filename)) or not filename.startswith("<")
        if package in _LIBRARIES or not linecache.getlines(filename):
            return False
        return not filename.startswith(self._folders)

    def owns_frame(self, frame: FrameType) -> bool:
        """Whether a frame runs the user's code."""
        return self.owns(frame.f_code, frame.f_globals.get("__name__", ""))

    def innermost(self, frame: Optional[FrameType] = None) -> Tuple[Optional[CallSite], str]:
        """The innermost line of the user's that led here, and the library code that it called.

        Returns:
            The line, and `torchmetrics/functional/accuracy.py:12` or the like if library code that
            is neither torch nor Lightning stands between.
        """
        frame = frame or sys._getframe(1)
        through = ""
        while frame is not None:
            if self.owns_frame(frame):
                return CallSite(frame.f_code.co_filename, frame.f_lineno), through
            package = frame.f_globals.get("__name__", "").split(".")[0]
            if package in _NAMED and not through:
                through = f"{frame.f_globals['__name__']}, line {frame.f_lineno}"
            frame = frame.f_back
        return None, through

    def stack(self) -> List[FrameType]:
        """The frames from here to the innermost one of the user's, innermost first."""
        frames: List[FrameType] = []
        frame: Optional[FrameType] = sys._getframe(1)
        while frame is not None:
            frames.append(frame)
            if self.owns_frame(frame):
                break
            frame = frame.f_back
        return frames


#: Libraries that a finding names when one of them is what reads a value.
_NAMED = frozenset(
    ("PIL", "matplotlib", "pandas", "scipy", "sklearn", "torchmetrics", "transformers")
)
