"""Loads the public names of a package on first use, so that importing the package is cheap."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any


def lazy_names(
    package: str, homes: Mapping[str, str] | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return a package's `__getattr__` and `__dir__`.

    Args:
        package: full name of the package.
        homes: maps each public name to the full name of its module; by default, the imports of the package under
            `if TYPE_CHECKING` do.
    """

    @cache
    def known() -> Mapping[str, str]:
        return _imports_for_types(package) if homes is None else homes

    def get(name: str) -> Any:
        if name.startswith("__") or name not in known():
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(known()[name]), name)

    def names() -> list[str]:
        return list(known())

    return get, names


def _imports_for_types(package: str) -> dict[str, str]:
    """The module of each name that a package imports in its first `if`."""
    import ast  # not before: these two are slower to import than the package
    import inspect

    block = next(one for one in ast.parse(inspect.getsource(sys.modules[package])).body if isinstance(one, ast.If))
    imports = [one for one in block.body if isinstance(one, ast.ImportFrom)]
    return {name.name: str(one.module) for one in imports for name in one.names}
