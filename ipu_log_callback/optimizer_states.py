"""The optimizer's states: by PopART's stable names where they have one, else read as a whole."""

from typing import Any, Dict, Iterator, List, Mapping, Sequence, Tuple

import torch

from .errors import KeySelectionError, names_text, report
from .selection import Selection

__all__ = ["OptimizerStates"]

# PopART's names of states that PyTorch calls otherwise.
_TORCH_NAMES = {"Step": "step"}


class OptimizerStates:
    """Which states are wanted, and how each is to be had.

    A state is named `<parameter>/<state>`, as in `"head.weight/exp_avg"`; a pattern without a
    state (`"head.*"`) wants all states of the parameter.

    Args:
        optimizer: The user's optimizer.
        prefix: What parameter names begin with in the compiled model.
        patterns: What the user asked for.
        stable: PopART's stable names by PyTorch's.
        parameters: Names of the trained parameters.
        owner: Class of the LightningModule, for messages.

    Raises:
        KeySelectionError: A pattern matches no state that has a stable name, and the optimizer
            keeps no readable state (it is not of `poptorch.optim`).
    """

    def __init__(
        self,
        optimizer: Any,
        prefix: str,
        patterns: Sequence[str],
        stable: Mapping[str, str],
        parameters: Sequence[str],
        owner: str,
    ) -> None:
        self._optimizer = optimizer
        self._prefix = prefix
        self._stable = {popart: name for name, popart in stable.items()}
        self.anchored: List[Tuple[str, str]] = []
        unmatched: List[str] = []
        known = {f"{name}/{state}": (name, state) for name in parameters for state in stable}
        for pattern in patterns:
            selection = Selection((pattern, f"{pattern}/*"))
            found = [pair for name, pair in known.items() if selection.selects(name)]
            self.anchored += [pair for pair in found if pair not in self.anchored]
            unmatched += [] if found else [pattern]
        self._patterns = tuple(unmatched)
        if unmatched and not hasattr(optimizer, "host_state_is_dirty"):
            raise self._no_match(unmatched[0], list(known), owner)

    @staticmethod
    def _no_match(pattern: str, known: List[str], owner: str) -> KeySelectionError:
        selection = Selection((pattern,))
        for name in known:
            selection.selects(name)
        return KeySelectionError(
            report(
                f"`IPULogCallback(optimizer_state=[{pattern!r}])` matches no optimizer state of "
                f"`{owner}`",
                nearest=names_text(selection.unmatched()[0][1] if known else ()),
                expected="'<parameter>/<state>', such as 'head.weight/exp_avg', or a glob",
                why="" if known else "this optimizer keeps no state on the device",
            )
        )

    def read(self) -> Iterator[Tuple[str, torch.Tensor]]:
        """Read the wanted states that have no stable name; copies all of them from the device.

        Yields:
            `<parameter>/<state>` and its value.

        Raises:
            KeySelectionError: A pattern matches none of the states that the device keeps.
        """
        if not self._patterns:
            return
        # PopTorch's `state_dict` fetches the states first (`_poplar_executor.py`)
        states: Dict[str, Any] = self._optimizer.state_dict().get("ipu_state") or {}
        names = {self._name(entry): value for entry, value in states.items()}
        for pattern in self._patterns:
            selection = Selection((pattern, f"{pattern}/*"))
            found = [name for name in names if selection.selects(name)]
            if not found:
                raise self._no_match(pattern, list(names), type(self._optimizer).__name__)
            for name in found:
                yield name, torch.as_tensor(names[name]).float()

    def _name(self, entry: str) -> str:
        state, _, parameter = entry.partition("___")
        if parameter.startswith(self._prefix):
            parameter = parameter[len(self._prefix) :]
        return f"{parameter}/{self._stable.get(state, _TORCH_NAMES.get(state, state))}"
