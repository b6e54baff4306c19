"""`onstep recipes list|show`."""

from __future__ import annotations

import inspect
from enum import StrEnum
from typing import Annotated

import typer

from onstep.cli.tables import table
from onstep.config import ConfigContainer, diff, dump_yaml
from onstep.metrics.flops import num_floating_point_operations
from onstep.metrics.formatting import format_si
from onstep.metrics.model_shape import ModelShape
from onstep.metrics.parameter_counts import num_active_parameters, num_parameters
from onstep.recipes import RECIPES, get_recipe, summary

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False, no_args_is_help=True)

BYTE_VOCABULARY = 257
"""Tokens of the built-in tokenizer, where a recipe leaves the vocabulary to it."""


class Format(StrEnum):
    """How `show` prints."""

    TEXT = "text"
    YAML = "yaml"


@app.command("list")
def list_recipes(
    all_forms: Annotated[bool, typer.Option("--all", help="The forms for fine-tuning one by one, too.")] = False,
) -> None:
    """List the recipes: parameters (and how many a token meets), training FLOPs per token, what they are."""
    names = [name for name in RECIPES if all_forms or "_finetune" not in name]
    rows = [("RECIPE", "PARAMETERS", "ACTIVE", "FLOPS/TOKEN", "WHAT IT IS"), *map(_row, names)]
    print("\n".join(table(rows, "<>>><", indent="", shrink=4)))
    if not all_forms:
        print("\nEach also as NAME_finetune and NAME_finetune_lora; any_finetune takes the model from the weights.")


@app.command()
def show(
    name: Annotated[str, typer.Argument(help="Name of a recipe, such as tiny_gpt.")],
    form: Annotated[
        Format,
        typer.Option("--format", help="text: what differs from the defaults; yaml: all of it, for onstep train."),
    ] = Format.TEXT,
) -> None:
    """Show a recipe: onstep recipes show NAME; with --format yaml as a file that `onstep train` takes."""
    config = get_recipe(name)()
    if form is Format.YAML:
        print(dump_yaml(config), end="")
        return
    recipe = get_recipe(name)
    print(f"{config.run.recipe}: {inspect.cleandoc(getattr(recipe, 'func', recipe).__doc__ or '')}\n")
    _, parameters, active, flops, _ = _row(str(config.run.recipe))
    print(f"{parameters} parameters, {active} of them for each token; {flops} FLOPs a token\n")
    for key, _, value in diff(ConfigContainer(), config):
        print(f"{key}={value}")


def sized(config: ConfigContainer) -> ConfigContainer:
    """The same configuration, with a vocabulary where it leaves it to the built-in tokenizer. It is written to."""
    if config.model.vocab_size is None:
        config.model.vocab_size = BYTE_VOCABULARY
    return config


def _row(name: str) -> tuple[str, str, str, str, str]:
    config = get_recipe(name)()
    if name.startswith("any_"):  # whatever the weights are of
        return (name, "-", "-", "-", summary(name))
    shape = ModelShape.of(sized(config).model)
    assert shape is not None
    flops = num_floating_point_operations(config, 1) / shape.seq_length
    total, active = format_si(num_parameters(shape)), format_si(num_active_parameters(shape))
    return (name, total, active, format_si(flops), summary(name))
