"""Values that live on the host."""

from typing import Callable, TypeVar

from .current import current_capture

__all__ = ["live"]

T = TypeVar("T")


def live(function: Callable[[], T]) -> T:
    """A value to log that is looked up on the host at every execution.

    A Python number in a compiled step is frozen when the step is compiled. `live(function)` is
    `function()` everywhere else; in a captured step the function is called after every execution.

    Args:
        function: Called without arguments; returns what `self.log` accepts.

    Returns:
        The function's value; in a captured step, something that only `self.log` and metrics take.

    Example:
        >>> live(lambda: 0.1)
        0.1
    """
    if current_capture() is None:
        return function()
    from .record import LiveValue

    # the step's Python only hands it on to `self.log`, which knows what it is
    return LiveValue(function)  # type: ignore[return-value]
