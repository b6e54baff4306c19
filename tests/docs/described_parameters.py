"""The parameters of the public functions, classes and methods, and which of them are described."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import itertools
import pkgutil
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import onstep
from onstep.config.hf.argument import KEY_OF
from onstep.config.hf.reserved import REASONS

_ARGS = re.compile(r"^Args:\n(.*?)(?=^\S|\Z)", re.MULTILINE | re.DOTALL)
_ENTRY = re.compile(r"^    \*{0,2}(\w+(?:, \*{0,2}\w+)*)(?: \(.*?\))?: \S", re.MULTILINE)


@dataclass(frozen=True)
class Parameter:
    """One parameter of a public name."""

    of: str
    """The dotted name of the function, the class (for its constructor), or the method."""
    name: str
    is_described: bool

    def __str__(self) -> str:
        return f"{self.of}({self.name})"


def parameters() -> list[Parameter]:
    """The parameters of what the packages of Onstep export; each object once, where it comes first."""
    found, seen = list[Parameter](), set[object]()
    every = dict(exported())
    classes = {value for value in every.values() if inspect.isclass(value)}
    for name, value in every.items():
        if value in seen:
            continue
        seen.add(value)
        found += (
            _of_class(name, value, classes, seen)
            if inspect.isclass(value)
            else _of(name, value, _args_of(value) | _named_in(value))
        )
    return found


def exported() -> Iterator[tuple[str, Any]]:
    """The functions and classes that are named in `__all__` of a package, and are Onstep's own."""
    for info in pkgutil.iter_modules(onstep.__path__):
        if info.name.startswith("_") or info.name in ("cli", "as_transformers"):
            continue
        package = importlib.import_module(f"onstep.{info.name}")
        for name in getattr(package, "__all__", []):
            value = getattr(package, name)
            is_own = str(getattr(value, "__module__", "")).startswith("onstep")
            if is_own and (inspect.isclass(value) or inspect.isroutine(value)):
                yield f"onstep.{info.name}.{name}", value


def _of_class(name: str, kind: type, exported_classes: set[type], seen: set[object]) -> list[Parameter]:
    """Those of its constructor and its methods, also of methods that it has from a class that is not exported."""
    own = [base for base in kind.__mro__ if base.__module__.startswith("onstep")]
    described = set[str]().union(*(_args_of(base) | _args_of(vars(base).get("__init__")) for base in own))
    is_made = not issubclass(kind, Enum | BaseException) and not getattr(kind, "_is_protocol", False)
    constructor = kind.__init__ if is_dataclass(kind) else kind  # a metaclass may have a signature of its own
    found = _of(name, constructor, described.union(*map(_fields, own))) if is_made else []
    shared = set[str]().union(*map(_named_in, own))
    methods = {}
    for base in own:
        if base is kind or base not in exported_classes:
            methods.update({method: value for method, value in vars(base).items() if method not in methods})
    for method, value in methods.items():
        function = getattr(value, "__func__", value)
        is_own = inspect.isfunction(function) and function.__module__.startswith("onstep")
        if not method.startswith("_") and is_own and function not in seen:
            seen.add(function)
            same = [vars(base).get(method) for base in own]
            found += _of(f"{name}.{method}", function, shared.union(*map(_args_of, same), *map(_named_in, same)))
    return found


def _of(name: str, value: Callable[..., Any], described: set[str]) -> list[Parameter]:
    try:
        names = [one for one in inspect.signature(value).parameters if one not in ("self", "cls")]
    except (TypeError, ValueError):
        return []
    return [Parameter(name, one, one in described) for one in names if not one.startswith("_")]


def _named_in(value: object) -> set[str]:
    """The names in backticks in the text of a docstring, which says of them what they are."""
    doc = getattr(getattr(value, "__func__", value), "__doc__", None) or ""
    return {name for text in re.findall(r"`([^`]+)`", doc) for name in re.findall(r"\w+", text)}


def _args_of(value: object) -> set[str]:
    """The names in the section `Args:` of a docstring."""
    doc = getattr(getattr(value, "__func__", value), "__doc__", None)
    section = _ARGS.search(inspect.cleandoc(doc or ""))
    names = _ENTRY.findall(section[1]) if section else []
    return {one.strip(" *") for group in names for one in group.split(",")}


def _fields(kind: type) -> set[str]:
    """The fields of a class that have a docstring, or are declared with their help."""
    described = set(REASONS)
    if is_dataclass(kind):
        described |= {one.name for one in fields(kind) if inspect.isclass(one.default_factory)}  # a section
        described |= {one.name for one in fields(kind) if {"option", "help"} & set(one.metadata) or one.name in KEY_OF}
    body = _classes(inspect.getsourcefile(kind) or "").get(kind.__qualname__.rpartition(".")[2], [])
    for statement, text in itertools.pairwise(body):
        is_field = isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
        if is_field and isinstance(text, ast.Expr):  # its docstring
            described.add(ast.unparse(statement.target))
    return described


@functools.cache
def _classes(file: str) -> dict[str, list[ast.stmt]]:
    """The statements of each class of a module."""
    tree = ast.parse(Path(file).read_text(encoding="utf-8"))
    return {node.name: node.body for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}


if __name__ == "__main__":
    every = parameters()
    print(f"{sum(one.is_described for one in every)} of {len(every)}")
    print("\n".join(str(one) for one in every if not one.is_described))
