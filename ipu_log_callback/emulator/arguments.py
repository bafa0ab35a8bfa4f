"""Arguments of a compiled model: bound to a signature, checked against the first call's.

Rules and texts are those of PopTorch 3.4 `_args_parser.py`.
"""

import inspect
from typing import Any, Callable, Dict, List, Tuple

import torch

from ipu_log_callback.emulator.console import logger
from ipu_log_callback.emulator.errors import python_error
from ipu_log_callback.emulator.structures import flatten, map_tensors

__all__ = ["Arguments", "ArgumentsParser"]

_MISMATCH = (
    "\nThis error occurred because the inputs passed at runtime don't match the inputs used to "
    "compile "
    "the model.\nTo recompile the model for the new inputs create a new inferenceModel / "
    "trainingModel "
    "wrapper or call destroy() on the curent one and try again."
)


class Arguments:
    """One call's arguments.

    Attributes:
        args: Positional arguments.
        names: Their parameters' names.
        kwargs: Named arguments.
        none_by_default: Names of the parameters whose default is ``None``.
    """

    def __init__(self) -> None:
        self.args: List[Any] = []
        self.names: List[str] = []
        self.kwargs: Dict[str, Any] = {}
        self.none_by_default: List[str] = []

    def map_tensors(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "Arguments":
        """Return the same arguments with `change` applied to each tensor."""
        changed = Arguments()
        changed.args = map_tensors(self.args, change)
        changed.names = self.names
        changed.kwargs = map_tensors(self.kwargs, change)
        changed.none_by_default = self.none_by_default
        return changed

    def tensors(self, order: "Arguments") -> List[torch.Tensor]:
        """Return all tensors, those in dicts in the key order of `order`."""
        return flatten(self.args, order.args) + flatten(self.kwargs, order.kwargs)

    def check(self, given: "Arguments") -> None:
        """Check that `given` could have been used to compile the model in place of these.

        Raises:
            Error: If a number, type, length, key, shape, data type or value differs.
        """
        if len(given.args) != len(self.args):
            raise python_error(
                f"Number of positional arguments mismatch: expected {len(self.args)} "
                f"arguments but got {len(given.args)}.{_MISMATCH}"
            )
        for name, compiled, value in zip(self.names, self.args, given.args):
            _check(name, compiled, value)
        _check("named arguments", self.kwargs, given.kwargs, names_are_keys=True)


def _check(name: str, compiled: Any, given: Any, names_are_keys: bool = False) -> None:
    if type(compiled) is not type(given):
        raise _mismatch("Type", name, type(compiled), type(given))
    if isinstance(compiled, tuple):
        if len(compiled) != len(given):
            raise python_error(
                f"Length mismatch for {name}: expected {len(compiled)} elements "
                f"but got {len(given)}.{_MISMATCH}"
            )
        for index, item in enumerate(compiled):
            _check(f"{name}[{index}]", item, given[index])
    elif isinstance(compiled, dict):
        _check_keys(name, compiled, given)
        for key, item in compiled.items():
            _check(key if names_are_keys else f"{name}[{key}]", item, given[key])
    elif isinstance(compiled, torch.Tensor):
        if compiled.dtype != given.dtype:
            raise _mismatch("Data type", name, compiled.dtype, given.dtype)
        if compiled.shape != given.shape:
            raise _mismatch("Shape", name, compiled.shape, given.shape)
    else:
        tensors = flatten(compiled)
        if tensors:
            _check(name, tuple(tensors), tuple(flatten(given)))
        elif compiled != given:
            # Such a value is part of the compiled graph.
            raise _mismatch("Value", name, compiled, given)


def _check_keys(name: str, compiled: Dict[str, Any], given: Dict[str, Any]) -> None:
    extra, missing = given.keys() - compiled.keys(), compiled.keys() - given.keys()
    details = []
    if extra:
        details.append("Unexpected arguments: " + ", ".join(sorted(extra)))
    if missing:
        details.append("Missing arguments: " + ", ".join(sorted(missing)))
    if details:
        raise python_error(f"Keys mismatch for {name}: {'. '.join(details)}.{_MISMATCH}")


def _mismatch(kind: str, name: str, expected: Any, got: Any) -> Exception:
    return python_error(
        f"{kind} mismatch for {name}: expected {expected} but got {got}.{_MISMATCH}"
    )


class ArgumentsParser:
    """Binds a call's arguments to a model's `forward`."""

    def __init__(self, model: Any) -> None:
        """Read the signature of `model`.

        Raises:
            TypeError: If it is neither a module nor callable.
        """
        if not callable(model):
            msg = "Expected a torch.nn.Module or a callable"
            raise TypeError(msg)
        function = model.forward if isinstance(model, torch.nn.Module) else model
        self._parameters = list(inspect.signature(function).parameters.values())
        self._is_variadic = any(
            p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in self._parameters
        )
        self._warned = False

    def __call__(self, args: Tuple[Any, ...], kwargs: Dict[str, Any], is_first: bool) -> Arguments:
        """Bind `args` and `kwargs`, fill in defaults, and make every tensor contiguous.

        Raises:
            AssertionError: If there are too many arguments, or one is unknown or given twice.
            Error: If one is missing.
        """
        self._check_names(args, kwargs)
        bound = Arguments()
        bound.none_by_default = [p.name for p in self._parameters if p.default is None]
        rest = list(args)
        only_named = False
        for index, parameter in enumerate(self._parameters):
            name = parameter.name
            if parameter.kind == parameter.VAR_KEYWORD:
                before = {p.name for p in self._parameters[:index]}
                bound.kwargs.update({k: v for k, v in kwargs.items() if k not in before})
                continue
            if parameter.kind == parameter.VAR_POSITIONAL:
                only_named = True
                for position, value in enumerate(rest):
                    bound.args.append(value)
                    bound.names.append(f"*{name}[{position}]")
                rest = []
            elif rest:
                bound.args.append(rest.pop(0))
                bound.names.append(name)
            elif only_named:
                bound.kwargs[name] = self._named_or_default(parameter, kwargs)
                continue
            else:
                bound.args.append(self._named_or_default(parameter, kwargs))
                bound.names.append(name)
                continue
            assert name not in kwargs, f"Parameter {name} was passed more than once"
        if is_first and any(map(_contains_dict, [*bound.args, *bound.kwargs.values()])):
            logger.warning(
                "Dicts as inputs only have partial support, they can be accessed using literal "
                "keys, "
                "but full Python functionality is not enabled. Consider changing dict inputs to "
                "tuple."
            )
        return self._contiguous(bound)

    def _check_names(self, args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> None:
        if self._is_variadic:
            return
        names = [parameter.name for parameter in self._parameters]
        assert len(args) + len(kwargs) <= len(names), (
            f"Too many arguments provided: expected {names} ({len(names)}) but got "
            f"{len(args) + len(kwargs)}"
        )
        for name in kwargs:
            assert name in names, f"{name} is not a valid parameter.Allowed values are {names}"

    @staticmethod
    def _named_or_default(parameter: inspect.Parameter, kwargs: Dict[str, Any]) -> Any:
        if parameter.name in kwargs:
            return kwargs[parameter.name]
        if parameter.default is parameter.empty:
            raise python_error(f"Mandatory parameter {parameter.name} missing")
        return parameter.default

    def _contiguous(self, bound: Arguments) -> Arguments:
        if all(tensor.is_contiguous() for tensor in bound.tensors(bound)):
            return bound
        if not self._warned:
            logger.warning(
                "At least one input tensor is not contiguous: non-contiguous tensors will be "
                "converted."
            )
            self._warned = True
        return bound.map_tensors(torch.Tensor.contiguous)


def _contains_dict(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_contains_dict, value))
    return isinstance(value, dict)
