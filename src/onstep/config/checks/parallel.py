"""Refuses parallelism that is configured but not supported."""

from __future__ import annotations

import logging

from onstep.config.container import ConfigContainer
from onstep.config.later_parts import LATER_PARTS
from onstep.config.sections.optimizer import OF_BITSANDBYTES
from onstep.config.suggestions import shown
from onstep.errors import ConfigError
from onstep.files.bounded_reading import integer_from_environment

logger = logging.getLogger(__name__)

_told: set[str] = set()
"""Warnings so far: a run checks its configuration more than once."""


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
    _check_shards(config, config.parallel_sizes(ranks).dp_shard)
    if ranks > 1 and getattr(config.ddp, "use_distributed_optimizer", False):
        _tell_once(
            "ddp.use_distributed_optimizer=true does not divide the state of the optimizer between the ranks: each "
            "has all of it, and the updates are the same; set it to false in ddp and optimizer to drop this line"
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
    if optimizer in OF_BITSANDBYTES:
        raise ConfigError(
            f"optimizer.optimizer={optimizer} is one of bitsandbytes, whose kernels cannot update a model that is "
            f"divided between {shards} ranks; use adam, adamw_torch_8bit or adamw_torch_4bit."
        )
    if config.peft.base_quantization is not None:
        raise ConfigError(
            f"peft.base_quantization={config.peft.base_quantization} holds weights that cannot be divided between "
            f"{shards} ranks; set parallel.data_parallel_shard_size=1, by which each rank has them whole."
        )


def _tell_once(text: str) -> None:
    """A warning, on rank 0."""
    if text not in _told and integer_from_environment("RANK", 0) == 0:
        _told.add(text)
        logger.warning("%s", text)
