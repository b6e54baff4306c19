"""What ranks that hold parts of one model agree on after an update."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from onstep.config.parts import TrainingConfig
from onstep.events.context import unwrap
from onstep.metrics.reductions import (
    has_others,
    logical_and_across_model_parallel_group,
    reduce_max_stat_across_model_parallel_group,
)
from onstep.training.feature import Feature
from onstep.training.job import Job
from onstep.training.losses import Weight
from onstep.training.step import Step

Update = tuple[bool, Weight | None, Tensor | int | None]
"""(successful, gradient norm before clipping, number of zero gradients)"""


def model_parallel_group(model: list[nn.Module]) -> Any:
    """The group of the ranks that hold this model, from the `pg_collection` of its first chunk (Megatron's `mp`).

    None where one rank holds all of it.
    """
    group = getattr(getattr(unwrap(model[0]), "pg_collection", None), "mp", None)
    return group if has_others(group) else None


def agreed_update(update: Update, group: Any, options: TrainingConfig) -> Update:
    """One update for all ranks of `group`. Collective; reads norm and zeros.

    It was successful where it was on all of them (`train.check_optimizer_step_success`), its norm is the largest
    (unless `train.skip_sync_grad_norm_across_mp`), and so is the number of zeros.
    """
    successful, norm, zeros = update
    if options.check_optimizer_step_success:
        successful = logical_and_across_model_parallel_group(successful, group)
    if not options.skip_sync_grad_norm_across_mp:
        norm = reduce_max_stat_across_model_parallel_group(norm, group)  # type: ignore[arg-type]  # a tensor is read
    most = reduce_max_stat_across_model_parallel_group(zeros, group)  # type: ignore[arg-type]
    return successful, norm, None if most is None else int(most)


class ModelParallelAgreement(Feature[Job]):
    """One update for all ranks that hold parts of one model."""

    name = "model_parallel"
    needs_grad_norm = True
    when = "the model's `pg_collection.mp` has other ranks"

    @classmethod
    def wanted(cls, host: Job) -> bool:
        """Whether other ranks hold parts of this model."""
        return model_parallel_group(host.model) is not None

    def __init__(self, host: Job) -> None:
        super().__init__(host)
        self._group, self._options = model_parallel_group(host.model), host.run.cfg.train

    def wrap_update(self, update: Callable[[Step], None]) -> Callable[[Step], None]:
        """Agree on what came of it. Collective over the group; reads norm and zeros."""

        def agreed(step: Step) -> None:
            update(step)
            result = step.applied, step.grad_norm, step.num_zeros
            step.applied, step.grad_norm, step.num_zeros = agreed_update(result, self._group, self._options)

        return agreed
