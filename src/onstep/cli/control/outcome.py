"""Prints the outcome of a command, and asks before one that can lose work."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import typer

from onstep.analysis.text_tables import printable
from onstep.cli.exit_codes import ERROR
from onstep.control import ControlError, ControlResponse
from onstep.errors import ConfigError


def show(response: ControlResponse, *, as_json: bool) -> None:
    """Print a response and the result in it.

    Raises:
        ControlError: if the command failed.
        typer.Exit: the same, after JSON was printed.
    """
    if as_json:
        print(json.dumps({"success": response.success, "message": response.message, "data": response.data}, indent=2))
        if not response.success:
            raise typer.Exit(ERROR)
        return
    if not response.success:
        raise ControlError(printable(response.message))
    print(printable(response.message))
    for line in result_lines((response.data or {}).get("result")):
        print(line)


def result_lines(result: Any, indent: str = "") -> Iterator[str]:
    """The result of a command as lines: texts as they are, the parts of an object below their names."""
    if isinstance(result, str):
        yield from (f"{indent}{printable(line.expandtabs())}" for line in result.splitlines())
    elif isinstance(result, dict) and result.keys() == {"prompt", "text"}:
        yield from result_lines(_continued(str(result["prompt"]), str(result["text"])), indent)
    elif isinstance(result, dict):
        for name, part in result.items():
            if isinstance(part, (dict, list)) or (isinstance(part, str) and "\n" in part):
                yield f"{indent}{printable(str(name))}:"
                yield from result_lines(part, f"{indent}  ")
            else:
                yield f"{indent}{printable(f'{name}: {part}')}"
    elif isinstance(result, list):
        for part in result:
            yield from result_lines(part, indent)
    elif result is not None:
        yield f"{indent}{printable(str(result))}"


def _continued(prompt: str, text: str) -> str:
    """A prompt and the generated text after it."""
    return text if text.startswith(prompt) else f"{prompt}{text}"


def confirm(question: str, *, force: bool) -> None:
    """Ask before a command that can lose work.

    Raises:
        ConfigError: if there is no terminal to ask on.
        typer.Exit: if the answer is no.
    """
    if force:
        return
    if not sys.stdin.isatty():
        raise ConfigError(f"{question} There is no terminal to ask on; repeat the command with --force.")
    if not typer.confirm(question):
        print("Nothing was sent.")
        raise typer.Exit(ERROR)
