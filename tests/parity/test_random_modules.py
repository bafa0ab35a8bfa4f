"""Modules put together at random from the suite's pieces log what they log on the CPU.

The everyday run draws 200 of them; `--hypothesis-profile=thorough` draws thousands.
"""

from dataclasses import dataclass
from typing import Any, Tuple

import torch
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st
from torchmetrics import MaxMetric, MeanMetric, SumMetric

from ipu_log_callback import live

from .bench import Net, Setting, check_parity, fit, two_loaders, validate_only

VALUES = {
    "loss": lambda x, loss: loss,
    "sum": lambda x, loss: x.sum(),
    "one element": lambda x, loss: x.mean().reshape(1),
    "count": lambda x, loss: (x > 0).sum(),
    "flag": lambda x, loss: x[0, 0] > 0,
    "bfloat16": lambda x, loss: (x[0, 0] > 0).bfloat16(),
    "number": lambda x, loss: 0.5,
    "live": lambda x, loss: live(lambda: 3.0),
    "constant": lambda x, loss: torch.tensor(0.25),
    "some NaN": lambda x, loss: torch.where(x[0, 0] > 1, x.sum() * float("nan"), x.sum()),
}
METRICS = {"mean": MeanMetric, "sum": SumMetric, "max": MaxMetric}


@dataclass(frozen=True)
class Call:
    """One `self.log`, or one entry of a `self.log_dict`."""

    name: str
    value: str
    options: Tuple[Tuple[str, Any], ...]
    as_dict: bool


@dataclass(frozen=True)
class Plan:
    """What a module does in each of its steps."""

    calls: Tuple[Tuple[str, Tuple[Call, ...]], ...]
    metrics: Tuple[str, ...]
    returns: str
    end_hook: bool
    override: bool


class Planned(Net):
    """Does what a plan says."""

    def __init__(self, plan):
        super().__init__()
        self.plan = plan
        self.val_metrics = torch.nn.ModuleDict({name: METRICS[name]() for name in plan.metrics})

    def log(self, name, value, *args, **kwargs):
        name = f"o_{name}" if self.plan.override and not name.startswith("o_") else name
        super().log(name, value, *args, **kwargs)

    def logs(self, stage, x, loss):
        for call in dict(self.plan.calls)[stage]:
            value = VALUES[call.value](x, loss)
            if call.as_dict:
                self.log_dict({f"{stage}_{call.name}": value}, **dict(call.options))
            else:
                self.log(f"{stage}_{call.name}", value, **dict(call.options))

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return {"loss": loss, "x": batch[0]} if self.plan.returns == "dict" else loss

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        loss = super().validation_step(batch, batch_idx)
        for name, metric in self.val_metrics.items():
            metric.update(batch[0].sum())
            self.log(f"val_metric_{name}", metric, on_step=False, on_epoch=True)
        return {"dict": {"out": batch[0]}, "tuple": (loss, batch[0]), "none": None}.get(
            self.plan.returns, loss
        )

    def on_train_epoch_end(self):
        if self.plan.end_hook:
            self.log("epoch_end", 1.0)


def levels(stage):
    """Levels that are of use in a stage."""
    pairs = [(None, None), (True, None), (None, True), (True, True), (True, False), (False, True)]
    return st.sampled_from(pairs)


@st.composite
def calls(draw, stage):
    """Some calls under different keys."""
    made = []
    for number in range(draw(st.integers(0, 4))):
        on_step, on_epoch = draw(levels(stage))
        options = {
            "on_step": on_step,
            "on_epoch": on_epoch,
            "reduce_fx": draw(st.sampled_from([None, "sum", "min", "max", torch.mean, max])),
            "prog_bar": draw(st.sampled_from([None, True])),
            "logger": draw(st.sampled_from([None, None, False])),
            "batch_size": draw(st.sampled_from([None, None, 3])),
        }
        kept = tuple((key, value) for key, value in options.items() if value is not None)
        value = draw(st.sampled_from(sorted(VALUES)))
        made.append(Call(f"k{number}", value, kept, draw(st.booleans())))
    if made and draw(st.booleans()):
        made.append(made[0])  # one key logged twice
    return tuple(made)


plans = st.builds(
    Plan,
    calls=st.tuples(*(st.tuples(st.just(s), calls(s)) for s in ("train", "val"))),
    metrics=st.lists(st.sampled_from(sorted(METRICS)), unique=True, max_size=2).map(tuple),
    returns=st.sampled_from(["tensor", "dict", "tuple", "none"]),
    end_hook=st.booleans(),
    override=st.booleans(),
)
cuts = st.builds(
    Setting,
    iterations=st.sampled_from([1, 2, 3]),
    accumulation=st.sampled_from([1, 2]),
    replicas=st.sampled_from([1, 2]),
    executions=st.just(2),
    mode=st.sampled_from([None, None, "All", "Final", "Sum"]),
)
programs = st.sampled_from([fit, fit, validate_only, two_loaders])


@given(plan=plans, setting=cuts, program=programs)
@settings(suppress_health_check=list(HealthCheck))
def test_a_random_module_logs_what_it_logs_on_the_cpu(plan, setting, program):
    """Every combination of calls, values, options, returns, cut and program is as on the CPU."""
    note(f"{plan} {setting} {program.__name__}")
    check_parity(lambda: Planned(plan), program, setting, tolerance=1e-3)
