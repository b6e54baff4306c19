"""Gives the clients of trackers a random generator of their own, so that Python's is that of the training alone.

They draw names, waits before a retry and the like, in threads, at any time between two draws of the training: its
random state, which checkpoints and the trajectory hash have, would depend on its trackers.
"""

from __future__ import annotations

import builtins
import random
import sys
from functools import cache
from importlib.util import find_spec, module_from_spec
from types import ModuleType
from typing import Any

from onstep.import_hook import ImportHook

_packages = {
    *("wandb", "sentry_sdk", "mlflow", "opentelemetry", "comet_ml", "rich", "trackio", "gradio_client"),
    *("huggingface_hub", "urllib3", "websockets", "databricks", "google", "botocore"),
}
"""Clients of services, and what they use that draws."""
_NAMES = {id(getattr(random, name)): name for name in random.__all__ if name[0].islower()}
"""The functions of `random` by their ids: `from random import choice` makes one a name of another module."""


def draw_from_own_random(package: str | None) -> None:
    """Let the modules of trackers' clients draw from another generator, those to come as they are imported.

    Args:
        package: a further package of a client; None for none.
    """
    _packages.update(() if package is None else (package,))
    if _HOOK not in sys.meta_path:
        sys.meta_path.insert(0, _HOOK)
    for name, module in sys.modules.copy().items():
        if _is_client(name) and isinstance(module, ModuleType):
            _exchange(module)


def _is_client(name: str) -> bool:
    return name.partition(".")[0] in _packages


@cache
def _own_random() -> ModuleType:
    """Python's `random` a second time, with a generator of its own."""
    spec = find_spec("random")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _exchange(module: ModuleType) -> None:
    """In a module that is loaded, exchange `random` and its functions for those of the other generator."""
    content: dict[str, object] = object.__getattribute__(module, "__dict__")  # one imported lazily stays unloaded
    for name, value in content.copy().items():
        if value is random:
            content[name] = _own_random()
        elif id(value) in _NAMES:
            content[name] = getattr(_own_random(), _NAMES[id(value)])


def _import(name: str, *how: Any, **named: Any) -> ModuleType:
    return _own_random() if name == "random" else builtins.__import__(name, *how, **named)


@cache
def _builtins() -> dict[str, Any]:
    """Those of a module whose `import random`, anywhere in it, is for the other generator."""
    return {**vars(builtins), "__import__": _import}


def _prepare(module: ModuleType) -> None:
    vars(module)["__builtins__"] = _builtins()


_HOOK = ImportHook(_is_client, before=_prepare)
