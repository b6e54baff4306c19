"""Cuts the model of a Trainer into the stages of a pipeline, once, and refuses what stages cannot do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from onstep.config import ConfigContainer, ModelConfig
from onstep.config.parallel_sizes import ParallelSizes
from onstep.distributed import World, check_weights
from onstep.errors import ConfigError
from onstep.models.hf.stages import num_layers_of, release
from onstep.models.hf.stages_probe import check_stages
from onstep.train_state import StateDict
from onstep.trainer.methods.saving import is_of
from onstep.trainer.overrides import overrides
from onstep.training.setup.final_weights import weights_of_stages
from onstep.training.setup.model_and_data import cut_into_stages

_OVERRIDDEN = (
    *("compute_loss", "training_step", "prediction_step", "_wrap_model", "create_optimizer", "_clip_grad_norm"),
    *("_load_from_checkpoint", "_load_best_model"),
)
"""Methods that a user's code gives a whole model, or calls itself."""
_SIZE = "parallel.pipeline_model_parallel_size"


@dataclass(frozen=True)
class TrainerStages:
    """The stages of this rank."""

    whole: nn.Module
    """The user's model, which has the weights of these stages, and of the others an outline once they are freed."""
    chunks: list[nn.Module]
    world: World

    @classmethod
    def of(cls, trainer: Any, config: ConfigContainer, world: World) -> TrainerStages:
        """The stages of a Trainer's model, as an earlier call made them if there was one. Collective the first time.

        Raises:
            ConfigError: for a model that cannot be cut.
        """
        known = trainer.stages
        if known is not None and known.whole is trainer.model:
            made: TrainerStages = known
            return made
        whole = trainer.model
        check_weights([whole])
        chunks = cut_into_stages([whole], config, world)
        _make_alike(chunks, world)
        trainer.stages = cls(whole, chunks, world)
        return trainer.stages  # type: ignore[no-any-return]

    @property
    def module(self) -> nn.Module:
        """All of them as one module, for an optimizer."""
        return self.chunks[0] if len(self.chunks) == 1 else nn.ModuleList(self.chunks)

    def free_others(self) -> None:
        """Free the weights of the stages of other ranks: once nothing that is asked for can be refused any more."""
        release(self.whole, self.chunks)

    def weights(self) -> StateDict | None:
        """The weights of the whole model on the CPU of rank 0; None on others. Collective."""
        return weights_of_stages(self.chunks, self.world)


@torch.no_grad()
def _make_alike(chunks: Sequence[Any], world: World) -> None:
    """Give replicas the weights of the first one, and both ends of a pipeline the same tied ones. Collective."""
    for chunk in chunks if world.data.size > 1 else ():
        for tensor in chunk.state_dict().values():
            if world.data.rank:
                tensor.zero_()
            world.data.sum(tensor)
    own = {name: one for chunk in chunks for name, one in chunk.named_parameters()}
    for name in chunks[0].tied_weights:
        shape = chunks[0].whole_shapes[name]
        value = own[name].data if name in own else next(iter(own.values())).new_empty(shape)
        dist.broadcast(value, world.part("pp")[0], group=world.group("pp"))


def check_pipeline(trainer: Any, config: ConfigContainer, sizes: ParallelSizes) -> None:
    """Refuse what the stages of a Trainer's model cannot do.

    Args:
        trainer: the Trainer, whose model might not exist yet.
        config: the configuration of its run.
        sizes: the number of ranks along each axis, several along that of the pipeline.

    Raises:
        ConfigError: naming it.
    """
    size, shards = sizes.pp, config.parallel.data_parallel_shard_size
    for divides, key, remedy in (
        (sizes.tp > 1, f"parallel.tensor_model_parallel_size={sizes.tp}", "1"),
        (sizes.dp_shard > 1 and shards != 1, f"parallel.data_parallel_shard_size={shards}", "1"),
        (config.ddp.use_distributed_optimizer and sizes.data > 1, "ddp.use_distributed_optimizer=true", "false"),
    ):
        if divides:
            raise ConfigError(
                f"{key} cannot divide the stages of a model of transformers further ({_SIZE}={size}); set it to "
                f"{remedy}, or the size to 1."
            )
    found = next((name for name in _OVERRIDDEN if overrides(trainer, name)), None)
    if found is not None:
        raise ConfigError(
            f"{type(trainer).__name__} overrides {found}, which has a whole model, but with {_SIZE}={size} a rank has "
            f"some of its layers; use compute_loss_func, which is called with the outputs on the last stage, and "
            f"factories in optimizers, or set the size to 1."
        )
    for name, value in (
        ("fused_loss_factory", trainer.fused_loss_factory),
        ("use_liger_kernel", trainer.args.use_liger_kernel),
        ("enable_activation_checkpoint_fn", trainer.enable_activation_checkpoint_fn),
        ("torch_compile", trainer.args.torch_compile),
        ("predict_with_generate", getattr(trainer.args, "predict_with_generate", False)),
    ):
        if value:
            raise ConfigError(f"{name} requires a whole model, which {_SIZE}={size} divides; leave it out.")
    model = trainer.model
    if model is None:
        return
    if is_of(model, "peft"):
        raise ConfigError(
            f"adapters of peft cannot be cut into stages ({_SIZE}={size}); use data parallelism for them."
        )
    num_layers_of(model)
    check_stages(ModelConfig(hf_config=model.config.to_dict()))
