"""Divides the tensors of a model's layers between tensor-parallel ranks."""

from __future__ import annotations

from weakref import WeakKeyDictionary

from torch import nn

from onstep.config import ConfigContainer
from onstep.distributed import World
from onstep.distributed.fully_sharded import check_alike
from onstep.distributed.tensor_parallel import TensorRanks, divide
from onstep.errors import ConfigError
from onstep.models.hf.tensor_plan import plan_of as by_own_plan
from onstep.models.hf.tensor_plan import share_out as share_heads
from onstep.models.hf.tensor_styles import check_tensors
from onstep.models.tensor_plan import plan_of, share_out
from onstep.models.transformer import Transformer

_DIVIDED: WeakKeyDictionary[nn.Module, TensorRanks] = WeakKeyDictionary()
"""The chunks that were divided here."""


def divide_tensors(chunk: nn.Module, world: World, config: ConfigContainer) -> None:
    """Divide the tensors of a chunk between the ranks of `tp`, in place. Collective.

    Args:
        chunk: the whole model.
        world: the ranks of the run.
        config: the configuration of the run.

    Raises:
        ConfigError: for a model that cannot be divided, or one that an earlier training has divided in another way.
    """
    ranks = TensorRanks(world.part_of_mesh("tp"), config.parallel.sequence_parallel)
    if (known := _DIVIDED.get(chunk)) is not None:
        if known != ranks:
            raise ConfigError(
                f"an earlier training has divided the tensors of the model over {known.mesh}, and this one is to "
                f"divide them over {ranks.mesh}; build the model again."
            )
        return
    own = [(name, module) for name, module in chunk.named_modules() if isinstance(module, Transformer)]
    check_tensors(chunk, ranks.size)
    check_alike(chunk, world)
    if len(own) == 1:
        [(prefix, model)] = own
        plan = {f"{prefix}.{name}" if prefix else name: part for name, part in plan_of(model, ranks).items()}
        divide(chunk, plan, ranks, world)
        share_out(model, ranks)
    else:
        divide(chunk, by_own_plan(chunk, ranks), ranks, world)
        share_heads(chunk, ranks)
    _DIVIDED[chunk] = ranks
