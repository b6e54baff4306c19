"""Lets a module be called as the function that it is named after."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any


def show_module_as(function: Callable[..., Any]) -> None:
    """Replace a function in its package by its module, which has the same name and is callable as the function.

    The function would hide the module, as `import a.b as m` binds the attribute `b` of `a`. Then both `from a import b;
    b(...)` and `import a.b as m; m.b(...)` work.
    """
    module = sys.modules[function.__module__]
    module.__class__ = _CallableModule
    package, _, name = module.__name__.rpartition(".")
    setattr(sys.modules[package], name, module)


class _CallableModule(ModuleType):
    @property
    def __wrapped__(self) -> Any:  # `inspect.signature` reads it
        return getattr(self, self.__name__.rpartition(".")[2])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__wrapped__(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:  # a spawned process gets it as its target
        return import_module, (self.__name__,)
