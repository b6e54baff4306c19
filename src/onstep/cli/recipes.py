"""`onstep recipes list|show`: shows recipes."""

from __future__ import annotations

import inspect
from enum import StrEnum
from typing import Annotated

import typer

from onstep.analysis.text_tables import printable, table
from onstep.cli.application import application
from onstep.cli.completed_words import Offer, complete_recipes, complete_runs
from onstep.cli.config import configuration, is_recipe, run_directory
from onstep.cli.runs import run_names
from onstep.config import ConfigContainer, diff, dump_yaml
from onstep.config.suggestions import nearest, shown
from onstep.console.formats import format_si
from onstep.errors import ConfigError
from onstep.metrics.flops import num_floating_point_operations
from onstep.metrics.model_shape import ModelShape, num_active_parameters, num_parameters
from onstep.recipes import RECIPES, get_recipe, summary

app = application(no_args_is_help=True)

BYTE_VOCABULARY = 257
"""Vocabulary size of the built-in tokenizer, used where a recipe sets none."""


_UNKNOWN = "-"


class Format(StrEnum):
    """Output formats of `show`."""

    TEXT = "text"
    YAML = "yaml"


def _complete(incomplete: str) -> list[Offer]:
    return [*complete_recipes(incomplete), *complete_runs(incomplete)]


@app.command("list")
def list_recipes(
    all_forms: Annotated[bool, typer.Option("--all", help="Also list the fine-tuning variants one by one.")] = False,
) -> None:
    """List the recipes with total and active parameters, training FLOPs per token, and a description."""
    names = [name for name in RECIPES if all_forms or "_finetune" not in name]
    rows = [("RECIPE", "PARAMETERS", "ACTIVE", "FLOPS/TOKEN", "DESCRIPTION"), *map(_row, names)]
    print("\n".join(table(rows, "<>>><", indent="", shrink=4)))
    if not all_forms:
        print("\nEach is also available as NAME_finetune and NAME_finetune_lora; any_finetune infers the model.")


@app.command()
def show(
    name: Annotated[
        str,
        typer.Argument(help="Recipe name, such as tiny_gpt, or the path or name of a run.", autocompletion=_complete),
    ],
    form: Annotated[
        Format,
        typer.Option("--format", help="text: differences from the defaults; yaml: a complete file for onstep train."),
    ] = Format.TEXT,
) -> None:
    """Show a recipe: onstep recipes show NAME; --format yaml prints a configuration file for `onstep train`.

    NAME may also be a run's, whose configuration is shown; a name that both have is the recipe's (write runs/NAME).
    """
    run = None if is_recipe(name) else run_directory(name)
    if run is None and (near := nearest(name, run_names())) and not nearest(name, list(RECIPES), cutoff=0.6):
        raise ConfigError(f"there is no run and no recipe {shown(name)}.{near}")
    config = get_recipe(name)() if run is None else configuration([name], None)[0]
    if form is Format.YAML:
        print(dump_yaml(config), end="")
        return
    if run is None:
        recipe = get_recipe(name)
        print(f"{config.run.recipe}: {inspect.cleandoc(getattr(recipe, 'func', recipe).__doc__ or '')}\n")
    else:
        print(printable(f"the run {run}, of the recipe {config.run.recipe}"), end="\n\n")
    parameters, active, flops = _sizes(config)
    if parameters != _UNKNOWN:
        print(f"{parameters} parameters, {active} active per token; {flops} FLOPs per token\n")
    for key, _, value in diff(ConfigContainer(), config):
        print(f"{key}={value}")


def sized(config: ConfigContainer) -> ConfigContainer:
    """Set the built-in tokenizer's vocabulary size where the configuration has none, in place."""
    if config.model.vocab_size is None:
        config.model.vocab_size = config.tokenizer.vocab_size or BYTE_VOCABULARY
    return config


def _row(name: str) -> tuple[str, str, str, str, str]:
    config = get_recipe(name)()
    return (name, *_sizes(config), summary(name))


def _sizes(config: ConfigContainer) -> tuple[str, str, str]:
    """Parameters, those that are active per token, and FLOPs per token, where they do not depend on weights."""
    shape = None if str(config.run.recipe).startswith("any_") else ModelShape.of(sized(config).model)
    if shape is None:
        return _UNKNOWN, _UNKNOWN, _UNKNOWN
    flops = num_floating_point_operations(config, 1) / shape.seq_length
    return format_si(num_parameters(shape)), format_si(num_active_parameters(shape)), format_si(flops)
