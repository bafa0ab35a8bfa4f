"""The optimizer on the device: PyTorch's own step on the device's weights.

PopTorch runs no Python of the user's optimizer; it reads its class and its numbers and builds
PopART's equivalent (PopTorch 3.4 `_optimizer_attributes.py`). So here: the step is that of
PyTorch's or PopTorch's class, whatever a subclass overrides, and numbers that were constant at
compile time stay constant.
"""

import collections
from typing import Any, Callable, Dict, List

import torch

from ipu_log_callback.emulator import optim
from ipu_log_callback.emulator.errors import NotEmulatedError

__all__ = ["DeviceOptimizer"]

# Numbers that may change after compilation, with the value at which PopTorch compiles them in.
_COMPILED_IN_AT: Dict[str, Any] = {
    "weight_decay": 0.0,
    "momentum": 0.0,
    "velocity_scaling": 1.0,
    "dampening": 0.0,
    "eps": 1e-8,
    "max_weight_norm": 65500.0,
}
_ALWAYS_COMPILED_IN = ("betas", "alpha", "nesterov", "centered", "amsgrad")


def _implementation(optimizer: Any) -> type:
    """Return the class whose step the device performs."""
    modules = (optim.__name__, "torch.optim")
    return next(cls for cls in type(optimizer).__mro__ if cls.__module__.startswith(modules))


def _kind(cls: type) -> type:
    """Return the class that PyTorch's and PopTorch's optimizers of one kind have in common."""
    kinds = (torch.optim.SGD, torch.optim.AdamW, torch.optim.Adam, torch.optim.RMSprop)
    return next((kind for kind in kinds if issubclass(cls, kind)), cls)


def _numbers(group: Dict[str, Any]) -> Dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


class DeviceOptimizer:
    """Performs the weight updates of one compiled model."""

    def __init__(self, host: Any, on_device: Callable[[torch.Tensor], List[torch.Tensor]]) -> None:
        """Build the device's equivalent of `host`.

        Args:
            host: The user's optimizer.
            on_device: Finds the device's values of one of its parameters: one, or one for each
                group of replicas.
        """
        cls = _implementation(host)
        own = ("param_groups", "state", "step", "state_dict", "zero_grad")
        twin: Any = object.__new__(cls)
        twin.__dict__.update({name: value for name, value in vars(host).items() if name not in own})
        for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
            if name in vars(host):
                setattr(twin, name, collections.OrderedDict())
        twin.state = collections.defaultdict(dict)
        twin.param_groups = [
            {
                **_numbers(group),
                "params": [value for param in group["params"] for value in on_device(param)],
            }
            for group in host.param_groups
        ]
        self._twin: Any = twin
        self._step: Callable[[], Any] = twin.step
        self._compiled_in = [self._constants(host, group) for group in host.param_groups]

    @staticmethod
    def _constants(host: Any, group: Dict[str, Any]) -> Dict[str, Any]:
        variable = getattr(host, "variable_attrs", None)
        constants = {}
        for name, value in _numbers(group).items():
            at = 1e-2 if name == "weight_decay" and isinstance(host, torch.optim.AdamW) else None
            neutral = _COMPILED_IN_AT.get(name) if at is None else at
            if variable is not None and (
                name == "lr" or name in _COMPILED_IN_AT or name == "betas"
            ):
                is_constant = variable.isConstant(name)
            else:
                is_constant = name in _ALWAYS_COMPILED_IN or (
                    name in _COMPILED_IN_AT and value == neutral
                )
            if is_constant:
                constants[name] = value
        return constants

    @property
    def parameters(self) -> List[torch.Tensor]:
        """The device's weights that are updated."""
        return [param for group in self._twin.param_groups for param in group["params"]]

    def update(self, host: Any) -> None:
        """Take over the present numbers of `host`, for instance its learning rate.

        Raises:
            NotEmulatedError: If `host` is of another kind, has other groups, or changed a
            compiled-in number.
        """
        if _kind(_implementation(host)) is not _kind(type(self._twin)):
            raise NotEmulatedError(
                f"setOptimizer({type(host).__name__})",
                f"the model was compiled with {type(self._twin).__name__}; call destroy() first",
            )
        if len(host.param_groups) != len(self._twin.param_groups):
            raise NotEmulatedError(
                f"setOptimizer with {len(host.param_groups)} groups",
                f"the model was compiled with {len(self._twin.param_groups)}; call destroy() first",
            )
        groups = zip(self._compiled_in, host.param_groups, self._twin.param_groups)
        for index, (constants, given, group) in enumerate(groups):
            for name, value in constants.items():
                if given.get(name) != value:
                    raise NotEmulatedError(
                        f"{name}={given.get(name)!r} in group {index}",
                        f"{value!r} was compiled in as a constant; call destroy() first, or use "
                        "a poptorch.optim "
                        f"class and mark it as variable",
                    )
            group.update(_numbers(given))
        for name in getattr(host, "_own_defaults", ()):
            setattr(self._twin, name, getattr(host, name))

    def step(self) -> None:
        """Update the weights from their gradients, and forget these."""
        self._step()
        for param in self.parameters:
            param.grad = None

    @property
    def loss_scaling(self) -> float:
        """What the loss's gradient is multiplied with; undone before the update."""
        return float(getattr(self._twin, "loss_scaling", 1.0))

    @property
    def velocity_scaling(self) -> float:
        """What SGD's momentum is kept larger by.

        The loss scaling (PopTorch 3.4 `CompilerImpl.cpp`).
        """
        return self.loss_scaling if _kind(type(self._twin)) is torch.optim.SGD else 1.0

    # The state, as PopTorch's optimizers keep it on the host

    @property
    def _popart_names(self) -> Dict[str, str]:
        kind = _kind(type(self._twin))
        if kind is torch.optim.RMSprop:
            return _AVERAGES
        return _MOMENTUM if kind is torch.optim.SGD else _MOMENTS

    def state(self, names: Dict[int, str]) -> Dict[str, torch.Tensor]:
        """Return the state by PopART-like names, ``<entry>___<parameter>``.

        That of a grouped parameter has a leading dimension that counts the groups.

        Args:
            names: Names of the wanted weights by `id`.
        """
        popart = self._popart_names
        found: Dict[str, List[torch.Tensor]] = {}
        for param in self.parameters:
            for entry, value in self._twin.state.get(param, {}).items():
                if value is not None and id(param) in names:
                    key = f"{popart.get(entry, entry)}___{names[id(param)]}"
                    found.setdefault(key, []).append(torch.as_tensor(value))
        return {
            key: torch.stack(values) if len(values) > 1 else values[0].clone()
            for key, values in found.items()
        }

    def load_state(self, state: Dict[str, torch.Tensor], names: Dict[int, str]) -> None:
        """Take over what `state` returned."""
        entries = {popart: entry for entry, popart in self._popart_names.items()}
        by_name: Dict[str, List[torch.Tensor]] = {}
        for param in self.parameters:
            by_name.setdefault(names[id(param)], []).append(param)
        for key, value in state.items():
            entry, _, name = key.partition("___")
            entry = entries.get(entry, entry)
            params = by_name.get(name, [])
            for param, part in zip(params, value.unbind(0) if len(params) > 1 else [value]):
                is_count = isinstance(self._twin.state[param].get(entry), int)
                self._twin.state[param][entry] = int(part) if is_count else part.clone()


# Names of PopART's optimizer state tensors, as anchors know them (PopART 3.4 `adamdecompose.cpp`,
# `sgd2decompose.cpp`, `adaptivedecompose.cpp`).
_MOMENTS = {"exp_avg": "Accl1", "exp_avg_sq": "Accl2", "step": "Step"}
_MOMENTUM = {"momentum_buffer": "Accl1"}
_AVERAGES = {"square_avg": "Accl1", "grad_avg": "Accl2", "momentum_buffer": "Accl3", "step": "Step"}
