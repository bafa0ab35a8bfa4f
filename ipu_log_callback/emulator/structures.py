"""Nested inputs and outputs: to a flat list of tensors and back.

Tuples, lists, dicts and NamedTuples nest; other types take part if a parser is registered for them
(PopTorch 3.4 `_utils.py`).
"""

import abc
from typing import Any, Callable, Dict, Iterable, Iterator, List, Optional, Type

import torch

from ipu_log_callback.emulator.errors import python_error

__all__ = ["ICustomArgParser", "flatten", "map_tensors", "rebuild", "registerCustomArgParser"]


class ICustomArgParser(abc.ABC):
    """Tells where the tensors in an object of a user's own type are, and how to exchange them."""

    @abc.abstractmethod
    def yieldTensors(self, struct: Any) -> Iterator[torch.Tensor]:
        """Yield every tensor of `struct`, always in the same order."""

    @abc.abstractmethod
    def reconstruct(self, original_structure: Any, tensor_iterator: Iterator[torch.Tensor]) -> Any:
        """Return an object like `original_structure` with the iterator's tensors, in order."""


_parsers: Dict[type, ICustomArgParser] = {}


def registerCustomArgParser(
    arg_data_type: Type[Any], arg_parser: Optional[ICustomArgParser]
) -> None:
    """Use `arg_parser` for objects of `arg_data_type` and of its subclasses.

    ``None`` removes the parser.

    Raises:
        Error: If `arg_parser` does not derive from `ICustomArgParser`.
    """
    if arg_parser is None:
        _parsers.pop(arg_data_type, None)
    elif isinstance(arg_parser, ICustomArgParser):
        _parsers[arg_data_type] = arg_parser
    else:
        raise python_error("arg_parser must inherit from ICustomArgParser")


def _parser_of(value: Any) -> Optional[ICustomArgParser]:
    exact = _parsers.get(type(value))
    if exact is not None:
        return exact
    return next((parser for kind, parser in _parsers.items() if isinstance(value, kind)), None)


def _tensors(value: Any, order: Any) -> Iterator[torch.Tensor]:
    parser = _parser_of(value)
    if parser is not None:
        yield from parser.yieldTensors(value)
    elif isinstance(value, dict):
        for key in value if order is None else order:
            yield from _tensors(value[key], None if order is None else order[key])
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _tensors(item, None if order is None else order[index])
    elif isinstance(value, torch.Tensor):
        yield value


def flatten(structure: Any, order: Any = None) -> List[torch.Tensor]:
    """Return the tensors of `structure`.

    Args:
        structure: Anything; what is neither tensor nor container is skipped.
        order: A structure of the same shape, whose dicts give the order of keys.
    """
    return list(_tensors(structure, order))


def rebuild(
    structure: Any,
    tensors: Iterable[torch.Tensor],
    replaced: Callable[[torch.Tensor], bool] = lambda tensor: True,
) -> Any:
    """Return `structure` with its tensors replaced, in order, by `tensors`.

    Args:
        structure: What to imitate; everything in it that is not a tensor is kept.
        tensors: The new tensors.
        replaced: Says of a tensor of `structure` whether it takes part; others are kept.
    """
    source = iter(tensors)

    def imitate(value: Any) -> Any:
        parser = _parser_of(value)
        if parser is not None:
            return parser.reconstruct(value, source)
        if isinstance(value, dict):
            return type(value)({key: imitate(item) for key, item in value.items()})
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*(imitate(item) for item in value))
        if isinstance(value, (list, tuple)):
            return type(value)(imitate(item) for item in value)
        if isinstance(value, torch.Tensor) and replaced(value):
            return next(source)
        return value

    return imitate(structure)


def map_tensors(structure: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return `structure` with `change` applied to each of its tensors."""
    return rebuild(structure, [change(tensor) for tensor in flatten(structure)])
