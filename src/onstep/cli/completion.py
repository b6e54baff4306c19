"""Shell completion for `onstep`: commands, options, keys and values, runs, recipes and jobs, in bash, zsh and fish.

The shell runs `onstep` with the variable `_ONSTEP_COMPLETE`. The commands are listed without importing them; only the
one that is being completed is imported. Typer finds the words, by its protocol for fish, which has each with its help;
they are written here as the shell reads them, since Typer's bash and zsh set a blank after `optimizer.lr=`, and bash
treats `=` as the end of a word.
"""

from __future__ import annotations

import io
import os
import shlex
from collections.abc import Sequence
from contextlib import redirect_stdout
from typing import Any

import typer
from typer import completion as shells
from typer.core import TyperGroup

from onstep.cli.completed_words import GOES_ON
from onstep.cli.exit_codes import ERROR, OK
from onstep.errors import ConfigError, OnstepError

VARIABLE = "_ONSTEP_COMPLETE"
INSTALL, SHOW = "--install-completion", "--show-completion"
SHELLS = ("bash", "zsh", "fish")
_ONE_LINE = "100000"
"""Columns, so that Typer does not wrap the help of a word."""
Commands = dict[str, tuple[str, str]]


def complete(commands: Commands) -> int:
    """Print what the shell asks for in the environment; the exit code."""
    shell = os.environ[VARIABLE].rpartition("_")[2]
    if shell == "bash":
        words, before = _in_bash(os.environ.get("COMP_WORDS", ""), int(os.environ.get("COMP_CWORD") or 0))
        code, lines = _lines(commands, COMP_WORDS=" ".join(words), COMP_CWORD=str(len(words) - 1))
        print("\n".join(line.removeprefix(before) for line in lines))
    elif shell == "zsh":
        asked = {VARIABLE: "complete_fish", "_TYPER_COMPLETE_FISH_ACTION": "get-args", "COLUMNS": _ONE_LINE}
        code, lines = _lines(commands, **asked)
        print(_for_zsh(lines) if lines else "compset -P '*='; _files")
    else:
        os.environ["COLUMNS"] = _ONE_LINE
        code = _typer(commands)
    return code


def _lines(commands: Commands, **asked: str) -> tuple[int, list[str]]:
    """The exit code, and what Typer prints when a shell asks so."""
    os.environ.update(asked)
    with redirect_stdout(io.StringIO()) as out:
        code = _typer(commands)
    return code, [line for line in out.getvalue().splitlines() if line]


def _typer(commands: Commands) -> int:
    root = typer.Typer(cls=_group(commands), add_completion=True, rich_markup_mode=None)
    root.callback()(lambda: None)
    try:
        root(args=[], prog_name="onstep", complete_var=VARIABLE)
    except SystemExit as exit_:
        return exit_.code if isinstance(exit_.code, int) else ERROR
    except OnstepError:  # the shell has no place for a message
        return ERROR
    return OK


def _in_bash(text: str, current: int) -> tuple[list[str], str]:
    """The words up to the cursor, and the part of its last word that bash holds for words of their own.

    Bash splits `optimizer.lr=3` into `optimizer.lr`, `=` and `3`, and replaces only the last of these.
    """
    pieces = text.split("\n" if "\n" in text else " ")[: current + 1]
    pieces += [""] * (current + 1 - len(pieces))
    words: list[str] = []
    is_open, before = False, ""
    for piece in pieces:
        is_break = bool(piece) and not piece.strip("=:")
        if words and piece and (is_break or is_open):
            before = words[-1] + (piece if is_break else "")
            words[-1] += piece
        else:
            words.append(piece)
            before = ""
        is_open = is_break
    return words, before


def _for_zsh(rows: list[str]) -> str:
    """Commands that offer the words, each with its help; no blank follows a word that is not complete yet."""
    arrays = {"ends": list[str](), "goes_on": list[str]()}
    for row in rows:
        word, _, text = row.partition("\t")
        described = word.replace(":", "\\:") + (f":{text}" if text else "")
        arrays["goes_on" if word.endswith(GOES_ON) else "ends"].append(shlex.quote(described))
    lines = [f"local -a {name}; {name}=({' '.join(words)});" for name, words in arrays.items()]
    return "\n".join([*lines, "_describe word ends -- goes_on -S ''"])


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
        path.write_text(_script(shell), encoding="utf-8")
        print(f"Completion for {shell} is installed in {path}; it works in new shells.")


def _script(shell: str) -> str:
    text = shells.get_completion_script(prog_name="onstep", complete_var=VARIABLE, shell=shell)  # type: ignore[attr-defined]
    ending = "".join(f"|*{one}" for one in GOES_ON).removeprefix("|")
    no_blank = f"    case ${{COMPREPLY[0]}} in ({ending}) compopt -o nospace 2>/dev/null;; esac\n    return 0"
    return str(text).replace("    return 0", no_blank) if shell == "bash" else str(text)


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
            from onstep.cli.application import application_at

            name, *rest = args
            known = name in commands
            return name, typer.main.get_command(application_at(commands[name][0])) if known else None, rest

    return Root


def _listed(name: str, text: str) -> Any:
    """A command with a name and a help, and nothing else."""
    single = typer.Typer(add_completion=False, rich_markup_mode=None)
    single.command(name, help=text)(lambda: None)
    return typer.main.get_command(single)
