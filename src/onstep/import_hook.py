"""Changes modules of other packages when they are imported, by any code."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def _nothing(module: ModuleType) -> None:
    pass


class ImportHook(MetaPathFinder):
    """Finds modules as Python does, and calls functions with each wanted one when it is executed.

    Args:
        wants: whether a module is wanted, by its full name; no two hooks want the same.
        before: called with a module that was not executed yet.
        after: called with one that was.
    """

    def __init__(
        self,
        wants: Callable[[str], bool],
        *,
        before: Callable[[ModuleType], None] = _nothing,
        after: Callable[[ModuleType], None] = _nothing,
    ) -> None:
        self._wants, self._before, self._after = wants, before, after

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of a wanted module; None for all others."""
        if not self._wants(fullname):
            return None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            if isinstance(finder, ImportHook) or find is None:
                continue
            spec: ModuleSpec | None = find(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader, self._before, self._after)
                return spec
        return None


class _Loader(Loader):
    """The loader of a wanted module, which calls the functions; in all else the module's own loader."""

    def __init__(self, own: Loader, before: Callable[[ModuleType], None], after: Callable[[ModuleType], None]) -> None:
        self._own, self._before, self._after = own, before, after

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._own.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._before(module)
        self._own.exec_module(module)
        self._after(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)
