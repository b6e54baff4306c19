"""Values that are functions: in a configuration they are texts, `module:function`, as its YAML has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from onstep.errors import ConfigError

_SET: dict[str, Callable[..., Any]] = {}
"""The functions that this process's script has set, by name: names that come from another rank mean them, too."""


class NamedFunction(str):
    """`module:function`, the name of a function; also the function itself, where a script has set it."""

    function: Callable[..., Any] | None = None

    def __deepcopy__(self, memo: object) -> NamedFunction:
        return self

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (str(self),)  # what a script has defined may be impossible to pickle


def named_function(function: Callable[..., Any]) -> NamedFunction:
    """The name of a function, with the function.

    Args:
        function: any callable object; one without a name has that of its class.
    """
    named = function if hasattr(function, "__qualname__") else type(function)
    name = NamedFunction(f"{named.__module__}:{named.__qualname__}")
    name.function = _SET[name] = function
    return name


def names_function(text: str) -> bool:
    """Whether a text names a function, and not a class or a file."""
    return ":" in text


def function_of(key: str, name: str) -> Callable[..., Any]:
    """The function that a name stands for. A name alone, as YAML has it, imports nothing.

    Args:
        key: the key of the configuration.
        name: `module:function`.

    Raises:
        ConfigError: for a function that no script of this process has set.
    """
    known = getattr(name, "function", None) or _SET.get(name)
    if known is None:
        raise ConfigError(
            f"{key} names the function {name!r}, which a configuration cannot import; set {key} to the function in the "
            f"script that trains, or name the classes of the blocks."
        )
    return known
