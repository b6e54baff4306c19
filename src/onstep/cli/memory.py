"""`onstep memory`: estimates the memory that training requires, and measures it."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from onstep.cli.application import Recipe, Words
from onstep.cli.config import configuration_and_keys
from onstep.cli.hub import start_from
from onstep.cli.recipes import sized
from onstep.config import ConfigContainer, resolve
from onstep.errors import ConfigError
from onstep.metrics.memory.changes import Estimator, changes_that_fit
from onstep.metrics.memory.estimate import (
    MemoryEstimate,
    checkpoint_bytes,
    estimate_training_memory,
    format_training_memory_estimate,
)
from onstep.metrics.memory.fitting import shown

GPU_SIZES = (8, 16, 24, 32, 40, 48, 80, 96, 141, 192, 288)
"""Memory sizes of available GPUs, in nominal GB."""
USABLE = 0.9
"""The fraction that an estimate may use; the rest is for fragmentation and kernel workspaces."""


def memory(
    words: Words = None,
    recipe: Recipe = None,
    hf_model: Annotated[
        str | None,
        typer.Option(
            "--hf-model", metavar="DIR", help="A Hugging Face model of any family: a directory with its config.json."
        ),
    ] = None,
    ranks: Annotated[
        int, typer.Option(min=1, help="Ranks of the run, between which its batch and its model are divided.")
    ] = 1,
    gpu_gb: Annotated[
        int | None, typer.Option("--gpu-gb", min=1, metavar="GB", help="Say what would make it fit a GPU of this size.")
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Also build the model, run two steps on random tokens, and compare.")
    ] = False,
) -> None:
    """Estimate the memory that training requires on each device: onstep memory qwen25_500m

    To reduce it: train.micro_batch_size=1, model.recompute_granularity=full, peft.peft_scheme=lora.
    """
    config = _configuration(words or [], recipe, ranks, hf_model)
    estimator = _estimator(config, ranks)
    estimate = estimator(config)
    if estimate is None:
        raise ConfigError("the memory of this model cannot be estimated: no formula is known for it.")
    print(format_training_memory_estimate(estimate))
    recomputed = ", with full recomputation" if config.model.recompute_granularity == "full" else ""
    print(
        f"\nPer device, for a micro-batch of {config.train.micro_batch_size} x {config.model.seq_length:,} tokens "
        f"in {config.mixed_precision or 'float32'}{recomputed}, optimizer {config.optimizer.optimizer}.\n"
        f"{fits(estimate)}"
    )
    size = checkpoint_bytes(config)
    if config.checkpoint.non_persistent_place == "memory" and size is not None:
        print(
            f"A checkpoint in memory (checkpoint.non_persistent_place) has {shown(size)}: see "
            f"checkpoint.memory_dir={config.checkpoint.memory_dir}, on the nodes."
        )
    if gpu_gb is not None:
        print(_changes(config, estimate, gpu_gb, estimator))
    if measure:
        from onstep.cli import memory_measurement

        print(memory_measurement.report(memory_measurement.measure(config)))


def fits(estimate: MemoryEstimate) -> str:
    """A sentence on which GPUs the estimate fits."""
    sizes = [size for size in GPU_SIZES if estimate.total <= _usable(size)]
    if not sizes:
        return f"It does not fit a single GPU of up to {GPU_SIZES[-1]} GB, and every rank holds a full copy."
    return f"It fits a GPU with {sizes[0]} GB, leaving 10% for the allocator and the kernels."


def _usable(gigabytes: int) -> int:
    return int(USABLE * gigabytes * 1024**3)


def _changes(config: ConfigContainer, estimate: MemoryEstimate, gigabytes: int, estimator: Estimator) -> str:
    """What would make the training fit a GPU of this size, a line for each way."""
    if estimate.total <= _usable(gigabytes):
        return f"It fits {gigabytes} GB as it is."
    found = changes_that_fit(config, _usable(gigabytes), device="cuda", estimate=estimator)
    if not found:
        return f"No change of the configuration makes it fit {gigabytes} GB; use a smaller model."
    return "\n".join([f"To fit {gigabytes} GB, from cheap to dear:", *(f"  {change}" for change in found)])


def _estimator(config: ConfigContainer, ranks: int) -> Estimator:
    """The estimate by a formula, or for a model of `transformers`, with seconds of importing torch, by traces."""
    ranks = config.parallel_sizes(ranks).data
    if config.model.hf_config is None:
        return partial(estimate_training_memory, ranks=ranks)
    if config.parallel.tensor_model_parallel_size > 1:
        raise ConfigError(
            f"the memory of a model of transformers on parallel.tensor_model_parallel_size="
            f"{config.parallel.tensor_model_parallel_size} ranks cannot be estimated; set the size to 1 for what one "
            f"rank with all of it requires."
        )
    from onstep.training.setup.family_memory import TracedMemory

    return TracedMemory(ranks)


def _configuration(words: list[str], recipe: str | None, ranks: int, hf_model: str | None = None) -> ConfigContainer:
    """The configuration that `words` describes, with the model of the pretrained weights if they can be read."""
    if hf_model is not None and not any("=" not in word for word in words):
        recipe = recipe or "any"
    config, _, keys = configuration_and_keys(words, recipe)
    if hf_model is not None:
        start_from(config, _directory(hf_model), keys)
    weights = config.checkpoint.pretrained_checkpoint
    is_any = str(config.run.recipe).startswith("any_")
    if is_any and weights is None and config.checkpoint.load is None and config.model.hf_model is None:
        raise ConfigError(
            f"{config.run.recipe} reads its model from the pretrained weights; set "
            "checkpoint.pretrained_checkpoint=DIR."
        )
    if is_any or config.model.hf_model is not None or (weights is not None and Path(weights).exists()):
        from onstep.training.setup.pretrained import fill_from_pretrained

        config = fill_from_pretrained(config)
    elif config.checkpoint.finetune and weights is None and config.checkpoint.load is None:
        config.checkpoint.pretrained_checkpoint = "the weights"  # the estimate does not depend on which ones
    if config.dataset.kind != "text" and not config.dataset.paths:
        config.dataset.paths = ["the data"]
    return sized(resolve(config, ranks))


def _directory(name: str) -> Path:
    """The directory of a model on this machine; nothing is downloaded for an estimate."""
    directory = Path(os.path.expanduser(name))
    if not (directory / "config.json").is_file():
        raise ConfigError(f"--hf-model={name} has no config.json; pass the directory of a Hugging Face model.")
    return directory
