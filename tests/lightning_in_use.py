"""Which of Lightning's two distributions the tests run, its IPU strategies, a trainer's options.

The unified package brings a `pytorch-lightning` along that is newer than itself and has no IPU
strategy any more: where `lightning` is installed, it is the one in use.
"""

import importlib
import importlib.util
import inspect
import warnings
from contextlib import nullcontext
from typing import Any, ContextManager, Dict

__all__ = [
    "NO_INFERENCE_MODE",
    "QUIET",
    "STRATEGIES",
    "IPUStrategy",
    "apart_from_its_trainer",
    "pl",
]

with warnings.catch_warnings():
    # what Lightning's own import warns of differs from version to version
    warnings.simplefilter("ignore")
    pl: Any = importlib.import_module(
        "pytorch_lightning"
        if importlib.util.find_spec("lightning") is None
        else "lightning.pytorch"
    )
    #: IPU strategies by where they come from; none from Lightning 2.1 on.
    STRATEGIES: Dict[str, Any] = {}
    if hasattr(pl.strategies, "IPUStrategy"):
        STRATEGIES["built-in"] = pl.strategies.IPUStrategy
        if importlib.util.find_spec("lightning_graphcore") is not None:
            graphcore: Any = importlib.import_module("lightning_graphcore")
            STRATEGIES["lightning-graphcore"] = graphcore.IPUStrategy
    #: The one that tests use which have no reason to try both: whoever has the unified package has
    #: Graphcore's.
    IPUStrategy: Any = STRATEGIES.get(
        "lightning-graphcore" if pl.__name__ == "lightning.pytorch" else "built-in"
    )

#: For a trainer that writes nothing.
QUIET: Dict[str, bool] = {
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
}

#: For a trainer that evaluates without `torch.inference_mode`, as Lightning 1.6 always does.
NO_INFERENCE_MODE: Dict[str, bool] = (
    {"inference_mode": False}
    if "inference_mode" in inspect.signature(pl.Trainer).parameters
    else {}
)


def apart_from_its_trainer(module: Any) -> ContextManager[None]:
    """While the block runs a copy or a pickle of a module does not include its trainer.

    Lightning 1 otherwise includes it, and with it the compiled models, which cannot be pickled.
    """
    apart: ContextManager[None] = getattr(
        module, "_prevent_trainer_and_dataloaders_deepcopy", nullcontext
    )()
    return apart
