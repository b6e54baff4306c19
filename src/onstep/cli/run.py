"""`onstep run`: runs an unmodified script of `transformers` with Onstep's Trainer."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from onstep.analysis.text_tables import printable
from onstep.cli.application import application
from onstep.cli.program import Program, run_to_end
from onstep.cli.script import WORDS
from onstep.errors import ConfigError

_MODULE = "-m"


class RunCommand(TyperCommand):
    """A command whose options end with the script, or with `-m MODULE`: everything after it is for the script."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # the context's class has no public name
        """Keep the arguments of the script aside."""
        end = next((at for at, word in enumerate(args, 1) if not word.startswith("-")), len(args))
        ctx.meta[WORDS] = args[end:]
        return super().parse_args(ctx, args[:end])


app = application()


@app.command(cls=RunCommand)
def run(
    context: typer.Context,
    script: Annotated[
        str | None, typer.Argument(metavar="SCRIPT.py [ARGS]", help="The script and its arguments.")
    ] = None,
    module: Annotated[
        str | None, typer.Option(_MODULE, metavar="MODULE [ARGS]", help="A module instead, as in python -m.")
    ] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Say which of its overrides and attributes Onstep honours; run nothing.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --explain: all of it as JSON.")] = False,
) -> None:
    """Run an unmodified script with Onstep's Trainer, TrainingArguments and callbacks in place of transformers'.

    They are Onstep's for every library that the script imports too. Everything else is as in python SCRIPT.py [ARGS].
    On several ranks: torchrun ... -m onstep.run SCRIPT.py, or accelerate launch -m onstep.run SCRIPT.py.
    """
    if bool(script) == bool(module):
        raise ConfigError("give the script to run, onstep run SCRIPT.py [ARGS], or onstep run -m MODULE [ARGS].")
    program = Program(script or module or "", bool(module), context.meta[WORDS])
    program.check()
    if explain:
        print_explanation(program, as_json=as_json)
    elif as_json:
        raise ConfigError("--json belongs to --explain: onstep run --explain --json SCRIPT.py.")
    else:
        context.obj.append(program)


def print_explanation(program: Program, *, as_json: bool) -> None:
    """Print the outcome of a program's overrides and attributes, from its source.

    Raises:
        ConfigError: if it has no readable source, or transformers isn't installed.
    """
    from onstep.explain.explaining import explain_module, explain_script
    from onstep.explain.report import report

    explanation = explain_module(program.name) if program.is_module else explain_script(Path(program.name))
    if as_json:
        print(json.dumps(asdict(explanation), indent=2))
    else:
        for line in report(explanation, f"-m {program.name}" if program.is_module else program.name):
            print(printable(line))


def run_exchanged(program: Program) -> None:
    """Run a program after the exchange of names.

    Raises:
        NoProgramError: if there is no such module.
    """
    from onstep.exchange.install import install, install_in_children

    install()
    install_in_children()
    run_to_end(program)
