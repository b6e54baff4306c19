"""`onstep logs list|summary|tail|plot|compare|report|replay`: the group; each command is imported when it is used."""

from __future__ import annotations

import importlib
from typing import Any

import typer
from typer.core import TyperGroup

_COMMANDS: dict[str, tuple[str, str]] = {
    "list": ("onstep.cli.logs_summary", "list_"),
    "summary": ("onstep.cli.logs_summary", "summary"),
    "tail": ("onstep.cli.logs_tail", "tail"),
    "plot": ("onstep.cli.logs_plot", "plot"),
    "compare": ("onstep.cli.logs_summary", "compare"),
    "report": ("onstep.cli.logs_plot", "report"),
    "replay": ("onstep.cli.logs_replay", "replay"),
}
"""Command name: module and function."""


class _LateGroup(TyperGroup):
    """Knows its commands by name, and imports one when it is asked for."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in _COMMANDS:
            return None
        module, function = _COMMANDS[cmd_name]
        single = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
        single.command(cmd_name)(getattr(importlib.import_module(module), function))
        return typer.main.get_command(single)


app = typer.Typer(
    cls=_LateGroup,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
)


@app.callback()
def logs() -> None:
    """Read the logs of runs: list them, sum them up, follow, plot and compare them, send them to a tracker."""
