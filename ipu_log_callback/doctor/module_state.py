"""Leave a module as it was: what a step changes in Python is put back."""

import collections
import importlib
import logging
import random
import sys
import warnings
from contextlib import contextmanager
from typing import Any, Dict, Iterator, List, Sequence, Tuple

import torch

from ipu_log_callback import _compat

__all__ = ["attached_trainer", "optimizers_known", "restored", "swapped"]

_MISSING = object()
_CONTAINERS = (list, dict, set, collections.deque)


@contextmanager
def restored(module: torch.nn.Module) -> Iterator[None]:
    """After the block, attributes, containers, tables and random states are as before.

    Parameters and buffers need no copy: the emulator works on values of its own.
    """
    attributes: List[Tuple[Dict[str, Any], Dict[str, Any]]] = []
    contents: List[Tuple[Any, Any]] = []
    for part in module.modules():
        attributes.append((vars(part), dict(vars(part))))
        contents.extend(
            (value, value.copy()) for value in vars(part).values() if isinstance(value, _CONTAINERS)
        )
    python_state, torch_state = random.getstate(), torch.get_rng_state()
    try:
        yield
    finally:
        for live, before in attributes:
            live.clear()
            live.update(before)
        for container, before_content in contents:
            _refill(container, before_content)
        random.setstate(python_state)
        torch.set_rng_state(torch_state)


def _refill(container: Any, content: Any) -> None:
    if isinstance(container, list):
        container[:] = content
    elif isinstance(container, collections.deque):
        container.clear()
        container.extend(content)
    elif not _same_items(container, content):
        container.clear()
        container.update(content)


def _same_items(now: Any, before: Any) -> bool:
    if isinstance(now, dict):
        return list(now) == list(before) and all(now[key] is before[key] for key in now)
    return bool(now == before)


@contextmanager
def attached_trainer(module: Any) -> Iterator[Tuple[Any, bool]]:
    """The trainer of a module, or one made for it while the block runs.

    Yields:
        The trainer, and whether it was made here.
    """
    try:
        trainer = module.trainer
    except RuntimeError:  # Lightning 2.0 has no trainer to give
        trainer = None
    if trainer is not None:
        yield trainer, False
        return
    trainer = _new_trainer(_compat.namespace_of(module, "LightningModule"))
    module.trainer = trainer
    yield trainer, True


@contextmanager
def optimizers_known(trainer: Any, optimizers: Sequence[Any]) -> Iterator[None]:
    """Let `self.optimizers()` in a step find what `configure_optimizers` made."""
    before = list(trainer.optimizers)
    if not before:
        trainer.optimizers = list(optimizers)
    try:
        yield
    finally:
        if not before:
            trainer.optimizers = []


def _new_trainer(namespace: Any) -> Any:
    name = "lightning.pytorch" if namespace == "lightning" else "pytorch_lightning"
    lightning = sys.modules.get(name) or importlib.import_module(name)
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    options = {
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return lightning.Trainer(**options)
    finally:
        logger.setLevel(level)


@contextmanager
def swapped(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replace `owner.name` while the block runs; leaves no attribute behind."""
    before = vars(owner).get(name, _MISSING)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is _MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, before)
