"""The state of everything that a run could change, as something that can be compared."""

from typing import Any, Dict, List, Tuple

import torch
import torchmetrics

from ipu_log_callback import run as package_run
from ipu_log_callback.current import current_capture

from .runs import IPUStrategy, pl

__all__ = ["differences", "snapshot"]

Snapshot = Dict[Tuple[str, ...], Any]

#: What Lightning itself sets on a module or strategy in a run and leaves there on every strategy.
_LIGHTNINGS = frozenset(
    (
        *("_trainer", "trainer", "_fabric", "_current_fx_name", "_param_requires_grad_state"),
        *("_LightningOptimizer__step", "training", "_jit_is_scripting", "_automatic_optimization"),
        *("_hparams", "_hparams_initial", "_hparams_name", "_log_hyperparams", "_dtype"),
        *("prepare_data_per_node", "allow_zero_length_dataloader_with_multiple_devices"),
        # put back as an attribute of the instance by the strategy's teardown
        *("optimizer_zero_grad", "_metric_attributes"),
    )
)
_STRATEGYS = frozenset(
    (
        *("_lightning_module", "_model", "model", "_optimizers", "_lightning_optimizers"),
        *("optimizers", "lr_scheduler_configs", "poptorch_models", "lightning_optimizers"),
        *("_update_dataloader_original", "_optimizer_zero_grad_original", "_launcher"),
        *("optimizer_frequencies", "_forward_redirection", "_checkpoint_io", "_precision_plugin"),
        *("_lightning_precision_plugin", "parallel_devices", "_cluster_environment"),
    )
)


def _described(value: Any) -> Any:
    """Type and place of a value: numbers change in a run, what they are does not."""
    if isinstance(value, torch.Tensor):
        return (type(value), value.device.type, value.dtype, tuple(value.shape))
    if isinstance(value, torch.device):
        return str(value)
    if isinstance(value, dict):
        return (type(value), tuple((name, id(item), type(item)) for name, item in value.items()))
    if callable(value):
        return getattr(value, "__func__", value)
    return type(value)


def _module(module: torch.nn.Module) -> Snapshot:
    found: Snapshot = {}
    for name, child in module.named_modules():
        found[("module", name)] = (id(child), type(child))
        for key, value in vars(child).items():
            if key in _LIGHTNINGS:
                continue
            described = None if key in _METRICS else _described(value)
            if key in ("_parameters", "_buffers") and isinstance(child, torchmetrics.Metric):
                described = None
            found[("module", name, key)] = described
        for key, parameter in (*child._parameters.items(), *child._buffers.items()):
            if parameter is not None:
                found[("tensor", name, key)] = (
                    type(parameter),
                    parameter.device.type,
                    parameter.requires_grad,
                )
    return found


_METRICS = frozenset(
    ("_computed", "_forward_cache", "_cache", "_update_count", "_is_synced", "_groups")
)

#: Classes and modules of other packages that something might be tempted to patch.
_LIBRARIES: List[Any] = [
    pl.LightningModule,
    pl.Trainer,
    pl.Callback,
    IPUStrategy,
    pl.trainer.connectors.data_connector,
    torch,
    torch.Tensor,
    torch.nn,
    torch.nn.Module,
    torch.nn.Linear,
    torch.nn.functional,
    torch.jit,
    torch.utils.data.DataLoader,
    torchmetrics.Metric,
    torchmetrics.MetricCollection,
    torchmetrics.MeanMetric,
]


def snapshot(trainer: Any, module: Any) -> Snapshot:
    """What the trainer, its strategy, the module, the libraries and this package look like."""
    found = _module(module)
    strategy = trainer.strategy
    found[("trainer", "callbacks")] = (
        id(trainer.callbacks),
        tuple(map(id, trainer.callbacks)),
    )
    found[("trainer", "strategy")] = (id(strategy), type(strategy))
    for key, value in vars(strategy).items():
        if key not in _STRATEGYS:
            found[("strategy", key)] = (id(value), _described(value))
    for key in sorted(set(vars(trainer)) - _TRAINERS):
        found[("trainer", key)] = type(vars(trainer)[key])
    for library in _LIBRARIES:
        for key, value in vars(library).items():
            if not key.startswith("__") and key not in _CACHES:
                found[("library", library.__name__, key)] = id(value)
    found[("package", "runs under way")] = len(package_run._UNDER_WAY)
    found[("package", "capture")] = current_capture()
    found[("mode", "torch function modes")] = (
        torch.overrides._get_current_function_mode_stack()
        if hasattr(torch.overrides, "_get_current_function_mode_stack")
        else None
    )
    found[("mode", "grad")] = torch.is_grad_enabled()
    return found


# Set by the trainer in its first run.
_TRAINERS = frozenset(
    (
        *("_results", "should_stop", "datamodule", "predict_loop", "train_dataloader"),
        *("val_check_batch",),
        # Lightning 1, where the loaders and their state are the trainer's; later the loops'
        *("val_dataloaders", "test_dataloaders", "predict_dataloaders", "num_training_batches"),
        *("_last_train_dl_reload_epoch", "_last_val_dl_reload_epoch"),
        *("overridden_optimizer_step", "overridden_optimizer_zero_grad"),
        *("_validated_ckpt_path", "_tested_ckpt_path", "_predicted_ckpt_path"),
    )
)
# Filled by the libraries as they go.
_CACHES = frozenset(("_jit_is_scripting",))


def differences(before: Snapshot, after: Snapshot) -> List[str]:
    """What changed, in words."""
    told = []
    for place in sorted({*before, *after}, key=str):
        if place not in after:
            told.append(f"{' '.join(place)}: gone")
        elif place not in before:
            told.append(f"{' '.join(place)}: new, {after[place]}")
        elif before[place] != after[place]:
            told.append(f"{' '.join(place)}: {before[place]} became {after[place]}")
    return told


def leftovers(trainer: Any, module: Any) -> List[str]:
    """What a run leaves on the device, or wrapped by PopTorch: nothing."""
    told = []
    for name, child in module.named_modules():
        for key, value in {**vars(child), **child._parameters, **child._buffers}.items():
            device = value if isinstance(value, torch.device) else getattr(value, "device", None)
            if isinstance(device, torch.device) and device.type == "ipu":
                told.append(f"{name}.{key} is on {device}")
            if "poptorch" in type(value).__name__.lower():
                told.append(f"{name}.{key} is a {type(value).__name__}")
    executors = getattr(trainer.strategy, "poptorch_models", {}).values()
    told += [
        "an executor still has the listener's class"
        for bases in (type(executor).__mro__ for executor in executors)
        if bases[0].__name__ == bases[1].__name__
    ]
    return told
