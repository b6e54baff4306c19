"""Arguments of Onstep's own: keywords of the constructor that are not fields, so that no argument parser has them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import InitVar
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

T = TypeVar("T")

if TYPE_CHECKING:
    Unparsed = Annotated[T, "not a field"]
else:  # a dataclass passes it on to `__post_init__`, and so do the dataclasses derived from it
    Unparsed = InitVar

UNPARSED = ("config_overrides", "control")
"""Their names, in the order of their declaration."""


def receives_unparsed(method: Callable[..., None]) -> Callable[..., None]:
    """A `__post_init__` that sets the unparsed arguments, which the constructor passes to the outermost one."""

    @functools.wraps(method)
    def receiving(self: Any, *values: object) -> None:
        if values and type(self).__post_init__ is receiving:
            own, values = values[: len(UNPARSED)], values[len(UNPARSED) :]
            for name, value in zip(UNPARSED, own, strict=True):
                setattr(self, name, value)
        method(self, *values)

    receiving.__dict__["receives_unparsed"] = True
    return receiving


class UnparsedArguments:
    """Lets subclasses define `__post_init__(self)` as if there were no unparsed arguments."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        method = getattr(cls, "__post_init__", None)
        if method is not None and not hasattr(method, "receives_unparsed"):
            type.__setattr__(cls, "__post_init__", receives_unparsed(method))
