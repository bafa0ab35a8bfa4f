"""What is measured: each function gives rows of the table."""

import copy
import gc
import resource
import subprocess
import sys
import time
import tracemalloc
import warnings
from dataclasses import dataclass
from statistics import median
from typing import Any, Callable, Dict, List, Optional, Tuple

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
import torchmetrics

from ipu_log_callback import IPULogCallback, emulator

from .steps import (
    PEERS,
    SAMPLES,
    InHook,
    InStep,
    Silent,
    Stopwatch,
    callback_seconds,
    device_apart,
    emulated,
    fit,
    host_laps,
    seconds_after_execution,
)

__all__ = ["MEASURES", "Row"]

KEYS = {1: "1 key", 10: "10 keys", 100: "100 keys"}


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Args:
        what: What was measured.
        measured: The figure.
        unit: Its unit; empty for ratios and counts.
        wanted: The most that it may be; `None` where it is there for comparison.
    """

    what: str
    measured: float
    unit: str = ""
    wanted: Optional[float] = None

    @property
    def cells(self) -> List[str]:
        """The line as text."""
        number = f"{self.measured:.4g}{self.unit and ' '}{self.unit}"
        if self.wanted is None:
            return [self.what, number, "", ""]
        held = "yes" if self.measured <= self.wanted else "NO"
        return [self.what, number, f"<= {self.wanted:.4g}", held]

    @property
    def data(self) -> Dict[str, Any]:
        """The line as JSON data."""
        return dict(vars(self))


def host_time(quick: bool) -> List[Row]:
    """1: host time per execution that logging takes, the callback's against its peers'."""
    rows: List[Row] = []
    for keys, label in KEYS.items():
        with device_apart():
            peers = [peer for peer in PEERS if peer != "(a) after an execution"]
            cases = [(peer, n) for peer in peers for n in ((1, 16) if emulated(peer) else (1,))]
            at, whole = _host_seconds(cases, keys, quick)
        plain = at["(a) self.log on CPU", 1]
        callback, many = at["callback", 1], at["callback", 16]
        silent = "(d) no logging"
        rows += [
            Row(f"{label}: (a) self.log on CPU, per batch", plain * 1e6, "us"),
            Row(f"{label}: (b) dict, log in hook", at["(b) dict, log in hook", 1] * 1e6, "us"),
            Row(f"{label}: (c) by hand", at["(c) by hand", 1] * 1e6, "us"),
            Row(f"{label}: callback", callback * 1e6, "us"),
            Row(f"{label}: callback / (a)", callback / plain, wanted=1.1),
            Row(f"{label}: callback, 16 iterations / 1 iteration", many / callback, wanted=1.2),
            Row(f"{label}: callback, 16 iterations / 16 x (a)", many / (16 * plain), wanted=0.1),
        ]
        for n in (1, 16):
            plural = "s" if n > 1 else ""
            if keys >= 10:
                ratio = at["callback", n] / at["(b) dict, log in hook", n]
                rows.append(Row(f"{label}: callback / (b), {n} iteration{plural}", ratio, "", 1.0))
            more = (whole["callback", n] - whole[silent, n]) * 1e6
            rows.append(
                Row(f"{label}: whole host time beyond (d), {n} iteration{plural}", more, "us")
            )
        # the same on a core that computed the micro-batches: both take longer there
        cases = [(peer, n) for peer in ("callback", "(a) after an execution") for n in (1, 16)]
        at, _ = _host_seconds(cases, keys, quick)
        for n, place in ((1, "a micro-batch"), (16, "16 micro-batches")):
            ratio = at["callback", n] / at["(a) after an execution", n]
            rows.append(Row(f"{label}: callback / (a), both after {place} on the same core", ratio))
    return rows


def _host_seconds(cases: List[Any], keys: int, quick: bool) -> Tuple[Dict[Any, float], ...]:
    """Medians of what logging takes, and of everything, for pairs of a peer and iterations."""
    executions, repetitions = (30, 1) if quick else (150, 5)
    watches: Dict[Any, List[Stopwatch]] = {case: [] for case in cases}
    # round after round, so that a slow moment of the machine meets every peer
    for _ in range(repetitions):
        for (peer, iterations), found in watches.items():
            found.append(host_laps(peer, keys, iterations, executions))
    return (
        {case: median(watch.median for watch in found) for case, found in watches.items()},
        {case: median(watch.whole_median for watch in found) for case, found in watches.items()},
    )


def _counted(module: pl.LightningModule, callbacks: List[Any], iterations: int) -> Any:
    emulator.counters.reset()
    fit(module, True, iterations, 12, callbacks)
    return copy.copy(emulator.counters)


def wire(quick: bool) -> List[Row]:
    """2 and 3: output tensors, bytes, compilations and weight copies that logging adds."""
    rows = []
    for keys, label in KEYS.items():
        disabled = [IPULogCallback(enabled=False)]
        none = _counted(Silent(keys, Stopwatch()), disabled, 16)
        ours = _counted(InStep(keys, Stopwatch()), [IPULogCallback("*")], 16)
        theirs = _counted(InHook(keys, Stopwatch()), disabled, 16)
        extra = ours.last_output_bytes - none.last_output_bytes
        rows += [
            Row(
                f"{label}: output tensors added",
                ours.last_output_tensors - none.last_output_tensors,
                wanted=1,
            ),
            Row(
                f"{label}: output tensors added by (b)",
                theirs.last_output_tensors - none.last_output_tensors,
            ),
            Row(f"{label}: bytes added per key and micro-batch", extra / keys / 16, "B", 4),
            Row(f"{label}: compilations added", ours.compiles - none.compiles, wanted=0),
            Row(
                f"{label}: implicit weight copies added",
                ours.implicit_copies_to_host - none.implicit_copies_to_host,
                wanted=0,
            ),
        ]
    return rows


class _Metric(Silent):
    """A torchmetrics object, fed and logged in the step."""

    def __init__(self, watch: Stopwatch) -> None:
        super().__init__(0, watch)
        self.f1 = torchmetrics.F1Score(task="multiclass", num_classes=3, average="macro")

    def training_step(self, batch: Any, batch_idx: Any) -> Any:
        x, y = batch
        out = self.layer(x)
        self.f1.update(out, y)
        self.log("f1", self.f1)
        return F.cross_entropy(out, y)


def metrics(quick: bool) -> List[Row]:
    """4: a metric in a 16-iteration execution against one update on the same samples."""
    executions = 30 if quick else 150
    out, y = torch.randn(16 * SAMPLES, 3), torch.randint(0, 3, (16 * SAMPLES,))
    ratios = []
    for _ in range(1 if quick else 5):
        ours = callback_seconds(_Metric(Stopwatch()), 16, executions)
        module = _Metric(Stopwatch())
        update = seconds_after_execution(module, 16, executions, lambda: module.f1.update(out, y))
        other = _Metric(Stopwatch())
        log = seconds_after_execution(other, 16, executions, lambda: other.log("f1", other.f1))
        ratios.append((ours - log) / update)
    return [Row("metric in 16 iterations / one host update", median(ratios), wanted=1.5)]


def _seconds(function: Callable[[], Any]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


class _Growth(pl.Callback):
    """Memory at a quarter and at the end of a run, and the laps of its halves."""

    def __init__(self, executions: int) -> None:
        self._quarter = executions // 4
        self._last = executions - 1
        self.traced: List[int] = []
        self.resident: List[int] = []

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        if args[2] in (self._quarter, self._last):
            gc.collect()
            self.traced.append(tracemalloc.get_traced_memory()[0])
            self.resident.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


def scaling(quick: bool) -> List[Row]:
    """5: linear in keys, flat in executions and in epochs."""
    executions = 400 if quick else 20_000
    watch, growth = Stopwatch(), _Growth(executions)
    tracemalloc.start()
    try:
        callback_seconds(InStep(10, watch), 1, executions, growth)
    finally:
        tracemalloc.stop()
    epochs = 20 if quick else 300
    many = Stopwatch()
    callback_seconds(InStep(10, many), 1, 10, epochs=epochs)
    traced = (growth.traced[1] - growth.traced[0]) / executions
    per_key = {n: host_laps("callback", n, 1, 100).median for n in (50, 500)}
    return [
        Row(f"{executions} executions: late / early host time", _late_to_early(watch), wanted=1.1),
        Row(f"{epochs} epochs: late / early host time", _late_to_early(many), wanted=1.1),
        # 8 bytes are each of the two figures that the stopwatch keeps of a lap
        Row(f"{executions} executions: traced growth per execution", traced, "B", 16),
        Row(
            f"{executions} executions: growth of resident memory",
            (growth.resident[1] - growth.resident[0]) / 1024,
            "MB",
        ),
        Row("500 keys / 10 x 50 keys", per_key[500] / (10 * per_key[50]), wanted=1.1),
    ]


def _late_to_early(watch: Stopwatch) -> float:
    half = len(watch.laps) // 2
    return median(watch.laps[half:]) / median(watch.laps[10:half])


def off_the_ipu(quick: bool) -> List[Row]:
    """6: a CPU run with the callback against one without, and with a callback that is empty."""
    batches, repetitions = (100, 2) if quick else (1000, 9)
    present = {"none": [], "empty": [pl.Callback()], "ours": [IPULogCallback("*")]}
    laps: Dict[str, List[float]] = {name: [] for name in present}
    for _ in range(repetitions):
        for name, callbacks in present.items():
            module = InStep(10, Stopwatch())
            fit(module, False, 1, batches, callbacks)
            laps[name].append(module.watch.whole_median)
    batch = {name: median(found) for name, found in laps.items()}
    empty, ours = batch["empty"] / batch["none"], batch["ours"] / batch["none"]
    return [
        Row("CPU run with an empty pl.Callback / without, per batch", empty),
        Row("CPU run with the callback / without, per batch", ours, wanted=1.01),
    ]


def imports(quick: bool) -> List[Row]:
    """7: what importing the package adds to importing Lightning."""
    code = (
        "import warnings; warnings.simplefilter('ignore'); import time, pytorch_lightning; "
        "start = time.perf_counter(); import ipu_log_callback; print(time.perf_counter() - start)"
    )
    seconds = [
        float(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout)
        for _ in range(1 if quick else 7)
    ]
    return [Row("import added to pytorch_lightning's", median(seconds) * 1e3, "ms", 30)]


def emulated_execution(quick: bool) -> List[Row]:
    """8: an emulated execution against the same micro-batches in plain PyTorch."""
    import poptorch

    rows = []
    for name, make, shape in (
        ("MLP", _mlp, (8, 64)),
        ("CNN", _cnn, (8, 1, 8, 8)),
    ):
        iterations = 16
        batch = torch.randn(iterations * shape[0], *shape[1:])
        target = torch.randint(0, 10, (iterations * shape[0],))
        torch.manual_seed(0)
        model = _WithLoss(make())
        plain = copy.deepcopy(model)
        options = poptorch.Options().deviceIterations(iterations)
        device = poptorch.trainingModel(
            model, options, torch.optim.SGD(model.parameters(), lr=0.01)
        )
        optimizer = torch.optim.SGD(plain.parameters(), lr=0.01)

        def run_plain() -> None:
            for x, y in zip(batch.chunk(iterations), target.chunk(iterations)):
                optimizer.zero_grad()
                _, loss = plain(x, y)
                loss.backward()
                optimizer.step()

        device(batch, target)
        pairs = [
            (_seconds(lambda: device(batch, target)), _seconds(run_plain))
            for _ in range(20 if quick else 100)
        ]
        ratio = median(p[0] for p in pairs) / median(p[1] for p in pairs)
        rows.append(Row(f"emulated execution / plain PyTorch, {name}", ratio, wanted=2.0))
    return rows


class _WithLoss(torch.nn.Module):
    def __init__(self, net: torch.nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        out = self.net(x)
        return out, F.cross_entropy(out, y)


def _mlp() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))


def _cnn() -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 16, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.Flatten(),
        torch.nn.Linear(256, 10),
    )


def digits(quick: bool) -> List[Row]:
    """8: the digits example against its `--cpu` run."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pairs = [
            (_digits_seconds([]), _digits_seconds(["--cpu"])) for _ in range(1 if quick else 3)
        ]
    ratio = median(p[0] for p in pairs) / median(p[1] for p in pairs)
    return [Row("digits example, emulated / --cpu", ratio, wanted=2.0)]


def _digits_seconds(arguments: List[str]) -> float:
    command = [sys.executable, "examples/digits.py", *arguments]
    return _seconds(lambda: subprocess.run(command, capture_output=True, check=True))


MEASURES: Dict[str, Callable[..., List[Row]]] = {
    "host time": host_time,
    "wire": wire,
    "metrics": metrics,
    "scaling": scaling,
    "off the IPU": off_the_ipu,
    "import": imports,
    "emulated execution": emulated_execution,
    "digits": digits,
}
