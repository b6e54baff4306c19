"""Shell completion for `onstep`: commands, options and job ids, in bash, zsh and fish.

The shell runs `onstep` with the variable `_ONSTEP_COMPLETE`. The commands are listed without importing them; only the
one that is being completed is imported.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import typer
from typer import completion as shells
from typer.core import TyperGroup

from onstep.cli.application import application_at
from onstep.cli.exit_codes import ERROR, OK
from onstep.errors import ConfigError, OnstepError

VARIABLE = "_ONSTEP_COMPLETE"
INSTALL, SHOW = "--install-completion", "--show-completion"
SHELLS = ("bash", "zsh", "fish")
Commands = dict[str, tuple[str, str]]


def complete(commands: Commands) -> int:
    """Print what the shell asks for in the environment; the exit code."""
    root = typer.Typer(cls=_group(commands), add_completion=True, rich_markup_mode=None)
    root.callback()(lambda: None)
    try:
        root(args=[], prog_name="onstep", complete_var=VARIABLE)
    except SystemExit as exit_:
        return exit_.code if isinstance(exit_.code, int) else ERROR
    except OnstepError:  # the shell has no place for a message
        return ERROR
    return OK


def install_or_show(words: Sequence[str]) -> None:
    """`onstep --install-completion [SHELL]` and `onstep --show-completion [SHELL]`.

    Raises:
        ConfigError: for an unknown shell, or if none is given and the current one is unknown.
    """
    option, *rest = words
    shell = _shell(option, rest)
    if option == SHOW:
        print(_script(shell))
    else:
        _, path = shells.install(shell=shell, prog_name="onstep", complete_var=VARIABLE)  # type: ignore[attr-defined]
        print(f"Completion for {shell} is installed in {path}; it works in new shells.")


def _script(shell: str) -> str:
    text = shells.get_completion_script(prog_name="onstep", complete_var=VARIABLE, shell=shell)  # type: ignore[attr-defined]
    return str(text)


def _shell(option: str, words: Sequence[str]) -> str:
    shell = words[0] if words else _current_shell()
    if len(words) > 1 or shell not in SHELLS:
        given = " ".join(words) or f"{shell or 'an unknown shell'} as the current one"
        raise ConfigError(f"{option} must be followed by one of {', '.join(SHELLS)}, got {given}.")
    return shell


def _current_shell() -> str | None:
    import shellingham

    try:
        name, _ = shellingham.detect_shell()
    except shellingham.ShellDetectionFailure:
        return None
    return str(name)


def _group(commands: Commands) -> type[TyperGroup]:
    """A group that lists the commands by name and help, and imports one when its words are completed."""

    class Root(TyperGroup):
        def list_commands(self, ctx: Any) -> list[str]:
            return list(commands)

        def get_command(self, ctx: Any, cmd_name: str) -> Any:
            return _listed(cmd_name, commands[cmd_name][1]) if cmd_name in commands else None

        def resolve_command(self, ctx: Any, args: list[str]) -> Any:
            name, *rest = args
            known = name in commands
            return name, typer.main.get_command(application_at(commands[name][0])) if known else None, rest

    return Root


def _listed(name: str, text: str) -> Any:
    """A command with a name and a help, and nothing else."""
    single = typer.Typer(add_completion=False, rich_markup_mode=None)
    single.command(name, help=text)(lambda: None)
    return typer.main.get_command(single)
