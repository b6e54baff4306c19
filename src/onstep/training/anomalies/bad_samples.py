"""Finds the micro-batches and samples whose loss or gradient is not finite."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from onstep.checkpoint import RngState
from onstep.config.parallel_sizes import ParallelSizes
from onstep.distributed import World, no_sync
from onstep.distributed.exchanges import own_gradients
from onstep.distributed.pipeline.seats import is_staged
from onstep.optim import clip_grad_norm
from onstep.training.anomalies.worst_samples import WorstSample
from onstep.training.compute.losses import MicroLoss
from onstep.training.compute.step import MicroBatches, Step
from onstep.training.stages.forward_backward import backward_of, backward_start_of, forward_of
from onstep.training.stages.job import Job

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class BadSamples:
    """A micro-batch of one rank whose loss or gradient is not finite."""

    rank: int
    micro_batch: int
    found: str
    """The non-finite value: "loss nan", "gradient norm inf"."""
    sample_ids: list[int] | None
    is_empty: bool = False
    """Whether the micro-batch has no labels."""
    place: str = ""
    """The rank with its coordinates, if it has any."""

    def __str__(self) -> str:
        ids = "" if self.sample_ids is None else f", sample ids {self.sample_ids}"
        empty = ", no labels in it" if self.is_empty else ""
        return f"{self.place or f'rank {self.rank}'}, micro-batch {self.micro_batch}: {self.found}{ids}{empty}"


@dataclass(frozen=True)
class Findings:
    """The findings of all ranks about a bad step; the same on every rank."""

    bad_samples: list[BadSamples]
    ids_by_rank: list[list[list[int]] | None]
    """Sample ids of the micro-batches of each share of the samples; None if samples have no index."""
    worst: list[WorstSample] = field(default_factory=list)
    """The samples of a spike with the largest losses."""
    sharers: list[list[int]] = field(default_factory=list)
    """The ranks that have each share; by default one for each, in their order."""

    @property
    def sample_ids(self) -> list[int] | None:
        """The ids of the bad micro-batches, or else of the whole step; None for samples without ids."""
        if any(ids is None for ids in self.ids_by_rank):
            return None
        of_bad_samples = [one for suspect in self.bad_samples for one in suspect.sample_ids or []]
        of_all = [one for micros in self.ids_by_rank for ids in micros or [] for one in ids]
        return sorted(set(of_bad_samples or of_all))

    def __str__(self) -> str:
        if self.bad_samples:
            return "; ".join(map(str, self.bad_samples))
        sharers = self.sharers or [[rank] for rank in range(len(self.ids_by_rank))]
        ranks = [
            f"rank{'s' * (len(those) > 1)} {', '.join(map(str, those))}, sample ids {ids}"
            for those, ids in zip(sharers, self.ids_by_rank, strict=True)
            if ids
        ]
        return (
            "every local loss was finite, so a gradient overflowed or became NaN in the backward pass"
            + " of " * bool(ranks)
            + "; ".join(ranks)
        )


def find_bad_samples(
    job: Job, micros: list[MicroLoss], sample_ids: list[list[int]] | None, step: Step | None
) -> Findings:
    """Find out which micro-batches of which ranks are at fault. Collective.

    If every local loss is finite and the weights are still those of the given step, each rank recomputes the gradient
    of each of its micro-batches, without reducing it.
    """
    world = job.run.world
    own = (_bad_losses(world, micros, sample_ids), world.data.rank, sample_ids)
    by_rank = world.gather(own)
    bad_samples = _named_once([(found, share) for found, share, _ in by_rank])
    if not bad_samples and step is not None:
        bad_samples = _named_once(world.gather((_bad_gradients(job, step, sample_ids), world.data.rank)))
    ids_of_shares = world.data.one_of_each([ids for *_, ids in by_rank])
    return Findings(bad_samples, ids_of_shares, sharers=sharers_of(world.sizes))


def sharers_of(sizes: ParallelSizes) -> list[list[int]]:
    """The ranks that have each share of the samples, in the order of the shares.

    Args:
        sizes: the number of ranks along each axis.
    """
    ranks = range(sizes.ranks)
    return [[rank for rank in ranks if sizes.data_rank(rank) == share] for share in range(sizes.data)]


def _named_once(found: list[tuple[list[BadSamples], int]]) -> list[BadSamples]:
    """What each rank has found, with its share of the samples; of ranks with the same samples, the first finder's."""
    first: dict[tuple[int, int], BadSamples] = {}
    for suspects, share in found:
        for suspect in suspects:
            first.setdefault((share, suspect.micro_batch), suspect)
    return list(first.values())


def _bad_losses(world: World, micros: list[MicroLoss], sample_ids: list[list[int]] | None) -> list[BadSamples]:
    """Non-finite losses; a mean over no labels is NaN, and is at fault only if no other loss is."""
    bad = [number for number, micro in enumerate(micros) if not math.isfinite(float(micro.loss))]
    with_labels = [number for number in bad if float(micros[number].weight) != 0]
    return [
        BadSamples(
            world.rank,
            number,
            f"loss {float(micros[number].loss)}",
            None if sample_ids is None else sample_ids[number],
            is_empty=not float(micros[number].weight),
            place=world.place(),
        )
        for number in with_labels or bad
    ]


def _bad_gradients(job: Job, step: Step, sample_ids: list[list[int]] | None) -> list[BadSamples]:
    world = job.run.world
    if is_staged(job.model):
        return []
    try:
        with RngState(world.device).kept(), job.run.features.pause("replay"):
            norms = list(_gradient_norms(job, step))
    except Exception as error:  # noqa: BLE001 - the other ranks wait for an answer; an empty one only names less
        logger.warning("the gradients of the bad step could not be recomputed: %s: %s", type(error).__name__, error)
        return []
    finally:
        _drop_gradients(job)
    return [
        BadSamples(
            world.rank,
            number,
            f"gradient norm {norm}",
            None if sample_ids is None else sample_ids[number],
            place=world.place(),
        )
        for number, norm in enumerate(norms)
        if not math.isfinite(norm)
    ]


def _gradient_norms(job: Job, step: Step) -> Iterator[float]:
    """The gradient norm of each micro-batch on this rank."""
    model, forward, backward = job.model, forward_of(job), backward_of(job)
    iterator = MicroBatches(step.batches, job.run.world.device)
    for index in range(len(iterator)):
        _drop_gradients(job)
        batch = iterator.stage(index)
        with no_sync(model), own_gradients(job.sharded) as squares:
            micro = forward(iterator, batch, step.batches.is_filler[index])
            backward(micro, backward_start_of(job, micro, len(iterator)))
        if job.sharded:
            yield math.sqrt(sum(map(float, squares)))
        else:
            yield float(clip_grad_norm((named for chunk in model for named in chunk.named_parameters()), math.inf))


def _drop_gradients(job: Job) -> None:
    for chunk in job.model:
        for parameter in chunk.parameters():
            parameter.grad = None
    for chunk in job.chunks_with_buffers:  # which add to what they hold
        chunk.zero_grad_buffer()
