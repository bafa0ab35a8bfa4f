"""What a step says while it runs, noticed instead of done: `self.log`, metrics, loggers, prints."""

import builtins
import contextlib
import logging
import sys
from contextlib import ExitStack, contextmanager
from typing import Any, Callable, Dict, Iterator, List, Mapping, Tuple

import torch

from ipu_log_callback import _compat
from ipu_log_callback.capture import Capture
from ipu_log_callback.doctor.module_state import swapped
from ipu_log_callback.doctor.onlooker import Notice, Onlooker
from ipu_log_callback.doctor.walk import device_tensors_in
from ipu_log_callback.errors import describe_value
from ipu_log_callback.metrics import Metrics, is_metric, result_keys
from ipu_log_callback.record import CallSite, LiveValue
from ipu_log_callback.selection import Selection

__all__ = ["Witness", "loggers_watched", "manual_optimization_watched", "prints_watched"]

#: Functions that send values to a logger of their own.
_LOGGING_FUNCTIONS = {
    "wandb": ("log", "log_artifact", "save"),
    "mlflow": ("log_metric", "log_metrics", "log_param", "log_params", "log_artifact", "log_image"),
    "neptune": ("log_metric", "log_image", "log_text"),
    "aim": ("track",),
}


class Witness(Capture):
    """A capture that notices and goes on.

    Args:
        module: The LightningModule.
        step: Name of the step.
        metrics: Its metrics.
        onlooker: The recorder of the step.
        notice: Called with every finding.
        site: Tells where in the user's file the step is.
    """

    def __init__(
        self,
        module: Any,
        step: str,
        metrics: Metrics,
        onlooker: Onlooker,
        notice: Notice,
        site: Callable[[], Any],
    ) -> None:
        super().__init__(module, step, Selection(["*"]), metrics, traced=False)
        self._onlooker = onlooker
        self._notice = notice
        self._here = site
        self.anchored: List[Tuple[str, torch.Tensor, CallSite]] = []

    def record_log(
        self,
        original: Callable[..., None],  # noqa: ARG002  # the signature is the capture's
        name: Any,
        value: Any,
        options: Mapping[str, Any],  # noqa: ARG002  # the same
    ) -> None:
        """Notice what a `self.log` cannot carry across compilation."""
        if not isinstance(name, str) or any(mark in name for mark in ("tensor(", "<unavailable>")):
            self._notice("tensor-key", "", "")
        for leaf in _leaves(value):
            self._check_logged(leaf)

    def _check_logged(self, leaf: Any) -> None:
        if isinstance(leaf, torch.Tensor) and leaf.device.type == "ipu":
            if leaf.numel() != 1:
                self._notice("log-shape", str(list(leaf.shape)), "")
            self.anchored.append(("logs", leaf, self._here()))
        elif isinstance(leaf, float) and leaf in self._onlooker.numbers:
            return  # read from the device, which was noticed there
        elif not isinstance(leaf, LiveValue) and not _is_pending(leaf):
            self._notice("frozen-log", describe_value(leaf), "")

    def record_log_collection(
        self, original: Callable[..., None], collection: Any, options: Mapping[str, Any]
    ) -> None:
        """A collection is logged on the host: nothing to notice."""

    def record_log_results(self, pending: Any, options: Mapping[str, Any]) -> None:
        """A metric call's results are logged on the host: nothing to notice."""

    def record_metric(
        self, metric: Any, path: str, method: str, args: Tuple[Any, ...], kwargs: Dict[str, Any]
    ) -> Any:
        """Stand in for a metric's result."""
        for leaf in [*_leaves(list(args)), *_leaves(kwargs)]:
            if isinstance(leaf, torch.Tensor) and leaf.device.type == "ipu":
                self.anchored.append((f"gives `self.{path}`", leaf, self._here()))
        if method in ("update", "reset"):
            return None
        call = f"self.{path}(...)" if method == "forward" else f"self.{path}.compute()"
        keys = result_keys(metric)
        if keys is not None:
            return {key: self._onlooker.stand_in(call) for key in keys}
        if hasattr(metric, "items"):  # a wrapper that names its results as it goes
            return super().record_metric(metric, path, method, args, kwargs)
        return self._onlooker.stand_in(call)


def _is_pending(leaf: Any) -> bool:
    return is_metric(leaf) or type(leaf).__name__ == "PendingMetricValue"


def _leaves(value: Any) -> List[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [leaf for item in value for leaf in _leaves(item)]
    return [value]


# -- prints -------------------------------------------------------------------------------------


@contextmanager
def prints_watched(notice: Notice, is_users: Callable[[], bool]) -> Iterator[None]:
    """Notice `print` and the `logging` module in the user's code; nothing is written."""

    def noticing(original: Callable[..., Any]) -> Callable[..., Any]:
        def quiet(*args: Any, **kwargs: Any) -> None:
            if not is_users():
                original(*args, **kwargs)
                return
            for arg in args:
                str(arg)  # a text made of tensors may be a finding of its own
            notice("print", "", "")

        return quiet

    levels = ("debug", "info", "warning", "error", "critical", "log", "exception")
    with ExitStack() as stack:
        stack.enter_context(swapped(builtins, "print", noticing(print)))
        for level in levels:
            original = getattr(logging.Logger, level)
            stack.enter_context(swapped(logging.Logger, level, noticing(original)))
        yield


# -- manual optimization ------------------------------------------------------------------------


class _InertOptimizer:
    """An optimizer, or a scheduler, that changes nothing."""

    def __init__(self, real: Any) -> None:
        self._real = real

    @property  # type: ignore[misc]  # `isinstance(opt, Optimizer)` must hold
    def __class__(self) -> Any:
        return type(self._real)

    def __getattr__(self, name: str) -> Any:
        if name in ("param_groups", "state", "optimizer", "get_last_lr"):
            return getattr(self._real, name)
        return lambda *_, **__: contextlib.nullcontext()


@contextmanager
def manual_optimization_watched(module: Any, tell: Callable[[], None]) -> Iterator[None]:
    """Let a step that optimizes by hand run to its end, without optimizing.

    Args:
        module: The LightningModule.
        tell: Called where it asks for gradients.
    """
    if module.automatic_optimization:
        yield
        return
    optimizers = [_InertOptimizer(real) for real in module.trainer.optimizers]

    def given(*_: Any, **__: Any) -> Any:
        return optimizers[0] if len(optimizers) == 1 else optimizers

    def nothing(*_: Any, **__: Any) -> None:
        pass

    def backward(*_: Any, **__: Any) -> None:
        tell()

    replaced = {"optimizers": given, "lr_schedulers": given, "manual_backward": backward}
    for name in ("toggle_optimizer", "untoggle_optimizer", "clip_gradients"):
        replaced[name] = nothing
    with ExitStack() as stack:
        for name, function in replaced.items():
            stack.enter_context(swapped(module, name, function))
        yield


# -- loggers ------------------------------------------------------------------------------------


class _LoggerStandIn:
    """Takes whatever is done with a logger, and notices calls."""

    def __init__(self, notice: Notice, real: Any, path: str) -> None:
        self._notice = notice
        self._real = real
        self._path = path

    @property  # type: ignore[misc]  # `isinstance(self.logger, TensorBoardLogger)` must hold
    def __class__(self) -> Any:
        return _LoggerStandIn if self._real is None else type(self._real)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in ("name", "version", "save_dir", "log_dir", "root_dir"):
            return getattr(self._real, name, None) or "doctor"
        return _LoggerStandIn(self._notice, None, f"{self._path}.{name}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = [*_leaves(list(args)), *_leaves(kwargs)]
        reads = any(map(device_tensors_in, given))
        self._notice("logger-call-tensor" if reads else "logger-call", self._path, "")
        return _LoggerStandIn(self._notice, None, f"{self._path}(...)")

    def __getitem__(self, key: Any) -> Any:
        return _LoggerStandIn(self._notice, None, f"{self._path}[{key!r}]")

    def __iter__(self) -> Iterator[Any]:
        return iter(())


@contextmanager
def loggers_watched(module: Any, trainer: Any, notice: Notice, invented: bool) -> Iterator[None]:
    """Give the step loggers that notice what they are told.

    Args:
        module: The LightningModule.
        trainer: Its trainer.
        notice: Called with every finding.
        invented: Whether the trainer is the doctor's: then there is a logger even if it has none.
    """
    reals = list(getattr(trainer, "loggers", None) or [])
    stand_ins = [_LoggerStandIn(notice, real, "logger") for real in reals]
    if invented and not stand_ins:
        stand_ins = [_LoggerStandIn(notice, None, "logger")]
    first = property(lambda _: stand_ins[0] if stand_ins else None)
    everyone = property(lambda _: list(stand_ins))
    with ExitStack() as stack:
        for owner in (_compat.lightning_class_of(module), _class_called(trainer, "Trainer")):
            for name, answer in (("logger", first), ("loggers", everyone)):
                if owner is not None and name in vars(owner):
                    stack.enter_context(swapped(owner, name, answer))
        for package, names in _LOGGING_FUNCTIONS.items():
            library = sys.modules.get(package)
            for name in names if library is not None else ():
                stand_in = _LoggerStandIn(notice, None, f"{package}.{name}")
                stack.enter_context(swapped(library, name, stand_in))
        yield


def _class_called(value: Any, name: str) -> Any:
    return next((base for base in type(value).__mro__ if base.__name__ == name), None)
