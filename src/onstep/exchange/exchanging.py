"""Exchanges names in modules of `transformers`: in those to come as they are imported, in loaded ones at once."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from onstep.errors import ConfigError
from onstep.exchange.names import NAMES
from onstep.import_hook import ImportHook
from onstep.originals import ORIGINALS

_PACKAGE = "transformers"


class ExchangingFinder(ImportHook):
    """Exchanges names in the modules of the table as they are imported."""

    def __init__(self) -> None:
        super().__init__(NAMES.__contains__, after=exchange_in)


def exchange_in(module: ModuleType) -> None:
    """Put Onstep's objects in the place of those that this module of the table defines, and keep the latter aside."""
    content = vars(module)
    for name, place in NAMES[module.__name__].items():
        home, _, attribute = place.partition(":")
        if name in content:
            replacement = getattr(importlib.import_module(home), attribute)
            if content[name] is not replacement:
                content.setdefault(ORIGINALS, {})[name] = content[name]
                content[name] = replacement


def exchange_loaded() -> None:
    """Exchange names in the modules of `transformers` that are loaded already."""
    replaced = {}
    for module in (sys.modules[name] for name in NAMES if name in sys.modules):
        exchange_in(module)
        for name, own in vars(module).get(ORIGINALS, {}).items():
            replaced[id(own)] = vars(module)[name]
    _replace(replaced)


def restore() -> None:
    """Undo the exchange in all modules of `transformers`."""
    replaced = {}
    for module in (sys.modules[name] for name in NAMES if name in sys.modules):
        for name, own in vars(module).pop(ORIGINALS, {}).items():
            replaced[id(vars(module)[name])] = own
    _replace(replaced)


def _replace(replaced: dict[int, Any]) -> None:
    """Replace objects, by their ids, wherever a module of `transformers` has a name for them."""
    for name, content in _loaded_modules():
        if name.partition(".")[0] == _PACKAGE:
            for key, value in list(content.items()):
                if id(value) in replaced:
                    content[key] = replaced[id(value)]


def refuse_if_in_use() -> None:
    """Refuse the exchange if code outside of `transformers` holds a name of the table already.

    Raises:
        ConfigError: naming the module, the name and the remedy.
    """
    loaded = [vars(sys.modules[module]) for module in NAMES if module in sys.modules]
    names = [(content, name) for content in loaded for name in NAMES[content["__name__"]]]
    own = {id(content[name]) for content, name in names if name in content and not _is_exchanged(content, name)}
    for module, content in _loaded_modules() if own else ():
        root = module.partition(".")[0]
        if root in (_PACKAGE, "onstep"):
            continue
        for name, value in list(content.items()):
            if issubclass(type(value), type) and not own.isdisjoint(map(id, type.mro(value))):
                where = "above all other imports of the script" if root == "__main__" else f"above `import {root}`"
                raise ConfigError(
                    f"{module}.{name} is made of transformers' own Trainer or callbacks, which were imported before "
                    f"Onstep's could take their place; write `import onstep.as_transformers` {where}, or start the "
                    f"script with `onstep run`."
                )


def _is_exchanged(content: dict[str, Any], name: str) -> bool:
    return name in content.get(ORIGINALS, {})


def _loaded_modules() -> Iterator[tuple[str, dict[str, Any]]]:
    for name, module in list(sys.modules.items()):
        if isinstance(module, ModuleType):
            yield name, module.__dict__
