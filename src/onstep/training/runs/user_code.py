"""Finds the code of a user: which modules are theirs, and which of their methods a method may call."""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Iterable
from functools import lru_cache


def is_users(module: str | None) -> bool:
    """Whether code of this module is the user's own: not of Python, Onstep or an installed package."""
    return module is not None and not _is_installed(module)


def reachable(cls: type, roots: Iterable[str]) -> dict[str, types.FunctionType]:
    """The user's methods of a class among `roots`, and those that they refer to by name; by `Class.method`."""
    found: dict[str, types.FunctionType] = {}
    waiting, seen = list(roots), set[str]()
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        for owner in cls.__mro__:
            function = _function_of(vars(owner).get(name))
            if function is not None and is_users(function.__module__):
                found[short_name(function)] = function
                waiting += sorted(names_in(function.__code__))
    return dict(sorted(found.items()))


def names_in(code: types.CodeType) -> set[str]:
    """The names of globals and attributes that code refers to, including nested functions."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= names_in(constant)
    return names


def short_name(function: types.FunctionType) -> str:
    """`Class.method`, without the functions that it is defined in."""
    return function.__qualname__.rpartition("<locals>.")[2]


def full_name(cls: type) -> str:
    """A class's name, with the module unless that is the user's own, which may be called `__main__`."""
    return f"{cls.__module__ if not is_users(cls.__module__) else ''}.{cls.__qualname__.rpartition('<locals>.')[2]}"


def entries_of(objects: Iterable[object]) -> list[dict[str, str]]:
    """How to find the user's own objects again, as run.json has it: `{"name": "module:Class", "file": path}` each.

    A function, a class or an instance of one. What cannot be imported has a `<locals>` in its name.
    """
    found = []
    for one in objects:
        named = one if isinstance(one, (type, types.FunctionType)) else type(one)
        if is_users(named.__module__):
            file = getattr(sys.modules.get(named.__module__), "__file__", None)
            place = {} if file is None else {"file": os.path.abspath(file)}
            found.append({"name": f"{named.__module__}:{named.__qualname__}", **place})
    return found


@lru_cache(maxsize=4096)
def _is_installed(module: str) -> bool:
    root = module.partition(".")[0]
    if root in ("onstep", "builtins") or (root in sys.stdlib_module_names and root != "__main__"):
        return True
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    return any(
        f"{separator}{name}{separator}" in file for name in ("site-packages", "dist-packages") for separator in "/\\"
    )


def _function_of(member: object) -> types.FunctionType | None:
    if isinstance(member, (staticmethod, classmethod, types.MethodType)):
        member = member.__func__
    if isinstance(member, property):
        member = member.fget
    return member if isinstance(member, types.FunctionType) else None
