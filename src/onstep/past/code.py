"""Finds the user's own callbacks and functions that a run had, by what its run.json has of them."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from onstep.errors import ConfigError
from onstep.training.runs.user_code import full_name, is_users


def own_callbacks(run_json: Mapping[str, Any], given: Sequence[object]) -> list[object]:
    """The user's callbacks of a run, made again, without those that are given.

    Raises:
        ConfigError: for one that cannot be imported, or requires arguments.
    """
    names = {type(one).__qualname__ for one in given}
    entries = [one for one in _entries(run_json, "callbacks") if one["name"].rpartition(":")[2] not in names]
    return [_made(_loaded(one, "callbacks=[...]"), one["name"]) for one in entries]


def own_functions(run_json: Mapping[str, Any], kind: str, parameter: str) -> list[Any]:
    """The user's functions of a kind.

    Raises:
        ConfigError: for one that cannot be imported.
    """
    return [_loaded(one, parameter) for one in _entries(run_json, kind)]


def listen_to_evaluations(callbacks: Sequence[object]) -> bool:
    """Whether one of the user's callbacks is called at evaluations, whose results it may act on."""
    return any(
        name.startswith(("on_eval", "on_prediction", "on_log"))
        and is_users(getattr(getattr(type(one), name), "__module__", None))
        for one in callbacks
        for name in dir(type(one))
    )


def _entries(run_json: Mapping[str, Any], kind: str) -> list[dict[str, str]]:
    found = run_json.get("user_code", {}).get(kind, [])
    return [one for one in found if isinstance(one, dict) and isinstance(one.get("name"), str)]


def _loaded(entry: Mapping[str, str], parameter: str) -> Any:
    module_name, _, name = entry["name"].partition(":")
    file = entry.get("file")
    remedy = f"rewind it in Python, with {parameter} of onstep.rewind"
    if module_name == "__main__" or "<" in name:
        raise ConfigError(f"the run had {entry['name']} of its script {file}, which would run again; {remedy}.")
    try:
        module = sys.modules.get(module_name) or _imported(module_name, file)
        found: Any = module
        for part in name.split("."):
            found = getattr(found, part)
    except Exception as error:
        raise ConfigError(f"the run had {entry['name']} of {file}, which is not found: {error}; {remedy}.") from error
    return found


def _imported(name: str, file: str | None) -> Any:
    """The module of a name; that of its file if it is not installed."""
    if file is None or not Path(file).is_file() or importlib.util.find_spec(name.partition(".")[0]) is not None:
        return importlib.import_module(name)
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _made(found: Any, name: str) -> object:
    if not isinstance(found, type):
        return found
    try:
        return found()
    except TypeError as error:
        raise ConfigError(
            f"the run had the callback {name}, which requires arguments ({error}); rewind it in Python, with "
            f"callbacks=[{full_name(found).rpartition('.')[2]}(...)] of onstep.rewind."
        ) from None
