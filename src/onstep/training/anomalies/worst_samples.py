"""Finds the samples of a spiking step whose losses are the largest, by one forward pass of the step's batch."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from onstep.checkpoint import RngState
from onstep.data import StepBatches
from onstep.distributed import no_sync
from onstep.distributed.pipeline.seats import is_staged
from onstep.training.compute.loss_sums import local_sums
from onstep.training.compute.rows import normalised_alone, rows_of
from onstep.training.compute.step import MicroBatches, Step
from onstep.training.stages.forward_backward import forward_of
from onstep.training.stages.job import Job

logger = logging.getLogger(__name__)

_MOST = 3
"""Samples that are named."""


@dataclass(frozen=True)
class WorstSample:
    """A sample of a spiking step."""

    rank: int
    micro_batch: int
    row: int
    sample_id: int | None
    loss: float
    """Its mean loss."""
    share: float
    """Of the step's loss: what it adds to the sum, divided by that of all samples."""
    place: str = ""
    """The rank by its coordinates."""

    def __str__(self) -> str:
        name = f"sample {self.sample_id}"
        if self.sample_id is None:
            name = f"{self.place or f'rank {self.rank}'}, micro-batch {self.micro_batch}, row {self.row}"
        return f"{name} (loss {self.loss:.4g}, {self.share:.0%} of the step's)"


def find_worst_samples(job: Job, step: Step) -> list[WorstSample]:
    """The samples of all ranks with the largest shares of a step's loss, the largest first. Collective.

    The weights must still be those of the step. Each sample passes the model once, without gradients; every rank calls
    the model equally often, since its weights may be sharded. None for a forward step that runs backward by itself, and
    in a pipeline.
    """
    if getattr(job.forward_step_func, "runs_backward", False) or is_staged(job.model):
        return []
    world = job.run.world
    rows = [
        (number, row, len(parts), part)
        for number, batch in enumerate(step.batches.micro_batches)
        if not step.batches.is_filler[number]
        for parts in [rows_of(batch)]
        for row, part in enumerate(parts)
    ]
    most = max(map(int, world.gather(len(rows))))
    sums: list[tuple[float, float]] = []
    try:
        fillers = [step.batches.micro_batches[0]] * (most - len(rows))
        kept = RngState(world.device).kept()
        with kept, job.run.features.pause("replay"), no_sync(job.model), torch.no_grad(), normalised_alone(job.model):
            sums = list(_sums(job, [*(row[-1] for row in rows), *fillers]))[: len(rows)]
    except Exception as error:  # noqa: BLE001 - the other ranks wait for an answer; an empty one only names less
        logger.warning("the samples of the spike could not be measured: %s: %s", type(error).__name__, error)
    ids = step.batches.sample_ids
    own = []
    for (number, row, count, _), (total, weight) in zip(rows, sums, strict=False):
        is_listed = ids is not None and len(ids[number]) == count
        own.append((number, row, ids[number][row] if ids is not None and is_listed else None, total, weight))
    by_rank = world.data.gather(own)
    whole = sum(total for one in by_rank for *_, total, _ in one if math.isfinite(total)) or math.nan
    found = [
        WorstSample(rank, number, row, sample_id, total / (weight or 1.0), total / whole, world.place(rank))
        for rank, one in enumerate(by_rank)
        for number, row, sample_id, total, weight in one
    ]
    return sorted(found, key=lambda one: -_order(one.share))[:_MOST]


def _order(share: float) -> float:
    return math.inf if math.isnan(share) else share


def _sums(job: Job, parts: list[object]) -> Iterator[tuple[float, float]]:
    """The summed loss of each part, and its weight."""
    forward = forward_of(job)
    for part in parts:
        iterator = MicroBatches(StepBatches([part], None, None, [False]), job.run.world.device)
        micro = forward(iterator, iterator.stage(0), False)
        numerator, weight, _ = local_sums([micro])
        yield float(numerator), 1.0 if micro.kind == "share" else float(weight)
