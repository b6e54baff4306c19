"""`onstep config show|defaults`."""

from __future__ import annotations

from typing import Annotated

import typer

from onstep.cli.configuration import configuration
from onstep.config import ConfigContainer, dump_yaml, resolve

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False, no_args_is_help=True)


@app.command()
def show(
    words: Annotated[list[str] | None, typer.Argument(metavar="[CONFIG.yaml] [KEY=VALUE ...]")] = None,
    recipe: Annotated[str | None, typer.Option(help="Named configuration to start from.")] = None,
    as_written: Annotated[bool, typer.Option(help="Do not fill in what is derived from other values.")] = False,
) -> None:
    """Print the configuration that `onstep train` with the same words would run, as YAML that it reads back."""
    config, _ = configuration(words or [], recipe)
    print(dump_yaml(config if as_written else resolve(config, 1)), end="")


@app.command()
def defaults() -> None:
    """Print every key with its default, as YAML."""
    print(dump_yaml(ConfigContainer()), end="")
