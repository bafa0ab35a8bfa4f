"""What an executor keeps in step between host and device: weights, optimizer state, random numbers.

When each of them travels is PopTorch 3.4 `_poplar_executor.py`'s decision.
"""

from types import MethodType
from typing import Any, Callable, Dict, List, Optional

import torch

from ipu_log_callback.emulator import optim, weights
from ipu_log_callback.emulator.console import logger
from ipu_log_callback.emulator.counters import Counters, Tally
from ipu_log_callback.emulator.device_optimizer import DeviceOptimizer
from ipu_log_callback.emulator.enums import ConnectionType
from ipu_log_callback.emulator.errors import python_error
from ipu_log_callback.emulator.executable import Executable
from ipu_log_callback.emulator.options import Options

__all__ = ["DeviceState"]

_NO_EXECUTABLE = "Model has not been compiled or has been destroyed."


class DeviceState:
    """The part of an executor that moves things between host and device."""

    _model: torch.nn.Module
    _user_model: torch.nn.Module
    _options: Options
    _training: bool

    def __init__(self) -> None:
        self._executable: Optional[Executable] = None
        self._host_weights_version = 0
        self._dirty_host_weights = False
        self._is_attached = False
        self._tally = Tally()
        self._optimizer: Optional[Any] = None
        self._cached_rng_state: Optional[List[int]] = None

    @property
    def counters(self) -> Counters:
        """This executor's costly events."""
        return self._tally.own

    def isCompiled(self) -> bool:
        """Whether the model is compiled, and not destroyed since."""
        return self._executable is not None

    def _compiled(self) -> Executable:
        if self._executable is None:
            raise python_error(_NO_EXECUTABLE)
        return self._executable

    # Weights

    def copyWeightsToHostIfNeeded(self) -> bool:
        """Copy the weights to the host if the device's are newer; return whether that was so."""
        if not self._dirty_host_weights:
            return False
        logger.debug("Implicit copyWeightsToHost()")
        self._download()
        self._tally.add(implicit_copies_to_host=1)
        return True

    def copyWeightsToHost(self) -> None:
        """Copy parameters and buffers from the device into the module."""
        self._download()
        self._tally.add(explicit_copies_to_host=1)

    def copyWeightsToDevice(self) -> None:
        """Copy parameters and buffers from the module to the device."""
        self._upload()
        self._tally.add(explicit_copies_to_device=1)

    def _download(self) -> None:
        executable = self._compiled()
        # First, so that reading the module's parameters does not lead back here.
        self._dirty_host_weights = False
        with weights.unwrapped(self._model):
            executable.download(weights.named_state(self._model))
        self._host_weights_version += 1

    def _upload(self) -> None:
        executable = self._compiled()
        self._dirty_host_weights = False
        if self._optimizer is not None:
            self._optimizer.state_dict()
        with weights.unwrapped(self._model):
            executable.upload(weights.named_state(self._model))

    def copyNamedBuffersToDevice(self) -> None:
        """Copy the buffers that the option ``updatableNamedBuffers`` names to the device."""
        executable = self._compiled()
        if "updatableNamedBuffers" not in self._options._Popart.options:
            raise python_error(
                "No named buffers marked as updatable via updatableNamedBuffers option"
            )
        self._dirty_host_weights = False
        if self._optimizer is not None:
            self._optimizer.state_dict()
        named = dict(self._model.named_buffers())
        wanted = self._options._Popart.options["updatableNamedBuffers"]
        executable.upload_buffers({name: named[name] for name in wanted})

    def load_state_dict(self, state_dict: Dict[str, torch.Tensor], strict: bool = True) -> Any:
        """Load a state into the module, and from there to the device if there is one."""
        result = self._user_model.load_state_dict(state_dict, strict)
        if self.isAttachedToDevice():
            logger.debug("load_state_dict: implicit copyWeightsToDevice()")
            self._upload()
            self._tally.add(implicit_copies_to_device=1)
        return result

    # Optimizer

    def setOptimizer(self, optimizer: Any) -> None:
        """Use `optimizer` from here on.

        After compilation only numbers that were not compiled in may differ: the learning rate, in
        the first place.
        """
        optim.check(optimizer)
        if self.isCompiled() and optimizer is not self._optimizer:
            if isinstance(self._optimizer, optim.Optimizer):
                self._read_optimizer_state_if_needed()
                self._optimizer.state_dict = self._optimizer.get_state_dict  # type: ignore[method-assign]  # undo ours
            if isinstance(optimizer, optim.Optimizer):
                optimizer.ipu_state_is_dirty = True
        if isinstance(optimizer, optim.Optimizer):
            # Reading the state fetches it from the device first.
            optimizer.state_dict = MethodType(DeviceState._optimizer_state_dict, self)  # type: ignore[method-assign]
        self._optimizer = optimizer
        if self._executable is not None and self._executable.optimizer is not None:
            if self._executable.layout.grouped:
                optim.check_grouped(optimizer)
            self._executable.optimizer.update(optimizer)
            self._write_optimizer_state_if_needed()

    def _optimizer_state_dict(self) -> Dict[str, Any]:
        assert isinstance(self._optimizer, optim.Optimizer)
        self._read_optimizer_state_if_needed()
        return self._optimizer.get_state_dict()

    def _read_optimizer_state_if_needed(self) -> None:
        optimizer = self._optimizer
        if not isinstance(optimizer, optim.Optimizer) or not optimizer.host_state_is_dirty:
            return
        executable = self._compiled()
        assert executable.optimizer is not None
        own_state = torch.optim.Optimizer.state_dict(optimizer)  # type: ignore[arg-type]  # PyTorch's as well
        device_state = {
            "ipu_state": executable.optimizer.state(executable.weight_names),
            "ipu_param": {},
        }
        optimizer.set_state_dict({**device_state, **own_state})
        optimizer.ipu_state_is_dirty = False

    def _write_optimizer_state_if_needed(self) -> None:
        optimizer = self._optimizer
        if not isinstance(optimizer, optim.Optimizer) or not optimizer.ipu_state_is_dirty:
            return
        if optimizer.has_state():
            executable = self._compiled()
            assert executable.optimizer is not None
            self.copyWeightsToHostIfNeeded()
            state = optimizer.state_dict()["ipu_state"]
            executable.optimizer.load_state(state, executable.weight_names)
        optimizer.ipu_state_is_dirty = False

    # Device

    def isAttachedToDevice(self) -> bool:
        """Whether the model is compiled and on a device."""
        return self.isCompiled() and self._is_attached

    def attachToDevice(self) -> None:
        """Attach again after `detachFromDevice`.

        Weights, optimizer state and random numbers travel to the device.
        """
        self._compiled()
        assert self._options.connection_type != ConnectionType.Never, (
            "Trying to attach to an offline device (ConnectionType.Never)"
        )
        if self._is_attached:
            raise python_error("Device is already attached")
        self._is_attached = True
        self._on_device_attach()

    def detachFromDevice(self) -> None:
        """Release the device but keep the compiled model.

        Weights, states and random numbers come to the host.
        """
        self._compiled()
        if not self._is_attached:
            raise python_error("Device is not attached")
        self._cached_rng_state = self.rng_state
        if self._training:
            self.copyWeightsToHostIfNeeded()
            self._read_optimizer_state_if_needed()
        self._is_attached = False

    def _on_device_attach(self) -> None:
        executable = self._compiled()
        self._upload()
        self._tally.add(implicit_copies_to_device=1)
        optimizer = self._optimizer
        if optimizer is not None:
            if executable.optimizer is None:
                executable.optimizer = DeviceOptimizer(optimizer, self._device_values(executable))
            if isinstance(optimizer, optim.Optimizer):
                if optimizer.has_state():
                    optimizer.ipu_state_is_dirty = True
                    self._write_optimizer_state_if_needed()
                else:
                    optimizer.host_state_is_dirty = True
                    optimizer.ipu_state_is_dirty = False
        if self._cached_rng_state is not None:
            executable.rng_state = self._cached_rng_state

    def _device_values(
        self, executable: Executable
    ) -> Callable[[torch.Tensor], List[torch.Tensor]]:
        by_id, by_address = {}, {}
        for name, param in self._model.named_parameters():
            if name in executable.layout.parameters:
                by_id[id(param)] = by_address[param.data_ptr()] = executable.values_of(name)

        def find(param: torch.Tensor) -> List[torch.Tensor]:
            return by_id[id(param)] if id(param) in by_id else by_address[param.data_ptr()]

        return find

    @property
    def rng_state(self) -> List[int]:
        """Seed and state of the device's random numbers."""
        executable = self._compiled()
        if self._cached_rng_state is None or len(self._cached_rng_state) == 1:
            self._cached_rng_state = executable.rng_state
        return self._cached_rng_state

    @rng_state.setter
    def rng_state(self, state: List[int]) -> None:
        executable = self._compiled()
        self._cached_rng_state = list(state)
        if self.isAttachedToDevice():
            executable.rng_state = self._cached_rng_state
