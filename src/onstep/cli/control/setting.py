"""`onstep control set`: changes values of a running job, or lists them."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from onstep.analysis.text_tables import table
from onstep.cli.control.options import AsJson, Remote, TokenFile, Wait, complete_jobs
from onstep.cli.control.outcome import show
from onstep.cli.control.target import Target, find_target
from onstep.config.suggestions import listed, nearest
from onstep.control import ControlError, ControlResponse
from onstep.errors import ConfigError

_LISTED = 20
_NONE = ("none", "null")


def set_(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[JOB] [KEY=VALUE ...]",
            help="What to change, such as lr_factor=0.5; KEY=none restores the configured value. Without KEY=VALUE, "
            "lists what can be changed.",
            autocompletion=complete_jobs,
        ),
    ] = None,
    wait: Wait = False,
    as_json: AsJson = False,
    remote: Remote = None,
    token_file: TokenFile = None,
) -> None:
    """Change values from the next step on: a factor of the learning rate, intervals, the last step, ...

    A resumed run keeps them until they are set to none.
    """
    job, values = split_words(words or [])
    target = find_target(job, remote, token_file)
    settable = _settable(target, remote, token_file)
    if not values:
        print(json.dumps(settable, indent=2) if as_json else "\n".join(_lines(settable)))
        return
    for key in values.keys() - settable.keys():
        known = list(settable)
        raise ConfigError(
            f"{target.job_id} has no value {key!r} to set.{nearest(key, known)} Settable: {listed(known, _LISTED)}."
        )
    seconds = math.inf if wait else None
    for key, value in values.items():
        show(_shown(key, value, target.client.set_value(target.job_id, key, value, seconds)), as_json=as_json)


def split_words(words: Sequence[str]) -> tuple[str | None, dict[str, float | None]]:
    """The job, if it is named, and the values to set.

    Raises:
        ConfigError: for a second word that is not KEY=VALUE, a value that is not a number, or a key that occurs twice.
    """
    jobs = [word for word in words if "=" not in word]
    if len(jobs) > 1:
        raise ConfigError(f"expected one JOB, then KEY=VALUE, got {' '.join(jobs)}; write a value as lr_factor=0.5.")
    values: dict[str, float | None] = {}
    for key, _, text in (word.partition("=") for word in words if "=" in word):
        if key in values:
            raise ConfigError(f"{key} is set twice; give one value.")
        values[key] = None if text.lower() in _NONE else _number(key, text)
    return (jobs[0] if jobs else None), values


def _number(key: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ConfigError(f"{key} must be a number, or none for the configured value, got {text!r}.")
    return value


def _settable(target: Target, remote: str | None, token_file: Path | None) -> dict[str, dict[str, Any]]:
    status = target.client.get_status(target.job_id)
    if "error" in status:
        raise ControlError(str(status["error"]))
    return dict(status.get("settable") or {})


def _lines(settable: dict[str, dict[str, Any]]) -> list[str]:
    if not settable:
        return ["Nothing can be set in this job."]
    rows = [["key", "value", "configured", "minimum", "what it does"]]
    for key, one in settable.items():
        rows.append(
            [key, *(_cell(one.get(name)) for name in ("value", "configured", "minimum")), str(one.get("help") or "")]
        )
    return table(rows, "<>>><", indent="", shrink=4)


def _cell(value: Any) -> str:
    return "-" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _shown(key: str, value: float | None, response: ControlResponse) -> ControlResponse:
    """A response that names the value; with the old one, if the job has reported it."""
    if not response.success:
        return response
    result = (response.data or {}).get("result")
    old = f" (it was {_cell(result['old'])})" if isinstance(result, dict) and "old" in result else ""
    text = f"{key}={'none' if value is None else f'{value:g}'}{old}: {response.message.removeprefix('set: ')}"
    return replace(response, message=text, data={**(response.data or {}), "result": None} if old else response.data)
