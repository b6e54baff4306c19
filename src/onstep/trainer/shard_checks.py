"""Refuses a model or an optimizer that cannot be divided between ranks, before these meet."""

from __future__ import annotations

from typing import cast

import torch
from torch import nn

from onstep.config import ConfigContainer
from onstep.distributed import world_size_from_environment
from onstep.distributed.shards import is_sharded
from onstep.errors import ConfigError
from onstep.models.hf.sequence_regions import check_sequences
from onstep.models.hf.tensor_styles import check_tensors
from onstep.models.transformer import Transformer
from onstep.optim import check_scalable
from onstep.trainer.methods import TrainerMethods
from onstep.trainer.optimizer_checks import is_object
from onstep.trainer.overrides import overrides
from onstep.trainer.stages import check_pipeline


def check_shards(trainer: TrainerMethods, config: ConfigContainer) -> None:
    """Refuse what cannot be divided; a model that `model_init` makes, or the user wraps, is checked when it is there.

    Raises:
        ConfigError: for a model without blocks, an unknown class of blocks, a parameter that blocks share, quantized
            or float16 weights with a loss scale, or an optimizer of the whole parameters.
    """
    model = trainer.model
    sizes = config.parallel_sizes(world_size_from_environment())
    if sizes.pp > 1:
        check_pipeline(trainer, config, sizes)
        if model is not None and trainer.stages is None:
            _check_optimizer(trainer, model, sizes.pp)
    if model is None or overrides(trainer, "_wrap_model"):
        return
    if sizes.tp > 1:
        check_tensors(model, sizes.tp)
        if config.parallel.sequence_parallel and not any(isinstance(one, Transformer) for one in model.modules()):
            check_sequences(model)
        _check_optimizer(trainer, model, sizes.tp)
    if sizes.dp_shard == 1:
        return
    if config.parallel.data_parallel_shard_size == 1:  # ranks divide the updates only
        return
    parameters = list(model.parameters())
    if is_sharded(parameters):  # by an earlier training
        return
    from onstep.distributed.fully_sharded import (  # importing DTensor costs 0.7 s
        blocks_of,
        check_parameters,
        check_shared,
    )

    check_shared(model, blocks_of(model, config.fsdp.wrap))
    check_parameters(model)
    if config.mixed_precision == "fp16_mixed":
        check_scalable(parameters)
    _check_optimizer(trainer, model, sizes.dp_shard)


def _check_optimizer(trainer: TrainerMethods, model: nn.Module, ranks: int) -> None:
    """Refuse an optimizer that has the parameters of a model from before it is divided between ranks."""
    whole = set(map(id, model.parameters()))
    if is_sharded(model.parameters()):  # by an earlier training
        return
    optimizer = trainer.optimizer
    if is_object(optimizer) and hasattr(optimizer, "param_groups"):
        groups = cast(torch.optim.Optimizer, optimizer).param_groups
        if any(id(one) in whole for group in groups for one in group["params"]):
            raise ConfigError(
                f"the {type(optimizer).__name__} in optimizers has the whole parameters of {type(model).__name__}, "
                f"which is divided between {ranks} ranks after it was made; pass a factory, which gets those "
                f"of this rank: optimizers=(lambda parameters: ..., None), or override create_optimizer."
            )
