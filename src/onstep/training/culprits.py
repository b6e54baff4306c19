"""Who is to blame for a step that is not finite: rank, micro-batch and samples."""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from onstep.distributed import no_sync
from onstep.training.compute import backward_start_of, forward_of
from onstep.training.job import Job
from onstep.training.losses import MicroLoss
from onstep.training.micro_batches import MicroBatches
from onstep.training.run import Run
from onstep.training.step import Step

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Culprit:
    """A micro-batch of one rank whose loss or gradient is not finite."""

    rank: int
    micro_batch: int
    found: str
    """What is not finite, with its value: "loss nan", "gradient norm inf"."""
    sample_ids: list[int] | None
    is_empty: bool = False
    """The micro-batch has no labels."""

    def __str__(self) -> str:
        ids = "" if self.sample_ids is None else f", sample ids {self.sample_ids}"
        empty = ", no labels in it" if self.is_empty else ""
        return f"rank {self.rank}, micro-batch {self.micro_batch}: {self.found}{ids}{empty}"


@dataclass(frozen=True)
class Findings:
    """What all ranks know of a bad step; the same on every rank."""

    culprits: list[Culprit]
    ids_by_rank: list[list[list[int]] | None]
    """Sample ids of every rank's micro-batches; None where samples have no index."""

    @property
    def sample_ids(self) -> list[int] | None:
        """The samples to blame: of the bad micro-batches, else of the whole step; None where there are no ids."""
        if any(ids is None for ids in self.ids_by_rank):
            return None
        of_culprits = [one for culprit in self.culprits for one in culprit.sample_ids or []]
        of_all = [one for micros in self.ids_by_rank for ids in micros or [] for one in ids]
        return sorted(set(of_culprits or of_all))

    def __str__(self) -> str:
        if self.culprits:
            return "; ".join(map(str, self.culprits))
        ranks = [f"rank {rank}, sample ids {ids}" for rank, ids in enumerate(self.ids_by_rank) if ids]
        return (
            "every local loss was finite, so a gradient overflowed or became NaN in the backward pass"
            + " of " * bool(ranks)
            + "; ".join(ranks)
        )


def investigate(job: Job, micros: list[MicroLoss], sample_ids: list[list[int]] | None, step: Step | None) -> Findings:
    """Find out which micro-batches of which ranks are to blame. Collective.

    Where every local loss is finite and the weights are still those of the step (which is given), each rank computes
    the gradient of each of its micro-batches again, without reducing it.
    """
    world = job.run.world
    by_rank = world.gather((_bad_losses(world.rank, micros, sample_ids), sample_ids))
    culprits = [culprit for found, _ in by_rank for culprit in found]
    if not culprits and step is not None:
        found_again = world.gather(_bad_gradients(job, step, sample_ids))
        culprits = [culprit for found in found_again for culprit in found]
    return Findings(culprits, [ids for _, ids in by_rank])


def innocent(run: Run, sample_ids: list[list[int]] | None) -> Findings:
    """The samples of a step in which everything is finite. Collective."""
    return Findings([], run.world.gather(sample_ids))


def _bad_losses(rank: int, micros: list[MicroLoss], sample_ids: list[list[int]] | None) -> list[Culprit]:
    """Losses that are not finite; a mean over no labels is NaN, and to blame only where no other is."""
    bad = [number for number, micro in enumerate(micros) if not math.isfinite(float(micro.loss))]
    with_labels = [number for number in bad if float(micros[number].weight) != 0]
    return [
        Culprit(
            rank,
            number,
            f"loss {float(micros[number].loss)}",
            None if sample_ids is None else sample_ids[number],
            is_empty=not float(micros[number].weight),
        )
        for number in with_labels or bad
    ]


def _bad_gradients(job: Job, step: Step, sample_ids: list[list[int]] | None) -> list[Culprit]:
    world = job.run.world
    try:
        with _random_state_kept(world.device), job.run.features.paused("replay"):
            norms = list(_gradient_norms(job, step))
    except Exception as error:  # noqa: BLE001 - the other ranks wait for an answer; without one less is named
        logger.warning("the gradients of the bad step could not be computed again: %s: %s", type(error).__name__, error)
        return []
    finally:
        _drop_gradients(job.model)
    return [
        Culprit(world.rank, number, f"gradient norm {norm}", None if sample_ids is None else sample_ids[number])
        for number, norm in enumerate(norms)
        if not math.isfinite(norm)
    ]


def _gradient_norms(job: Job, step: Step) -> Iterator[float]:
    """The gradient norm of each micro-batch on this rank."""
    model, forward = job.model, forward_of(job)
    iterator = MicroBatches(step.batches, job.run.world.device)
    for index in range(len(iterator)):
        _drop_gradients(model)
        batch = iterator.stage(index)
        with no_sync(model):
            micro = forward(iterator, batch, step.batches.is_filler[index])
            micro.backward(backward_start_of(job, micro, len(iterator)))
        grads = [p.grad for chunk in model for p in chunk.parameters() if p.grad is not None]
        yield float(torch.stack(torch._foreach_norm(grads)).norm()) if grads else 0.0


def _drop_gradients(model: list[nn.Module]) -> None:
    for chunk in model:
        for parameter in chunk.parameters():
            parameter.grad = None


@contextmanager
def _random_state_kept(device: torch.device) -> Iterator[None]:
    """Leave the random generators as they are: what follows must not depend on whether something was recomputed."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        yield
    random.setstate(python)
    np.random.set_state(numpy)
