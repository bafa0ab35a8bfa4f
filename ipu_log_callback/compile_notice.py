"""Say that a step is being compiled, which can take many minutes, and which one.

The log says it in two lines. The progress bar says it beside its description, through the public
attributes of Lightning's two bars; it gets the description back afterwards. PopTorch's own bar
("Graph compilation", on stderr, unless `showCompilationProgressBar(False)`) is left alone: it shows
how far the compilation is.
"""

from contextlib import contextmanager
from time import perf_counter
from typing import Any, Callable, Dict, Iterator, Optional, Tuple

from . import _compat

__all__ = ["STEP_OF_STAGE", "compile_notice"]

#: Step by the stage under which the strategy keeps its executor.
STEP_OF_STAGE = {
    "train": "training_step",
    "validate": "validation_step",
    "sanity_check": "validation_step",
    "test": "test_step",
    "predict": "predict_step",
}

# The attributes in which the bars keep what they draw for a stage; Lightning 1 calls the first of
# TQDM's `main_progress_bar`.
_TQDM_BARS: Dict[str, Tuple[str, ...]] = {
    "train": ("train_progress_bar", "main_progress_bar"),
    "validate": ("val_progress_bar",),
    "sanity_check": ("val_progress_bar",),
    "test": ("test_progress_bar",),
    "predict": ("predict_progress_bar",),
}
_RICH_TASKS: Dict[str, Tuple[str, ...]] = {
    "train": ("train_progress_bar_id", "main_progress_bar_id"),
    "validate": ("val_progress_bar_id",),
    "sanity_check": ("val_sanity_progress_bar_id",),
    "test": ("test_progress_bar_id",),
    "predict": ("predict_progress_bar_id",),
}


@contextmanager
def compile_notice(trainer: Any, owner: str, step: str) -> Iterator[None]:
    """Say that `step` is being compiled while the block runs.

    Args:
        trainer: The trainer.
        owner: Class name of the LightningModule.
        step: The step's name.
    """
    _compat.rank_zero_info(
        f"Compiling `{owner}.{step}` for the IPU. Its first execution waits for it, maybe minutes."
    )
    started = perf_counter()
    put_back = _harmless(_describe, trainer, f"compiling {step}")
    try:
        yield
    finally:
        if put_back is not None:
            _harmless(put_back)
    _compat.rank_zero_info(f"Compiled `{owner}.{step}` in {perf_counter() - started:.1f} s.")


def _harmless(function: Callable[..., Any], *args: Any) -> Any:
    """Call what only shows something: no fault of a bar may end a run."""
    try:
        return function(*args)
    except Exception:  # noqa: BLE001 - a bar of the user's own may do anything
        return None


def _describe(trainer: Any, text: str) -> Optional[Callable[[], None]]:
    """Add a text to the description of the bar that is shown; returns what takes it off again."""
    bar = trainer.progress_bar_callback
    stage = getattr(trainer.state.stage, "value", None)
    if bar is None or stage is None or not getattr(bar, "is_enabled", False):
        return None
    if getattr(bar, "progress", None) is not None:
        return _describe_rich(bar, str(stage), text)
    return _describe_tqdm(bar, str(stage), text)


def _describe_tqdm(bar: Any, stage: str, text: str) -> Optional[Callable[[], None]]:
    tqdm = _first(bar, _TQDM_BARS[stage])
    if tqdm is None or tqdm.disable:
        return None
    before = tqdm.desc  # ends with ": ", which `set_description` adds
    tqdm.set_description(f"{before[:-2] if before.endswith(': ') else before}, {text}")
    return lambda: tqdm.set_description_str(before)


def _describe_rich(bar: Any, stage: str, text: str) -> Optional[Callable[[], None]]:
    task_id = _first(bar, _RICH_TASKS[stage])
    if task_id is None:
        return None
    progress = bar.progress
    task = next(task for task in progress.tasks if task.id == task_id)
    before, visible = task.description, task.visible

    def show(description: str, shown: bool) -> None:
        # an evaluation's bar is hidden until its first batch is over
        progress.update(task_id, description=description, visible=shown)
        progress.refresh()

    show(f"{before.rstrip()}, {text}", True)
    return lambda: show(before, visible)


def _first(owner: Any, names: Tuple[str, ...]) -> Any:
    return next((getattr(owner, name) for name in names if _has(owner, name)), None)


def _has(owner: Any, name: str) -> bool:
    try:
        return hasattr(owner, name)
    except TypeError:  # TQDM's properties, while they are unset
        return False
