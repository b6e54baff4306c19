"""How the commands of `onstep` are made, each when it is used."""

from __future__ import annotations

import importlib
from typing import Annotated, Any

import typer

Imports = Annotated[list[str] | None, typer.Option("--import", help="Python file with your code; may be given again.")]
Recipe = Annotated[str | None, typer.Option(help="Named configuration to start from; default tiny_gpt.")]
Labels = Annotated[
    list[str] | None, typer.Option(metavar="A,B", help="A name for each run; may be given once for each.")
]


def application(**settings: Any) -> typer.Typer:
    """A Typer application with the settings that all commands have in common."""
    return typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False, **settings)


def application_at(place: str) -> typer.Typer:
    """The application at ``module:name`` of this package, or one of the single command that the function there is."""
    module, _, name = place.partition(":")
    found = getattr(importlib.import_module(f"onstep.cli.{module}"), name)
    if isinstance(found, typer.Typer):
        return found
    single = application()
    single.command(name.rstrip("_"))(found)
    return single
