"""The host's side of weights: stale after an execution, until any touch brings them back.

A training model's class, and the classes of its parameters and buffers, are replaced by
subclasses whose attribute accesses copy the weights from the device if they moved on there
(PopTorch 3.4 `_poplar_executor.py`: `PoptorchModel`, `PoptorchParameter`, `PoptorchBuffer`;
`_impl.py`: unwrapping, copying and pickling).
"""

import collections
import copy
import copyreg
import itertools
import weakref
from contextlib import contextmanager
from typing import Any, Dict, Iterator, List, Protocol

import torch

from ipu_log_callback.emulator.errors import python_error

__all__ = ["is_wrapped", "named_state", "state_restored", "unwrap", "unwrapped", "wrap"]


class StaleWeights(Protocol):
    """What wrapped objects need of their executor."""

    _host_weights_version: int

    def copyWeightsToHostIfNeeded(self) -> bool:
        """Bring the weights to the host if the device's are newer."""

    def destroy(self) -> None:
        """Release the device."""


_wrapper_types: "weakref.WeakSet[type]" = weakref.WeakSet()


def is_wrapped(value: Any) -> bool:
    """Whether the class of `value` was replaced."""
    return type(value) in _wrapper_types


def _base(wrapper: type) -> type:
    return wrapper.__mro__[1]


def _set_class(value: Any, cls: type) -> None:
    # Not `value.__class__ = cls`: a wrapper that overrides attribute access must not notice.
    object.__setattr__(value, "__class__", cls)


def _copied(value: Any) -> Any:
    """Copy a wrapped object; the copy is wrapped, too."""
    twin = _plain_copy(value)
    _set_class(twin, type(value))
    return twin


def _reduce(value: Any) -> Any:
    """Pickle a wrapped object: what is loaded from a file is not wrapped.

    The file holds nothing of this module, so that it can be loaded without it.
    """
    # protocol 1: the later ones insist on the class of the object that is being pickled
    return _plain_copy(value).__reduce_ex__(1)


def _plain_copy(value: Any) -> Any:
    # An attribute access, so that stale weights come to the host first.
    wrapper = value.__class__
    _set_class(value, _base(wrapper))
    try:
        return copy.copy(value)
    finally:
        _set_class(value, wrapper)


def _register(wrapper: type) -> type:
    _wrapper_types.add(wrapper)
    wrapper.__copy__ = _copied  # type: ignore[attr-defined]  # `copy` asks for it before `copyreg`
    copyreg.pickle(wrapper, _reduce)
    return wrapper


def _parameter_type(parent: Any) -> type:
    class PoptorchParameter(torch.nn.Parameter):
        def __getattribute__(self, name: str) -> Any:
            executor = parent()
            if executor is not None:
                executor.copyWeightsToHostIfNeeded()
            return object.__getattribute__(self, name)

        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            # Its mere presence makes PyTorch read an attribute before it uses the tensor.
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]  # of torch

    return _register(PoptorchParameter)


def _buffer_type(parent: Any) -> type:
    class PoptorchBuffer(torch.Tensor):
        def __getattribute__(self, name: str) -> Any:
            executor = parent()
            if executor is not None:
                executor.copyWeightsToHostIfNeeded()
            return object.__getattribute__(self, name)

        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]  # of torch

    return _register(PoptorchBuffer)


def _model_type(parent: Any, base: type) -> type:
    class PoptorchModel(base):  # type: ignore[misc]  # the user's class, known at run time
        def copyWeightsToHostIfNeeded(self) -> bool:
            """Bring the weights to the host if the device's are newer.

            Return whether that was so.
            """
            executor = parent()
            return executor.copyWeightsToHostIfNeeded() if executor is not None else False

        def destroy(self) -> None:
            """Release the device and give the model back as it was."""
            executor = parent()
            if executor is not None:
                executor.destroy()

        def __getattribute__(self, name: str) -> Any:
            if name == "_host_weights_version":
                executor = parent()
                return None if executor is None else executor._host_weights_version
            if name in ("_buffers", "_parameters", "forward"):
                self.copyWeightsToHostIfNeeded()
            return object.__getattribute__(self, name)

        def __getattr__(self, name: str) -> Any:
            attribute = super().__getattr__(name)
            if isinstance(attribute, torch.nn.Parameter):
                self.copyWeightsToHostIfNeeded()
            return attribute

        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            """Return the model's state with plain tensors, loadable where there is no PopTorch."""
            twins: Dict[int, Any] = {}
            state = collections.OrderedDict()
            for name, value in super().state_dict(*args, **kwargs).items():
                if id(value) not in twins:
                    twin = copy.copy(value)
                    if is_wrapped(twin):
                        _set_class(twin, _base(type(twin)))
                    twins[id(value)] = twin
                state[name] = twins[id(value)]
            return state

    PoptorchModel.__name__ = f"Poptorch{base.__name__}"
    return _register(PoptorchModel)


def wrap(model: torch.nn.Module, executor: StaleWeights) -> None:
    """Replace the classes of `model` and of its parameters and buffers.

    Raises:
        Error: If a buffer is of a tensor class of its own.
    """
    # Weak: the user's model must not keep the executor alive.
    parent = weakref.ref(executor)
    parameter, buffer = _parameter_type(parent), _buffer_type(parent)
    for weight in model.parameters():
        _set_class(weight, parameter)
    for tensor in model.buffers():
        if type(tensor) is not torch.Tensor and type(tensor) is not buffer:
            raise python_error(
                f"All buffers must be an instance of torch.Tensor (Got {type(tensor)})"
            )
        _set_class(tensor, buffer)
    _set_class(model, _model_type(parent, type(model)))


def _wrapped_parts(model: torch.nn.Module) -> List[Any]:
    tensors = itertools.chain(model.buffers(), model.parameters())
    return [part for part in [*tensors, model] if is_wrapped(part)]


def unwrap(model: torch.nn.Module) -> None:
    """Give `model`, its parameters and buffers their own classes back."""
    for part in _wrapped_parts(model):
        _set_class(part, _base(type(part)))


@contextmanager
def unwrapped(model: torch.nn.Module) -> Iterator[None]:
    """Give `model` and its parts their own classes while the block runs."""
    parts = [(part, type(part)) for part in _wrapped_parts(model)]
    for part, wrapper in parts:
        _set_class(part, _base(wrapper))
    try:
        yield
    finally:
        for part, wrapper in parts:
            _set_class(part, wrapper)


def named_state(model: torch.nn.Module) -> Dict[str, torch.Tensor]:
    """Return the parameters and buffers of `model` by name."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


@contextmanager
def state_restored(model: torch.nn.Module) -> Iterator[None]:
    """After the block, put the present parameters and buffers of `model` back; nothing else."""
    before = [
        (module, name, tensor)
        for module in model.modules()
        for table in (module._parameters, module._buffers)
        for name, tensor in table.items()
        if tensor is not None
    ]
    try:
        yield
    finally:
        for module, name, tensor in before:
            # Through the module's own `__setattr__`: recurrent layers keep a list of their weights
            # up to date there.
            setattr(module, name, tensor)
