"""The same micro-batches on the device, watched by the callback, and in plain PyTorch."""

import logging
import warnings
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple

import torch
import torch.nn.functional as F
from lightning_in_use import QUIET, IPUStrategy, pl
from torch.utils.data import DataLoader, TensorDataset

from ipu_log_callback import IPULogCallback

Logger = (
    pl.loggers.logger.Logger
    if hasattr(pl.loggers, "logger")
    else pl.loggers.base.LightningLoggerBase
)
for _name in ("pytorch_lightning", "lightning.pytorch", "lightning"):
    logging.getLogger(_name).setLevel(logging.ERROR)

SAMPLES = 2  # of a micro-batch
FEATURES = 4
LEARNING_RATE = 0.1

OptimizerFactory = Callable[[Any], torch.optim.Optimizer]


class Counts(NamedTuple):
    """Micro-batches of an execution."""

    iterations: int = 1
    accumulation: int = 1
    replicas: int = 1

    @property
    def total(self) -> int:
        """All of them."""
        return self.iterations * self.accumulation * self.replicas


ONE = Counts()
GRID = [ONE, Counts(3, 1, 1), Counts(1, 3, 1), Counts(1, 1, 2), Counts(2, 2, 2)]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """Plain SGD."""
    return torch.optim.SGD(parameters, lr=LEARNING_RATE)


class Net(pl.LightningModule):
    """Two layers; `make_optimizer` decides how they learn."""

    def __init__(self, make_optimizer: OptimizerFactory = sgd) -> None:
        super().__init__()
        self.encoder = torch.nn.Sequential(torch.nn.Linear(FEATURES, 3), torch.nn.Tanh())
        self.head = torch.nn.Linear(3, 2)
        self.make_optimizer = make_optimizer

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        return F.cross_entropy(self.head(self.encoder(x)), y)

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def validation_step(self, batch, batch_idx):
        self.loss(batch)

    def configure_optimizers(self):
        return self.make_optimizer(self.parameters())


class Rows(Logger):
    """Keeps what is logged, one dict an execution."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: List[Dict[str, float]] = []

    name = version = "rows"
    experiment = None

    def log_hyperparams(self, *args, **kwargs):
        pass

    def log_metrics(self, metrics, step=None):
        row = {name: value for name, value in metrics.items() if name != "epoch"}
        if row:
            self.rows.append(row)


def data(counts: Counts, executions: int) -> Tuple[torch.Tensor, torch.Tensor]:
    """Samples for so many executions."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(executions * counts.total * SAMPLES, FEATURES, generator=generator)
    return x, (x.sum(1) > 0).long()


def options_of(counts: Counts, edit: Optional[Callable[[Any], Any]] = None) -> Any:
    """Training options with these counts."""
    import poptorch

    options = poptorch.Options()
    options.deviceIterations(counts.iterations).replicationFactor(counts.replicas)
    options.Training.gradientAccumulation(counts.accumulation)
    if edit is not None:
        edit(options)
    return options


def trainer_of(
    callbacks: List[Any], options: Any = None, logger: Any = False, **kwargs: Any
) -> Any:
    """A quiet trainer on the IPU strategy."""
    return pl.Trainer(
        accelerator="ipu",
        devices=1 if options is None else options.replication_factor,
        strategy=IPUStrategy(training_opts=options),
        callbacks=callbacks,
        logger=logger,
        log_every_n_steps=1,
        **{"max_epochs": 1, **QUIET, **kwargs},
    )


def fit(
    net: Any,
    callback: IPULogCallback,
    counts: Counts = ONE,
    executions: int = 2,
    edit: Optional[Callable[[Any], Any]] = None,
    others: Tuple[Any, ...] = (),
    **kwargs: Any,
) -> List[Dict[str, float]]:
    """Train on the device; returns the rows that the logger got."""
    rows = Rows()
    trainer = trainer_of([callback, *others], options_of(counts, edit), rows, **kwargs)
    fit_quietly(trainer, net, counts, executions)
    return rows.rows


def fit_quietly(trainer: Any, net: Any, counts: Counts = ONE, executions: int = 2) -> None:
    """Train without Lightning's own warnings."""
    with warnings.catch_warnings():
        for text in (".*does not have many workers.*", ".*LeafSpec.*", ".*updated_called.*"):
            warnings.filterwarnings("ignore", text)
        warnings.filterwarnings("ignore", category=UserWarning, module="(pytorch_)?lightning.*")
        loader = DataLoader(TensorDataset(*data(counts, executions)), batch_size=SAMPLES)
        trainer.fit(net, loader)


class Update(NamedTuple):
    """One weight update in plain PyTorch: what the parameters had after it, by name."""

    gradients: Dict[str, torch.Tensor]
    weights: Dict[str, torch.Tensor]
    states: Dict[str, Dict[str, torch.Tensor]]


def plain(
    net: Any, counts: Counts = ONE, executions: int = 2, summed: bool = False
) -> List[List[Update]]:
    """Train the same micro-batches in plain PyTorch; the updates of each execution."""
    optimizer = net.make_optimizer(net.parameters())
    x, y = data(counts, executions)
    micro_batches = iter(zip(x.split(SAMPLES), y.split(SAMPLES)))
    share = counts.accumulation * counts.replicas
    history = []
    for _ in range(executions):
        updates = []
        for _ in range(counts.iterations):
            optimizer.zero_grad()
            for _ in range(share):
                (net.loss(next(micro_batches)) / (1 if summed else share)).backward()
            gradients = {n: p.grad.clone() for n, p in net.named_parameters()}
            optimizer.step()
            updates.append(
                Update(
                    gradients,
                    {n: p.detach().clone() for n, p in net.named_parameters()},
                    {
                        n: {
                            k: torch.as_tensor(v).clone()
                            for k, v in optimizer.state[p].items()
                            if v is not None
                        }
                        for n, p in net.named_parameters()
                    },
                )
            )
        history.append(updates)
    return history
