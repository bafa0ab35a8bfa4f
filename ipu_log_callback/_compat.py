"""Lightning's two names and many versions: the only module that knows them.

Every private name of another library that this package relies on is used here and nowhere else.

==========================================  =====================================  ==============
private name                                what for                               checked on
==========================================  =====================================  ==============
`Trainer._results`, `_Metadata`             logged calls are checked at capture    1.6.5-2.0.9
`Trainer._results.dataloader_idx`           the history has the loggers' names     1.6.5-2.0.9
`Trainer._logger_connector._current_fx`     put back after those checks            1.6.5-2.0.9
`LightningModule._current_fx_name`          replay under the step's own name       1.6.5-2.0.9
`IPUStrategy._training_opts`, `._inference  the user's options stay as they are,   1.6.5-2.0.9,
_opts`                                      the strategy gets a clone              graphcore 0.1.0
`Metric._update_count`, `._defaults`,       a metric that took a whole execution   torchmetrics
`._forward_cache`, `._computed`, `._cache`  at once is left as after single ones   0.11-1.9
`torch.nn.Module._modules`                  metrics step aside while PopTorch      torch 1.13-2.13
                                            moves the module
==========================================  =====================================  ==============

Each has a test in `tests/test_compat.py`.
"""

import dataclasses
import re
import sys
from contextlib import contextmanager
from importlib import metadata
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Callable, Dict, Iterator, Optional, Type

import torch


def _unified_is_in_use() -> bool:
    """Whether `lightning.pytorch` is the Lightning in use, and not `pytorch_lightning`.

    Whoever imported one of them first decides. Where nobody has yet and both are installed, it is
    the one that has an IPU strategy: `lightning` 2.0 brings the newest `pytorch-lightning` along.
    """
    if "lightning.pytorch" in sys.modules:
        return True
    if find_spec("pytorch_lightning") is None:
        return True
    if "pytorch_lightning" in sys.modules or find_spec("lightning") is None:
        return False
    return _has_ipu_strategy("lightning") and not _has_ipu_strategy("pytorch-lightning")


def _has_ipu_strategy(distribution: str) -> bool:
    """Whether an installed distribution of Lightning has an IPU strategy: until 2.0."""
    try:
        version = metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return False
    return [int(number) for number in re.findall(r"\d+", version)[:2]] < [2, 1]


if TYPE_CHECKING:
    from lightning_fabric.utilities.exceptions import MisconfigurationException
    from lightning_utilities.core.rank_zero import rank_zero_info
    from pytorch_lightning import Callback, LightningModule
elif _unified_is_in_use():
    from lightning.pytorch import Callback, LightningModule
    from lightning.pytorch.utilities.exceptions import MisconfigurationException
    from lightning.pytorch.utilities.rank_zero import rank_zero_info
else:
    from pytorch_lightning import Callback, LightningModule
    from pytorch_lightning.utilities.exceptions import MisconfigurationException
    from pytorch_lightning.utilities.rank_zero import rank_zero_info

__all__ = [
    "NAMESPACE",
    "Callback",
    "LightningModule",
    "count_updates",
    "current_hook",
    "dataloader_suffix",
    "filed_under",
    "is_ipu_strategy",
    "last_value",
    "lightning_class_of",
    "metric_attributes",
    "metric_lists",
    "namespace_of",
    "options_replaced",
    "rank_zero_info",
    "shown_value",
    "submodules",
    "trial_results",
    "update_count",
]


def namespace_of(instance: object, name: str) -> Optional[str]:
    """Which of Lightning's trees the class called `name` among an object's classes comes from."""
    for base in type(instance).__mro__:
        if base.__name__ == name and base.__module__.split(".")[0] in (
            "pytorch_lightning",
            "lightning",
        ):
            return "lightning" if base.__module__.startswith("lightning.") else "pytorch_lightning"
    return None


#: The distribution whose `Callback` this package's callback is: "lightning" or "pytorch_lightning".
NAMESPACE = (
    "lightning" if LightningModule.__module__.startswith("lightning.") else "pytorch_lightning"
)


def is_ipu_strategy(strategy: object) -> bool:
    """Whether a strategy is Lightning's or Graphcore's `IPUStrategy`, or derives from one."""
    return any(base.__name__ == "IPUStrategy" for base in type(strategy).__mro__)


@contextmanager
def trial_results(trainer: Any) -> Iterator[None]:
    """Let `self.log` run for its checks only: nothing that it records outlives the block.

    Lightning's own errors (an unsupported `reduce_fx`, one key logged twice with other options)
    are then raised while a step is captured, before its long compilation. Only the checks are
    made: recording a value makes tensors, which inside a compilation are on the device.
    """
    results, connector = trainer._results, trainer._logger_connector
    if results is None:
        yield
        return
    recorded, attributes = dict(results), dict(vars(results))
    current_fx = connector._current_fx
    try:
        results.clear()
        vars(results)["log"] = _checks_of_recording(results)
        yield
    finally:
        results.update(recorded)
        vars(results).clear()
        vars(results).update(attributes)
        connector._current_fx = current_fx


def _checks_of_recording(results: Any) -> Callable[..., None]:
    """The checks of `_ResultCollection.log`, which come from making and comparing `_Metadata`."""
    metadata_class = sys.modules[type(results).__module__]._Metadata
    fields = {field.name for field in dataclasses.fields(metadata_class)}
    seen: Dict[str, Any] = {}

    def check(fx: str, name: str, _value: Any, **options: Any) -> None:
        known = {key: option for key, option in options.items() if key in fields}
        metadata = metadata_class(fx=fx, name=name, **known)
        if seen.setdefault(name, metadata) != metadata:
            raise MisconfigurationException(
                f"You called `self.log({name}, ...)` twice in `{fx}` with different arguments. "
                "This is not allowed"
            )

    return check


def current_hook(module: Any) -> Optional[str]:
    """The hook, or step, of a LightningModule that the trainer is calling."""
    name: Optional[str] = module._current_fx_name
    return name


@contextmanager
def filed_under(module: Any, hook: str) -> Iterator[None]:
    """File what is logged in the block under `hook`, as Lightning does around a step."""
    before = module._current_fx_name
    try:
        module._current_fx_name = hook
        yield
    finally:
        module._current_fx_name = before


@contextmanager
def options_replaced(strategy: Any, replacements: Dict[str, Any]) -> Iterator[None]:
    """Give a strategy other `training_opts` or `inference_opts` while the block runs."""
    before = {name: getattr(strategy, "_" + name) for name in replacements}
    try:
        for name, options in replacements.items():
            setattr(strategy, "_" + name, options)
        yield
    finally:
        for name, options in before.items():
            setattr(strategy, "_" + name, options)


# What a torchmetrics object keeps besides its states.
_METRIC_BOOKKEEPING = frozenset(("_update_count", "_computed", "_forward_cache", "_cache"))


def metric_attributes(metric: Any) -> Dict[str, Any]:
    """A metric's states and its plain numbers and strings: all that an update can leave behind."""
    return {
        name: value
        for name, value in vars(metric).items()
        if name not in _METRIC_BOOKKEEPING
        and (name in metric._defaults or isinstance(value, (int, float, str)))
    }


def metric_lists(metric: Any) -> Dict[str, int]:
    """Lengths of the states that a metric keeps as lists of one entry an update."""
    return {
        name: len(getattr(metric, name))
        for name, default in metric._defaults.items()
        if isinstance(default, list) and isinstance(getattr(metric, name), list)
    }


def update_count(metric: Any) -> int:
    """How many updates a metric has seen since its last reset."""
    return int(metric._update_count)


def count_updates(metric: Any, more: int) -> None:
    """Count updates that a metric took together with another one."""
    metric._update_count += more


def shown_value(metric: Any) -> Any:
    """What Lightning logs for a metric object `on_step`: what its last `forward` returned."""
    return metric._forward_cache


def dataloader_suffix(trainer: Any) -> str:
    """What Lightning appends to a key where there are several loaders, else nothing."""
    index = getattr(trainer._results, "dataloader_idx", None)
    return "" if index is None else f"/dataloader_idx_{index}"


@contextmanager
def last_value(metric: Any, value: Any) -> Iterator[None]:
    """Let Lightning find `value` where it looks for what a metric's last `forward` returned."""
    before = metric._forward_cache
    try:
        metric._forward_cache = value
        yield
    finally:
        metric._forward_cache = before


def submodules(module: torch.nn.Module) -> Dict[str, Any]:
    """The dict in which a module keeps its children: an entry taken out is seen by nobody."""
    return module._modules


def lightning_class_of(module: Any) -> Type[Any]:
    """The `LightningModule` class, of whichever tree, that a module derives from."""
    return next(base for base in type(module).__mro__ if base.__name__ == "LightningModule")
