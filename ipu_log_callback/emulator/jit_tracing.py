"""The trace front end of SDK 2.x: `torch.jit.trace` first, then a recording of its graph.

The step's Python runs on the host, more than once, on the user's own weights; errors are
`torch.jit`'s own (PopTorch 2.6 `_poplar_executor.py`, `_trace_model_and_get_compile_args`). What
comes out of the trace then lives by the same rules as a step recorded by the dispatcher.
"""

import functools
import re
import warnings
from contextlib import contextmanager
from typing import Any, Callable, Dict, Iterator, List, Tuple

import torch

from ipu_log_callback.emulator._torch_private import parse_schema
from ipu_log_callback.emulator.arguments import Arguments
from ipu_log_callback.emulator.device_tensor import DEVICE, is_device_tensor
from ipu_log_callback.emulator.errors import NotEmulatedError, python_error
from ipu_log_callback.emulator.refusals import item_read
from ipu_log_callback.emulator.structures import map_tensors
from ipu_log_callback.emulator.tracing import Recorder

__all__ = ["interpret", "trace"]


@contextmanager
def _state_kept(model: torch.nn.Module) -> Iterator[None]:
    """Undo, after the block, what running the model on the host did to parameters and buffers."""
    tensors = [*model.parameters(), *model.buffers()]
    copies = [tensor.detach().clone() for tensor in tensors]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, copy in zip(tensors, copies):
                tensor.copy_(copy)


@contextmanager
def _dummy_output(model: torch.nn.Module) -> Iterator[None]:
    """Let `model` return something while the block runs: a trace without outputs is an error."""
    cls = type(model)

    class WithOutput(cls):  # type: ignore[valid-type,misc]  # the user's class, known at run time
        def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            super().forward(*args, **kwargs)
            return torch.tensor([0])

    model.__class__ = WithOutput
    try:
        yield
    finally:
        model.__class__ = cls


def trace(model: torch.nn.Module, arguments: Arguments) -> Tuple[Any, bool]:
    """Trace `model` on the first micro-batch's arguments.

    Returns:
        The traced module, and whether the model returned anything.

    Raises:
        TypeError: If an argument holds anything but tensors.
        RuntimeError: Whatever `torch.jit.trace` refuses: dicts, numbers and ``None`` among the
        outputs, for instance.
    """
    args = _positional(arguments)
    returns = True
    with _state_kept(model), warnings.catch_warnings():
        # PopTorch drops them, unless the graph holds random operators: branches freeze silently.
        warnings.simplefilter("ignore")
        try:
            try:
                traced = torch.jit.trace(model, args)
            except RuntimeError as err:
                if "didn't return any values" not in str(err):
                    raise
                with _dummy_output(model):
                    traced = torch.jit.trace(model, args)
                returns = False
        except RuntimeError as err:
            match = re.match(r"Type 'Tuple(\[.*\])' cannot be traced", str(err))
            if match is None:
                raise
            msg = (
                "All forward function arguments used to compile and run the model must be "
                "Tensors or "
                f"(possibly nested) Lists and Tuples of Tensors (Got types: {match.group(1)})."
            )
            raise TypeError(msg) from err
    return traced, returns


def _positional(arguments: Arguments) -> Tuple[Any, ...]:
    """Return what `torch.jit.trace` is given, checked like PopTorch 2.6 `_args_parser.py`."""
    args = list(arguments.args)
    for name, value in zip(arguments.names, args):
        _refuse_dicts(value, name)
    while args and args[-1] is None and arguments.names[len(args) - 1] in arguments.none_by_default:
        args.pop()
    if any(arg is None for arg in args):
        raise python_error(
            "'None' may not be passed as explicit model argument. It may only be used as default "
            "initialiser"
        )
    if arguments.kwargs:
        raise NotEmulatedError(
            "named arguments in trace mode", "torch.jit.trace takes positional arguments"
        )
    return tuple(_tuples(arg) for arg in args)


def _refuse_dicts(value: Any, place: str) -> None:
    if isinstance(value, dict):
        msg = (
            "Dictionaries are not supported as input arguments, including when nested in tuples.\n"
            f"Received dict {place} = {value}"
        )
        raise TypeError(msg)
    if isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            _refuse_dicts(item, f"{place}[{index}]")


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, (list, tuple)) else value


class _Path(str):
    """Dotted path of a module or tensor inside the traced model."""


class _Interpreter:
    """Calls the recorder for each operator of a traced graph."""

    def __init__(self, recorder: Recorder, model: torch.nn.Module, states: Dict[int, Any]) -> None:
        self._recorder = recorder
        self._model = model
        self._states = states
        self._values: Dict[str, Any] = {}

    def run(self, graph: Any, inputs: List[Any]) -> Any:
        """Record the graph, given device tensors for its inputs; return its output."""
        for value, given in zip(graph.inputs(), [_Path(""), *inputs]):
            self._values[value.debugName()] = given
        for node in graph.nodes():
            self._node(node)
        results = [self._values[value.debugName()] for value in graph.outputs()]
        return results[0] if len(results) == 1 else tuple(results)

    def _node(self, node: Any) -> None:
        args = [self._values[value.debugName()] for value in node.inputs()]
        outputs = list(node.outputs())
        kind = node.kind()
        if kind in ("prim::TupleUnpack", "prim::ListUnpack"):
            results = list(args[0])
        else:
            result = self._evaluate(kind, node, args)
            results = [result] if len(outputs) == 1 else list(result or ())
        for output, result in zip(outputs, results):
            self._values[output.debugName()] = result

    def _evaluate(self, kind: str, node: Any, args: List[Any]) -> Any:
        if kind == "prim::Constant":
            return node.output().toIValue()
        if kind == "prim::GetAttr":
            return self._attribute(args[0], node.s("name"))
        if kind in _STRUCTURES:
            return _STRUCTURES[kind](args)
        if kind in _NUMBERS:
            if is_device_tensor(args[0]):
                raise item_read()
            return _NUMBERS[kind](args[0])
        if kind.startswith("prim::"):
            raise NotEmulatedError(f"{kind} in a traced model", "only operators can be executed")
        return self._operator(node, args)

    def _attribute(self, base: _Path, name: str) -> Any:
        path = _Path(f"{base}.{name}" if base else name)
        value = functools.reduce(getattr, path.split("."), self._model)
        return self._states[id(value)] if isinstance(value, torch.Tensor) else path

    def _operator(self, node: Any, args: List[Any]) -> Any:
        schema = parse_schema(node.schema())
        namespace, _, name = schema.name.partition("::")
        operator = getattr(getattr(torch.ops, namespace), name)
        operator = getattr(operator, schema.overload_name or "default")
        if any(map(is_device_tensor, _leaves(args))):
            args = [self._on_device(arg) for arg in args]
        positional, named = [], {}
        for declared, value in zip(schema.arguments, args):
            given = DEVICE if isinstance(value, torch.device) else value
            if declared.kwarg_only:
                named[declared.name] = given
            else:
                positional.append(given)
        return self._recorder.call(operator, tuple(positional), named)

    def _on_device(self, value: Any) -> Any:
        """Turn host tensors, constants of the trace, into constants of the device."""

        def move(tensor: torch.Tensor) -> torch.Tensor:
            return tensor if is_device_tensor(tensor) else self._recorder.add_constant(tensor)

        return map_tensors(value, move)


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _leaves(item)
    else:
        yield value


_STRUCTURES: Dict[str, Callable[[List[Any]], Any]] = {
    "prim::TupleConstruct": tuple,
    "prim::ListConstruct": list,
    "prim::TupleIndex": lambda args: args[0][args[1]],
}

_NUMBERS: Dict[str, Callable[[Any], Any]] = {
    "prim::NumToTensor": torch.tensor,
    "aten::Int": int,
    "aten::IntImplicit": int,
    "aten::Float": float,
    "aten::FloatImplicit": float,
    "aten::Bool": bool,
    "aten::ScalarImplicit": lambda tensor: tensor.item(),
}


def interpret(
    recorder: Recorder,
    model: torch.nn.Module,
    traced: Any,
    states: Dict[int, Any],
    inputs: List[Any],
) -> Any:
    """Record a traced model.

    Args:
        recorder: Where to.
        model: The module that was traced.
        traced: What `trace` returned.
        states: Device tensors of its parameters and buffers, by `id` of the host's.
        inputs: Device tensors, nested like the traced arguments.

    Returns:
        What the model returned, with device tensors.
    """
    return _Interpreter(recorder, model, states).run(traced.inlined_graph, inputs)
