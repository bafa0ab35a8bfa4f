"""Which code is the user's own, and where in it something happens."""

import linecache
import site
import sys
import sysconfig
from types import CodeType, FrameType
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

from ipu_log_callback.record import CallSite

__all__ = ["UserCode", "fix_for_library"]

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

#: Folders of this name hold libraries wherever they are.
_SITE = frozenset(("site-packages", "dist-packages"))


def _library_folders() -> Tuple[str, ...]:
    folders = {
        sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")
    }
    folders.update(site.getsitepackages() if hasattr(site, "getsitepackages") else ())
    folders.add(site.getusersitepackages())
    return tuple(sorted(folders))


class Library(NamedTuple):
    """A line of a library's that the user's code led to."""

    module: str
    function: str
    line: int

    def __str__(self) -> str:
        return f"in {self.module}, line {self.line}"


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
        # code that a library writes for itself lies elsewhere, under the library's name
        source = getattr(sys.modules.get(package), "__file__", None) or filename
        return not any(map(self._is_installed, (filename, source)))

    def _is_installed(self, filename: str) -> bool:
        parts = filename.replace("\\", "/").split("/")
        return filename.startswith(self._folders) or not _SITE.isdisjoint(parts)

    def owns_frame(self, frame: FrameType) -> bool:
        """Whether a frame runs the user's code."""
        return self.owns(frame.f_code, frame.f_globals.get("__name__", ""))

    def caller_of(  # pragma: no cover - called in a trace function, where nothing is traced
        self, frame: FrameType
    ) -> Optional[FrameType]:
        """The innermost frame of the user's below which a frame runs, within the same step."""
        caller = frame.f_back
        while caller is not None and not self.owns_frame(caller):
            if caller.f_globals.get("__name__", "").split(".")[0] == "ipu_log_callback":
                return None
            caller = caller.f_back
        return caller

    def innermost(
        self, frame: Optional[FrameType] = None
    ) -> Tuple[Optional[CallSite], Optional[Library]]:
        """The innermost line of the user's that led here, and the library code that it called.

        Returns:
            The line, and the library's if one stands between that looks at values of its own
            accord.
        """
        frame = frame or sys._getframe(1)
        through: Optional[Library] = None
        while frame is not None:
            if self.owns_frame(frame):
                return CallSite(frame.f_code.co_filename, frame.f_lineno), through
            name = frame.f_globals.get("__name__", "")
            if not through and (name.split(".")[0] in _NAMED or name.startswith(_NAMED_OF_TORCH)):
                through = Library(name, frame.f_code.co_name, frame.f_lineno)
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
#: Parts of torch that do so.
_NAMED_OF_TORCH = ("torch.distributions", "torch.nn.modules.transformer", "torch.nn.utils")

_METRIC = "a metric object of the module (self.name = ... in `__init__`): it runs on the host"
#: Of parts of libraries, what keeps them from reading values.
_FIXES = {
    "torchmetrics": _METRIC,
    "torch.nn.modules.transformer": "give `is_causal` or `tgt_is_causal` as a bool: torch then "
    "does not look into the mask",
}
_OTHER = (
    "look for an option of the library that avoids it, or make the call on the host in\n"
    "`on_train_batch_end(self, outputs, ...)` and the like"
)
_OF_THE_STEP = "make the distribution in the step, from tensors on the device"


def fix_for_library(library: Library, kind: str) -> str:
    """What to type where a library's code does what a finding says, or `""`."""
    if kind == "host-tensor":
        return _OF_THE_STEP if library.module.startswith("torch.distributions") else ""
    if library.module.startswith("torchmetrics") and "validation" in library.function:
        return f"{_METRIC};\nor the function's validate_args=False, if that is enough"
    other = _OTHER if kind in ("value-read", "tensor-branch", "tensor-format", "host-move") else ""
    return next((fix for start, fix in _FIXES.items() if library.module.startswith(start)), other)
