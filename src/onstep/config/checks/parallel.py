"""Refuses parallelism that is configured but not supported."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

from onstep.config.checks.tensor import check_tensor
from onstep.config.container import ConfigContainer
from onstep.config.later_parts import LATER_PARTS
from onstep.config.pipelines import layers_of_stages, schedule_named, schedule_of
from onstep.config.sections.optimizer import OF_PACKAGES
from onstep.config.suggestions import shown
from onstep.errors import ConfigError


def check_parallel(config: ConfigContainer, ranks: int) -> None:
    """Refuse what is not supported, and sizes that do not make up the ranks.

    Args:
        config: the configuration of a run.
        ranks: the number of ranks, which are the processes of a run.

    Raises:
        ConfigError: naming the value and what works instead.
    """
    parallel = config.parallel
    for name, part in LATER_PARTS.items():
        value = getattr(parallel, name)
        if value not in part.values:
            allowed = " or ".join({None: "null", False: "false"}.get(one, str(one)) for one in part.values)
            raise ConfigError(f"parallel.{name}={shown(value)} must be {allowed}: {part.why}; {part.remedy}.")
    sizes = config.parallel_sizes(ranks)
    _check_pipeline(config, ranks)
    check_tensor(config, sizes)
    _check_shards(config, sizes.dp_shard)
    if config.ddp.use_distributed_optimizer and (ranks > 1 or config.ddp.fp8_param_gather):
        _check_distributed_optimizer(config)
    elif config.ddp.overlap_param_gather and ranks > 1 and config.parallel.data_parallel_shard_size == 1:
        raise ConfigError(
            "ddp.overlap_param_gather=true gathers what ranks have updated for each other, but each updates all of the "
            "model; set ddp.use_distributed_optimizer=true, or the key to false in ddp and optimizer."
        )


def _check_pipeline(config: ConfigContainer, ranks: int) -> None:
    """Refuse what a pipeline cannot do, and layers or micro-batches that do not fit it."""
    parallel, pp = config.parallel, config.parallel.pipeline_model_parallel_size
    if pp == 1:
        if parallel.pipeline_schedule is not None:
            schedule_named(parallel.pipeline_schedule)  # one without effect is named when the run begins
        return
    schedule = schedule_of(parallel)
    where = f"parallel.pipeline_model_parallel_size={pp}, schedule {schedule.name}"
    _check_values(config, _NOT_IN_A_PIPELINE, where)
    if config.model.hf_config is not None:
        _check_values(config, _NOT_OF_TRANSFORMERS, f"models of transformers, {where}")
    if schedule.halves_backward:
        _check_values(config, _NOT_IN_HALVES, f"{where}, whose backward passes come in halves")
    if config.model.mtp_num_layers and config.model.position_embedding_type == "learned_absolute":
        raise ConfigError(
            f"model.position_embedding_type=learned_absolute is not supported with model.mtp_num_layers and {where}, "
            f"whose last stage has no table of positions; set it to rope, or mtp_num_layers to null."
        )
    balancing, recomputes = config.model.moe_router_load_balancing_type, config.model.recompute_granularity
    if recomputes and "global_aux_loss" in ([balancing] if isinstance(balancing, str) else balancing):
        raise ConfigError(
            f"model.moe_router_load_balancing_type=global_aux_loss counts the choices up to a micro-batch, which "
            f"model.recompute_granularity={recomputes} would do later than others in a pipeline; set one of them to "
            f"null or aux_loss."
        )
    if schedule.chunks == "two" and config.model.share_embeddings_and_output_weights and _divides_model(config, ranks):
        raise ConfigError(
            f"parallel.pipeline_schedule={schedule.name} has both ends of the model on one rank, whose tied embedding "
            f"cannot be in the shards of both; set model.share_embeddings_and_output_weights=false, "
            f"parallel.data_parallel_shard_size=1 and ddp.use_distributed_optimizer=false, or "
            f"parallel.pipeline_schedule=1F1B."
        )
    sizes = config.parallel_sizes(ranks)
    if config.model.hf_config is not None and (sizes.tp > 1 or _divides_model(config, ranks)):
        raise ConfigError(
            f"parallel.pipeline_model_parallel_size={pp} cannot divide the stages of a model of transformers further "
            f"(model.hf_config); set parallel.tensor_model_parallel_size=1, parallel.data_parallel_shard_size=1 and "
            f"ddp.use_distributed_optimizer=false."
        )
    number = _num_layers(config)
    if number:
        layers_of_stages(parallel, number)
    batch, micro = config.train.global_batch_size, config.train.micro_batch_size
    if batch and micro:
        data = sizes.data
        count, least = batch // (micro * data), schedule.least(pp)
        if not schedule.runs(pp, count):
            smaller = (one for one in range(micro - 1, 0, -1) if batch % (one * data) == 0)
            fitting = next((one for one in smaller if schedule.runs(pp, batch // (one * data))), None)
            close = next(one for one in range(max(count, least), count + least + pp + 1) if schedule.runs(pp, one))
            remedy = "" if fitting is None else f"train.micro_batch_size={fitting}, "
            raise ConfigError(
                f"train.global_batch_size={batch} gives {count} micro-batch{'es' * (count != 1)} of {micro} to each of "
                f"{data} pipeline{'s' * (data != 1)}, which the schedule {schedule.name} on {pp} ranks does not run; "
                f"use {remedy}train.global_batch_size={close * micro * data}, or "
                f"parallel.pipeline_schedule={schedule.for_any_number.name}."
            )


def _divides_model(config: ConfigContainer, ranks: int) -> bool:
    """Whether ranks of data have parts of the model or of its updates."""
    sizes = config.parallel_sizes(ranks)
    is_sharded = config.parallel.data_parallel_shard_size != 1 and sizes.dp_shard > 1
    return is_sharded or (config.ddp.use_distributed_optimizer and sizes.data > 1)


def _check_values(config: ConfigContainer, supported: dict[str, tuple[Any, ...]], where: str) -> None:
    for key, usual in supported.items():
        value: Any = attrgetter(key)(config)
        if value not in usual:
            remedy = " or ".join(dict.fromkeys(_written(one) for one in usual))
            raise ConfigError(
                f"{key}={_written(value)} is not supported with {where}; set it to {remedy}, or the size to 1."
            )


def _num_layers(config: ConfigContainer) -> int | None:
    """The layers of the model, by the section `model` or its `hf_config`; None if that does not say."""
    content = config.model.hf_config
    if content is None:
        return config.model.num_layers
    named = (content.get("text_config") or content).get
    found = next((one for one in map(named, ("num_hidden_layers", "n_layer", "num_layers")) if one), None)
    return found if isinstance(found, int) else None


def _written(value: object) -> str:
    """A value as it is written in a file."""
    return str(value).lower() if isinstance(value, bool) else "null" if value is None else str(value)


_OFF: tuple[Any, ...] = (False,)
_NOT_IN_A_PIPELINE: dict[str, tuple[Any, ...]] = {
    "ddp.sync_each_micro_batch": (None, False),
    "ddp.overlap_grad_reduce": _OFF,
    "ddp.overlap_param_gather": _OFF,
    "ddp.fp8_param_gather": _OFF,
    "model.offload_activations": _OFF,
    "peft.base_quantization": (None,),
    "optimizer.optimizer": ("adam", "adamw", "sgd", "muon"),
}
"""The keys that a pipeline does not support, each with the values that it does."""
_NOT_IN_HALVES: dict[str, tuple[Any, ...]] = {
    "model.recompute_granularity": (None, "full"),
    "model.mtp_num_layers": (None, 0),
}
"""The same where gradients of weights are computed later: results are kept for one pass, a weight is used once."""
_NOT_OF_TRANSFORMERS: dict[str, tuple[Any, ...]] = {"peft.peft_scheme": (None,), "train.torch_compile": _OFF}
"""The same for those that it supports for Onstep's transformer only."""


def _check_distributed_optimizer(config: ConfigContainer) -> None:
    """Refuse what ranks that divide the updates of a whole model cannot do."""
    asked, ddp = "ddp.use_distributed_optimizer=true", config.ddp
    if config.parallel.data_parallel_shard_size != 1:
        raise ConfigError(
            f"{asked} divides the updates of a whole model, but parallel.data_parallel_shard_size="
            f"{config.parallel.data_parallel_shard_size} the model itself, whose ranks divide the updates too; set "
            f"ddp.use_distributed_optimizer and optimizer.use_distributed_optimizer to false, or the size to 1."
        )
    for key, rule in (
        ("sync_each_micro_batch", "sums gradients once in a step"),
        ("broadcast_buffers", "keeps the buffers of each rank"),
        ("static_graph", "does not rely on a fixed graph"),
    ):
        if getattr(ddp, key):
            raise ConfigError(f"ddp.{key}=true has no effect with {asked}, which {rule}; set one of them to false.")
    if config.optimizer.optimizer in OF_PACKAGES:
        raise ConfigError(
            f"optimizer.optimizer={config.optimizer.optimizer} has quantized state, which cannot be of a part of a "
            f"parameter, as {asked} requires; use adam, sgd or muon."
        )
    if ddp.fp8_param_gather and config.optimizer.params_dtype != "float32":
        raise ConfigError(
            f"ddp.fp8_param_gather=true keeps float32 masters of float32 weights, but optimizer.params_dtype="
            f"{config.optimizer.params_dtype}; leave it float32, and set mixed_precision=bf16_mixed."
        )
    if ddp.overlap_param_gather and config.train.torch_compile:
        raise ConfigError(
            "ddp.overlap_param_gather=true waits for parameters before each module is called, which code that "
            "torch.compile has made of a whole model leaves out; set train.torch_compile=false, or the key to false in "
            "ddp and optimizer."
        )


def _check_shards(config: ConfigContainer, shards: int) -> None:
    """Refuse what cannot be divided between ranks."""
    within, optimizer = config.fsdp.reshard_after_forward, config.optimizer.optimizer
    if shards == 1 or config.parallel.data_parallel_shard_size == 1:
        return
    if within is not True and within is not False and (within >= shards or shards % within):
        raise ConfigError(
            f"fsdp.reshard_after_forward={within} must divide the {shards} ranks of "
            f"parallel.data_parallel_shard_size, and be less; or true (all of them), or false (gathered weights are "
            f"kept)."
        )
    if optimizer in OF_PACKAGES:
        raise ConfigError(
            f"optimizer.optimizer={optimizer} has quantized state, which cannot be divided between {shards} ranks; use "
            f"adam, sgd or muon."
        )
    if config.peft.base_quantization is not None:
        raise ConfigError(
            f"peft.base_quantization={config.peft.base_quantization} holds weights that cannot be divided between "
            f"{shards} ranks; set parallel.data_parallel_shard_size=1, by which each rank has them whole."
        )
