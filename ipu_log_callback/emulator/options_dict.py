"""The base of PopTorch's option groups: named values that freeze once they are used.

The rules are those of PopTorch 3.4 `_options_impl.py`: only names declared in the constructor
exist, a value keeps its type, a frozen group refuses every assignment, and a copy is never frozen.
"""

import copy
from typing import Any, Dict, TypeVar

__all__ = ["Freezable", "OptionsDict"]

_Self = TypeVar("_Self", bound="Freezable")


class Freezable:
    """Something that users may edit until it is first used."""

    _is_frozen: bool = False

    def checkIsFrozen(self) -> None:
        """Refuse a modification if this group is already in use.

        Raises:
            AttributeError: If frozen.
        """
        if self._is_frozen:
            msg = "Can't modify frozen Options"
            raise AttributeError(msg)

    def _freeze(self) -> None:
        self._set_frozen(True)

    def _unfreeze(self) -> None:
        self._set_frozen(False)

    def _set_frozen(self, frozen: bool) -> None:
        for member in list(vars(self).values()):
            if isinstance(member, Freezable) and member is not self:
                object.__setattr__(member, "_is_frozen", frozen)
        object.__setattr__(self, "_is_frozen", frozen)

    def __deepcopy__(self: _Self, memo: Dict[int, Any]) -> _Self:
        twin = object.__new__(type(self))
        memo[id(self)] = twin
        for name, value in vars(self).items():
            object.__setattr__(twin, name, copy.deepcopy(value, memo))
        object.__setattr__(twin, "_is_frozen", False)
        return twin


class OptionsDict(Freezable):
    """A fixed set of typed options, readable as attributes."""

    def __init__(self, **default_values: Any) -> None:
        """Declare the options: their names, types and defaults."""
        # Last on purpose: from here on no further private attribute may appear.
        self._values: Dict[str, Any] = default_values

    def set(self, **kwargs: Any) -> None:
        """Change declared options.

        Raises:
            AttributeError: If frozen.
            AssertionError: If an option is unknown or a value has not the type of the current one.
        """
        self.checkIsFrozen()
        for option, value in kwargs.items():
            assert self.exists(option), (
                f"Invalid option {option}, valid options are {self._values.keys()}"
            )
            expected = type(self._values[option])
            assert isinstance(value, expected), (
                f"Unexpected type {type(value)} for option {option}. Expected {expected}"
            )
            self._values[option] = value

    def createOrSet(self, **kwargs: Any) -> None:
        """Like `set`, and declare the options that do not exist yet."""
        self.checkIsFrozen()
        for option, value in kwargs.items():
            if self.exists(option):
                self.set(**{option: value})
            else:
                self._values[option] = value

    def exists(self, option: str) -> bool:
        """Whether `option` is declared."""
        return option in self._values

    def deleteIfExists(self, option: str) -> None:
        """Forget `option`."""
        self._values.pop(option, None)

    def update(self, other: Dict[str, Any]) -> Dict[str, Any]:
        """Add this group's values to `other` and return it."""
        assert not set(self._values) & set(other), (
            "Can't merge dictionaries, they have some keys in common"
        )
        other.update(self._values)
        return other

    def toDict(self) -> Dict[str, Any]:
        """The values as a new dictionary."""
        return self.update({})

    def __call__(self, option: str) -> Any:
        """The value of `option`."""
        return getattr(self, option)

    def __setattr__(self, option: str, value: Any) -> None:
        self.checkIsFrozen()
        if not option.startswith("_"):
            self.set(**{option: value})
            return
        declared = vars(self)
        if "_values" in declared and option not in declared and option != "__class__":
            msg = f"Invalid private attribute {option}. Valid attributes: {list(declared)}"
            raise AttributeError(msg)
        super().__setattr__(option, value)

    def __getattr__(self, option: str) -> Any:
        # Reached only for what normal lookup did not find. `vars`, because an object that is being
        # unpickled has no `_values` yet and must not ask for it through this very method.
        values = vars(self).get("_values", {})
        if option.startswith("_") or option not in values:
            msg = f"Invalid attribute {option}."
            raise AttributeError(msg)
        return values[option]

    def __repr__(self) -> str:
        values = ", ".join(f"{name}={value!r}" for name, value in self._values.items())
        return f"{type(self).__name__}({values})"
