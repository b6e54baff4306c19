"""Trains a held step again without each of its samples in turn, and the steps after it, to see what they would give."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from onstep.checkpoint import ModelState, RngState
from onstep.data import Batch, StepBatches
from onstep.data.loaders.collate import mapping_like
from onstep.data.loaders.iterable_loader import count_samples
from onstep.errors import ConfigError
from onstep.past.place import last_step
from onstep.past.rewinding import Past
from onstep.record import leading_records
from onstep.record.kinds import FILE_NAME
from onstep.training.checkpointing.saved_states import SchedulerPosition
from onstep.training.compute.losses import IGNORE_INDEX
from onstep.training.compute.rows import chosen_rows
from onstep.training.loop import Loop
from onstep.training.protocols import StateDict, has_state
from onstep.training.stages.job import Job

_Place = tuple[int, int, int | None]
"""A sample of a rank: its micro-batch, its row, and its index in the dataset."""


@dataclass(frozen=True)
class Dropped:
    """What the next steps would have given without a sample of the held step."""

    rank: int
    micro_batch: int
    row: int
    index: int | None
    """In its dataset; None for a sample without an index."""
    losses: list[float]
    """Of the steps after the held one."""

    @property
    def mean(self) -> float:
        """The mean of the next losses."""
        return sum(self.losses) / len(self.losses)


@dataclass(frozen=True)
class Blame:
    """The samples of a step by what the next losses would have been without each, the lowest first."""

    step: int
    happened: list[float]
    """The losses of the steps after it, as they were."""
    repeated: list[float]
    """The same, trained again with all samples; equal to the bit if nothing hides from the comparison."""
    dropped: list[Dropped]

    @property
    def mean(self) -> float:
        """The mean of the losses as they were."""
        return sum(self.happened) / len(self.happened)


def drop_each(past: Past, horizon: int) -> Blame:
    """Drop each sample of the held step in turn, and train on the following steps as they were. Collective.

    A dropped sample counts neither in the loss nor in its divisor; the labels of tokens are masked, so that the dropout
    masks of the other samples stay the same. The training is used up: nothing else can be seen of it afterwards.

    Args:
        past: held before the update of the step.
        horizon: how many steps after it; fewer if the run has no more.

    Raises:
        ConfigError: if no step follows, or the step has a single sample.
    """
    job, number, plan = past.job, past.step, past.plan
    last = last_step(plan.directory, plan.run_json, leading_records(plan.directory / FILE_NAME))
    if number >= last:
        raise ConfigError(f"no step follows step {number}, so there is nothing that dropping its samples changes.")
    state = _State(past)
    steps, happened = [(past.current.batches, past.random_state)], []
    for _ in range(min(horizon, last - number)):
        past.next()
        steps.append((past.current.batches, past.random_state))
        happened.append(past.loss)
    past.release()
    batches, loop, rank = steps[0][0], Loop(job), job.run.world.data.rank
    by_rank = job.run.world.data.gather(_places(batches))
    if sum(map(len, by_rank)) < 2:
        raise ConfigError(f"step {number} has a single sample, so it cannot be dropped.")
    repeated, dropped = _trained(loop, state, number, steps), []
    for owner, places in enumerate(by_rank):
        for micro_batch, row, index in places:
            left = _without(batches, micro_batch, row) if owner == rank else batches
            losses = _trained(loop, state, number, [(left, steps[0][1]), *steps[1:]])
            dropped.append(Dropped(owner, micro_batch, row, index, losses))
    return Blame(number, happened, repeated, sorted(dropped, key=lambda one: one.mean))


def _trained(loop: Loop, state: _State, number: int, steps: list[tuple[StepBatches, StateDict]]) -> list[float]:
    """Train on these steps from the state before the first; the losses of the others."""
    losses, run = [], loop.run
    state.restore()
    for at, (batches, random_state) in enumerate(steps, start=number):
        run.train_state.step = at - 1
        RngState(run.world.device).load_state_dict(random_state)
        step = loop.last.begin(at, batches)
        loop.train_step(step)
        losses.append(float(step.total.value()))
    return losses[1:]


def _places(batches: StepBatches) -> list[_Place]:
    found: list[_Place] = []
    for number, batch in enumerate(batches.micro_batches):
        ids = None if batches.sample_ids is None else batches.sample_ids[number]
        count = 0 if batches.is_filler[number] else count_samples(batch) or 1
        found += [(number, row, ids[row] if ids is not None and len(ids) == count else None) for row in range(count)]
    return found


def _without(batches: StepBatches, micro_batch: int, row: int) -> StepBatches:
    """The step without a sample; a micro-batch that has no other counts as zero."""
    batch = batches.micro_batches[micro_batch]
    count = count_samples(batch) or 1
    if count == 1:
        fillers = [one or number == micro_batch for number, one in enumerate(batches.is_filler)]
        return replace(batches, is_filler=fillers)
    micro_batches = list(batches.micro_batches)
    micro_batches[micro_batch] = _masked(batch, row, count)
    return replace(batches, micro_batches=micro_batches)


def _masked(batch: Batch, row: int, count: int) -> Batch:
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    is_of_tokens = isinstance(labels, Tensor) and labels.ndim > 1 and not labels.is_floating_point()
    if not isinstance(batch, Mapping) or not isinstance(labels, Tensor) or not is_of_tokens:
        return chosen_rows(batch, [one for one in range(count) if one != row], count)
    masked = labels.clone()
    masked[row] = IGNORE_INDEX
    return mapping_like(batch, {**{key: one for key, one in batch.items() if key != "num_tokens"}, "labels": masked})


class _State:
    """Weights, optimizer, schedule and the features' states before a step; needs their memory once more."""

    def __init__(self, past: Past) -> None:
        job: Job = past.job
        self._progress, self._saved_progress = job.run.train_state, copy.deepcopy(job.run.train_state.state_dict())
        self._buffers = past.take_buffers()
        scheduler = [] if job.scheduler is None else [SchedulerPosition(job.scheduler)]
        optimizer = [job.raw_optimizer] if has_state(job.raw_optimizer) else []
        features = job.run.features.states(per_rank=False).values()
        self._parts: list[Any] = [ModelState(job.model), *optimizer, *scheduler, *features]
        self._saved = [_copied(part.state_dict()) for part in self._parts]

    def restore(self) -> None:
        """Put everything back."""
        self._progress.load_state_dict(copy.deepcopy(self._saved_progress))
        for part, saved in zip(self._parts, self._saved, strict=True):
            part.load_state_dict(_copied(saved))
        self._buffers.restore()


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, Mapping):
        return {key: _copied(one) for key, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_copied(one) for one in value)
    return copy.deepcopy(value)
