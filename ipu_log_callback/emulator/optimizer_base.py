"""What PopTorch's optimizers have in common (PopTorch 3.4 `optim.py`)."""

from typing import Any, Callable, Dict, Iterable, List, Mapping

import torch

from ipu_log_callback.emulator.errors import NotEmulatedError

__all__ = ["Optimizer", "VariableAttributes"]

_ACCUMULATION_TYPES = (torch.float16, torch.float32)


class VariableAttributes:
    """Which attributes of an optimizer may still change once the model is compiled."""

    def __init__(self, variable_attributes: List[str], allowed_attributes: List[str]) -> None:
        """Start with `variable_attributes` variable out of `allowed_attributes`."""
        self._variable = list(variable_attributes)
        self._allowed = list(allowed_attributes)

    def isConstant(self, attr: str) -> bool:
        """Whether `attr` is fixed at compile time."""
        return attr not in self._variable

    def markAsConstant(self, attr: str) -> None:
        """Fix `attr` at compile time."""
        self._check(attr)
        self._variable = [name for name in self._variable if name != attr]

    def markAsVariable(self, attr: str) -> None:
        """Let `attr` change after compilation."""
        self._check(attr)
        self._variable.append(attr)

    def _check(self, attr: str) -> None:
        assert attr in self._allowed, f"Unknown attribute {attr}, allowed values: {self._allowed}"


class Optimizer:
    """What PopTorch's optimizers add to PyTorch's: device attributes and a state on the device.

    Attributes:
        variable_attrs: Which attributes may change after compilation: those that the user passed.
        ipu_state_is_dirty: A state was loaded that the device has not got yet.
        host_state_is_dirty: The device's state moved on since it was last read.
    """

    # Arguments that PyTorch's class does not have, with their defaults.
    _own_defaults: Mapping[str, Any] = {}

    def _prepare(
        self,
        initialise: Callable[..., None],
        params: Iterable[Any],
        arguments: Mapping[str, Any],
    ) -> None:
        """Initialise PyTorch's part with what was given, and ours with its defaults.

        Args:
            initialise: The constructor of PyTorch's class.
            params: Parameters or groups.
            arguments: The constructor's other arguments by name; ``None`` for not given.
        """
        if arguments.get("maximize"):
            raise NotEmulatedError(
                f"{type(self).__name__}(maximize=True)", "the device always minimises the loss"
            )
        self._state_dict: Dict[str, Any] = {"ipu_state": None, "ipu_param": None}
        self.ipu_state_is_dirty = False
        self.host_state_is_dirty = False
        given = {
            name: value
            for name, value in arguments.items()
            if value is not None and name not in ("self", "params")
        }
        inherited = {name: given[name] for name in given if name not in self._own_defaults}
        initialise(self, params, **inherited)
        for name, default in self._own_defaults.items():
            value = given.get(name, default)
            assert not name.endswith("accum_type") or value in _ACCUMULATION_TYPES, (
                "Accumulation types must be either torch.float32 or torch.float16"
            )
            setattr(self, name, value)
        known = [*_as_torch(self).defaults, "loss_scaling", "velocity_scaling"]
        self.variable_attrs = VariableAttributes(list(given), known)

    def state_dict(self) -> Dict[str, Any]:
        """PyTorch's state, with the device's under ``"ipu_state"`` and ``"ipu_param"``."""
        return self.get_state_dict()

    def load_state_dict(self, state: Dict[str, Any]) -> None:
        """Load what `state_dict` returned.

        Raises:
            RuntimeError: If `state` is empty or comes from an optimizer without a device state.
        """
        torch.optim.Optimizer.load_state_dict(_as_torch(self), state)
        self.set_state_dict(state)

    def get_state_dict(self) -> Dict[str, Any]:
        """The merged state, without asking the device."""
        host = torch.optim.Optimizer.state_dict(_as_torch(self))
        return {**self._state_dict, **host}

    def set_state_dict(self, state: Dict[str, Any]) -> None:
        """Keep `state` for the device.

        Raises:
            RuntimeError: If `state` is empty or has no device part.
        """
        if not state:
            msg = "Cannot load optimizer state dictionary because it is empty."
            raise RuntimeError(msg)
        if not ("ipu_state" in state and "ipu_param" in state):
            msg = "Only IPU optimizer states can be loaded onto the IPU."
            raise RuntimeError(msg)
        self._state_dict = state
        self.ipu_state_is_dirty = True
        self.host_state_is_dirty = False

    def has_state(self) -> bool:
        """Whether a device state is known."""
        known = (self._state_dict.get("ipu_state"), self._state_dict.get("ipu_param"))
        return all(part is not None for part in known)

    def __getstate__(self) -> Dict[str, Any]:
        state = torch.optim.Optimizer.__getstate__(_as_torch(self))
        for name in (*self._own_defaults, "variable_attrs", "_state_dict"):
            state[name] = getattr(self, name)
        state["ipu_state_is_dirty"] = self.has_state()
        state["host_state_is_dirty"] = False
        return state

    def _clip(self) -> None:
        """Bring the norm of all gradients down to `max_grad_norm`."""
        limit = self.max_grad_norm  # type: ignore[attr-defined]  # of the subclasses that call this
        if limit == float("inf"):
            return
        params = [
            p
            for group in _as_torch(self).param_groups
            for p in group["params"]
            if p.grad is not None
        ]
        if params:
            torch.nn.utils.clip_grad_norm_(params, limit)


def _as_torch(optimizer: Any) -> torch.optim.Optimizer:
    """Tell the type checker that every PopTorch optimizer is one of PyTorch's as well."""
    return optimizer  # type: ignore[no-any-return]
