"""Which of Lightning's two distributions the tests run, and which IPU strategies it has.

The unified package brings a `pytorch-lightning` along that is newer than itself and has no IPU
strategy any more: where `lightning` is installed, it is the one in use.
"""

import importlib
import importlib.util
import warnings
from typing import Any, Dict

__all__ = ["STRATEGIES", "pl"]

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
