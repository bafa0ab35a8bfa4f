"""One training job, run whole in one process or as one of several that share it.

``python -m tests.processes.job FOLDER`` under `mpirun` is one of several: PopTorch's options read
process id and count from the launch. What a process saw goes to ``FOLDER/<process>.json``.
"""

import importlib
import json
import sys
import warnings
from pathlib import Path
from typing import Any, Dict, List

import torch
import torchmetrics
from lightning_in_use import IPUStrategy, pl
from torch.utils.data import TensorDataset

from ipu_log_callback import IPULogCallback, emulator, live

GLOBAL_REPLICAS = 4
ITERATIONS, ACCUMULATION, EXECUTIONS, MICRO_BATCH = 2, 2, 2, 2


class Net(pl.LightningModule):
    """Logs in every way that processes can differ in."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)
        self.error = torchmetrics.MeanSquaredError()
        self.rank = torchmetrics.SpearmanCorrCoef()  # keeps every sample
        self.several = torchmetrics.MetricCollection(
            {"mse": torchmetrics.MeanSquaredError(), "mae": torchmetrics.MeanAbsoluteError()}
        )

    def training_step(self, batch: Any, batch_idx: Any) -> Any:
        x, y = batch
        prediction = self.layer(x).squeeze(1)
        difference = prediction - y
        loss = torch.nn.functional.mse_loss(prediction, y)
        both = {"on_step": True, "on_epoch": True, "sync_dist": True}
        self.log("loss", loss, **both)
        self.log("sum", difference.sum(), reduce_fx="sum", **both)
        self.log("smallest", difference.min(), reduce_fx="min", **both)
        self.log("largest", difference.max(), reduce_fx=max, **both)
        above = y > 1
        self.log("count", above.sum(), reduce_fx="sum", **both)
        mean = (difference * above).sum() / above.sum().clamp(min=1)
        self.log("weighed", mean, batch_size=above.sum(), **both)
        self.log("ones", live(lambda: 1.0), reduce_fx="sum", **both)
        self.error(difference, torch.zeros_like(difference))
        self.log("error", self.error, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: Any) -> None:
        x, y = batch
        prediction = self.layer(x).squeeze(1)
        loss = ((prediction - y) ** 2).mean()
        self.log("val_loss", loss, sync_dist=True, batch_size=MICRO_BATCH)
        self.log("val_own", loss)
        self.rank.update(prediction, y)
        self.log("val_rank", self.rank)
        self.several.update(prediction, y)
        self.log_dict(self.several)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def environment() -> List[Any]:
    """Lightning's own view of the launch, where it has one: 2.0 looks for MPI.

    Its search for the machines of the launch fails with newer numpy; here there is one.
    """
    environments: Any = importlib.import_module(f"{pl.__name__}.plugins.environments")
    if not hasattr(environments, "MPIEnvironment"):
        return []

    class OneMachine(environments.MPIEnvironment):
        def local_rank(self) -> int:
            return int(self.global_rank())

        def node_rank(self) -> int:
            return 0

    return [OneMachine()]


def data(options: Any, seed: int, process_count: int) -> Any:
    """Data that process 0 would fit at other weights than the last.

    Args:
        options: By which `poptorch.DataLoader` divides it.
        seed: Of the samples.
        process_count: Among how many it is divided in the job that this one is compared with: a
            single process takes the micro-batches of all in the same executions.
    """
    import poptorch

    random = torch.Generator().manual_seed(seed)
    updates = options.device_iterations * options.Training.gradient_accumulation
    replicas = GLOBAL_REPLICAS // process_count
    shape = (process_count, EXECUTIONS, updates, replicas, MICRO_BATCH)
    order = torch.arange(EXECUTIONS * updates * GLOBAL_REPLICAS * MICRO_BATCH).view(shape)
    x = torch.randn(order.numel(), 3, generator=random)
    y = torch.linspace(3, -1, len(x)) + 0.1 * torch.randn(len(x), generator=random)
    if options.Distributed.numProcesses == 1:
        order = order.permute(1, 2, 0, 3, 4)
    samples = TensorDataset(x[order.flatten()], y[order.flatten()])
    # not torch's, which Lightning converts together with the sampler of the undivided data set
    return poptorch.DataLoader(options, samples, batch_size=MICRO_BATCH)


def run(folder: Path, process_count: int) -> Dict[str, Any]:
    """Fit with callbacks that decide by what was logged, then validate.

    Args:
        folder: For checkpoints and logs.
        process_count: Processes of the job, or of the job that this one is compared with.

    Returns:
        What this process saw.
    """
    import poptorch

    processes = poptorch.Options().Distributed.numProcesses
    training, inference = poptorch.Options(), poptorch.Options()
    training.Training.gradientAccumulation(ACCUMULATION)
    for options in (training, inference):
        options.deviceIterations(ITERATIONS)
        options.replicationFactor(GLOBAL_REPLICAS // processes)
    strategy = IPUStrategy(training_opts=training, inference_opts=inference)
    torch.manual_seed(1)
    net = Net()
    stop = pl.callbacks.EarlyStopping("val_loss", min_delta=0.05, patience=1)
    best = pl.callbacks.ModelCheckpoint(folder, "{epoch}", monitor="val_loss", save_top_k=1)
    logger = pl.loggers.CSVLogger(str(folder))
    trainer = pl.Trainer(
        max_epochs=8,
        accelerator="ipu",
        devices=GLOBAL_REPLICAS // processes,
        strategy=strategy,
        plugins=environment() if processes > 1 else None,
        callbacks=[IPULogCallback("*"), stop, best],
        logger=logger,
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    validation = data(inference, 1, process_count)
    trainer.fit(net, data(training, 0, process_count), validation)
    fitted = {name: value.item() for name, value in trainer.callback_metrics.items()}
    logged: List[Dict[str, Any]] = [
        {name: float(value) for name, value in row.items()} for row in logger.experiment.metrics
    ]
    validated = trainer.validate(net, validation, verbose=False)[0]
    return {
        "fitted": fitted,
        "logged": logged,
        "validated": validated,
        "stopped": [stop.stopped_epoch, trainer.current_epoch],
        "best": [Path(best.best_model_path).name, float(best.best_model_score)],
        "weights": [value for p in net.parameters() for value in p.detach().flatten().tolist()],
        "left behind": [
            name
            for name, part in net.named_modules()
            if isinstance(part, torchmetrics.Metric) and part.dist_sync_fn is not None
        ]
        + [name for name in vars(strategy) if name == "reduce_boolean_decision"],
    }


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    emulator.install()
    import poptorch

    launch = poptorch.Options().Distributed
    place = Path(sys.argv[1])
    seen = run(place / f"process{launch.processId}", launch.numProcesses)
    (place / f"{launch.processId}.json").write_text(json.dumps(seen))
