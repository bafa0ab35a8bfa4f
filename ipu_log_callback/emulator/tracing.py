"""Recording: a step's Python runs once on device tensors and leaves a graph.

Calls are recorded at the level of PyTorch's own functions (`F.cross_entropy` is one call), so that
replaying them on real tensors is what plain PyTorch does. Beside each device tensor the recorder
keeps a hidden CPU tensor with the values of the first micro-batch; it serves to learn shapes and
types and is never shown to the step.
"""

from contextlib import contextmanager
from typing import Any, Dict, Iterator, List, Optional, Tuple

import torch
from torch.overrides import TorchFunctionMode

from ipu_log_callback.emulator import refusals
from ipu_log_callback.emulator._torch_private import (
    storage_key,
    without_torch_function,
)
from ipu_log_callback.emulator.call_effects import (
    Widened,
    halves_have_gradients,
    tensors_in,
    unchanged_test,
)
from ipu_log_callback.emulator.device_tensor import (
    DEVICE,
    DeviceTensor,
    function_name,
    is_device_tensor,
)
from ipu_log_callback.emulator.errors import NotEmulatedError
from ipu_log_callback.emulator.graph import Graph, Node, Ref, refs_in
from ipu_log_callback.emulator.structures import map_tensors

__all__ = ["Recorder", "active_recorder", "device_dtype", "to_device_dtype"]

_NARROWER = {
    torch.int64: torch.int32,
    torch.float64: torch.float32,
    torch.bfloat16: torch.float32,
}

# Answered with numbers, but from shapes and types alone.
_SHAPE_QUESTIONS = {
    "size", "dim", "ndimension", "numel", "nelement", "__len__", "stride", "storage_offset",
    "element_size",
    "can_cast", "broadcast_shapes", "infer_size",
}  # fmt: skip

_active: List["Recorder"] = []


def active_recorder() -> Optional["Recorder"]:
    """Return the recorder of the step that is being compiled, if any."""
    return _active[-1] if _active else None


def device_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type that values of `dtype` have on the device: it knows no 64-bit types."""
    return _NARROWER.get(dtype, dtype)


def to_device_dtype(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor` in its type on the device."""
    return tensor.to(device_dtype(tensor.dtype))


def _is_ipu(device: Any) -> bool:
    if isinstance(device, str):
        return device.split(":")[0] == "ipu"
    return isinstance(device, torch.device) and device.type == "ipu"


def _names_device(args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> Any:
    """Return the device that the arguments of `Tensor.to` name, or ``None``."""
    if kwargs.get("device") is not None:
        return kwargs["device"]
    for value in [*args, kwargs.get("other")]:
        if isinstance(value, torch.device):
            return value
        if isinstance(value, str):
            return torch.device(value)
        if isinstance(value, torch.Tensor):
            return value.device
    return None


class Recorder:
    """Records one step.

    Attributes:
        graph: What was recorded so far.
        values: The hidden value of each slot.
        is_open: Whether the step is still being compiled.
        moving_parameters: Whether tensors moved to the device are parameters and buffers of the
            model.
    """

    def __init__(self) -> None:
        self.graph = Graph()
        self.values: Dict[int, torch.Tensor] = {}
        self.is_open = False
        self.moving_parameters = False
        self._suspended = 0
        self._moved: Dict[int, Tuple[torch.Tensor, int]] = {}

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record what happens to device tensors while the block runs."""
        self.is_open = True
        _active.append(self)
        try:
            with _RecordingMode(self):
                yield
        finally:
            _active.pop()
            self.is_open = False

    def close(self) -> None:
        """Forget the hidden values, which device tensors still around would keep alive."""
        self.values.clear()
        self._moved.clear()

    # Values entering the step

    def _tensor(self, hidden: torch.Tensor) -> DeviceTensor:
        slot = self.graph.new_slot(storage_key(hidden))
        self.values[slot] = hidden
        return self._view_of_slot(slot)

    def _view_of_slot(self, slot: int) -> DeviceTensor:
        with without_torch_function():
            return DeviceTensor(self.values[slot], slot, self)

    def add_input(self, tensor: torch.Tensor) -> DeviceTensor:
        """Declare a tensor argument of the step, given its part for the first micro-batch."""
        with self._hidden_run():
            made = self._tensor(to_device_dtype(tensor.detach()).clone())
        self.graph.inputs.append(made._slot)
        return made

    def _move(self, tensor: torch.Tensor) -> DeviceTensor:
        """Move a host tensor to the device: a parameter while those are moved, else a constant."""
        if self.moving_parameters and id(tensor) in self._moved:
            return self._view_of_slot(self._moved[id(tensor)][1])
        with self._hidden_run():
            hidden = to_device_dtype(tensor.detach()).clone()
            if self.moving_parameters and tensor.requires_grad:
                hidden.requires_grad_()
            made = self._tensor(hidden)
        if self.moving_parameters:
            self._moved[id(tensor)] = (tensor, made._slot)
        self.graph.constants[made._slot] = hidden.detach().clone()
        return made

    def add_constant(self, tensor: torch.Tensor) -> DeviceTensor:
        """Declare a host tensor that the step uses as it is now."""
        return self._move(tensor)

    def add_state(self, tensor: torch.Tensor) -> DeviceTensor:
        """Declare a parameter or buffer, to be named with `name_states`."""
        self.moving_parameters = True
        try:
            return self._move(tensor)
        finally:
            self.moving_parameters = False

    def name_states(self, states: Dict[str, torch.Tensor]) -> None:
        """Tell which of the moved host tensors are parameters and buffers, by name.

        Integer ones stay constants: they never change on the device (PopTorch 3.4
        `JitDispatch.cpp`, `addParameter`).
        """
        for name, tensor in states.items():
            slot = self._moved[id(tensor)][1]
            if self.values[slot].is_floating_point() and slot not in self.graph.states.values():
                self.graph.states[name] = slot
                self.graph.constants.pop(slot, None)

    # Calls

    @contextmanager
    def _hidden_run(self) -> Iterator[None]:
        """Let PyTorch run on hidden values, unrecorded."""
        self._suspended += 1
        try:
            with without_torch_function():
                yield
        finally:
            self._suspended -= 1

    @property
    def is_suspended(self) -> bool:
        """Whether calls at this moment are the recorder's own."""
        return self._suspended > 0

    def call(self, func: Any, args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> Any:
        """Record a call through PyTorch's Python interface; return what the step gets to see."""
        if self._suspended:
            return func(*args, **kwargs)
        name = function_name(func)
        on_device = _has_device((args, kwargs))
        if name in ("to", "type_as", "cpu", "ipu"):
            moved = self._device_move(name, args, kwargs)
            if moved is not None:
                return moved
        if not on_device and not _is_ipu(kwargs.get("device")):
            return func(*args, **kwargs)
        return self._special(name, func, args, kwargs)

    def call_aten(self, func: Any, args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> Any:
        """Record a call that reached an operator without passing PyTorch's Python interface."""
        name = str(func).split(".")[1] if str(func).startswith("aten.") else str(func)
        target = kwargs.get("device")
        if name == "_to_copy" and target is not None and not _is_ipu(target):
            raise refusals.illegal_move()
        return self._special(name, func, args, kwargs)

    def _device_move(self, name: str, args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> Any:
        """Handle a move between host and device; ``None`` if the call is not one."""
        source = args[0]
        target = {"cpu": torch.device("cpu"), "ipu": DEVICE}.get(name) or _names_device(
            args[1:], kwargs
        )
        if target is None or not isinstance(source, torch.Tensor):
            return None
        if is_device_tensor(source):
            if not _is_ipu(target):
                raise refusals.illegal_move()
            return None
        if not _is_ipu(target):
            return None
        wanted = [
            value if isinstance(value, torch.dtype) else value.dtype
            for value in [*args[1:], *kwargs.values()]
            if isinstance(value, (torch.dtype, torch.Tensor))
        ]
        return self._move(source.to(wanted[0]) if wanted else source)

    def _special(self, name: str, func: Any, args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> Any:
        """Answer questions that need no recording; record the rest."""
        refusals.refuse(name, args, kwargs, is_device_tensor)
        first: Any = args[0] if args else None
        if name == "get:device":
            return DEVICE
        if name in ("get:is_ipu", "get:is_cpu"):
            return name == "get:is_ipu"
        if name == "get_device":
            return 0
        if name == "_has_compatible_shallow_copy_type":
            return False
        if name == "get:grad":
            return None
        if name in ("__repr__", "__str__") or (name == "__format__" and self._hidden(first).dim()):
            return self._text(first)
        if name == "__format__":
            raise refusals.item_read()
        if name in ("requires_grad_", "retain_grad") or name.startswith("set:"):
            return self._set(name, first, args)
        if name == "detach" and self.moving_parameters:
            return self._view_of_slot(first._slot)
        if name == "__deepcopy__":
            if not self._hidden(first).is_leaf:
                msg = (
                    "Only Tensors created explicitly by the user (graph leaves) "
                    "support the deepcopy protocol at the moment."
                )
                raise RuntimeError(msg)
            return self._record("clone", torch.clone, (first,), {})
        return self._record(name, func, args, kwargs)

    def _hidden(self, tensor: DeviceTensor) -> torch.Tensor:
        return self.values[tensor._slot]

    def _text(self, tensor: DeviceTensor) -> str:
        hidden = self._hidden(tensor)
        extras = [f"device='{DEVICE}'"]
        if hidden.dtype not in (torch.float32, torch.int32, torch.bool):
            extras.append(f"dtype={hidden.dtype}")
        if hidden.requires_grad:
            extras.append("requires_grad=True")
        return f"tensor(<unavailable>, {', '.join(extras)})"

    def _set(self, name: str, tensor: DeviceTensor, args: Tuple[Any, ...]) -> Any:
        with self._hidden_run():
            if name == "requires_grad_":
                self._hidden(tensor).requires_grad_(*args[1:])
            elif name == "set:requires_grad":
                self._hidden(tensor).requires_grad = args[1]
            elif name == "set:data" and not self._is_own_data(tensor, args[1]):
                raise NotEmulatedError("tensor.data = ...", "use tensor.copy_(...) in a step")
        return tensor

    def _is_own_data(self, tensor: DeviceTensor, value: Any) -> bool:
        """Whether `tensor.data = value` only ends a `tensor.data *= ...`, which was in place."""
        groups = self.graph.groups
        return is_device_tensor(value) and groups[value._slot] == groups[tensor._slot]

    def _record(self, name: str, func: Any, args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> Any:
        """Run a call on hidden values, note it in the graph, and wrap its result."""
        if name in ("tensor", "as_tensor") and not is_device_tensor(args[0]) and _has_device(args):
            raise refusals.item_read()
        elsewhere = kwargs.get("device")
        on_host = elsewhere is not None and not _is_ipu(elsewhere)
        if not on_host:
            kwargs = {key: value for key, value in kwargs.items() if key != "device"}
        call_args, call_kwargs = self._lower(name, args), self._lower(name, kwargs)
        read = {slot: self.values[slot] for slot in refs_in((call_args, call_kwargs))}
        unchanged = {slot: unchanged_test(name, value) for slot, value in read.items()}
        result, random, func, call_args = self._run(name, func, call_args, call_kwargs)
        if on_host:
            return result
        mutates = {
            self.graph.groups[slot] for slot, value in read.items() if not unchanged[slot](value)
        }
        node = Node(
            func,
            call_args,
            call_kwargs,
            [],
            frozenset(mutates),
            torch.is_grad_enabled(),
            random,
            name,
        )
        casts: List[DeviceTensor] = []
        seen = {id(value): slot for slot, value in read.items()}
        wrapped = self._wrap(result, node, (), seen, args, casts)
        if node.outputs or mutates:
            self.graph.nodes.append(node)
        elif not _answers_without_values(name, result):
            raise refusals.item_read()
        if node.outputs and not read and not random:
            self._keep_as_constant(node)
        if casts:
            wrapped = self._narrow(wrapped, casts)
        return wrapped

    def _keep_as_constant(self, node: Node) -> None:
        self.graph.nodes.remove(node)
        for slot, _ in node.outputs:
            self.graph.constants[slot] = self.values[slot].detach().clone()

    def _run(
        self, name: str, func: Any, args: Tuple[Any, ...], kwargs: Dict[str, Any]
    ) -> Tuple[Any, bool, Any, Tuple[Any, ...]]:
        """Call `func` on hidden values without consuming random numbers."""
        before = torch.get_rng_state()
        given, named = self._fill(args), self._fill(kwargs)
        with self._hidden_run():
            widened = Widened(func, name.endswith("_") or name == "__setitem__", given, named)
            if widened.helps and name.endswith("_loss") and not halves_have_gradients():
                func = widened
            try:
                try:
                    result = func(*given, **named)
                except (RuntimeError, IndexError):
                    if not widened.helps:
                        raise
                    # A second failure is the one that 64-bit indices have on a CPU.
                    result = widened(*given, **named)
                    func = widened
            finally:
                random = not torch.equal(before, torch.get_rng_state())
                torch.set_rng_state(before)
        return result, random, func, args

    def _lower(self, name: str, value: Any) -> Any:
        """Turn arguments into a template: `Ref` for device tensors, host devices and types."""
        if is_device_tensor(value):
            if value._recorder is not self:
                raise refusals.no_active_dispatch()
            return Ref(value._slot)
        if isinstance(value, torch.Tensor):
            if name in ("copy_", "__getitem__", "__setitem__"):
                # PyTorch itself moves these to the device of the tensor they are used on.
                return Ref(self._move(value)._slot)
            raise refusals.not_on_device(value)
        if isinstance(value, torch.device):
            return torch.device("cpu") if _is_ipu(value) else value
        if isinstance(value, torch.dtype):
            return device_dtype(value)
        if isinstance(value, str):
            return "cpu" if _is_ipu(value) else value
        if isinstance(value, torch.Size):
            return tuple(value)
        if type(value) in (list, tuple):
            return type(value)(self._lower(name, item) for item in value)
        if type(value) is dict:
            return {key: self._lower(name, item) for key, item in value.items()}
        return value

    def _fill(self, template: Any) -> Any:
        """Turn a template into arguments on hidden values."""
        if isinstance(template, Ref):
            return self.values[template.slot]
        if type(template) in (list, tuple):
            return type(template)(self._fill(item) for item in template)
        if type(template) is dict:
            return {key: self._fill(item) for key, item in template.items()}
        return template

    def _wrap(
        self,
        result: Any,
        node: Node,
        path: Tuple[int, ...],
        seen: Dict[int, int],
        args: Tuple[Any, ...],
        casts: List[DeviceTensor],
    ) -> Any:
        """Return a call's result with device tensors for tensors, noting new slots in `node`."""
        if isinstance(result, torch.Tensor):
            slot = seen.get(id(result))
            if slot is not None:
                same = (
                    arg for arg in tensors_in(args) if is_device_tensor(arg) and arg._slot == slot
                )
                found = next(same, None)
                return self._view_of_slot(slot) if found is None else found
            made = self._tensor(result)
            node.outputs.append((made._slot, path))
            if device_dtype(result.dtype) != result.dtype:
                casts.append(made)
            return made
        if isinstance(result, (list, tuple)) and not isinstance(result, torch.Size):
            items = [
                self._wrap(item, node, (*path, index), seen, args, casts)
                for index, item in enumerate(result)
            ]
            return type(result)(items)
        return result

    def _narrow(self, wrapped: Any, casts: List[DeviceTensor]) -> Any:
        """Cast 64-bit results to what the device has."""
        narrow = {
            id(tensor): self._record(
                "to", torch.Tensor.to, (tensor, device_dtype(self._hidden(tensor).dtype)), {}
            )
            for tensor in casts
        }
        return map_tensors(wrapped, lambda tensor: narrow.get(id(tensor), tensor))


class _RecordingMode(TorchFunctionMode):
    """Shows the recorder what has no device tensor yet: factories and moves to the device."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Tuple[Any, ...] = (),
        kwargs: Optional[Dict[str, Any]] = None,
    ) -> Any:
        first = next(filter(is_device_tensor, tensors_in((args, kwargs))), None)
        if first is not None and first._recorder is not self._recorder:
            return DeviceTensor.__torch_function__(func, types, args, kwargs)
        return self._recorder.call(func, args, kwargs or {})


def _has_device(value: Any) -> bool:
    return any(map(is_device_tensor, tensors_in(value)))


def _answers_without_values(name: str, result: Any) -> bool:
    """Whether a call whose result holds no new tensor is known not to read values."""
    return (
        result is None
        or any(True for _ in tensors_in(result))
        or isinstance(result, (torch.Size, torch.dtype, torch.layout, str))
        or name.startswith(("get:", "is_", "_is_", "has_"))
        or name in _SHAPE_QUESTIONS
    )
