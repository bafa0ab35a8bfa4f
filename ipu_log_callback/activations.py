"""Outputs of submodules, anchored by the submodules' names."""

from contextlib import contextmanager
from typing import Any, Dict, Iterator, List, Optional, Tuple

import torch

from .anchor_calls import record_anchor, reduced
from .capture import Capture
from .errors import KeySelectionError, StepCaptureError, describe_value, names_text, report
from .metrics import is_metric
from .selection import Selection
from .structure import tensors_of

__all__ = ["Activations"]


class Activations:
    """The submodules whose outputs are anchored, while a step is captured.

    Args:
        module: The LightningModule.
        patterns: Names of submodules, or globs.
        reduce: What travels instead of an output: `"stats"`, or `None` for the whole of it.
        statistics: Which statistics.

    Raises:
        KeySelectionError: A pattern matches no submodule.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        patterns: Tuple[str, ...],
        reduce: Optional[str],
        statistics: Tuple[str, ...],
    ) -> None:
        selection = Selection(patterns)
        self._reduce = reduce
        self._statistics = statistics
        self._modules: Dict[str, torch.nn.Module] = {
            name: submodule
            for name, submodule in (module.named_modules() if patterns else ())
            if name and not is_metric(submodule) and selection.selects(name)
        }
        for pattern, nearest in selection.unmatched():
            raise KeySelectionError(
                report(
                    f"`IPULogCallback(activations=[{pattern!r}])` matches no submodule of "
                    f"`{type(module).__name__}`",
                    nearest=names_text(nearest),
                    expected="an attribute path such as 'encoder.0', or a glob",
                )
            )

    @property
    def names(self) -> List[str]:
        """Attribute paths of the submodules."""
        return list(self._modules)

    @contextmanager
    def recorded(self, capture: Capture) -> Iterator[None]:
        """Record the outputs that the submodules give in the block; the hooks go with it.

        A submodule that is called several times in a step is anchored once, its outputs stacked.
        """
        outputs: Dict[str, List[torch.Tensor]] = {}
        handles = [
            submodule.register_forward_hook(self._hook(capture, name, outputs))
            for name, submodule in self._modules.items()
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        for name, tensors in outputs.items():
            whole = tensors[0] if len(tensors) == 1 else torch.stack(tensors)
            value, how = reduced(whole, self._reduce, self._statistics, 0, None)
            record_anchor(capture, name, "activation", value, how)

    def _hook(self, capture: Capture, name: str, outputs: Dict[str, List[torch.Tensor]]) -> Any:
        def note(module: torch.nn.Module, _: Any, output: Any) -> None:
            found = tensors_of(output)
            if not found:
                raise StepCaptureError(
                    report(
                        f"`IPULogCallback(activations=[{name!r}])` anchors the output of "
                        f"`{type(module).__name__}`, which returned no tensor in `{capture.name}`",
                        received=describe_value(output),
                        expected="a module that returns a tensor, or something with a tensor in it",
                        fix="name the submodules that compute, not the one that holds them",
                    )
                )
            tensor = found[0].detach().clone()
            earlier = outputs.setdefault(name, [])
            if earlier and earlier[0].shape != tensor.shape:
                raise StepCaptureError(
                    report(
                        f"`IPULogCallback(activations=[{name!r}])` anchors a submodule whose "
                        f"output changes its shape between calls in `{capture.name}`",
                        received=f"{describe_value(tensor)} after {describe_value(earlier[0])}",
                        expected="one shape",
                        fix="anchor(name, tensor) in the step, with a name for each call",
                    )
                )
            earlier.append(tensor)

        return note
