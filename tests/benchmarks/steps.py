"""The modules and runs that are compared: one linear model, its logging done in five ways."""

import time
import warnings
from array import array
from collections import Counter
from contextlib import contextmanager
from statistics import median
from typing import Any, Callable, Dict, Iterator, List
from unittest import mock

import pytorch_lightning as pl
import torch
import torch.nn.functional as F

from ipu_log_callback import IPULogCallback
from ipu_log_callback.emulator.executable import Executable
from ipu_log_callback.executors import ExecutorListener

__all__ = [
    "PEERS",
    "SAMPLES",
    "Stopwatch",
    "callback_seconds",
    "device_apart",
    "emulated",
    "fit",
    "host_laps",
    "seconds_after_execution",
]

SAMPLES = 2


class Stopwatch:
    """Adds up the processor time of its blocks, lap by lap.

    The time of this thread, not of the clock: what else the machine does is nobody's cost.

    Attributes:
        laps: Seconds in blocks, of each lap.
        whole: Seconds altogether, of each lap.
    """

    def __init__(self) -> None:
        self.laps = array("d")  # 8 bytes a lap: its own growth is not the callback's
        self.whole = array("d")
        self._lap_began = time.thread_time()
        self._running = 0.0
        self._depth = 0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count the block's time; a block inside a block is not counted twice."""
        self._depth += 1
        start = time.thread_time()
        try:
            yield
        finally:
            self._depth -= 1
            if not self._depth:
                self._running += time.thread_time() - start

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, its time counted."""

        def run(*args: Any, **kwargs: Any) -> Any:
            with self.running():
                return function(*args, **kwargs)

        return run

    def lap(self) -> None:
        """Begin the next lap."""
        self.laps.append(self._running)
        self._running = 0.0
        now = time.thread_time()
        self.whole.append(now - self._lap_began)
        self._lap_began = now

    @property
    def median(self) -> float:
        """Median seconds in blocks, the first ten laps (warm-up, compilation) left out."""
        return median(self.laps[10:])

    @property
    def whole_median(self) -> float:
        """Median seconds of a lap altogether, the first ten left out."""
        return median(self.whole[10:])


class Silent(pl.LightningModule):
    """(d) No logging at all; the values are computed all the same."""

    def __init__(self, keys: int, watch: Stopwatch) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 3)
        self.keys = [f"key_{number}" for number in range(keys)]
        self.watch = watch

    def values(self, batch: Any) -> Any:
        x, y = batch
        loss = F.cross_entropy(self.layer(x), y)
        return loss, {key: loss.detach() * number for number, key in enumerate(self.keys)}

    def training_step(self, batch: Any, batch_idx: Any) -> Any:
        loss, _ = self.values(batch)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.watch.lap()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class InStep(Silent):
    """(a) and the callback: `self.log` in the step, as Lightning's documentation shows."""

    def training_step(self, batch: Any, batch_idx: Any) -> Any:
        loss, values = self.values(batch)
        for key, value in values.items():
            self.log(key, value)
        return loss


class InHook(Silent):
    """(b) Return a dict, log in `on_train_batch_end`: the workaround of Lightning's IPU page."""

    def training_step(self, batch: Any, batch_idx: Any) -> Any:
        loss, values = self.values(batch)
        return {"loss": loss, **values}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        with self.watch.running():
            for key in self.keys:
                self.log(key, outputs[key].mean())
        self.watch.lap()


class ByHand(InHook):
    """(c) As public IPU projects do: convert, average, `logger.log_metrics`."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        with self.watch.running():
            means = {key: float(outputs[key].numpy().mean()) for key in self.keys}
            self.logger.log_metrics(means, step=self.trainer.global_step)
        self.watch.lap()


PEERS: Dict[str, type] = {
    "callback": InStep,
    "(a) self.log on CPU": InStep,
    "(a) after an execution": Silent,
    "(b) dict, log in hook": InHook,
    "(c) by hand": ByHand,
    "(d) no logging": Silent,
}


def emulated(peer: str) -> bool:
    """Whether a peer runs on the IPU strategy."""
    return peer != "(a) self.log on CPU"


@contextmanager
def received_by(function: Callable[..., Any]) -> Iterator[None]:
    """Let `function(received, listener, ...)` stand in the place where the callback works."""
    received = ExecutorListener.received

    def instead(listener: Any, *args: Any) -> Any:
        return function(received, listener, *args)

    with mock.patch.object(ExecutorListener, "received", instead):
        yield


def seconds_after_execution(
    module: Silent, iterations: int, executions: int, action: Callable[[], None]
) -> float:
    """Median host seconds of an action in the callback's place, the callback itself disabled.

    What an execution leaves in the processor's caches makes the same lines up to three times
    slower than a loop does: only there is an action comparable with the callback's work.
    """

    def act(received: Callable[..., Any], *args: Any) -> Any:
        with module.watch.running():
            action()
        return received(*args)

    with received_by(act):
        fit(module, True, iterations, executions, [IPULogCallback(enabled=False)])
    return module.watch.median


@contextmanager
def device_apart() -> Iterator[None]:
    """Let executions cost the host nothing: what the fifth one returned is returned from then on.

    An IPU computes while its host waits. The emulator computes on the host's own core and drives
    out of its caches what the host had there, after which every line, Lightning's as well as the
    callback's, takes up to three times as long.
    """
    execute = Executable.execute
    executions: Counter[Executable] = Counter()
    answers: Dict[Executable, Any] = {}

    def answer(executable: Executable, inputs: Any) -> Any:
        executions[executable] += 1
        if executions[executable] <= 5:
            answers[executable] = execute(executable, inputs)
        outputs, anchored = answers[executable]
        return [value.clone() for value in outputs], anchored

    with mock.patch.object(Executable, "execute", answer):
        yield


def fit(
    module: pl.LightningModule,
    ipu: bool,
    iterations: int,
    executions: int,
    callbacks: List[Any],
    epochs: int = 1,
) -> pl.Trainer:
    """Train for so many executions an epoch, every row kept from the disk."""
    batches = executions * (iterations if ipu else 1)
    data = torch.utils.data.TensorDataset(
        torch.randn(batches * SAMPLES, 4), torch.randint(0, 3, (batches * SAMPLES,))
    )
    loader = torch.utils.data.DataLoader(data, batch_size=SAMPLES)
    options: Dict[str, Any] = {"accelerator": "cpu"}
    if ipu:
        from poptorch import Options, OutputMode
        from pytorch_lightning.strategies import IPUStrategy

        training = Options().deviceIterations(iterations).outputMode(OutputMode.All)
        options = {
            "accelerator": "ipu",
            "devices": 1,
            "strategy": IPUStrategy(training_opts=training, inference_opts=Options()),
        }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = pl.Trainer(
            max_epochs=epochs,
            logger=NoLogger(),
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
            callbacks=callbacks,
            **options,
        )
        trainer.fit(module, loader)
    return trainer


class NoLogger(pl.loggers.logger.DummyLogger):
    """Takes what it is given and writes nothing: disk time is nobody's merit."""

    def log_metrics(self, *args: Any, **kwargs: Any) -> None:
        pass


def host_laps(peer: str, keys: int, iterations: int, executions: int) -> Stopwatch:
    """Host seconds that a peer spends on logging, a lap for each execution (batch on CPU)."""
    watch = Stopwatch()
    module = PEERS[peer](keys, watch)
    if peer == "(a) after an execution":
        values = [(key, torch.tensor(float(number))) for number, key in enumerate(module.keys)]

        def log_all() -> None:
            for key, value in values:
                module.log(key, value)

        seconds_after_execution(module, iterations, executions, log_all)
    elif peer == "callback":
        callback_seconds(module, iterations, executions)
    else:
        if peer == "(a) self.log on CPU":
            module.log = watch.timed(module.log)
        # disabled it logs nothing, and mends what would stop others: the module's left-over device
        fit(module, emulated(peer), iterations, executions, [IPULogCallback(enabled=False)])
    return watch


def callback_seconds(
    module: Silent, iterations: int, executions: int, *others: pl.Callback, epochs: int = 1
) -> float:
    """Median host seconds of all that the callback does after an execution, `self.log` included."""

    def timed(received: Callable[..., Any], *args: Any) -> Any:
        with module.watch.running():
            return received(*args)

    with received_by(timed):
        fit(module, True, iterations, executions, [IPULogCallback("*"), *others], epochs)
    return module.watch.median
