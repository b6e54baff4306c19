"""Makes all ranks that hold parts of one model (Megatron-Core's `mp`) agree on each update."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn
from torch.distributed import ProcessGroup

from onstep.distributed import World, groups_within_models
from onstep.distributed.pipeline.seats import is_staged
from onstep.distributed.shard_sums import has_others
from onstep.distributed.shards import as_dtensor
from onstep.events.context import unwrap
from onstep.metrics.reductions import (
    logical_and_across_model_parallel_group,
    reduce_max_stat_across_model_parallel_group,
)
from onstep.training.compute.step import Step
from onstep.training.feature import Feature
from onstep.training.stages.job import Job


def model_parallel_group(model: list[nn.Module], world: World) -> ProcessGroup | None:
    """The group of the ranks that share this model: Megatron's `mp`, from the `pg_collection` of its first chunk, or
    that of the run for a model that has none.

    None if one rank holds all of it, and where its norm, zeros and overflows are those of all ranks anyway: in stages
    of a pipeline, and with every parameter divided or replicated along `tp`.
    """
    groups = getattr(unwrap(model[0]), "pg_collection", None)
    if groups is None and not (is_staged(model) or _is_divided_by_tensors(model)):
        groups = groups_within_models(world)
    group: ProcessGroup | None = getattr(groups, "mp", None)
    return group if has_others(group) else None


def _is_divided_by_tensors(model: list[nn.Module]) -> bool:
    parts = [as_dtensor(one) for chunk in model for one in chunk.parameters()]
    return bool(parts) and all(part is not None and "tp" in (part.device_mesh.mesh_dim_names or ()) for part in parts)


class ModelParallelAgreement(Feature[Job]):
    """Makes all ranks that hold parts of one model agree on each update."""

    name = "model_parallel"
    needs_grad_norm = True
    when = "the `pg_collection.mp` of the model, or of a run whose model its user divides, has other ranks"

    @classmethod
    def wanted(cls, host: Job) -> bool:
        """Whether other ranks hold parts of this model."""
        return model_parallel_group(host.model, host.run.world) is not None

    def __init__(self, host: Job) -> None:
        super().__init__(host)
        self._group, self._options = model_parallel_group(host.model, host.run.world), host.run.cfg.train

    def wrap_update(self, update: Callable[[Step], None]) -> Callable[[Step], None]:
        """Agree on the outcome of the update. Collective over the group; reads norm and zeros.

        The update succeeded if it did on all ranks (`train.check_optimizer_step_success`); its norm is the largest
        (unless `train.skip_sync_grad_norm_across_mp`), and so is the number of zeros.
        """
        group, options = self._group, self._options

        def agreed(step: Step) -> None:
            update(step)
            if options.check_optimizer_step_success:
                step.applied = logical_and_across_model_parallel_group(step.applied, group)
            if not options.skip_sync_grad_norm_across_mp:
                norm = step.grad_norm
                step.grad_norm = reduce_max_stat_across_model_parallel_group(norm, group)  # type: ignore[arg-type]  # a tensor is read
            most = reduce_max_stat_across_model_parallel_group(step.num_zeros, group)  # type: ignore[arg-type]
            step.num_zeros = None if most is None else int(most)

        return agreed
