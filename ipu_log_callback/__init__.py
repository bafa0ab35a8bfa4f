"""Log from steps that PopTorch compiles: `self.log` in Lightning on Graphcore IPUs.

Two verbs carry `self.log` across the boundary of a compiled step, whose Python runs only once:
every call is *captured* while the step is compiled, and *replayed* on the host after every
execution with the values that came back. Off the IPU both are identities.
"""

from .anchor import anchor
from .callback import IPULogCallback
from .errors import IPULogError, IPULogWarning
from .live import live

__all__ = ["IPULogCallback", "IPULogError", "IPULogWarning", "anchor", "live"]
