"""An optimizer of which each rank updates some rows of each parameter, with the state of these rows (ZeRO-1)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from onstep.distributed.buffered import BufferedDataParallel, buffered_chunks
from onstep.errors import ConfigError
from onstep.optim.optimizer import TrainingOptimizer


class DistributedOptimizer(TrainingOptimizer):
    """A torch optimizer over this rank's rows of the parameters, which are then gathered.

    The optimizer is one of the parameters of the chunks, without state; its groups get their shards, which are DTensors
    whose parts are views of the parameters. Norm, clipping and the gate see the sums of gradients over all ranks.

    Args:
        optimizer: torch's.
        chunks: the model chunks, made by `buffered_data_parallel`.
        settings: those of `TrainingOptimizer`.

    Raises:
        ConfigError: for an optimizer with state, or with parameters that the chunks do not have.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, chunks: Sequence[nn.Module], **settings: Any) -> None:
        self._chunks: list[BufferedDataParallel] = buffered_chunks(chunks)
        self._take_shards(optimizer.param_groups, optimizer.state)
        order = [self._shards[id(one)] for one in settings.pop("order", None) or [] if id(one) in self._shards]
        super().__init__(optimizer, order=order, **settings)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, which are in the buffers of the chunks.

        Args:
            set_to_none: of no effect: buffers are kept.
        """
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        super().zero_grad()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters of the chunks.

        Args:
            param_group: the parameter group: `params` and its settings.
        """
        group = dict(param_group)
        group["params"] = [group["params"]] if isinstance(group["params"], Tensor) else list(group["params"])
        self._take_shards([group])
        super().add_param_group(group)

    def prepare(self, grad_scale: Tensor | float | None = None, *, needs_norm: bool = True) -> Tensor | None:
        """Wait for the sums of the gradients over the ranks, then as `TrainingOptimizer`. Collective.

        Args:
            grad_scale: factor > 0 for all gradients; None is 1.
            needs_norm: whether the caller uses the norm.
        """
        for chunk in self._chunks:
            chunk.finish_grad_sync()
        return super().prepare(grad_scale, needs_norm=needs_norm)

    def apply(self) -> bool:
        """Update this rank's rows and gather those of the others, unless the gate is closed or the norm too large."""
        for chunk in self._chunks:
            chunk.take_written()  # what callbacks have written since the gradients were summed
        is_applied = super().apply()
        if is_applied:
            for chunk in self._chunks:
                chunk.mark_updated()
            self._copy_main_params_to_param_buffer()
        return is_applied

    def _copy_main_params_to_param_buffer(self) -> None:
        """Gather what has been updated; with forward pre-hooks, only begin to. Collective; Megatron-Core's name.

        In MXFP8, masters are quantized into what is sent, which is the memory of the gradients if they share it: their
        sums are elsewhere by then. Since an update is gathered at once, the calls of the loop after each clearing of
        the gradients, and before the gathers that it forces, find nothing that is not on its way.
        """
        for chunk in self._chunks:
            chunk.start_param_sync()

    def prepare_model_params_for_param_sync(self) -> None:
        """The same, before parameters are gathered by force; Megatron-Core's name."""
        self._copy_main_params_to_param_buffer()

    def _take_shards(self, groups: list[dict[str, Any]], known: Iterable[Tensor] = ()) -> None:
        """Put the shards of the parameters in their place; state that is known of whole ones is refused."""
        self._shards: dict[int, nn.Parameter] = {
            id(one.parameter): one.shard for chunk in self._chunks for one in chunk.members
        }
        shards = {id(shard) for shard in self._shards.values()}
        given = [one for group in groups for one in group["params"]]
        if any(id(one) in self._shards for one in known):
            raise ConfigError(
                "ranks that divide the updates require an optimizer without state; make it after the model is placed, "
                "and load its state from a checkpoint."
            )
        others = [one for one in given if id(one) not in self._shards and id(one) not in shards]
        if others:
            raise ConfigError(
                f"ranks that divide the updates cannot train the {len(others)} tensors of the optimizer that are not "
                f"trained parameters of the model, such as one of {tuple(others[0].shape)}; make them part of the "
                f"model, or set ddp.use_distributed_optimizer=false."
            )
        for group in groups:
            group["params"] = [self._shards.get(id(one), one) for one in group["params"]]
