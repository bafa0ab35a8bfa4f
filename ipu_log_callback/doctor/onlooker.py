"""A recorder that goes on: what a compiled step cannot do is noticed, and then done all the same.

The emulator's own recorder raises PopTorch's error at the first such call. This one knows the
values of the first micro-batch too, hands out the one that was asked for, and lets the step run to
its end, so that one run finds everything.
"""

from contextlib import contextmanager
from typing import Any, Callable, Dict, Iterator, List, Optional, Set, Tuple

import torch
from torch.overrides import TorchFunctionMode

from ipu_log_callback.doctor.refused import fix_for_shape, kind_of
from ipu_log_callback.emulator.device_tensor import (
    OWN_KNOWLEDGE,
    DeviceTensor,
    function_name,
    is_device_tensor,
)
from ipu_log_callback.emulator.errors import Error, NotEmulatedError
from ipu_log_callback.emulator.graph import Node
from ipu_log_callback.emulator.tracing import Recorder, to_device_dtype
from ipu_log_callback.record import CallSite

__all__ = ["Notice", "Onlooker"]

Notice = Callable[[str, str, str], None]

_STAY = {"cuda", "pin_memory", "share_memory_", "set_", "resize_"}
#: Calls that read a value on their way to a tensor.
_TENSOR_READS = {"gaussian_nll_loss", "one_hot", "tensor", "as_tensor"}


class Onlooker(Recorder):
    """Records one step to its end.

    Args:
        notice: Called with the kind of a finding, what it is about, and a fix of its own or `""`.
        look: Called before every call on device tensors.
        site: Tells where in the user's file the step is.
        index_positions: Which of the step's tensor arguments, flattened, are `batch_idx` and
            `dataloader_idx`.
        holder: Tells which attribute holds a tensor.
        before: The recorder of the step's run before this one, if it runs twice.

    Attributes:
        finished: Whether the step ran to its end.
        numbers: The numbers that were read from device tensors.
        carried: The attributes in which the run before left what this one used.
        sites: Line of each recorded call, by identity of its node.
    """

    def __init__(
        self,
        notice: Notice,
        look: Callable[[], None],
        site: Callable[[], Optional[CallSite]],
        index_positions: Dict[int, str],
        holder: Callable[[Any], str],
        before: Optional["Onlooker"] = None,
    ) -> None:
        super().__init__()
        self._holder = holder
        self._before = before
        self.index_positions = index_positions
        self._notice = notice
        self._look = look
        self._site = site
        self.finished = False
        self.indices: Dict[int, str] = {}
        self.metric_values: Dict[int, str] = {}
        self.numbers: Set[float] = set()
        self.carried: Set[str] = set()
        self.sites: Dict[int, Optional[CallSite]] = {}
        self._spoiled: Set[int] = set()
        self._read: List[torch.Tensor] = []
        self._differentiated = False

    # What the rest of the doctor asks

    def stand_in(self, call: str) -> torch.Tensor:
        """A device tensor in place of a metric's value; computing with it is noticed."""
        with self._hidden_run():
            made = self._tensor(torch.zeros(()))
        self.metric_values[made._slot] = call
        return made

    # The recorder's own life

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record; tensors of other steps are noticed and replaced."""
        with super().recording(), _StaleTensors(self):
            yield
            self.finished = True

    def close(self) -> None:
        """Keep the values: a later step may use a tensor of this one."""

    def add_input(self, tensor: torch.Tensor) -> DeviceTensor:
        """Declare an argument; remember which are indices."""
        position = len(self.graph.inputs)
        made = super().add_input(tensor)
        if position in self.index_positions:
            self.indices[made._slot] = self.index_positions[position]
        return made

    # Calls

    def call(self, func: Any, args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> Any:
        """Record a call, whatever it is."""
        return self._go_on(super().call, func, function_name(func), args, kwargs)

    def call_aten(self, func: Any, args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> Any:
        """Record a call of an operator, whatever it is."""
        return self._go_on(super().call_aten, func, str(func), args, kwargs)

    def _go_on(
        self,
        record: Callable[..., Any],
        func: Any,
        name: str,
        args: Tuple[Any, ...],
        kwargs: Dict[str, Any],
    ) -> Any:
        if self.is_suspended:
            return record(func, args, kwargs)
        if name == "set:data":
            return self._set_data(record, func, args)
        if name == "get:grad" and self._differentiated:
            return self._zero_gradient(args[0])
        if name.startswith(("get:", "set:")) or name in ("size", "dim", "numel", "detach"):
            return record(func, args, kwargs)
        self._look()
        told = self._check_metric_values(name, args, kwargs)
        known = len(self.graph.nodes)
        try:
            result = record(func, args, kwargs)
        except (Error, RuntimeError, TypeError) as error:
            kind = kind_of(name, error)
            if kind is None:
                raise
            result = self._instead(kind, func, name, args, kwargs, told=told)
        if told:
            self._spoiled.update(tensor._slot for tensor in _device_tensors(result))
        if len(self.graph.nodes) > known:
            site = self._site()
            self.sites.update((id(node), site) for node in self.graph.nodes[known:])
        return result

    def _set_data(self, record: Callable[..., Any], func: Any, args: Tuple[Any, ...]) -> Any:
        try:
            return record(func, args, {})
        except NotEmulatedError:
            self._notice("data-replaced", "", "")
        tensor, value = self._with_all_on_device(list(args))
        if self._hidden(tensor).shape == self._hidden(value).shape:
            with torch.no_grad():
                self._record("copy_", torch.Tensor.copy_, (tensor.detach(), value), {})
        return None

    def _check_metric_values(self, name: str, args: Any, kwargs: Any) -> bool:
        """Notice that a metric's value is used; whether that is what this call is about."""
        if name in ("__repr__", "__str__", "to", "clone", "float"):
            return False
        slots = {tensor._slot for tensor in _device_tensors((args, kwargs))}
        for slot in sorted(slots & set(self.metric_values)):
            self._notice("metric-value", self.metric_values[slot], "")
        return bool(slots & (self._spoiled | set(self.metric_values)))

    def _instead(
        self,
        kind: str,
        func: Any,
        name: str,
        args: Tuple[Any, ...],
        kwargs: Dict[str, Any],
        *,
        told: bool,
    ) -> Any:
        """Notice what a call does, unless it is told, and do it on the values that are known."""
        if not told and not (kind == "host-tensor" and self._all_read((args, kwargs))):
            self._tell(kind, name, args, kwargs)
        if kind == "autograd":
            return self._no_gradients(name, args, kwargs)
        if kind == "host-tensor":
            args, kwargs = self._with_all_on_device(args), self._with_all_on_device(kwargs)
            return self._go_on(super().call, func, name, args, kwargs)
        if kind in ("dynamic-shape", "unsupported-op") or name == "gaussian_nll_loss":
            return self._record(name, func, args, kwargs)
        if name in _STAY:
            return args[0]
        with self._hidden_run():
            result = func(*self._plain(args), **self._plain(kwargs))
        if isinstance(result, torch.Tensor):
            return self._read_tensor(name, result)
        if isinstance(result, float):
            self.numbers.add(result)
        return result

    def _tell(self, kind: str, name: str, args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> None:
        index = self._index_among(_device_tensors((args, kwargs)))
        if index and kind in ("value-read", "tensor-branch", "tensor-format", "host-move"):
            self._notice("batch-index", index, "")
        elif kind == "dynamic-shape":
            self._notice(kind, fix_for_shape(name), "")
        elif name in _STAY:
            self._notice(kind, name, f"leave out `{name}`: all of the step is on the device")
        elif kind == "host-move" and self._is_made_here(_device_tensors((args, kwargs))):
            self._notice(kind, name, "leave out the move: what the step makes is on the device")
        elif name == "one_hot":
            self._notice(kind, "", "F.one_hot(x, num_classes=N)")
        else:
            self._notice(kind, name, "")

    def _is_made_here(self, tensors: List[Any]) -> bool:
        steady = self.graph.constants.keys()
        return all(self._sources(tensor._slot) <= steady for tensor in tensors)

    def _read_tensor(self, name: str, result: torch.Tensor) -> torch.Tensor:
        if name in _TENSOR_READS:
            with self._hidden_run():
                return self._tensor(to_device_dtype(result.detach()).clone())
        # on the host from now on, and so not noticed again
        with self._hidden_run():
            self._read.append(result.detach().clone())
        return self._read[-1]

    def _all_read(self, arguments: Any) -> bool:
        """Whether all host tensors among some arguments came from the device, as was noticed."""
        on_host = [tensor for tensor in _tensors(arguments) if not is_device_tensor(tensor)]
        return all(any(tensor is read for read in self._read) for tensor in on_host)

    def _no_gradients(self, name: str, args: Any, kwargs: Any) -> Any:
        self._differentiated = True
        if name != "grad":
            return None
        inputs = kwargs.get("inputs", args[1] if len(args) > 1 else ())
        inputs = (inputs,) if isinstance(inputs, torch.Tensor) else tuple(inputs)
        return tuple(map(self._zero_gradient, inputs))

    def _zero_gradient(self, tensor: torch.Tensor) -> torch.Tensor:
        if is_device_tensor(tensor):
            made: torch.Tensor = self._record("zeros_like", torch.zeros_like, (tensor,), {})
            return made
        with self._hidden_run():
            return torch.zeros_like(tensor)

    def _plain(self, value: Any) -> Any:
        """Arguments with real tensors in place of device tensors."""
        if is_device_tensor(value):
            return value._recorder.values[value._slot].detach()
        return _mapped(value, self._plain)

    def _with_all_on_device(self, value: Any) -> Any:
        """Arguments with every tensor on the device."""
        if isinstance(value, torch.Tensor):
            return value if is_device_tensor(value) else self._move(value)
        return _mapped(value, self._with_all_on_device)

    def revived(self, value: Any) -> Any:
        """Arguments with this step's tensors in place of another's."""
        if is_device_tensor(value):
            if value._recorder is self:
                return value
            return self._move(value._recorder.values[value._slot])
        return _mapped(value, self.revived)

    def tell_backward(self) -> None:
        """Notice that gradients are asked for; tensors have some from now on."""
        self._differentiated = True
        self._notice("autograd", "", "")

    def is_stale(self, tensor: torch.Tensor) -> bool:
        """Whether a device tensor was made while another step was compiled."""
        return is_device_tensor(tensor) and tensor._recorder is not self  # type: ignore[attr-defined]

    def tell_stale(self, tensor: Any) -> None:
        """Notice that a tensor of another run is used: of another step, or of this one's first."""
        recorder, holder = tensor._recorder, self._holder(tensor)
        varies = recorder.varies(tensor._slot)
        if recorder is self._before:
            if varies:
                self.carried.add(holder)
                self._notice("state-carried", holder or "self", "")
            return
        fix = "" if varies else "make it in `__init__`, as a buffer: self.register_buffer(...)"
        self._notice("step-tensor-used", f"`{holder}`" if holder else "see where", fix)

    def varies(self, slot: int) -> bool:
        """Whether a value can differ from one execution to the next."""
        producers = self._producers()
        return any(
            producers[past].random if past in producers else past not in self.graph.constants
            for past in self._ancestry(slot, producers)
        )

    # Where values come from

    def _index_among(self, tensors: List[Any]) -> str:
        """The name of the index that all of `tensors` were computed from, if there is one."""
        names: Set[str] = set()
        for tensor in tensors:
            sources = self._sources(tensor._slot)
            if any(
                slot not in self.indices and slot not in self.graph.constants for slot in sources
            ):
                return ""
            names.update(self.indices[slot] for slot in sources if slot in self.indices)
        return ", ".join(sorted(names))

    def _sources(self, slot: int) -> Set[int]:
        """The slots without a call of their own that a value was computed from."""
        producers = self._producers()
        return {past for past in self._ancestry(slot, producers) if past not in producers}

    def _producers(self) -> Dict[int, Node]:
        return {out: node for node in self.graph.nodes for out, _ in node.outputs}

    @staticmethod
    def _ancestry(slot: int, producers: Dict[int, Node]) -> Set[int]:
        """A slot and all that its value was computed from."""
        stack, seen = [slot], set()
        while stack:
            current = stack.pop()
            if current not in seen:
                seen.add(current)
                stack.extend(producers[current].reads if current in producers else ())
        return seen


class _StaleTensors(TorchFunctionMode):
    """Replaces tensors of other steps before the recorder sees them."""

    def __init__(self, onlooker: Onlooker) -> None:
        super().__init__()
        self._onlooker = onlooker

    def __torch_function__(
        self, func: Any, types: Any, args: Tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        onlooker = self._onlooker
        name = function_name(func)
        asks = onlooker.is_suspended or name in OWN_KNOWLEDGE or name.startswith("get:")
        stale = [] if asks else [t for t in _device_tensors((args, kwargs)) if onlooker.is_stale(t)]
        if stale:
            for tensor in stale:
                onlooker.tell_stale(tensor)
            args, kwargs = onlooker.revived(args), onlooker.revived(kwargs)
        return func(*args, **kwargs)


def _device_tensors(value: Any) -> List[Any]:
    return [tensor for tensor in _tensors(value) if is_device_tensor(tensor)]


def _tensors(value: Any) -> List[Any]:
    found: List[Any] = []
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, torch.Tensor):
            found.append(item)
        elif isinstance(item, (list, tuple)):
            stack.extend(item)
        elif isinstance(item, dict):
            stack.extend(item.values())
        elif isinstance(item, slice):
            stack.extend((item.start, item.stop, item.step))
    return found


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    if type(value) in (list, tuple):
        return type(value)(change(item) for item in value)
    if type(value) is dict:
        return {key: change(item) for key, item in value.items()}
    if isinstance(value, slice):
        return slice(*(change(part) for part in (value.start, value.stop, value.step)))
    return value
