"""Run one LightningModule twice, on the CPU and on the IPU strategy, and compare all that is seen.

The two runs see the same micro-batches in the same order. A CPU batch is one micro-batch; an IPU
batch is an execution of `micro_batches` of them. The CPU run accumulates gradients over
accumulation x replicas micro-batches, so that both make the same updates.

Two differences are deliberate, and are what `expected_of` allows for: an `on_step` value stands for
a whole execution (the CPU's micro-batch values, reduced by the call's own `reduce_fx`), and the
trainer counts one step an execution.
"""

import copy
import logging
import warnings
from dataclasses import dataclass, field, replace
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple, Union

import torch
from lightning_in_use import QUIET, IPUStrategy, pl
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import Metric

from ipu_log_callback import IPULogCallback, IPULogWarning

Logger = (
    pl.loggers.logger.Logger
    if hasattr(pl.loggers, "logger")
    else pl.loggers.base.LightningLoggerBase
)
for _name in ("pytorch_lightning", "lightning.pytorch", "lightning"):
    logging.getLogger(_name).setLevel(logging.ERROR)

__all__ = [
    "DEFAULT",
    "ONE_TO_ONE",
    "Net",
    "Run",
    "Seen",
    "Setting",
    "assert_alike",
    "check_parity",
    "fit",
    "observe",
    "pl",
    "test_only",
    "two_loaders",
    "validate_only",
]

#: Whether `Jit.traceModel(True)` compiles the steps, PopTorch's only way up to SDK 2.6.
TRACED = False
MICRO_BATCH = 2
FEATURES = 3
Module = Any
Program = Callable[["Run"], None]


# -- what is run --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """How a run is cut into executions, and what the callback is told.

    Args:
        iterations: Device iterations, in training and inference.
        accumulation: Gradient accumulation; training only.
        replicas: Replication factor.
        executions: Executions of an epoch of training.
        mode: The user's own `poptorch.OutputMode` for both executors, by name; with `EveryN` the
            period is `period`.
        output_mode: The callback's argument.
        keys: The callback's argument.
        micro_batch: Samples of a micro-batch.
        strategy: Makes the strategy, given `training_opts` and `inference_opts`; the `IPUStrategy`
            of the Lightning in use if there is none.
    """

    iterations: int = 2
    accumulation: int = 2
    replicas: int = 1
    executions: int = 2
    mode: Optional[str] = None
    period: int = 1
    output_mode: str = "auto"
    keys: Union[str, Sequence[str]] = "*"
    micro_batch: int = MICRO_BATCH
    strategy: Optional[Callable[..., Any]] = None

    def micro_batches(self, training: bool) -> int:
        """Micro-batches of one execution."""
        return self.iterations * self.replicas * (self.accumulation if training else 1)

    @property
    def samples(self) -> int:
        """Samples of the data set: whole executions of training and of inference."""
        return self.executions * self.micro_batches(training=True) * self.micro_batch


DEFAULT = Setting()
ONE_TO_ONE = Setting(iterations=1, accumulation=1, replicas=1, executions=3)


class Net(pl.LightningModule):
    """A linear model whose loss is the mean square of its error; subclasses say what it logs.

    Args:
        logs: Called as `logs(module, stage, x, loss)` in every step, if given.
    """

    def __init__(self, logs: Optional[Callable[..., None]] = None) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(FEATURES, 1)
        self._logs = logs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        return torch.nn.functional.mse_loss(self(x).squeeze(-1), y)

    def logs(self, stage: str, x: torch.Tensor, loss: torch.Tensor) -> None:
        if self._logs is not None:
            self._logs(self, stage, x, loss)

    def training_step(self, batch: Any, batch_idx: Any) -> Any:
        loss = self.loss(batch)
        self.logs("train", batch[0], loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: Any) -> Any:
        loss = self.loss(batch)
        self.logs("val", batch[0], loss)
        return loss

    def test_step(self, batch: Any, batch_idx: Any) -> Any:
        loss = self.loss(batch)
        self.logs("test", batch[0], loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


class Run:
    """One side of the comparison: makes trainers and loaders, and keeps what was seen.

    Args:
        ipu: Which side.
        setting: The cut.
        module: The LightningModule.
        callbacks: Makes the user's callbacks.
    """

    def __init__(
        self, ipu: bool, setting: Setting, module: Module, callbacks: Callable[[], List[Any]]
    ) -> None:
        self.ipu = ipu
        self.setting = setting
        self.module = module
        self.results: List[Any] = []
        self.seen = Seen()
        self.callbacks = callbacks()
        self.trainers: List[Any] = []

    def loader(
        self,
        part: float = 1.0,
        seed: int = 0,
        samples: Optional[int] = None,
        size: Optional[int] = None,
        drop_last: bool = False,
    ) -> Any:
        """The data set, or the first executions of it, in order, in micro-batches."""
        generator = torch.Generator().manual_seed(seed)
        if samples is None:
            executions = int(self.setting.executions * part)
            samples = executions * (self.setting.samples // self.setting.executions)
        x = torch.randn(samples, FEATURES, generator=generator)
        return DataLoader(
            TensorDataset(x, x.sum(1)),
            batch_size=self.setting.micro_batch if size is None else size,
            drop_last=drop_last,
        )

    def batches(self, executions: int, training: bool = True) -> int:
        """How many of the trainer's batches that many executions are."""
        return executions if self.ipu else executions * self.setting.micro_batches(training)

    def updates(self, executions: int) -> int:
        """How many of the trainer's steps that many executions of training are."""
        return executions if self.ipu else executions * self.setting.iterations

    def trainer(self, **options: Any) -> Any:
        """A quiet trainer; options as for `Trainer`."""
        setting = self.setting
        given: Dict[str, Any] = {
            "max_epochs": 1,
            **QUIET,
            "num_sanity_val_steps": 0,
            "log_every_n_steps": 1,
        }
        given.update(options)
        callbacks = [*self.callbacks, *given.pop("callbacks", [])]
        rows = Rows(self.seen)
        if not given.get("barebones"):
            given.setdefault("logger", rows)
        else:
            given = {key: given[key] for key in ("max_epochs", "barebones")}
        spy = Spy(self.seen)
        if self.ipu:
            log_callback = IPULogCallback(setting.keys, output_mode=setting.output_mode)
            # last on purpose: it has to put itself first
            given.update(
                accelerator="ipu",
                devices=setting.replicas,
                strategy=_strategy(setting),
                callbacks=[*callbacks, spy, log_callback],
            )
        else:
            given.update(accelerator="cpu", callbacks=[*callbacks, spy])
            given["accumulate_grad_batches"] = setting.accumulation * setting.replicas
        trainer = pl.Trainer(**given)
        rows.trainer = trainer
        self.seen.log_every.append(given.get("log_every_n_steps", 1))
        self.trainers.append(trainer)
        return trainer


def _strategy(setting: Setting) -> Any:
    import poptorch

    def options(training: bool) -> Any:
        made = poptorch.Options()
        made.deviceIterations(setting.iterations)
        made.replicationFactor(setting.replicas)
        made.Jit.traceModel(TRACED)
        if training:
            made.Training.gradientAccumulation(setting.accumulation)
        if setting.mode == "EveryN":
            made.outputMode(poptorch.OutputMode.EveryN, setting.period)
        elif setting.mode is not None:
            made.outputMode(getattr(poptorch.OutputMode, setting.mode))
        return made

    make = setting.strategy or IPUStrategy
    return make(training_opts=options(True), inference_opts=options(False))


# -- programs -----------------------------------------------------------------------------------


def fit(run: Run) -> None:
    """Two epochs of training, each with a validation."""
    run.trainer(max_epochs=2).fit(run.module, run.loader(), run.loader())


def validate_only(run: Run) -> None:
    """One validation."""
    run.results += run.trainer().validate(run.module, run.loader(), verbose=False)


def two_loaders(run: Run) -> None:
    """A fit with two validation loaders of different lengths, then a validation."""
    loaders = [run.loader(), run.loader(seed=1, part=0.5)]
    run.trainer().fit(run.module, run.loader(), loaders)
    run.results += run.trainer().validate(run.module, loaders, verbose=False)


def test_only(run: Run) -> None:
    """One test."""
    run.results += run.trainer().test(run.module, run.loader(), verbose=False)


test_only.__test__ = False  # type: ignore[attr-defined]


# -- what is seen -------------------------------------------------------------------------------


class Row(NamedTuple):
    """One call of a logger's `log_metrics`; `hook` is `"epoch"` or the hook of an `on_step` row."""

    hook: str
    step: int
    metrics: Dict[str, float]


class Moment(NamedTuple):
    """What a callback reads in a batch-end hook.

    Args:
        hook: `"train"`, `"validation"` or `"test"`.
        views: `callback_metrics`, `logged_metrics`, `progress_bar_metrics`.
        reductions: The reduction of each name that has an `on_step` value now.
        fresh: Names in each of the views whose values are this batch's own.
        epoch: The trainer's epoch.
        trainer: The trainer's identity.
        logs: Whether the trainer sends rows of this hook to the logger.
    """

    hook: str
    views: Tuple[Dict[str, Any], ...]
    reductions: Dict[str, str]
    fresh: Tuple[Tuple[str, ...], ...]
    epoch: int
    trainer: int
    logs: bool


@dataclass
class Seen:
    """Everything that one side saw."""

    moments: List[Moment] = field(default_factory=list)
    rows: List[Row] = field(default_factory=list)
    final: Tuple[Dict[str, Any], ...] = ()
    results: List[Any] = field(default_factory=list)
    weights: Dict[str, Any] = field(default_factory=dict)
    metrics: Dict[str, Any] = field(default_factory=dict)
    state: Any = None
    warnings: List[str] = field(default_factory=list)
    log_every: List[int] = field(default_factory=list)
    run: Any = None

    def of(self, hook: str, view: int = 0) -> List[Dict[str, Any]]:
        """One view at every end of a batch, e.g. `seen.of("train")`."""
        return [moment.views[view] for moment in self.moments if moment.hook == hook]


class Rows(Logger):
    """A logger that keeps its rows."""

    name = "rows"
    version = 0

    def __init__(self, seen: Seen) -> None:
        super().__init__()
        self._seen = seen
        self.trainer: Any = None

    def log_metrics(self, metrics: Dict[str, float], step: Optional[int] = None) -> None:
        """Keep a row."""
        connector = self.trainer._logger_connector
        if connector._epoch_end_reached or self.trainer.state.stage is None:
            hook = "epoch"
        else:
            hook = _HOOKS[str(getattr(self.trainer.state.stage, "value", self.trainer.state.stage))]
        self._seen.rows.append(Row(hook, step, dict(metrics)))

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to keep."""

    @property
    def experiment(self) -> None:
        """No experiment."""


_HOOKS = {
    "train": "train",
    "validate": "validation",
    "sanity_check": "validation",
    "test": "test",
    "predict": "predict",
}


class Spy(pl.Callback):
    """Reads at the end of every batch what any callback could read there."""

    def __init__(self, seen: Seen) -> None:
        self._seen = seen

    def on_train_batch_end(self, trainer: Any, *_: Any, **__: Any) -> None:
        """Read."""
        self._read(trainer, "train")

    def on_validation_batch_end(self, trainer: Any, *_: Any, **__: Any) -> None:
        """Read."""
        self._read(trainer, "validation")

    def on_test_batch_end(self, trainer: Any, *_: Any, **__: Any) -> None:
        """Read."""
        self._read(trainer, "test")

    def _read(self, trainer: Any, hook: str) -> None:
        if trainer._results is None:
            return
        fresh = trainer._results.metrics(on_step=True)
        self._seen.moments.append(
            Moment(
                hook,
                tuple(map(dict, views_of(trainer))),
                _reductions(trainer._results),
                tuple(tuple(fresh[kind]) for kind in ("callback", "log", "pbar")),
                trainer.current_epoch,
                id(trainer),
                not trainer.sanity_checking,
            )
        )


def views_of(trainer: Any) -> Tuple[Dict[str, Any], ...]:
    """Where a trainer shows what was logged."""
    return trainer.callback_metrics, trainer.logged_metrics, trainer.progress_bar_metrics


def _reductions(results: Any) -> Dict[str, str]:
    found = {}
    for item in results.values():
        meta = item.meta
        if not meta.on_step or meta.dataloader_idx != results.dataloader_idx:
            continue
        suffix = ""
        if meta.add_dataloader_idx and meta.dataloader_idx is not None:
            suffix = results.DATALOADER_SUFFIX.format(meta.dataloader_idx)
        reduction = meta.reduce_fx.__name__ if item.is_tensor else "mean"
        if meta.reduce_fx in (min, max):
            reduction = f"Python's {reduction}"
        found[meta.forked_name(True) + suffix] = found[meta.name + suffix] = reduction
    return found


def observe(
    ipu: bool,
    make: Callable[[], Module],
    program: Program = fit,
    setting: Setting = DEFAULT,
    callbacks: Callable[[], List[Any]] = list,
    state: Optional[Callable[[Run], Any]] = None,
) -> Seen:
    """Run a program on one side.

    Args:
        ipu: Which side.
        make: Makes the LightningModule.
        program: What to do with it.
        setting: The cut.
        callbacks: Makes the user's callbacks.
        state: Reads off what else must be the same on both sides.
    """
    torch.manual_seed(1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = Run(ipu, setting, make(), callbacks)
        seen = run.seen
        program(run)
    seen.warnings = [str(w.message) for w in caught if issubclass(w.category, IPULogWarning)]
    seen.results = run.results
    seen.run = run
    if run.trainers:
        seen.final = tuple(map(dict, views_of(run.trainers[-1])))
    seen.weights = {name: w.detach().clone() for name, w in run.module.state_dict().items()}
    seen.metrics = {
        name: {state: copy.deepcopy(getattr(metric, state)) for state in metric._defaults}
        for name, metric in run.module.named_modules()
        if isinstance(metric, Metric)
    }
    seen.state = state(run) if state is not None else None
    return seen


def check_parity(
    make: Callable[[], Module],
    program: Program = fit,
    setting: Setting = DEFAULT,
    callbacks: Callable[[], List[Any]] = list,
    state: Optional[Callable[[Run], Any]] = None,
    tolerance: float = 1e-5,
) -> Seen:
    """Run a program on both sides and assert that the IPU side saw what the CPU side did.

    Returns:
        What the IPU side saw.
    """
    cpu = observe(False, make, program, setting, callbacks, state)
    ipu = observe(True, make, program, setting, callbacks, state)
    expected = expected_of(cpu, setting)
    for hook in ("train", "validation", "test"):
        seen = [moment for moment in ipu.moments if moment.hook == hook]
        wanted = [moment for moment in expected.moments if moment.hook == hook]
        assert len(seen) == len(wanted), f"executions of {hook}"
        for number, (one, other) in enumerate(zip(seen, wanted)):
            for view, left, right in zip(VIEWS, one.views, other.views):
                assert_alike(left, right, f"{view} after execution {number} of {hook}", tolerance)
        assert_alike(
            [row.metrics for row in ipu.rows if row.hook == hook],
            [row.metrics for row in expected.rows if row.hook == hook],
            f"rows of {hook}",
            tolerance,
        )
        assert [row.step for row in ipu.rows if row.hook == hook] == [
            row.step for row in expected.rows if row.hook == hook
        ], f"steps of the rows of {hook}"
    _assert_epoch_rows_alike(ipu, expected, setting, tolerance)
    for view, left, right in zip(VIEWS, ipu.final, expected.final):
        assert_alike(left, right, f"{view} at the end", tolerance)
    assert_alike(ipu.results, expected.results, "results", tolerance)
    assert_alike(ipu.weights, expected.weights, "weights", tolerance)
    assert_alike(ipu.metrics, expected.metrics, "states of metrics", tolerance)
    assert_alike(ipu.state, expected.state, "state", tolerance)
    return ipu


VIEWS = ("callback_metrics", "logged_metrics", "progress_bar_metrics")


def _assert_epoch_rows_alike(ipu: Seen, cpu: Seen, setting: Setting, tolerance: float) -> None:
    seen = [row for row in ipu.rows if row.hook == "epoch"]
    wanted = [row for row in cpu.rows if row.hook == "epoch"]
    assert_alike(
        [row.metrics for row in seen], [row.metrics for row in wanted], "rows of epochs", tolerance
    )
    for one, other in zip(seen, wanted):
        # a row carries the number of updates that were made, or the index of the last of them
        assert other.step in (
            one.step * setting.iterations,
            (one.step + 1) * setting.iterations - 1,
        ), f"step of the row {one}"


# -- what the CPU run says of the IPU run -------------------------------------------------------

_REDUCE = {
    "mean": lambda values: values.mean(),
    "sum": lambda values: values.sum(),
    "min": lambda values: values.amin(),
    "max": lambda values: values.amax(),
}
# Python's own compare: a NaN that is compared is passed over
_REDUCE["Python's min"] = lambda values: min([v for v in values if not v.isnan()] or [values[0]])
_REDUCE["Python's max"] = lambda values: max([v for v in values if not v.isnan()] or [values[0]])


def expected_of(cpu: Seen, setting: Setting) -> Seen:
    """What the IPU side must see, told from what the CPU side saw."""
    if setting.micro_batches(training=True) == 1:
        return cpu  # an execution is a micro-batch
    waiting: Dict[str, List[Moment]] = {}
    # per view: the value of the last micro-batch, and of the execution that it belongs to
    held: Tuple[Dict[str, Tuple[Any, torch.Tensor]], ...] = ({}, {}, {})
    moments: List[Moment] = []
    for moment in cpu.moments:
        group = waiting.setdefault(moment.hook, [])
        group.append(moment)
        if len(group) < setting.micro_batches(moment.hook == "train"):
            continue
        del waiting[moment.hook]
        for index, last in enumerate(moment.views):
            for name in moment.fresh[index]:
                values = [torch.as_tensor(one.views[index][name]).float() for one in group]
                reduced = _REDUCE[moment.reductions[name]](torch.stack(values))
                held[index][name] = (last[name], reduced)
        moments.append(moment._replace(views=_with_held(moment.views, held)))
    assert not waiting, "the CPU run ends within an execution"
    rows = [row for row in cpu.rows if row.hook == "epoch"] + _step_rows(cpu, moments, setting)
    return replace(cpu, moments=moments, rows=rows, final=_with_held(cpu.final, held))


def _with_held(views: Sequence[Dict[str, Any]], held: Sequence[Dict[str, Any]]) -> Any:
    """Views with the executions' values in place of the last micro-batches'."""
    return tuple(
        {
            name: kept[name][1] if name in kept and _same(kept[name][0], value) else value
            for name, value in view.items()
        }
        for view, kept in zip(views, held)
    )


def _same(one: Any, other: Any) -> bool:
    """Whether a view still shows a batch's value; an epoch's may happen to equal it."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.data_ptr() == other.data_ptr()
    return bool(torch.equal(torch.as_tensor(one).isnan(), torch.as_tensor(other).isnan())) and (
        bool(torch.as_tensor(one).isnan().all()) or bool(one == other)
    )


def _step_rows(cpu: Seen, moments: List[Moment], setting: Setting) -> List[Row]:
    """The rows that the logger must get for executions."""
    if not cpu.rows:
        return []
    rows = []
    trained: Dict[int, int] = {}
    steps = {hook: [r.step for r in cpu.rows if r.hook == hook] for hook in ("validation", "test")}
    first = {hook: found[0] for hook, found in steps.items() if found}
    for moment in moments:
        metrics = {name: float(moment.views[1][name]) for name in moment.fresh[1]}
        if moment.hook == "train":
            number = trained.get(moment.trainer, 0)
            trained[moment.trainer] = number + 1
            if metrics and (number + 1) % cpu.log_every[0] == 0:
                rows.append(Row("train", number, {**metrics, "epoch": moment.epoch}))
        elif metrics and moment.logs:
            # an evaluation row carries the number of its loader's batches, from 0 or from 1
            count = setting.micro_batches(training=False)
            last = steps[moment.hook][count - 1]
            del steps[moment.hook][:count]
            step = (last + 1 - first[moment.hook]) // count - 1 + first[moment.hook]
            rows.append(Row(moment.hook, step, metrics))
    return rows


def assert_alike(one: Any, other: Any, what: str, tolerance: float = 1e-5) -> None:
    """Assert that two structures hold the same names and numbers; NaN equals NaN."""
    if isinstance(other, dict):
        assert isinstance(one, dict), what
        assert set(one) == set(other), f"{what}: names"
        for key, item in other.items():
            assert_alike(one[key], item, f"{what}: {key!r}", tolerance)
    elif isinstance(other, (list, tuple)):
        assert len(one) == len(other), f"{what}: {one} {other}"
        for index, item in enumerate(other):
            assert_alike(one[index], item, f"{what}[{index}]", tolerance)
    elif isinstance(other, (torch.Tensor, int, float)) and not isinstance(other, bool):
        left, right = torch.as_tensor(one), torch.as_tensor(other)
        if left.numel() == right.numel() == 1:
            left = left.reshape(right.shape)  # Lightning 1.6 keeps the shape of what was logged
        assert left.shape == right.shape, f"{what}: shapes {tuple(left.shape)} {tuple(right.shape)}"
        assert torch.allclose(
            left.double(), right.double(), rtol=tolerance, atol=tolerance, equal_nan=True
        ), f"{what}: {one} instead of {other}"
    else:
        assert one == other, what
