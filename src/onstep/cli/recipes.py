"""`onstep recipes list|show` and `onstep memory`: shows recipes and estimates the memory that training requires."""

from __future__ import annotations

import inspect
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from onstep.analysis.text_tables import table
from onstep.cli.application import Recipe, application
from onstep.cli.completed_words import complete_recipes, complete_words
from onstep.cli.config import configuration
from onstep.config import ConfigContainer, diff, dump_yaml, resolve
from onstep.console.formats import format_si
from onstep.errors import ConfigError
from onstep.metrics.flops import num_floating_point_operations
from onstep.metrics.memory_estimate import MemoryEstimate, estimate_training_memory, format_training_memory_estimate
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


GPU_SIZES = (8, 16, 24, 32, 40, 48, 80, 96, 141, 192, 288)
"""Memory sizes of available GPUs, in nominal GB."""
USABLE = 0.9
"""The fraction that an estimate may use; the rest is for fragmentation and kernel workspaces."""


def memory(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="CONFIG.yaml | RUN | RECIPE [KEY=VALUE ...]",
            help="A file, a run or a recipe, and overrides.",
            autocompletion=complete_words,
        ),
    ] = None,
    recipe: Recipe = None,
    ranks: Annotated[int, typer.Option(min=1, help="Data-parallel ranks that the global batch is split over.")] = 1,
) -> None:
    """Estimate the memory that training requires on each device: onstep memory qwen25_500m

    To reduce it: train.micro_batch_size=1, model.recompute_granularity=full, peft.peft_scheme=lora.
    """
    config = _configuration(words or [], recipe, ranks)
    estimate = estimate_training_memory(config)
    if estimate is None:
        raise ConfigError("the memory of this model cannot be estimated: no formula is known for it.")
    print(format_training_memory_estimate(estimate))
    recomputed = ", with full recomputation" if config.model.recompute_granularity == "full" else ""
    print(
        f"\nPer device, for a micro-batch of {config.train.micro_batch_size} x {config.model.seq_length:,} tokens "
        f"in {config.mixed_precision or 'float32'}{recomputed}, optimizer {config.optimizer.optimizer}.\n"
        f"{fits(estimate)}"
    )


def fits(estimate: MemoryEstimate) -> str:
    """A sentence on which GPUs the estimate fits."""
    sizes = [size for size in GPU_SIZES if estimate.total <= USABLE * size * 1024**3]
    if not sizes:
        return f"It does not fit a single GPU of up to {GPU_SIZES[-1]} GB, and every rank holds a full copy."
    return f"It fits a GPU with {sizes[0]} GB, leaving 10% for the allocator and the kernels."


def _configuration(words: list[str], recipe: str | None, ranks: int) -> ConfigContainer:
    """The configuration that `words` describes, with the model of the pretrained weights if they can be read."""
    config, _ = configuration(words, recipe)
    weights = config.checkpoint.pretrained_checkpoint
    is_any = str(config.run.recipe).startswith("any_")
    if is_any and weights is None and config.checkpoint.load is None:
        raise ConfigError(
            f"{config.run.recipe} reads its model from the pretrained weights; set "
            "checkpoint.pretrained_checkpoint=DIR."
        )
    if is_any or (weights is not None and Path(weights).exists()):
        from onstep.training.setup.pretrained import fill_from_pretrained

        config = fill_from_pretrained(config)
    elif config.checkpoint.finetune and weights is None and config.checkpoint.load is None:
        config.checkpoint.pretrained_checkpoint = "the weights"  # the estimate does not depend on which ones
    if config.dataset.kind != "text" and not config.dataset.paths:
        config.dataset.paths = ["the data"]
    return sized(resolve(config, ranks))
