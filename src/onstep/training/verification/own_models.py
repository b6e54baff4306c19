"""Refuses a model that nothing wraps on several ranks, once each of them has trained it by itself."""

from __future__ import annotations

from itertools import chain

from torch import Tensor

from onstep.distributed import is_bare
from onstep.distributed.pipeline.seats import is_staged
from onstep.errors import ReplicaMismatchError
from onstep.training.compute.step import Step
from onstep.training.feature import Feature
from onstep.training.stages.job import Job
from onstep.training.verification.weight_hash import check_param_hashes_across_dp_replicas


class OwnModels(Feature[Job]):
    """Compares the weights of ranks after the first step, where no wrapper averages their gradients."""

    name = "own_models"
    when = "a model that nothing wraps, on several ranks"
    collective = True

    @classmethod
    def wanted(cls, host: Job) -> bool:
        if host.run.world.data.size == 1 or is_staged(host.model):
            return False
        parameters = chain.from_iterable(chunk.parameters() for chunk in host.model)
        return all(map(is_bare, host.model)) and not any(map(_is_of_a_rank, parameters))

    def __init__(self, host: Job) -> None:
        super().__init__(host)
        self._is_due = True

    def after_iteration(self, step: Step) -> None:
        if self._is_due:
            self._is_due = False
            compare_replicas(self.host)


def compare_replicas(job: Job) -> None:
    """Check that the ranks have the same weights. Collective.

    Raises:
        ReplicaMismatchError: on all ranks, if they do not: each would train a model of its own.
    """
    world = job.run.world
    try:
        check_param_hashes_across_dp_replicas(job.model, world)
    except ReplicaMismatchError as error:
        raise ReplicaMismatchError(
            f"each of the {world.data.size} ranks trains a model of its own: it is not wrapped for data parallelism, "
            f"and after the first step {str(error).partition(': ')[2].partition('. ')[0]}; wrap it with "
            f"onstep.distributed.data_parallel, or if your own code averages gradients, give all ranks the same "
            f"weights at the start; pass world=World() to GlobalState to train each rank by itself."
        ) from None


def _is_of_a_rank(parameter: Tensor) -> bool:
    """Whether Megatron's marks say that ranks have different values of it, as of an expert."""
    return not getattr(parameter, "allreduce", True) or bool(getattr(parameter, "tensor_model_parallel", False))
