"""`onstep memory`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from onstep.cli.config import configuration
from onstep.cli.recipes import sized
from onstep.config import ConfigContainer, resolve
from onstep.errors import ConfigError
from onstep.metrics.memory_estimate import MemoryEstimate, estimate_training_memory, format_training_memory_estimate

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False, no_args_is_help=True)

GPU_SIZES = (8, 16, 24, 32, 40, 48, 80, 96, 141, 192, 288)
"""Memory of GPUs that there are, in GB as they are sold."""
USABLE = 0.9
"""The share of it that the estimate may take; the rest is for the allocator's gaps and the kernels."""


@app.command()
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
    print(f"\n{_batch(config)}\n{fits(estimate)}")


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
        from onstep.training.pretrained import fill_from_pretrained

        config = fill_from_pretrained(config)
    elif config.checkpoint.finetune and weights is None and config.checkpoint.load is None:
        config.checkpoint.pretrained_checkpoint = "the weights"  # which ones is nothing to the memory
    if config.dataset.kind != "text" and not config.dataset.paths:
        config.dataset.paths = ["the data"]
    return sized(resolve(config, ranks))


def _batch(config: ConfigContainer) -> str:
    batch = config.train.micro_batch_size
    recomputed = ", its layers recomputed" if config.model.recompute_granularity == "full" else ""
    return (
        f"On each device, for a micro-batch of {batch} x {config.model.seq_length:,} tokens in "
        f"{config.mixed_precision or 'float32'}{recomputed}, with {config.optimizer.optimizer}."
    )
