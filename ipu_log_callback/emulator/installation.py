"""Put the emulator where `import poptorch` finds it, and take it out again.

Lightning asks once, at import, whether PopTorch and an IPU are there, and keeps the answers as
module globals (`_POPTORCH_AVAILABLE`, `_IPU_AVAILABLE`, `poptorch`), copied from module to module.
Which modules hold copies differs from version to version, so every loaded module of Lightning's
that has such a global is corrected.
"""

import importlib.util
import sys
from types import ModuleType
from typing import Any, Dict, List, Tuple

from ipu_log_callback.emulator.console import logger

__all__ = ["install", "is_installed", "uninstall"]

_LIGHTNING_PACKAGES = ("pytorch_lightning", "lightning", "lightning_graphcore")
_CACHED_ANSWERS = ("_POPTORCH_AVAILABLE", "_IPU_AVAILABLE", "poptorch")
_SUBMODULES = {
    "poptorch.enums": "ipu_log_callback.emulator.enums",
    "poptorch.ops": "ipu_log_callback.emulator.ops",
    "poptorch.optim": "ipu_log_callback.emulator.optim",
    "poptorch.options": "ipu_log_callback.emulator.options",
    "poptorch.poptorch_core": "ipu_log_callback.emulator.errors",
    "poptorch.profiling": "ipu_log_callback.emulator.profiling",
}
_NOTICE = (
    "poptorch is emulated on the CPU: results follow PopTorch's rules, but timings, memory use "
    "and the device's own rounding mean nothing."
)

_replaced_modules: Dict[str, Any] = {}
_replaced_answers: List[Tuple[ModuleType, str, Any]] = []
_said = False


def install(force: bool = False) -> None:
    """Make `import poptorch` give the emulator, before or after Lightning was imported.

    Says once, on PopTorch's own logger, that results are emulated. Installing twice does nothing
    more.

    Args:
        force: Hide a real PopTorch, if there is one, until `uninstall`.

    Raises:
        RuntimeError: If a real PopTorch can be imported and `force` is not set.
    """
    if is_installed():
        return
    if not force and _real_poptorch_exists():
        msg = (
            "A real `poptorch` can be imported here, so the emulator does not take its place. "
            "Use the hardware, or hide PopTorch with `emulator.install(force=True)`."
        )
        raise RuntimeError(msg)
    emulated = importlib.import_module("ipu_log_callback.emulator.poptorch")
    for name in [name for name in sys.modules if name.split(".")[0] == "poptorch"]:
        _replaced_modules[name] = sys.modules.pop(name)
    sys.modules["poptorch"] = emulated
    for name, source in _SUBMODULES.items():
        sys.modules[name] = importlib.import_module(source)
    _forget_availability()
    for module, answer in _cached_answers():
        _replaced_answers.append((module, answer, vars(module)[answer]))
        setattr(module, answer, emulated if answer == "poptorch" else True)
    _say_once()


def uninstall() -> None:
    """Undo `install`: `import poptorch` and Lightning's answers are again what they were."""
    if not is_installed():
        return
    emulated = sys.modules["poptorch"]
    for name in ("poptorch", *_SUBMODULES):
        sys.modules.pop(name, None)
    sys.modules.update(_replaced_modules)
    _forget_availability()
    for module, answer, before in _replaced_answers:
        setattr(module, answer, before)
    _correct_answers_given_meanwhile(emulated)
    _replaced_modules.clear()
    _replaced_answers.clear()


def is_installed() -> bool:
    """Whether `import poptorch` gives the emulator."""
    module = sys.modules.get("poptorch")
    return module is not None and module is sys.modules.get("ipu_log_callback.emulator.poptorch")


def _real_poptorch_exists() -> bool:
    if "poptorch" in sys.modules:
        return True
    spec = importlib.util.find_spec("poptorch")
    # A mere directory of that name is a namespace package, without a file of its own.
    return spec is not None and spec.origin is not None


def _cached_answers() -> List[Tuple[ModuleType, str]]:
    """The globals of Lightning's loaded modules that hold an answer about PopTorch."""
    return [
        (module, answer)
        for name, module in list(sys.modules.items())
        if name.split(".")[0] in _LIGHTNING_PACKAGES and isinstance(module, ModuleType)
        for answer in _CACHED_ANSWERS
        if answer in vars(module)
    ]


def _correct_answers_given_meanwhile(emulated: ModuleType) -> None:
    """Correct the modules of Lightning's that were imported while the emulator was installed."""
    corrected = {(module, answer) for module, answer, _ in _replaced_answers}
    real = _replaced_modules.get("poptorch")
    for module, answer in _cached_answers():
        if (module, answer) in corrected:
            continue
        if answer == "poptorch":
            if vars(module)[answer] is emulated:
                setattr(module, answer, real)
        else:
            setattr(module, answer, real is not None)


def _forget_availability() -> None:
    """Clear what `lightning_utilities` remembers about which packages can be imported."""
    imports = sys.modules.get("lightning_utilities.core.imports")
    for name in ("package_available", "module_available"):
        clear = getattr(getattr(imports, name, None), "cache_clear", None)
        if clear is not None:
            clear()


def _say_once() -> None:
    global _said  # noqa: PLW0603  # once a process
    if not _said:
        _said = True
        logger.warning(_NOTICE)
