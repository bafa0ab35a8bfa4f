"""`IPULogCallback`: Lightning's hooks."""

# ruff: noqa: ARG002 - the hooks' signatures are Lightning's
#
# No postponed annotations here: LightningCLI with the jsonargparse of Python 3.8 drops arguments
# whose annotations it cannot evaluate.
from dataclasses import replace
from html import escape
from typing import TYPE_CHECKING, Any, Dict, Optional, Sequence, Union

from . import _compat
from .anchor import stored_by
from .captured import Captured
from .cost import Cost
from .errors import (
    CallbackSetupError,
    KeySelectionError,
    MissingExtraError,
    MissingStepRecordError,
    report,
)
from .history import History
from .inspection_settings import inspection_parts, settings_of
from .measurement import Measurement
from .selection import Selection, parse_names

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from .run import Run

__all__ = ["IPULogCallback"]

#: Hooks of every batch that the callback has no use for. Lightning opens a profile for each hook of
#: each callback, an empty one too, which makes 1 % of a small batch; what cannot be called it
#: passes over. (But for `on_train_batch_start`, which Lightning 1.6 calls without a look.)
_IDLE_HOOKS = (
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_validation_batch_start",
    "on_test_batch_start",
    "on_predict_batch_start",
)


class IPULogCallback(_compat.Callback):
    """Make `self.log` work inside steps that PopTorch compiles.

    On an IPU a step's Python runs once, when it is compiled. This callback captures the step's
    `self.log` calls and torchmetrics updates in that one run, anchors the tensors of the selected
    ones as outputs of the step, and replays the calls after every execution with the values that
    came back. On any other strategy it does nothing.

    | key | value |
    | --- | --- |
    | as in the step | `on_step`: an execution's micro-batches, reduced by the call's `reduce_fx` |
    | | `on_epoch`: the epoch's micro-batches, likewise |
    | `<kind>/<name>/<statistic>` | of what is looked at: see below |
    | `grad/norm` | norm of all `gradients` together, mean over the execution's weight updates |
    | `ipu_log/...` | seconds, with `measure_cost` |

    All are logged under the step's own hook, as soon as its execution is over: in the trainer's
    step, where a CPU run logs, so that schedulers and the hooks around the optimizer see them; of
    an execution outside of it, in `on_train_batch_end`, `on_validation_batch_end` and
    `on_test_batch_end`.

    With `gradients`, `weights`, `optimizer_state`, `activations` and `tensors` a key
    `<kind>/<name>/<statistic>` each, such as `grad/encoder.0.weight/norm`; the kind is `grad`,
    `weight`, `optim`, `activation` or `tensor`, and `anchored` for `anchor(..., reduce="stats")`.
    An execution's updates or micro-batches are averaged; of `min`, `max` and `abs_max` the extreme
    is taken.

    Args:
        keys: Names, or globs such as `"val_*"` and `"*"`, of what to anchor: keys of `self.log`
            and `self.log_dict`, attribute paths of torchmetrics objects. Nothing is anchored
            unless selected; each scalar costs 4 bytes per micro-batch, and those of a step travel
            in one tensor for each kind of number. What is logged and not selected is listed in one
            warning a run.
        enabled: False makes every `self.log` in a compiled step a silent no-op; nothing is
            anchored, whatever else is asked for.
        output_mode: `"auto"` has every micro-batch returned, whatever output mode the strategy's
            `poptorch.Options` have, so that values are exact; hooks still see the step's outputs as
            those options promise. It does so where something is selected; `"all"` in any case,
            for steps that only call `anchor`. `"keep"` leaves the options alone: what is logged
            tells of the micro-batches that come back.
        history: True, or how many executions of each step to keep in `history`, micro-batch by
            micro-batch; True keeps the last 10,000.
        gradients: Names or globs of parameters, as `named_parameters()` of the module gives them,
            whose gradients are anchored. The gradient is that of a weight update: averaged or
            summed over accumulation and replicas as `poptorch.Options` say, without loss scaling,
            before clipping: what plain PyTorch has in `.grad`. Each costs the parameter's size per
            micro-batch.
        weights: Likewise for weights after the execution's last update.
        optimizer_state: `<parameter>/<state>`, e.g. `"head.*/exp_avg"`, names or globs of the
            optimizer's states, with PyTorch's names for states. Those that PopART has a stable name
            for (`momentum_buffer`, `exp_avg`, `exp_avg_sq`, `square_avg`, `grad_avg`) are anchored;
            any other is read from a `poptorch.optim` optimizer, which copies all states of all
            parameters from the device: set `every_n_executions`.
        activations: Attribute paths or globs of submodules whose outputs are anchored: the first
            tensor of what a submodule returns, the calls of one step stacked.
        tensors: Name of your own to PopART's name of a tensor, one of `tensor_names()`; in
            the training model, or in every model of a run without training.
        statistics: Which statistics of all these are logged: `"norm"`, `"mean"`, `"std"`, `"min"`,
            `"max"`, `"abs_max"`, `"nonfinite"` (fraction of NaN and infinities).
        reduce_activations: `"stats"` computes the statistics of activations on the device, so that
            only they travel.
        every_n_executions: How often the tensors of the arguments above, and of `anchor`, are
            looked at: at the first execution of a step and every n-th from there. They travel each
            time; logged keys are replayed each time.
        histograms: Also log the tensors as histograms to TensorBoard and W&B loggers.
        cost_warning: Warn when anchoring adds more than so many bytes to an execution of a step;
            `None` never warns.
        measure_cost: Log seconds: `ipu_log/execution_seconds`, `ipu_log/host_seconds` (this
            callback's own work) and, where the device counts them, `ipu_log/round_trip_seconds` and
            `ipu_log/ipu_to_host_seconds`; the end of the run summarises them at level INFO.

    Attributes:
        anchored: Tensors of the last execution that was looked at. `anchor(name, ...)` and
            submodules by their names, `[results, *shape]`, micro-batches in the order
            `[iterations, accumulation, replicas]`; `grad/<parameter>`, `[updates, *shape]`;
            `weight/<parameter>` and `optim/<parameter>/<state>`, `[1, *shape]`; `tensors` by your
            names, `[results, *shape]`.
        cost: Bytes per execution and output streams of all that is anchored, known after each
            compile; `print` shows a table.
        measured: What `measure_cost` measured, over all runs of this callback.
        history: What was replayed, key to entries; readable while training runs, after an
            interrupt, and after the run.
        captured: What was captured in each compiled step; readable as long.

    Raises:
        KeySelectionError: `keys`, or another argument that takes names, is not a str or a sequence
            of str or has an empty or a double entry; an argument has an unknown value; in the
            strategy's setup, a glob matches nothing.
        CallbackSetupError: In `setup`: a second `IPULogCallback`, a trainer of the other Lightning
            distribution, or a run in another thread that is under way.

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
        history: Union[bool, int] = False,
        gradients: Union[str, Sequence[str]] = (),
        weights: Union[str, Sequence[str]] = (),
        optimizer_state: Union[str, Sequence[str]] = (),
        activations: Union[str, Sequence[str]] = (),
        tensors: Optional[Dict[str, str]] = None,
        statistics: Union[str, Sequence[str]] = ("norm",),
        reduce_activations: Optional[str] = None,
        every_n_executions: int = 1,
        histograms: bool = False,
        cost_warning: Optional[int] = 1_000_000,
        measure_cost: bool = False,
    ) -> None:
        parse_names(keys, "keys")
        if output_mode not in ("auto", "all", "keep"):
            raise KeySelectionError(
                report(
                    f"`IPULogCallback(output_mode={output_mode!r})` received an unknown mode, "
                    "expected 'auto', 'all' or 'keep'",
                    fix="output_mode='auto' for exact values, 'keep' to leave "
                    "poptorch.Options as they are",
                )
            )
        self.keys = keys
        self.enabled = enabled
        self.output_mode = output_mode
        self.history = History(history)
        self.captured = Captured()
        self.gradients = gradients
        self.weights = weights
        self.optimizer_state = optimizer_state
        self.activations = activations
        self.tensors = tensors
        self.statistics = statistics
        self.reduce_activations = reduce_activations
        self.every_n_executions = every_n_executions
        self.histograms = histograms
        self.cost_warning = cost_warning
        self.measure_cost = measure_cost
        self.anchored: Dict[str, Any] = {}
        self.cost = Cost()
        self.measured = Measurement()
        self._tensor_names: Dict[str, Sequence[str]] = {}
        settings_of(self)
        self._runs: Dict[int, Run] = {}
        for name in _IDLE_HOOKS:
            if getattr(type(self), name) is getattr(_compat.Callback, name):  # no subclass has it
                setattr(self, name, None)

    def __repr__(self) -> str:
        given = {"keys": list(parse_names(self.keys, "keys"))}
        parts = [f"{name}={value!r}" for name, value in given.items() if value]
        if not self.enabled:
            parts.append("enabled=False")
        if self.output_mode != "auto":
            parts.append(f"output_mode={self.output_mode!r}")
        if self.history.keep:
            parts.append(f"history={self.history.keep}")
        parts += inspection_parts(self)
        return f"{type(self).__name__}({', '.join(parts)})"

    def _repr_html_(self) -> str:
        return f"<p><code>{escape(repr(self))}</code></p>{self.captured._repr_html_()}"

    def plot(self, *keys: str) -> "Figure":
        """Draw what the history holds: executions as lines, micro-batches faint, epochs marked.

        Args:
            *keys: Which keys; none for all. Keys that differ in the step's name only
                (`train_loss`, `val_loss`) share a panel.

        Returns:
            A `matplotlib.figure.Figure`, which a notebook shows and `savefig` writes.

        Raises:
            MissingExtraError: matplotlib is not installed.
            UnknownKeyError: The history has nothing of a key.
        """
        try:
            from .plot import draw
        except ImportError as error:
            raise MissingExtraError("callback.plot()", "matplotlib", "plot") from error
        return draw(self.history, keys or tuple(self.history))

    def tensor_names(self, step: str = "training_step") -> Sequence[str]:
        """PopART's names of all tensors of a compiled step, for `tensors`.

        Raises:
            MissingStepRecordError: The step was not compiled in a run of this callback.
        """
        if step not in self._tensor_names:
            raise MissingStepRecordError(
                report(
                    f"`callback.tensor_names({step!r})` was called before the step was compiled",
                    compiled=", ".join(self._tensor_names) or "no step",
                    fix="call it in a hook such as `on_train_batch_end`, or after `trainer.fit`",
                )
            )
        return self._tensor_names[step]

    def __getstate__(self) -> Dict[str, Any]:
        # a run belongs to its trainer: a copy or a pickle of the callback starts without one
        # and without the module, which the trainer's `log` and `log_dict` are bound to
        state = {**self.__dict__, "_runs": {}}
        return {name: value for name, value in state.items() if name not in ("log", "log_dict")}

    # -- hooks ------------------------------------------------------------------------------

    def setup(self, trainer: Any, pl_module: Any, stage: Optional[str] = None) -> None:
        """Prepare a run on an IPU strategy; leave any other alone."""
        _check_namespace(trainer)
        _check_alone(self, trainer)
        stored_by(trainer, self)
        if not _compat.is_ipu_strategy(trainer.strategy):
            return
        # half of the package's import time, and of no use off the IPU
        from .inspection import Inspector
        from .run import Run

        self._end(trainer)  # a run that was interrupted ends here at the latest
        self.history.begin()
        if trainer.state.fn == "fit":
            self.captured.clear()
        wanted = self.enabled and not getattr(trainer, "barebones", False)
        selection = Selection(parse_names(self.keys, "keys") if wanted else ())
        settings = replace(settings_of(self), enabled=wanted)
        asked = self.output_mode == "all" or bool(selection) or settings.needs_every_micro_batch
        run = Run(
            trainer,
            pl_module,
            self,
            selection,
            exact=wanted and asked and self.output_mode != "keep",
            tell_dropped=wanted,
            inspector=Inspector(self, trainer, pl_module, settings),
        )
        self._runs[id(trainer)] = run
        run.begin()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any, **__: Any) -> None:
        """The execution of `training_step` is replayed by now."""
        self._replay(trainer, "training_step")

    def on_validation_batch_end(self, trainer: Any, pl_module: Any, *_: Any, **__: Any) -> None:
        """The execution of `validation_step` is replayed by now."""
        self._replay(trainer, "validation_step")

    def on_test_batch_end(self, trainer: Any, pl_module: Any, *_: Any, **__: Any) -> None:
        """The execution of `test_step` is replayed by now."""
        self._replay(trainer, "test_step")

    def on_predict_batch_end(self, trainer: Any, pl_module: Any, *_: Any, **__: Any) -> None:
        """The metric calls of `predict_step` are replayed by now."""
        self._replay(trainer, "predict_step")

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Keep the values of the training epoch before, now that Lightning has them all."""
        self.history.epoch_over(trainer, "training_step")

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Keep the values of the last training epoch."""
        self.history.epoch_over(trainer, "training_step")

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Keep the values of the validation epoch."""
        self.history.epoch_over(trainer, "validation_step")

    def on_test_end(self, trainer: Any, pl_module: Any) -> None:
        """Keep the values of the test epoch."""
        self.history.epoch_over(trainer, "test_step")

    def teardown(self, trainer: Any, pl_module: Any, stage: Optional[str] = None) -> None:
        """Say what was not logged, and put everything back."""
        run = self._runs.get(id(trainer))
        try:
            if run is not None:
                run.tell()
        finally:
            self._end(trainer)
            stored_by(trainer, None)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Put everything back: `teardown` is not called after an exception."""
        run = self._runs.pop(id(trainer), None)
        stored_by(trainer, None)
        if run is not None:
            run.abandon(interrupted=isinstance(exception, KeyboardInterrupt))

    # -- runs -------------------------------------------------------------------------------

    def _replay(self, trainer: Any, step: str) -> None:
        run = self._runs.get(id(trainer))
        if run is not None:
            run.batch_over(step)

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
        keys = {key: None for c in [callback, *others] for key in parse_names(c.keys, "keys")}
        raise CallbackSetupError(
            report(
                f"the trainer has {len(others) + 1} `IPULogCallback`s, expected one",
                received=", ".join(map(repr, [callback, *others])),
                expected="one, with the keys of all of them",
                why="each would replay every logged call",
                fix=f"IPULogCallback(keys={list(keys)!r})",
            )
        )
