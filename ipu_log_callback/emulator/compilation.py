"""From a module and its first micro-batch to an executable: the dispatcher front end.

The order of events is that of PopTorch 3.4 `_poplar_executor.py`, `_compileWithDispatch`: the whole
module moves to the device, its Python runs once, and afterwards only parameters and buffers are put
back.
"""

import dataclasses
import warnings
from contextlib import contextmanager
from typing import Any, Callable, ContextManager, Dict, Iterator, List, Tuple

import torch

from ipu_log_callback.emulator import jit_tracing
from ipu_log_callback.emulator.anchors import AnchorReader
from ipu_log_callback.emulator.arguments import Arguments
from ipu_log_callback.emulator.batching import Geometry
from ipu_log_callback.emulator.default_device import factories_on_device
from ipu_log_callback.emulator.device_tensor import DEVICE, is_device_tensor
from ipu_log_callback.emulator.errors import NotEmulatedError, backend_error, python_error
from ipu_log_callback.emulator.executable import Executable, Layout
from ipu_log_callback.emulator.graph import Graph, Node, Ref
from ipu_log_callback.emulator.losses import final_loss
from ipu_log_callback.emulator.program import compile_program
from ipu_log_callback.emulator.replica_groups import GroupedParameter, ReplicaGroups
from ipu_log_callback.emulator.structures import flatten, map_tensors
from ipu_log_callback.emulator.tracing import Recorder
from ipu_log_callback.emulator.weights import named_state, state_restored, unwrapped

__all__ = ["Request", "compile_step"]

# PopTorch lets these replace their buffers (`_impl.py`, `BUFFERS_CAN_CHANGE`).
_BATCH_NORMS = (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d)


@dataclasses.dataclass
class Request:
    """What to compile.

    Attributes:
        model: The module.
        arguments: The first micro-batch.
        training: Whether weights are to be trained.
        geometry: Micro-batches of an execution.
        processes: Processes among which the model is trained.
        gradients_summed: Whether gradients are summed over accumulation, replicas and processes
            instead of averaged.
        buffers_broadcast: Whether replicas must have equal buffers.
        grouped: How parameters are divided among groups of replicas, by name.
        anchors: Names of anchored tensors.
        traced: Whether the front end is `torch.jit.trace` and not the dispatcher.
        surroundings: Makes the context in which the step's Python runs.
    """

    model: torch.nn.Module
    arguments: Arguments
    training: bool
    geometry: Geometry
    processes: int
    gradients_summed: bool
    buffers_broadcast: bool
    grouped: Dict[str, GroupedParameter]
    anchors: List[str]
    traced: bool
    surroundings: Callable[[], ContextManager[None]]


def compile_step(request: Request) -> Tuple[Executable, Any]:
    """Compile; return the executable and the step's result, to be filled with outputs."""
    recorder = Recorder()
    try:
        result = (_trace_step if request.traced else _run_step)(request, recorder)
        with _writes_counted():
            recorder.graph.fold_constants(recorder.values)
            recorder.graph.remove_dead_calls()
            return _build(request, recorder), result
    finally:
        recorder.close()


@contextmanager
def _writes_counted() -> Iterator[None]:
    """Leave inference mode: PyTorch does not count writes there, and the recorder goes by these."""
    gradients = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(gradients):
        yield


def _run_step(request: Request, recorder: Recorder) -> Any:
    model = request.model
    # Before unwrapping: stale weights of a training twin must come to the host first.
    host = named_state(model)
    with _writes_counted(), unwrapped(model), factories_on_device(), state_restored(model):
        host.update(_show_one_group(model, request.grouped))
        with recorder.recording():
            recorder.moving_parameters = True
            model.to(DEVICE)
            recorder.moving_parameters = False
            recorder.name_states(host)
            places = _places(model)
            with request.surroundings():
                args, kwargs = map_tensors(
                    (request.arguments.args, request.arguments.kwargs), recorder.add_input
                )
                result = model(*args, **kwargs)
            _check_places(places, _places(model))
            recorder.graph.outputs = _outputs(result)
    return result


def _trace_step(request: Request, recorder: Recorder) -> Any:
    model = request.model
    host = named_state(model)
    with unwrapped(model):
        places = _places(model)
        with request.surroundings():
            traced, returns = jit_tracing.trace(model, request.arguments)
        _check_places(places, _places(model))
        with _writes_counted(), recorder.recording():
            states = {id(tensor): recorder.add_state(tensor) for tensor in host.values()}
            recorder.name_states(host)
            inputs = map_tensors(request.arguments.args, recorder.add_input)
            result = jit_tracing.interpret(recorder, model, traced, states, inputs)
            result = result if returns else None
            recorder.graph.outputs = _outputs(result)
    return result


def _show_one_group(
    model: torch.nn.Module, grouped: Dict[str, GroupedParameter]
) -> Dict[str, torch.Tensor]:
    """Put the first group's value in the place of each grouped parameter; return these by name."""
    whole = {name: param for name, param in model.named_parameters() if name in grouped}
    shown: Dict[int, torch.nn.Parameter] = {}
    for param in whole.values():
        if not param.dim():
            raise python_error("Scalars cannot be passed as per-replica weight tensor values")
        first = param.detach().narrow(0, 0, 1).squeeze(0)
        shown[id(param)] = torch.nn.Parameter(first, requires_grad=param.requires_grad)
    for module in model.modules() if shown else ():
        for name, tensor in list(module._parameters.items()):
            if id(tensor) in shown:
                setattr(module, name, shown[id(tensor)])
    return {name: shown[id(param)] for name, param in whole.items()}


def _places(model: torch.nn.Module) -> Dict[Tuple[str, str], Any]:
    """Return which value each buffer and parameter of `model` names."""
    places = {}
    for prefix, module in model.named_modules():
        if not isinstance(module, _BATCH_NORMS):
            for name, tensor in module.named_buffers(prefix=prefix, recurse=False):
                places["Buffer", name] = getattr(tensor, "_slot", tensor)
    for name, tensor in model.named_parameters():
        places["Parameter", name] = getattr(tensor, "_slot", tensor)
    return places


def _check_places(before: Dict[Tuple[str, str], Any], after: Dict[Tuple[str, str], Any]) -> None:
    for (kind, name), value in before.items():
        if (kind, name) not in after:
            raise python_error(
                f"{kind} {name} is removed from the model when calling the forward method."
            )
        now = after[kind, name]
        if now is not value and not (isinstance(now, int) and now == value):
            raise python_error(
                f"{kind} {name} is reassigned within the model when calling the forward method. "
                "This is "
                f"not supported. Consider using self.{name}.copy_(src) to copy data from a "
                "source tensor, "
                "where src is the name of the source tensor."
            )


def _outputs(result: Any) -> List[int]:
    slots: List[int] = []
    tensor: Any
    for tensor in flatten(result):
        if is_device_tensor(tensor):
            slots.append(tensor._slot)
        else:
            warnings.warn(
                f"Output expected to be on the IPU but is on {tensor.device.type}", stacklevel=2
            )
    return slots


def _build(request: Request, recorder: Recorder) -> Executable:
    graph, geometry = recorder.graph, request.geometry
    mutated = graph.mutated()
    states = {name: graph.groups[slot] for name, slot in graph.states.items()}
    host = named_state(request.model)
    parameters = [name for name in states if isinstance(host[name], torch.nn.Parameter)]
    buffers = [name for name in states if name not in parameters]
    if geometry.input_groups > 1 and request.buffers_broadcast and mutated & set(states.values()):
        raise backend_error(
            "PopTorch does not support broadcasting buffers. If your model is able to tolerate "
            "buffers "
            "becoming out of sync between replicas, you can disable buffer broadcasting using "
            "poptorch.Options.broadcastBuffers(False).",
            source="poptorch/source/InplaceOps.cpp",
        )
    grouped = _groups(request.grouped, host, parameters)
    loss = _as_made(graph, final_loss(graph, recorder.values)) if request.training else None
    before_loss = graph.origins(loss) if loss is not None else set()
    written = [i for i, slot in enumerate(graph.inputs) if graph.groups[slot] in mutated]
    if written and geometry.shared_inputs is not None:
        raise NotEmulatedError("Options.inputReplicaGrouping(...)", "the step writes to an input")
    wanted = [*graph.outputs, *(graph.inputs[index] for index in written)]
    lasting = {*states.values(), *(graph.groups[slot] for slot in graph.inputs)}
    lasting |= {graph.groups[slot] for slot in graph.constants}
    groups = [graph.groups[slot] for slot in wanted]
    layout = Layout(
        geometry=geometry,
        parameters=parameters,
        buffers=buffers,
        grouped=grouped,
        trained=[
            name
            for name in parameters
            if host[name].requires_grad and graph.groups[graph.states[name]] in before_loss
        ],
        snapshots=[group in lasting or groups.count(group) > 1 for group in groups],
        outputs=len(graph.outputs),
        constant_outputs={
            index: graph.constants[slot]
            for index, slot in enumerate(graph.outputs)
            if slot in graph.constants and graph.groups[slot] not in mutated
        },
        written_inputs=written,
        loss=None if loss is None else len(wanted),
        loss_scale=_loss_scale(request),
        processes=request.processes,
    )
    program = compile_program(
        graph, wanted if loss is None else [*wanted, loss], no_grad=not request.training
    )
    anchors = AnchorReader(
        request.anchors, [*parameters, *buffers], layout.trained, len(graph.inputs)
    )
    return Executable(program, layout, anchors)


def _groups(
    grouped: Dict[str, GroupedParameter], host: Dict[str, torch.Tensor], parameters: List[str]
) -> Dict[str, ReplicaGroups]:
    """Check how the module's parameters are divided; return their groups by name."""
    groups = {}
    for name, param in grouped.items():
        if name not in host:
            continue
        param.check(name, host[name])
        if name not in parameters:
            raise NotEmulatedError(
                f"{name}.replicaGrouping(...)", "integers are the same on all replicas"
            )
        groups[name] = param.groups
    return groups


def _as_made(graph: Graph, loss: int) -> int:
    """The slot of the final loss as its function made it.

    What changes it in place afterwards has no influence on gradients: PopTorch's graph has no
    writes, only new values.
    """
    if graph.groups[loss] not in graph.mutated():
        return loss
    made = graph.new_slot(object())
    maker = next(i for i, node in enumerate(graph.nodes) if loss in dict(node.outputs))
    copied = Node(torch.clone, (Ref(loss),), {}, [(made, ())], frozenset(), True, False, "clone")
    graph.nodes.insert(maker + 1, copied)
    return made


def _loss_scale(request: Request) -> float:
    if request.gradients_summed:
        return 1.0
    geometry = request.geometry
    return 1.0 / (geometry.accumulation * geometry.replicas * request.processes)
