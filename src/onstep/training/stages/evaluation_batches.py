"""Reads the batches of an evaluation, equally many on each rank, wherever the data of each rank ends."""

from __future__ import annotations

import itertools
import math
from collections.abc import Generator, Iterator
from contextlib import closing
from copy import copy
from dataclasses import replace
from typing import NoReturn

from onstep.config.parallel_sizes import places
from onstep.data import Batch, EvalLoader, IteratorReader, StepBatches
from onstep.data.loaders.step_batches import Compared
from onstep.data.loaders.step_source import only_iterator
from onstep.distributed import World
from onstep.errors import ConfigError, DataError
from onstep.training.protocols import DataSource
from onstep.training.run import Run


def eval_batches(state: Run, data_iterator: DataSource) -> Iterator[StepBatches]:
    """The global batches of one evaluation, at most `validation.eval_iters`. Collective.

    Data of their own the ranks read until the longest ends: a rank whose data has ended repeats its last micro-batch as
    a filler. Data of which each rank keeps its share must be the same on all.

    Raises:
        DataError: on all ranks, where that is not the same, or a rank has no data of its own at all.
    """
    batches, compared_by = _own_batches(state, data_iterator), _compared_by(state.world, data_iterator)
    if compared_by is None:
        yield from batches
        return
    compared = _until_the_longest if compared_by == "micro-batches" else _checked
    with closing(batches):
        yield from compared(state.world, batches)


def _own_batches(state: Run, data_iterator: DataSource) -> Generator[StepBatches, None, None]:
    """The batches that this rank reads."""
    limit = state.cfg.validation.eval_iters
    if isinstance(data_iterator, EvalLoader):
        yield from data_iterator.batches(limit)
        return
    if data_iterator is None and limit is None:
        raise ConfigError("validation.eval_iters=None has no end for an evaluation without data; set it.")
    source = only_iterator(data_iterator)
    for _ in itertools.count() if limit is None else range(limit):
        step = IteratorReader(source, world_size=state.world.data.size).read(state.num_eval_microbatches)
        if step is None:
            return
        yield step


def _compared_by(world: World, data_iterator: DataSource) -> Compared:
    """What the ranks compare of each batch: nothing where all know equal lengths. Collective."""
    if world.size == 1 or data_iterator is None:
        return None
    if not isinstance(data_iterator, EvalLoader):
        return "micro-batches"
    lengths = [data_iterator.num_samples, data_iterator.num_batches]
    if data_iterator.compared_by is not None:
        return data_iterator.compared_by
    rows = world.gather_numbers([float(length or 0) for length in lengths])
    return None if all(row == rows[0] for row in rows) else "samples"


def _checked(world: World, batches: Iterator[StepBatches]) -> Iterator[StepBatches]:
    """The batches, of which every rank keeps its share, as far as they are the same on all ranks. Collective.

    Raises:
        DataError: on all ranks, at the first batch that differs.
    """
    num_read = 0
    while True:
        step = next(batches, None)
        num_read += 0 if step is None else step.num_samples or 0
        rows = world.gather_numbers([float(num_read), float(0 if step is None else len(step.micro_batches))])
        if any(row != rows[0] for row in rows):
            _refuse_differences([int(row[0]) for row in rows], rows, world)
        if step is None:
            return
        yield step


def _refuse_differences(samples: list[int], rows: list[list[float]], world: World) -> NoReturn:
    raise DataError(
        f"the evaluation data of {_ranks_of_least(rows, world)} ends before that of other ranks (samples up to this "
        f"batch, by rank: {samples}); each rank reads the whole and keeps its share, so the data must be the same on "
        "all ranks: pass the same on each; to give each rank samples of its own, return a DataLoader over an iterable "
        "dataset, or with a DistributedSampler, from get_eval_dataloader"
    )


def _until_the_longest(world: World, batches: Iterator[StepBatches]) -> Iterator[StepBatches]:
    """The batches of this rank's own data, with fillers where other ranks have more micro-batches. Collective.

    Their samples are those of all ranks.

    Raises:
        DataError: on all ranks, if there are some that have no batch to repeat.
    """
    spare: Batch = None
    for number in itertools.count():
        step = next(batches, None) or StepBatches([], None, 0, [], [])
        if step.micro_batches:
            spare = copy(step.micro_batches[-1])  # a forward step may remove items from the one that it gets
        own = math.nan if step.local_samples is None else float(sum(step.local_samples))
        rows = world.gather_numbers([float(len(step.micro_batches)), own])
        counts = [int(row[0]) for row in rows]
        if not any(counts):
            return
        if number == 0 and not all(counts):
            raise DataError(
                f"the evaluation data of {_ranks_of_least(rows, world)} has no batch, and that of other ranks has "
                f"(micro-batches of the first batch, by rank: {counts}); give each rank at least one"
            )
        samples = sum(world.data.one_of_each([row[1] for row in rows]))
        num_samples = None if math.isnan(samples) else int(samples)
        yield replace(_filled(step, spare, max(counts)), num_samples=num_samples)


def _filled(step: StepBatches, spare: Batch, count: int) -> StepBatches:
    """The step with `count` micro-batches, of which those that it lacks are copies of `spare` that count as zero."""
    missing = count - len(step.micro_batches)
    if missing == 0:
        return step
    return replace(
        step,
        micro_batches=[*step.micro_batches, *(copy(spare) for _ in range(missing))],
        is_filler=[*step.is_filler, *[True] * missing],
        local_samples=None if step.local_samples is None else [*step.local_samples, *[0] * missing],
    )


def _ranks_of_least(rows: list[list[float]], world: World) -> str:
    return places((rank for rank, row in enumerate(rows) if row == min(rows)), world.place)
