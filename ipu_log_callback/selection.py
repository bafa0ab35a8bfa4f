"""Keys and globs: which of the names that a step logs are wanted."""

import difflib
import re
from fnmatch import fnmatchcase
from typing import Dict, List, Sequence, Set, Tuple, Union

from .errors import KeySelectionError, report

__all__ = ["Selection", "parse_names"]


def parse_names(names: Union[str, Sequence[str]], argument: str) -> Tuple[str, ...]:
    """Check the names or globs that a user gave and return them as a tuple.

    Args:
        names: One name or glob, or a sequence of them.
        argument: The constructor's argument they were given as, for the message.

    Raises:
        KeySelectionError: Not a str or a sequence of str, an empty string, or the same name twice.
    """
    if isinstance(names, str):
        names = (names,)
    if not isinstance(names, (list, tuple)):
        raise KeySelectionError(
            report(
                f"`IPULogCallback({argument}={names!r})` received {type(names).__name__}, "
                "expected a str or a sequence of str",
                fix=f'{argument}=["train_loss", "val_*"]',
            )
        )
    for position, name in enumerate(names):
        if not isinstance(name, str) or not name.strip():
            raise KeySelectionError(
                report(
                    f"`IPULogCallback({argument}=...)` received {name!r} at position {position}, "
                    "expected a name or a glob",
                    fix=f'leave it out, or write {argument}="*" to anchor everything',
                )
            )
        if name in names[:position]:
            raise KeySelectionError(
                report(
                    f"`IPULogCallback({argument}=...)` received {name!r} twice",
                    fix="leave one of them out",
                )
            )
    return tuple(names)


def _matches(name: str, pattern: str) -> bool:
    """Whether a pattern is a name, or matches it as a glob."""
    try:
        return name == pattern or fnmatchcase(name, pattern)
    except re.error:  # up to Python 3.10.4 of a range that is empty, as in "acc[top-1]"
        return False


class Selection:
    """Decides whether a name is wanted, and remembers what was asked.

    A pattern selects the name that equals it, whatever characters it has, and every name that it
    matches as a shell glob (`*`, `?`, `[...]`, case counts).

    Args:
        patterns: Names and globs, as `parse_names` returns them.
    """

    def __init__(self, patterns: Sequence[str]) -> None:
        self.patterns = tuple(patterns)
        self._answers: Dict[str, bool] = {}
        self._matched: Set[str] = set()

    def __bool__(self) -> bool:
        return bool(self.patterns)

    def selects(self, name: str) -> bool:
        """Whether any pattern selects `name`."""
        if name not in self._answers:
            matching = [p for p in self.patterns if _matches(name, p)]
            self._matched.update(matching)
            self._answers[name] = bool(matching)
        return self._answers[name]

    def unmatched(self) -> List[Tuple[str, List[str]]]:
        """Patterns that selected nothing so far, each with the nearest names among those asked."""
        return [
            (pattern, difflib.get_close_matches(pattern, self._answers, n=3, cutoff=0.4))
            for pattern in self.patterns
            if pattern not in self._matched
        ]
