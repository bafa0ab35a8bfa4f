"""One batch of each loader that a call of `Trainer.fit` and the like names."""

import inspect
from typing import Any, Callable, Dict, List, Mapping, Optional, Tuple

from ipu_log_callback.doctor.step_run import Batch
from ipu_log_callback.emulator.structures import map_tensors

__all__ = ["METHODS", "batches_of_call"]

#: The trainer's methods, and of each the steps with the names of their loaders' hooks.
METHODS: Dict[str, Tuple[Tuple[str, str], ...]] = {
    "fit": (("training_step", "train_dataloader"), ("validation_step", "val_dataloader")),
    "validate": (("validation_step", "val_dataloader"),),
    "test": (("test_step", "test_dataloader"),),
    "predict": (("predict_step", "predict_dataloader"),),
}


def batches_of_call(
    trainer: Any, method: str, original: Callable[..., Any], args: Any, kwargs: Any
) -> Tuple[Any, Dict[str, List[Batch]]]:
    """The module and, for each step, one batch of each of its loaders.

    Data modules and modules are prepared and set up as the trainer would.

    Args:
        trainer: The trainer that was called.
        method: `"fit"`, `"validate"`, `"test"` or `"predict"`.
        original: The trainer's own method, for its signature.
        args: Positional arguments of the call.
        kwargs: Named arguments of the call.
    """
    given = inspect.signature(original).bind(trainer, *args, **kwargs).arguments
    module = given.get("model")
    if module is None:
        module = trainer.lightning_module
    data = given.get("datamodule")
    for name in ("train_dataloaders", "dataloaders"):
        if _is_data_module(given.get(name)):
            data = given.pop(name)
    module.trainer = trainer
    _set_up(trainer, data, module, method)
    batches: Dict[str, List[Batch]] = {}
    for step, hook in METHODS[method]:
        # not `or`: the truth of a loader is its length, which some do not know
        loaders = given.get(f"{hook}s", given.get("dataloaders"))
        if loaders is None:
            loaders = _from_hook(hook, data, module)
        if loaders is None or not _is_overridden(step, module):
            continue
        if step == "training_step":
            batches[step] = [Batch(_transferred(first_batch(loaders), data, module))]
        else:
            batches[step] = _one_of_each(loaders, data, module)
    return module, batches


def _one_of_each(loaders: Any, data: Any, module: Any) -> List[Batch]:
    each = list(loaders.values()) if isinstance(loaders, Mapping) else loaders
    each = list(each) if isinstance(each, (list, tuple)) else [each]
    return [
        Batch(_transferred(first_batch(loader), data, module), index if len(each) > 1 else None)
        for index, loader in enumerate(each)
    ]


def first_batch(loader: Any) -> Any:
    """The first micro-batch of a loader, or of a collection of loaders in the same structure."""
    if isinstance(loader, Mapping):
        return {name: first_batch(item) for name, item in loader.items()}
    if isinstance(loader, (list, tuple)):
        return type(loader)(first_batch(item) for item in loader)
    collection = getattr(loader, "iterables", getattr(loader, "loaders", None))
    if type(loader).__name__ == "CombinedLoader" and collection is not None:
        return first_batch(collection)
    batch = next(iter(loader))
    # a loader of PopTorch's gives the micro-batches of a whole execution in one
    parts = getattr(loader, "_num_batches_to_combine", None) or 1
    if parts == 1:
        return batch
    return map_tensors(batch, lambda tensor: tensor[: max(1, len(tensor) // parts)])


def _set_up(trainer: Any, data: Any, module: Any, stage: str) -> None:
    for part in (data, module):
        if part is None:
            continue
        if part is data:
            data.trainer = trainer
        part.prepare_data()
        if "stage" in inspect.signature(part.setup).parameters:
            part.setup(stage=stage)
        else:
            part.setup(stage)
    configure = getattr(module, "configure_model", None)
    if configure is not None:
        configure()


def _from_hook(hook: str, data: Any, module: Any) -> Optional[Any]:
    for part in (data, module):
        if part is not None and _is_overridden(hook, part):
            return getattr(part, hook)()
    return None


def _transferred(batch: Any, data: Any, module: Any) -> Any:
    """What `on_before_batch_transfer`, the one transfer hook on IPUs, makes of a batch."""
    for part in (data, module):
        if part is not None and _is_overridden("on_before_batch_transfer", part):
            return part.on_before_batch_transfer(batch, 0)
    return batch


def _is_data_module(value: Any) -> bool:
    return any(base.__name__ == "LightningDataModule" for base in type(value).__mro__)


def _is_overridden(name: str, part: Any) -> bool:
    if name in vars(part):
        return True
    own = getattr(type(part), name, None)
    base = next(
        (
            base
            for base in type(part).__mro__
            if base.__name__ in ("LightningModule", "LightningDataModule")
        ),
        None,
    )
    return own is not None and own is not getattr(base, name, None)
