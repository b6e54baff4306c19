"""Lists the commands that a running job accepts, and checks what is sent with one."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from onstep.config.suggestions import nearest
from onstep.errors import ConfigError
from onstep.events.settings import MOST_LR_FACTOR


class CommandError(ConfigError):
    """An unknown command, or data that does not fit it."""


class CommandRefusedError(ConfigError):
    """A command that this job cannot carry out now; the message says why."""


@dataclass(frozen=True)
class Parameter:
    """A value that is sent with a command."""

    name: str
    kind: type
    """int, float, str, or list for a list of str."""
    help: str
    required: bool = False
    default: Any = None
    least: float | None = None
    most: float | None = None
    may_be_null: bool = False

    def describe(self) -> dict[str, Any]:
        """As JSON."""
        kinds = {int: "integer", float: "number", str: "string", list: "list of strings"}
        return {
            "name": self.name,
            "kind": kinds[self.kind],
            "help": self.help,
            "required": self.required,
            "default": self.default,
            "minimum": self.least,
            "maximum": self.most,
        }

    def checked(self, command: str, value: Any) -> Any:
        """The value as the job uses it.

        Raises:
            CommandError: for a value of the wrong kind, too small or too large.
        """
        if value is None and self.may_be_null:
            return None
        number = self.kind in (int, float)
        fits = isinstance(value, (int, float) if self.kind is float else self.kind) and not isinstance(value, bool)
        if fits and number:
            fits = math.isfinite(value) and (self.least is None or value >= self.least)
            fits = fits and (self.most is None or value <= self.most)
        if fits and self.kind is list:
            fits = 0 < len(value) <= MOST_TEXTS and all(isinstance(one, str) for one in value)
        if fits and self.kind in (str, list):
            fits = sum(map(len, value)) <= MOST_CHARACTERS
        if not fits:
            raise CommandError(f"{command}: {self.name} must be {self._rule()}, got {_shown(value)}.")
        return value

    def _rule(self) -> str:
        article = {int: "an integer", float: "a number", str: "a text", list: f"a list of 1 to {MOST_TEXTS} texts"}
        low = f" >= {self.least:g}" if self.least is not None else ""
        high = f" <= {self.most:g}" if self.most is not None else ""
        characters = f" of at most {MOST_CHARACTERS} characters" if self.kind in (str, list) else ""
        return article[self.kind] + " and".join(part for part in (low, high) if part) + characters


@dataclass(frozen=True)
class Command:
    """A command: what it does, and what is sent with it."""

    name: str
    help: str
    parameters: tuple[Parameter, ...] = ()
    is_destructive: bool = False
    """Work can be lost: a client asks for confirmation."""
    code: int | None = None
    """Number in Forgather's protocol."""

    def describe(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "name": self.name,
            "help": self.help,
            "parameters": [one.describe() for one in self.parameters],
            "is_destructive": self.is_destructive,
        }


MOST_TEXTS = 16
MOST_CHARACTERS = 10_000

COMMANDS: dict[str, Command] = {
    one.name: one
    for one in (
        Command(
            "graceful_stop", "Stop after this step, with the final checkpoint, as if the run were complete", code=1
        ),
        Command("save_checkpoint", "Save a checkpoint after this step", code=2),
        Command("save_and_stop", "Save a checkpoint after this step, then stop", code=3),
        Command("status", "Do nothing; tells whether the training thread answers, and at which step", code=4),
        Command("abort", "Stop after this step without saving anything", is_destructive=True, code=5),
        Command("evaluate", "Evaluate after this step"),
        Command("pause", "Wait after this step until resumed; nothing is released"),
        Command("resume", "Continue a paused run"),
        Command(
            "set",
            "Change a value from the next step on; null restores the configured one",
            (
                Parameter("key", str, "One of the job's settable keys", required=True),
                Parameter("value", float, "The new value", required=True, may_be_null=True),
            ),
        ),
        Command(
            "skip_batch",
            "Read the batches of the next steps without training on them",
            (Parameter("count", int, "How many steps", default=1, least=1, most=10_000),),
        ),
        Command(
            "rollback",
            "Go back to the newest checkpoint at or before a step; data continues after the current one",
            (
                Parameter(
                    "step", int, "Step of the checkpoint; null: the newest before this step", least=0, may_be_null=True
                ),
                Parameter(
                    "lr_factor",
                    float,
                    "Multiplies the learning-rate factor from there on",
                    default=1.0,
                    least=0,
                    most=MOST_LR_FACTOR,
                ),
            ),
            is_destructive=True,
        ),
        Command(
            "generate",
            "Continue prompts with the current weights",
            (
                Parameter("prompts", list, "Texts to continue", required=True),
                Parameter("max_new_tokens", int, "Tokens to add to each", default=64, least=1, most=4096),
            ),
        ),
        Command(
            "profile",
            "Record the next steps with PyTorch's profiler, on every rank",
            (Parameter("steps", int, "How many steps", default=3, least=1, most=100),),
        ),
        Command("stacks", "Show the Python stacks of all threads of all ranks, at once, even if training hangs"),
    )
}
"""The commands by name, in the order in which clients show them."""


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
        raise CommandError(f"Unknown command: {_shown(command)}.{hint}")
    if not (data is None or isinstance(data, dict)):
        raise CommandError(f"{command}: data must be an object, got {_shown(data)}.")
    given: dict[str, Any] = data or {}
    if command not in COMMANDS:
        _check_json(command, given)
        return given
    parameters = {one.name: one for one in COMMANDS[command].parameters}
    for name in given.keys() - parameters:
        known_names = ", ".join(parameters) or "none"
        raise CommandError(f"{command} has no parameter {_shown(name)}; its parameters: {known_names}.")
    for one in parameters.values():
        if one.required and one.name not in given:
            raise CommandError(f"{command} requires {one.name}: {one.help.lower()}.")
    return {
        name: one.checked(command, given[name]) if name in given else one.default for name, one in parameters.items()
    }


def _check_json(command: str, data: dict[str, Any]) -> None:
    try:
        json.dumps(data, allow_nan=False)
    except ValueError:
        raise CommandError(
            f"{command}: data must be JSON, which has neither NaN nor infinity; send null or a text instead."
        ) from None


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
