"""Builds the model of a run: new or from trained weights, with LoRA and the user's hooks, on the device, wrapped."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from onstep.config import ConfigContainer, ModelConfig
from onstep.distributed import World, data_parallel
from onstep.errors import ConfigError, MissingWeightsError
from onstep.metrics.model_shape import ModelShape
from onstep.metrics.parameter_counts import num_active_parameters, num_parameters
from onstep.models import ModelHook, Transformer, build_transformer
from onstep.training.lora import add_lora, statistics
from onstep.training.pretrained import find_pretrained, load_pretrained
from onstep.training.run import Run


def build_model(config: ConfigContainer, world: World, state: Run) -> list[nn.Module]:
    """The model's chunks, on the device, wrapped for data parallelism; every rank has the same weights. Collective.

    Trained weights are read unless the run continues from a checkpoint of its own, which has them all. LoRA comes
    before the `pre_wrap_hooks`, which so have the last word on what is trained.

    Raises:
        MissingWeightsError: for fine-tuning without weights.
        ConfigError: when a hook gives no list of modules.
    """
    transformer = _transformer(config, world, state)
    state.sums.flops_per_token = 6.0 * (
        transformer.num_parameters(exclude_embeddings=True) - idle_parameters(config.model)
    )
    if config.peft.peft_scheme is not None:
        add_lora(transformer, config.peft, config.rng.seed)
        if world.is_main:
            print(statistics(transformer), flush=True)  # noqa: T201 - Megatron Bridge's block
    with torch.random.fork_rng(devices=[]):  # what hooks draw follows from the seed too, such as a new head's weights
        torch.manual_seed(config.rng.seed)
        chunks = run_hooks([transformer], state.door.pre_wrap_hooks)
    return data_parallel([chunk.to(world.device) for chunk in chunks], world, config.ddp)


def run_hooks(chunks: list[nn.Module], hooks: Sequence[ModelHook]) -> list[nn.Module]:
    """The chunks after each hook in turn. A hook that raises is named in a note of its error.

    Raises:
        ConfigError: when a hook gives anything but None or a list of modules.
    """
    for hook in hooks:
        name = getattr(hook, "__qualname__", type(hook).__qualname__)
        try:
            given = hook(chunks)
        except Exception as error:
            error.add_note(f"raised by the pre-wrap hook {name}")
            raise
        if given is None:
            continue
        if not isinstance(given, list) or not given or not all(isinstance(chunk, nn.Module) for chunk in given):
            raise ConfigError(
                f"the pre-wrap hook {name} must give None or a list of modules, got {type(given).__name__}; give the "
                f"list that it was handed."
            )
        chunks = given
    return chunks


def _transformer(config: ConfigContainer, world: World, state: Run) -> Transformer:
    if state.checkpoints is not None and state.checkpoints.start is not None:
        return build_transformer(config.model, seed=config.rng.seed)
    source = find_pretrained(config)
    if source is not None:
        with state.timers("load-pretrained-checkpoint").measure(barrier=True):
            return load_pretrained(source, config.model, world)
    if config.checkpoint.finetune:
        raise MissingWeightsError(
            f"checkpoint.load={config.checkpoint.load} has no checkpoint yet, so there is nothing to fine-tune; set "
            f"checkpoint.pretrained_checkpoint to the weights to start from."
        )
    return build_transformer(config.model, seed=config.rng.seed)


def idle_parameters(config: ModelConfig) -> int:
    """Weights of experts that a token does not meet."""
    shape = ModelShape.of(config)
    return 0 if shape is None else num_parameters(shape) - num_active_parameters(shape)
