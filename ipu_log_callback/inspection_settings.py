"""What a user asked to look at, checked."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Dict, List, Optional, Tuple

from .errors import KeySelectionError, report
from .selection import parse_names
from .tensor_statistics import STATISTICS

if TYPE_CHECKING:
    from .callback import IPULogCallback

__all__ = ["InspectionSettings", "inspection_parts", "settings_of"]


@dataclass(frozen=True)
class InspectionSettings:
    """What to look at; the constructor's arguments of `IPULogCallback` have the same names."""

    gradients: Tuple[str, ...] = ()
    weights: Tuple[str, ...] = ()
    optimizer_state: Tuple[str, ...] = ()
    activations: Tuple[str, ...] = ()
    tensors: Tuple[Tuple[str, str], ...] = ()
    statistics: Tuple[str, ...] = ("norm",)
    reduce_activations: Optional[str] = None
    every_n_executions: int = 1
    histograms: bool = False
    cost_warning: Optional[int] = 1_000_000
    measure_cost: bool = False
    enabled: bool = True

    @property
    def needs_every_micro_batch(self) -> bool:
        """Whether the output mode must be `All` for exact values."""
        return bool(self.gradients or self.activations or self.tensors)

    @property
    def names_tensors(self) -> bool:
        """Whether anchors must be declared in the options."""
        return bool(self.gradients or self.weights or self.optimizer_state or self.tensors)


_NAMES = ("gradients", "weights", "optimizer_state", "activations", "statistics")


def settings_of(callback: "IPULogCallback") -> InspectionSettings:
    """Read the arguments of a callback.

    Raises:
        KeySelectionError: One of them cannot be what the user meant.
    """
    names = {name: parse_names(getattr(callback, name), name) for name in _NAMES}
    for name in names["statistics"]:
        if name not in STATISTICS:
            raise _refused("statistics", name, "one of " + ", ".join(map(repr, STATISTICS)))
    if callback.reduce_activations not in (None, "stats"):
        raise _refused("reduce_activations", callback.reduce_activations, "None or 'stats'")
    every = callback.every_n_executions
    if not isinstance(every, int) or isinstance(every, bool) or every < 1:
        raise _refused("every_n_executions", every, "a whole number of 1 or more")
    limit = callback.cost_warning
    if limit is not None and (not isinstance(limit, (int, float)) or limit < 0):
        raise _refused("cost_warning", limit, "a number of bytes, or None")
    return InspectionSettings(
        gradients=names["gradients"],
        weights=names["weights"],
        optimizer_state=names["optimizer_state"],
        activations=names["activations"],
        tensors=_tensors(callback.tensors),
        statistics=names["statistics"],
        reduce_activations=callback.reduce_activations,
        every_n_executions=every,
        histograms=callback.histograms,
        cost_warning=limit,
        measure_cost=callback.measure_cost,
    )


def inspection_parts(callback: "IPULogCallback") -> List[str]:
    """The arguments that differ from their defaults, as a user would type them."""
    defaults: Dict[str, Any] = dict(vars(InspectionSettings()), tensors=None)
    parts = []
    for name, default in defaults.items():
        if name == "enabled":
            continue
        value = getattr(callback, name)
        given = list(parse_names(value, name)) if name in _NAMES else value
        if given != (list(default) if name in _NAMES else default):
            parts.append(f"{name}={given!r}")
    return parts


def _tensors(tensors: Any) -> Tuple[Tuple[str, str], ...]:
    if tensors is None:
        return ()
    if not isinstance(tensors, dict):
        raise _refused("tensors", tensors, "a dict of your names to PopART's")
    for name, tensor in tensors.items():
        if not (isinstance(name, str) and name and isinstance(tensor, str) and tensor):
            raise _refused("tensors", {name: tensor}, "a dict of str to str, none of them empty")
    double = [name for name in tensors if list(tensors.values()).count(tensors[name]) > 1]
    if double:
        raise _refused("tensors", tensors, f"each tensor once; {double} name the same")
    return tuple(tensors.items())


def _refused(argument: str, value: Any, expected: str) -> KeySelectionError:
    return KeySelectionError(
        report(
            f"`IPULogCallback({argument}={value!r})` received a value that it cannot use",
            expected=expected,
        )
    )
