"""Refuses models and options that tensor-parallel ranks cannot divide."""

from __future__ import annotations

from collections.abc import Iterator

from onstep.config.container import ConfigContainer
from onstep.config.parallel_sizes import ParallelSizes
from onstep.config.sections.model import ModelConfig, default_ffn_hidden_size
from onstep.config.sections.optimizer import OF_PACKAGES
from onstep.errors import ConfigError

_SIZE, _SEQUENCE = "parallel.tensor_model_parallel_size", "parallel.sequence_parallel"


def check_tensor(config: ConfigContainer, sizes: ParallelSizes) -> None:
    """Refuse what the ranks of `tp` cannot divide.

    Args:
        config: the configuration of a run.
        sizes: the number of ranks along each axis.

    Raises:
        ConfigError: naming the value and what works instead.
    """
    if sizes.tp == 1:
        if config.parallel.sequence_parallel:
            raise ConfigError(
                f"{_SEQUENCE}=true divides activations between tensor-parallel ranks, but {_SIZE}=1; set it to false, "
                f"or the size to the ranks that divide each layer."
            )
        return
    for asked, why, remedy in _undivided(config, sizes):
        raise ConfigError(f"{asked} cannot be combined with {_SIZE}={sizes.tp}: {why}; {remedy}.")
    if config.model.hf_config is None and not config.trainer:
        check_model_sizes(config.model, sizes.tp)
    _check_length(config, sizes)


def _undivided(config: ConfigContainer, sizes: ParallelSizes) -> Iterator[tuple[str, str, str]]:
    """What is asked for that is not supported there, why, and what to do."""
    model, optimizer = config.model, config.optimizer
    to_one = f"or {_SIZE} to 1"
    if model.num_moe_experts and (of_experts := config.parallel.expert_tensor_parallel_size) not in (None, sizes.tp):
        asked = f"parallel.expert_tensor_parallel_size={of_experts}"
        yield asked, "experts are divided as the rest of a layer is", "set it to null"
    if model.fused_linear_loss:
        why = "its kernel computes the losses of a whole vocabulary"
        yield "model.fused_linear_loss=true", why, "set it to false: model.chunked_loss needs no more memory"
    if config.ddp.fp8_param_gather:
        yield "ddp.fp8_param_gather=true", "it quantizes whole parameters", f"set it to false, {to_one}"
    if config.train.torch_compile and (model.hf_config is not None or config.trainer):
        why = "blocks of models other than that of section model are not compiled there"
        yield "train.torch_compile=true", why, f"set it to false, {to_one}"
    if optimizer.optimizer in OF_PACKAGES:
        why = "its quantized state is of whole parameters"
        yield f"optimizer.optimizer={optimizer.optimizer}", why, "use adam, sgd or muon"
    if config.peft.base_quantization is not None:
        why = "quantized weights are whole on each rank"
        yield f"peft.base_quantization={config.peft.base_quantization}", why, f"set it to null, {to_one}"


def check_model_sizes(model: ModelConfig, ranks: int) -> None:
    """Refuse sizes of the model of section `model` that tensor-parallel ranks do not divide.

    Args:
        model: its configuration.
        ranks: the number of ranks.

    Raises:
        ConfigError: naming the nearest size that divides.
    """
    heads = model.num_attention_heads
    ffn = model.ffn_hidden_size or default_ffn_hidden_size(model.hidden_size, model.gated_linear_unit)
    groups = model.num_query_groups or heads
    numbers = [("num_attention_heads", heads), ("num_query_groups", groups), ("ffn_hidden_size", ffn)]
    if model.num_moe_experts:
        of_experts = ("moe_ffn_hidden_size", "moe_shared_expert_intermediate_size")
        numbers += [(name, getattr(model, name)) for name in of_experts if getattr(model, name) is not None]
    for name, number in numbers:
        is_of_groups = name == "num_query_groups"
        if number % ranks and not (is_of_groups and ranks % number == 0):
            fits = max(size for size in range(1, min(ranks, number + 1)) if number % size == 0)
            raise ConfigError(
                f"model.{name}={number} must be a multiple of {_SIZE}={ranks}{', or a divisor of it' * is_of_groups}, "
                f"since each rank has as many; the nearest size that divides it is {fits}."
            )
    vocabulary = model.vocab_size
    if vocabulary is not None and not _all_have_tokens(vocabulary, ranks):
        fits = max(size for size in range(1, ranks) if _all_have_tokens(vocabulary, size))
        raise ConfigError(
            f"model.vocab_size={vocabulary} leaves a rank of {_SIZE}={ranks} without a token; the nearest size that "
            f"does not is {fits}."
        )


def _all_have_tokens(vocabulary: int, ranks: int) -> bool:
    """Whether each rank has some of the tokens: `ceil(vocabulary / ranks)`, the last one what is left."""
    return -(-vocabulary // ranks) * (ranks - 1) < vocabulary


def _check_length(config: ConfigContainer, sizes: ParallelSizes) -> None:
    length = config.dataset.seq_length
    if config.parallel.sequence_parallel and length is not None and length % sizes.tp:
        raise ConfigError(
            f"dataset.seq_length={length} must be a multiple of {_SIZE}={sizes.tp}, between whose ranks "
            f"{_SEQUENCE}=true divides each sequence; use {length - length % sizes.tp or sizes.tp}, or set it to false."
        )
