"""`onstep recipes list|show`: shows recipes."""

from __future__ import annotations

import inspect
from enum import StrEnum
from typing import Annotated

import typer

from onstep.analysis.text_tables import table
from onstep.cli.application import application
from onstep.cli.completed_words import complete_recipes
from onstep.config import ConfigContainer, diff, dump_yaml
from onstep.console.formats import format_si
from onstep.metrics.flops import num_floating_point_operations
from onstep.metrics.model_shape import ModelShape, num_active_parameters, num_parameters
from onstep.recipes import RECIPES, get_recipe, summary

app = application(no_args_is_help=True)

BYTE_VOCABULARY = 257
"""Vocabulary size of the built-in tokenizer, used where a recipe sets none."""


class Format(StrEnum):
    """Output formats of `show`."""

    TEXT = "text"
    YAML = "yaml"


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
    name: Annotated[str, typer.Argument(help="Recipe name, such as tiny_gpt.", autocompletion=complete_recipes)],
    form: Annotated[
        Format,
        typer.Option("--format", help="text: differences from the defaults; yaml: a complete file for onstep train."),
    ] = Format.TEXT,
) -> None:
    """Show a recipe: onstep recipes show NAME; --format yaml prints a configuration file for `onstep train`."""
    config = get_recipe(name)()
    if form is Format.YAML:
        print(dump_yaml(config), end="")
        return
    recipe = get_recipe(name)
    print(f"{config.run.recipe}: {inspect.cleandoc(getattr(recipe, 'func', recipe).__doc__ or '')}\n")
    _, parameters, active, flops, _ = _row(str(config.run.recipe))
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
    if name.startswith("any_"):  # its size depends on the weights
        return (name, "-", "-", "-", summary(name))
    shape = ModelShape.of(sized(config).model)
    assert shape is not None
    flops = num_floating_point_operations(config, 1) / shape.seq_length
    total, active = format_si(num_parameters(shape)), format_si(num_active_parameters(shape))
    return (name, total, active, format_si(flops), summary(name))
