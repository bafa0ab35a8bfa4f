"""`IPULogCallback`: Lightning's hooks."""

# No postponed annotations here: LightningCLI with the jsonargparse of Python 3.8 drops arguments
# whose annotations it cannot evaluate.
from typing import Any, Dict, Optional, Sequence, Union

from . import _compat
from .errors import CallbackSetupError, KeySelectionError, report
from .run import Run
from .selection import Selection, parse_names

__all__ = ["IPULogCallback"]


class IPULogCallback(_compat.Callback):
    """Make `self.log` work inside steps that PopTorch compiles.

    On an IPU a step's Python runs once, when it is compiled. This callback captures the step's
    `self.log` calls and torchmetrics updates in that one run, anchors the tensors of the selected
    ones as outputs of the step, and replays the calls after every execution with the values that
    came back. On any other strategy it does nothing.

    =================  ==================================================  ========================
    key                value                                               at
    =================  ==================================================  ========================
    as in the step     reduced by the call's `reduce_fx` over the          `on_train_batch_end`,
                       micro-batches of an execution (`on_step`),          `on_validation_batch_end`,
                       over the epoch (`on_epoch`)                         `on_test_batch_end`
    =================  ==================================================  ========================

    Args:
        keys: Names, or globs such as `"val_*"` and `"*"`, of what to anchor: keys of `self.log`
            and `self.log_dict`, attribute paths of torchmetrics objects. Nothing is anchored
            unless selected; each scalar costs 4 bytes per micro-batch, and all of a step travel
            in one tensor. What is logged and not selected is listed in one warning a run.
        enabled: False makes every `self.log` in a compiled step a silent no-op.
        output_mode: `"auto"` has every micro-batch returned, whatever output mode the strategy's
            `poptorch.Options` have, so that values are exact; hooks still see the step's outputs as
            those options promise. `"keep"` leaves the options alone.

    Raises:
        KeySelectionError: `keys` is not a str or a sequence of str, has an empty or a double
            entry, or `output_mode` is unknown.
        CallbackSetupError: In `setup`: a second `IPULogCallback`, or a trainer of the other
            Lightning distribution.

    Example:
        >>> IPULogCallback(keys=["train_loss", "val_*"])
        IPULogCallback(keys=['train_loss', 'val_*'])
    """

    def __init__(
        self,
        keys: Union[str, Sequence[str]] = (),
        *,
        enabled: bool = True,
        output_mode: str = "auto",
    ) -> None:
        parse_names(keys, "keys")
        if output_mode not in ("auto", "keep"):
            raise KeySelectionError(
                report(
                    f"`IPULogCallback(output_mode={output_mode!r})` received an unknown mode, "
                    "expected 'auto' or 'keep'",
                    fix="output_mode='auto' for exact values, 'keep' to leave "
                    "poptorch.Options as they are",
                )
            )
        self.keys = keys
        self.enabled = enabled
        self.output_mode = output_mode
        self._runs: Dict[int, Run] = {}

    def __repr__(self) -> str:
        given = {"keys": list(parse_names(self.keys, "keys"))}
        parts = [f"{name}={value!r}" for name, value in given.items() if value]
        if not self.enabled:
            parts.append("enabled=False")
        if self.output_mode != "auto":
            parts.append(f"output_mode={self.output_mode!r}")
        return f"{type(self).__name__}({', '.join(parts)})"

    def __getstate__(self) -> Dict[str, Any]:
        # a run belongs to its trainer: a copy or a pickle of the callback starts without one
        return {**self.__dict__, "_runs": {}}

    # -- hooks ------------------------------------------------------------------------------

    def setup(self, trainer: Any, pl_module: Any, stage: Optional[str] = None) -> None:
        """Prepare a run on an IPU strategy; leave any other alone."""
        _check_namespace(trainer)
        _check_alone(self, trainer)
        if not _compat.is_ipu_strategy(trainer.strategy):
            return
        self._end(trainer)  # a run that was interrupted ends here at the latest
        wanted = self.enabled and not getattr(trainer, "barebones", False)
        run = Run(
            trainer,
            pl_module,
            self,
            Selection(parse_names(self.keys, "keys") if wanted else ()),
            exact=self.output_mode == "auto",
            tell_dropped=wanted,
        )
        self._runs[id(trainer)] = run
        run.begin()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any, **__: Any) -> None:
        """Replay the execution's `training_step`."""
        self._replay(trainer, "training_step")

    def on_validation_batch_end(self, trainer: Any, pl_module: Any, *_: Any, **__: Any) -> None:
        """Replay the execution's `validation_step`."""
        self._replay(trainer, "validation_step")

    def on_test_batch_end(self, trainer: Any, pl_module: Any, *_: Any, **__: Any) -> None:
        """Replay the execution's `test_step`."""
        self._replay(trainer, "test_step")

    def on_predict_batch_end(self, trainer: Any, pl_module: Any, *_: Any, **__: Any) -> None:
        """Replay the metric calls of the execution's `predict_step`."""
        self._replay(trainer, "predict_step")

    def teardown(self, trainer: Any, pl_module: Any, stage: Optional[str] = None) -> None:
        """Say what was not logged, and put everything back."""
        run = self._runs.get(id(trainer))
        try:
            if run is not None:
                run.tell()
        finally:
            self._end(trainer)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Put everything back: `teardown` is not called after an exception."""
        self._end(trainer)

    # -- runs -------------------------------------------------------------------------------

    def _replay(self, trainer: Any, step: str) -> None:
        run = self._runs.get(id(trainer))
        if run is not None:
            run.replay(step)

    def _end(self, trainer: Any) -> None:
        run = self._runs.pop(id(trainer), None)
        if run is not None:
            run.end()


def _check_namespace(trainer: Any) -> None:
    namespace = _compat.namespace_of(trainer, "Trainer")
    if namespace is not None and namespace != _compat.NAMESPACE:
        distributions = {"lightning": "lightning", "pytorch_lightning": "pytorch-lightning"}
        raise CallbackSetupError(
            report(
                f"`IPULogCallback` was set up by a trainer of `{distributions[namespace]}`, "
                f"expected one of `{distributions[_compat.NAMESPACE]}`",
                why="both distributions are installed, and their classes are not each other's",
                fix=f"import `{'lightning.pytorch' if namespace == 'lightning' else namespace}` "
                "before `ipu_log_callback`, and only that one",
            )
        )


def _check_alone(callback: IPULogCallback, trainer: Any) -> None:
    others = [c for c in trainer.callbacks if isinstance(c, IPULogCallback) and c is not callback]
    if others:
        raise CallbackSetupError(
            report(
                f"the trainer has {len(others) + 1} `IPULogCallback`s, expected one",
                received=", ".join(map(repr, [callback, *others])),
                fix=f"IPULogCallback(keys={[*callback.keys, *others[0].keys]!r})"
                if not isinstance(callback.keys, str) and not isinstance(others[0].keys, str)
                else "one IPULogCallback with all keys",
            )
        )
