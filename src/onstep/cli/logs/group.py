"""`onstep logs list|summary|tail|plot|compare|report|replay`: the group; each command is imported on first use."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

from onstep.cli.application import application, application_at

_COMMANDS = {
    "list": "logs.summary:list_",
    "summary": "logs.summary:summary",
    "tail": "logs.tail:tail",
    "plot": "plot:plot",
    "compare": "logs.summary:compare",
    "report": "plot:report",
    "replay": "logs.replay:replay",
}


class _LateGroup(TyperGroup):
    """Knows its commands by name and imports one only when it is requested."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return typer.main.get_command(application_at(_COMMANDS[cmd_name])) if cmd_name in _COMMANDS else None


app = application(cls=_LateGroup, no_args_is_help=True)


@app.callback()
def logs() -> None:
    """Read the logs of runs: list, summarize, follow, plot and compare them, or send them to a tracker."""
