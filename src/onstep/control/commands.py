"""Checks what is sent with a command."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from onstep.commands import COMMANDS, Parameter
from onstep.config.suggestions import nearest
from onstep.errors import ConfigError
from onstep.files.bounded_reading import brief

MOST_TEXTS = 16
MOST_CHARACTERS = 10_000


class CommandError(ConfigError):
    """An unknown command, or data that does not fit it."""


class CommandRefusedError(ConfigError):
    """A command that this job cannot carry out now; the message says why."""


def check_command(command: Any, data: Any, own: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Check a command and its data; returns the data with defaults filled in.

    Args:
        command: its name.
        data: its parameters; None means none.
        own: commands that the run's callbacks declare, with their help; their data may be any JSON.

    Raises:
        CommandError: naming the command or the parameter, and the rule.
    """
    known = {**COMMANDS, **(own or {})}
    if not isinstance(command, str) or command not in known:
        hint = nearest(command, list(known)) if isinstance(command, str) else ""
        raise CommandError(f"Unknown command: {brief(command, 80)}.{hint}")
    if not (data is None or isinstance(data, dict)):
        raise CommandError(f"{command}: data must be an object, got {brief(data, 80)}.")
    given: dict[str, Any] = data or {}
    if command not in COMMANDS:
        _check_json(command, given)
        return given
    parameters = {one.name: one for one in COMMANDS[command].parameters}
    for name in given.keys() - parameters:
        known_names = ", ".join(parameters) or "none"
        raise CommandError(f"{command} has no parameter {brief(name, 80)}; its parameters: {known_names}.")
    for one in parameters.values():
        if one.required and one.name not in given:
            raise CommandError(f"{command} requires {one.name}: {one.help.lower()}.")
    return {
        name: _checked(command, one, given[name]) if name in given else one.default for name, one in parameters.items()
    }


def _checked(command: str, parameter: Parameter, value: Any) -> Any:
    """The value as the job uses it."""
    if value is None and parameter.may_be_null:
        return None
    kind, least, most = parameter.kind, parameter.least, parameter.most
    fits = isinstance(value, (int, float) if kind is float else kind) and not isinstance(value, bool)
    if fits and kind in (int, float):
        fits = math.isfinite(value) and (least is None or value >= least) and (most is None or value <= most)
    if fits and kind is list:
        fits = 0 < len(value) <= MOST_TEXTS and all(isinstance(one, str) for one in value)
    if fits and kind in (str, list):
        fits = sum(map(len, value)) <= MOST_CHARACTERS
    if not fits:
        raise CommandError(f"{command}: {parameter.name} must be {_rule(parameter)}, got {brief(value, 80)}.")
    return value


def _rule(parameter: Parameter) -> str:
    kind, least, most = parameter.kind, parameter.least, parameter.most
    article = {int: "an integer", float: "a number", str: "a text", list: f"a list of 1 to {MOST_TEXTS} texts"}
    low = f" >= {least:g}" if least is not None else ""
    high = f" <= {most:g}" if most is not None else ""
    characters = f" of at most {MOST_CHARACTERS} characters" if kind in (str, list) else ""
    return article[kind] + " and".join(part for part in (low, high) if part) + characters


def _check_json(command: str, data: dict[str, Any]) -> None:
    try:
        json.dumps(data, allow_nan=False)
    except ValueError:
        raise CommandError(
            f"{command}: data must be JSON, which has neither NaN nor infinity; send null or a text instead."
        ) from None
