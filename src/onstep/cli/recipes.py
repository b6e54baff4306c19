"""`onstep recipes list|show`, and `onstep memory`: what a training of one needs."""

from __future__ import annotations

import inspect
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from onstep.analysis.text_tables import table
from onstep.cli.application import application
from onstep.cli.config import configuration
from onstep.config import ConfigContainer, diff, dump_yaml, resolve
from onstep.errors import ConfigError
from onstep.metrics.console_table import format_si
from onstep.metrics.flops import num_floating_point_operations
from onstep.metrics.memory_estimate import MemoryEstimate, estimate_training_memory, format_training_memory_estimate
from onstep.metrics.model_shape import ModelShape, num_active_parameters, num_parameters
from onstep.recipes import RECIPES, get_recipe, summary

app = application(no_args_is_help=True)

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


GPU_SIZES = (8, 16, 24, 32, 40, 48, 80, 96, 141, 192, 288)
"""Memory of GPUs that there are, in GB as they are sold."""
USABLE = 0.9
"""The share of it that the estimate may take; the rest is for the allocator's gaps and the kernels."""


def memory(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="RECIPE | CONFIG.yaml [KEY=VALUE ...]", help="A recipe or a file, and single values."),
    ] = None,
    ranks: Annotated[int, typer.Option(min=1, help="Data-parallel ranks that share the global batch.")] = 1,
) -> None:
    """Tell what memory a training takes on each device, before it starts: onstep memory qwen25_500m

    What makes it smaller: train.micro_batch_size=1, model.recompute_granularity=full, peft.peft_scheme=lora.
    """
    config = _configuration(words or [], ranks)
    estimate = estimate_training_memory(config)
    if estimate is None:
        raise ConfigError("no formula is known for the memory of this model.")
    print(format_training_memory_estimate(estimate))
    recomputed = ", its layers recomputed" if config.model.recompute_granularity == "full" else ""
    print(
        f"\nOn each device, for a micro-batch of {config.train.micro_batch_size} x {config.model.seq_length:,} tokens "
        f"in {config.mixed_precision or 'float32'}{recomputed}, with {config.optimizer.optimizer}.\n{fits(estimate)}"
    )


def fits(estimate: MemoryEstimate) -> str:
    """Which GPUs it fits."""
    sizes = [size for size in GPU_SIZES if estimate.total <= USABLE * size * 1024**3]
    if not sizes:
        return f"It fits no single GPU of up to {GPU_SIZES[-1]} GB, and every rank holds all of it."
    return f"It fits a GPU of {sizes[0]} GB, with a tenth to spare for the allocator and the kernels."


def _configuration(words: list[str], ranks: int) -> ConfigContainer:
    """The configuration of the words, with the weights' model where they are there to be looked at."""
    named = [word for word in words if "=" not in word and not Path(word).is_file()]
    recipe = named[0] if len(named) == 1 else None
    config, _ = configuration([word for word in words if word != recipe], recipe)
    weights = config.checkpoint.pretrained_checkpoint
    is_any = str(config.run.recipe).startswith("any_")
    if is_any and weights is None and config.checkpoint.load is None:
        raise ConfigError(
            f"{config.run.recipe} is whatever model the weights are of; say which: "
            "checkpoint.pretrained_checkpoint=DIR."
        )
    if is_any or (weights is not None and Path(weights).exists()):
        from onstep.training.setup.pretrained import fill_from_pretrained

        config = fill_from_pretrained(config)
    elif config.checkpoint.finetune and weights is None and config.checkpoint.load is None:
        config.checkpoint.pretrained_checkpoint = "the weights"  # which ones is nothing to the memory
    if config.dataset.kind != "text" and not config.dataset.paths:
        config.dataset.paths = ["the data"]
    return sized(resolve(config, ranks))
