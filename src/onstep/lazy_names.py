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
        homes: maps each public name to the full name of its module; by default, the imports of the package, those
            under `if TYPE_CHECKING` included, do so for the names in its `__all__`.
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
    """The module of each public name that a package imports, from its compiled code: it may have no source."""
    import dis  # not before: it is slower to import than the package

    module = sys.modules[package]
    assert module.__spec__ is not None
    loader: Any = module.__spec__.loader
    homes, home = dict[str, str](), ""
    for one in dis.get_instructions(loader.get_code(package)):
        if one.opname == "IMPORT_NAME":
            home = one.argval
        elif one.opname == "IMPORT_FROM":
            homes[one.argval] = home
    return {name: homes[name] for name in module.__all__}
