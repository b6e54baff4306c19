"""Builds the Typer application of each `onstep` command, on first use."""

from __future__ import annotations

import importlib
from typing import Annotated, Any

import typer

Imports = Annotated[list[str] | None, typer.Option("--import", help="Python file with your code; repeatable.")]
Recipe = Annotated[str | None, typer.Option(help="Recipe to start from; default: tiny_gpt.")]
Labels = Annotated[
    list[str] | None, typer.Option(metavar="A,B", help="A label for each run; repeatable, once per run.")
]


def application(**settings: Any) -> typer.Typer:
    """A Typer application with the settings shared by all commands."""
    return typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False, **settings)


def application_at(place: str) -> typer.Typer:
    """The application at ``module:name`` of this package; a function there becomes its single command."""
    module, _, name = place.partition(":")
    found = getattr(importlib.import_module(f"onstep.cli.{module}"), name)
    if isinstance(found, typer.Typer):
        return found
    single = application()
    single.command(name.rstrip("_"))(found)
    return single
