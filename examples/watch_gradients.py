"""Watch gradients vanish in a deep sigmoid net on IPUs, and flow in the repaired one.

Two nets of the same depth learn to tell two interleaved spirals apart. In the first, each sigmoid
shrinks the gradient on its way back, so that the first layers hardly move and nothing is learnt.
The second has ReLUs and weights drawn to suit them. `IPULogCallback(gradients=...)` anchors the
gradient of each weight on the device and logs its norm after every execution; the modules know
nothing of it. Without an IPU the program runs on the emulator. It needs matplotlib.

    python examples/watch_gradients.py                      # writes gradients.png
    python examples/watch_gradients.py --depth 12 --out deep.png

It prints what the anchors cost, and how much smaller the first layer's gradient is than the last's.
"""

import argparse
import math
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence

import pytorch_lightning as pl
import torch
from pytorch_lightning.strategies import IPUStrategy  # type: ignore[attr-defined]  # not in its `__all__`
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from ipu_log_callback import IPULogCallback, emulator

WIDTH = 16
MICRO_BATCH = 16
ITERATIONS = 4
REPLICAS = 2
VANISHED = 1e-3


class SpiralClassifier(pl.LightningModule):
    """A deep net of narrow layers; tells two spirals apart.

    Args:
        depth: Hidden layers.
        repaired: ReLUs with weights drawn to suit them, instead of sigmoids.
    """

    def __init__(self, depth: int, repaired: bool) -> None:
        super().__init__()
        layers: List[nn.Module] = []
        for index in range(depth):
            layer = nn.Linear(2 if index == 0 else WIDTH, WIDTH)
            if repaired:
                nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
                nn.init.zeros_(layer.bias)
            layers += [layer, nn.ReLU() if repaired else nn.Sigmoid()]
        self.hidden = nn.Sequential(*layers)
        self.head = nn.Linear(WIDTH, 2)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Log loss and accuracy."""
        points, labels = batch
        logits = self.head(self.hidden(points))
        loss = F.cross_entropy(logits, labels)
        self.log("loss", loss)
        accuracy = (logits.detach().argmax(1) == labels).float().mean()
        self.log("accuracy", accuracy, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """SGD: its steps are as small as the gradients. Adam's would not be."""
        return torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.9)


class GradientNorms(pl.Callback):
    """Keep the logged norm of each weight's gradient, as any callback may."""

    def __init__(self) -> None:
        self.norms: Dict[str, List[float]] = {}

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        """Read what was logged for the execution that has just ended."""
        for key, value in trainer.callback_metrics.items():
            if key.startswith("grad/") and key.endswith(".weight/norm"):
                self.norms.setdefault(key[len("grad/") : -len(".weight/norm")], []).append(
                    float(value)
                )


@dataclass(frozen=True)
class Watched:
    """What one net's run showed.

    Attributes:
        norms: Layer to the norm of its gradient after each execution, first layer first.
        accuracy: In the last epoch.
        bytes_per_execution: What the anchors brought to the host.
    """

    norms: Dict[str, List[float]]
    accuracy: float
    bytes_per_execution: int

    @property
    def first_to_last(self) -> float:
        """The first layer's gradient as a fraction of the last's, at the start of training."""
        layers = list(self.norms.values())
        return layers[0][0] / layers[-1][0]


def main(argv: Optional[Sequence[str]] = None) -> Dict[str, Watched]:
    """Train both nets, draw their gradients, and return what was seen."""
    args = _parse(argv)
    _find_ipu()
    # The points are few: fetching them takes no time, whatever Lightning advises about workers.
    warnings.filterwarnings("ignore", ".*does not have many workers.*")
    seen = {}
    for name in ("sigmoid", "repaired"):
        torch.manual_seed(args.seed)
        seen[name] = _watch(SpiralClassifier(args.depth, name == "repaired"), args.epochs)
        print(
            f"{name}: the first layer's gradient is {seen[name].first_to_last:.1e} of the last's; "
            f"accuracy {seen[name].accuracy:.2f}; "
            f"{seen[name].bytes_per_execution:,} bytes anchored per execution"
        )
    _draw(seen, args.out)
    print(f"drawn: {args.out}")
    return seen


def _parse(argv: Optional[Sequence[str]]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Watch gradients vanish, and flow.")
    parser.add_argument("--depth", type=int, default=8, help="hidden layers (default %(default)s)")
    parser.add_argument("--epochs", type=int, default=25, help="(default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the weights (default %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("gradients.png"), help="the picture")
    return parser.parse_args(argv)


def _find_ipu() -> None:
    """Make an IPU up where there is none."""
    try:
        import poptorch

        if poptorch.ipuHardwareIsAvailable() and not emulator.is_installed():
            return
    except ImportError:
        pass
    emulator.install(force=True)


def _watch(net: SpiralClassifier, epochs: int) -> Watched:
    import poptorch

    options = poptorch.Options()
    options.deviceIterations(ITERATIONS).replicationFactor(REPLICAS)
    norms = GradientNorms()
    callback = IPULogCallback(["loss", "accuracy"], gradients="*.weight")
    trainer = pl.Trainer(
        accelerator="ipu",
        devices=REPLICAS,
        strategy=IPUStrategy(training_opts=options),
        max_epochs=epochs,
        callbacks=[callback, norms],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    points = DataLoader(_spirals(), batch_size=MICRO_BATCH, drop_last=True, shuffle=True)
    trainer.fit(net, points)
    accuracy = float(trainer.callback_metrics["accuracy"])
    return Watched(norms.norms, accuracy, callback.cost.bytes_per_execution("training_step"))


def _spirals(count: int = 512) -> TensorDataset:
    """Points on two interleaved spirals, in random order."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(count) % 2
    turn = torch.rand(count, generator=generator).sqrt() * 1.25 * 2 * math.pi
    angle = turn + labels * math.pi
    points = torch.stack([angle.cos(), angle.sin()], 1) * (turn / 5).unsqueeze(1)
    return TensorDataset(points + 0.03 * torch.randn(count, 2, generator=generator), labels)


def _draw(seen: Dict[str, Watched], out: Path) -> None:
    """Draw one panel a net: each layer's gradient norm over the executions."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    panels = figure.subplots(1, len(seen), sharey=True)
    for panel, (name, watched) in zip(panels, seen.items()):
        count = len(watched.norms)
        for index, norms in enumerate(watched.norms.values()):
            label = {0: "first layer", count - 1: "last layer"}.get(index)
            color = mpl.colormaps["viridis"](0.9 * index / max(count - 1, 1))
            panel.semilogy(norms, color=color, linewidth=1.2, label=label)
        panel.set_title(f"{name}: accuracy {watched.accuracy:.2f}")
        panel.set_xlabel("execution")
    panels[0].set_ylabel("norm of the gradient")
    panels[-1].legend(loc="lower right")
    figure.savefig(out, dpi=120)


if __name__ == "__main__":
    result = main()
    sys.exit(0 if result["sigmoid"].first_to_last < VANISHED else 1)
