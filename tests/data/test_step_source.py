"""Whatever a user trains on becomes a source that the loop can ask without looking."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from onstep.data import (
    ForeignReader,
    IterableLoader,
    IteratorReader,
    StepBatches,
    StepSource,
    TrainLoader,
    as_step_source,
)
from onstep.errors import DataError
from tests.support.small_runs import RaggedRows, run, small_state, stack


class OnlyReads:
    def __init__(self) -> None:
        self.batch = stack([RaggedRows()[0], RaggedRows()[1]])

    def read(self, num_microbatches: int) -> StepBatches:
        return StepBatches([self.batch] * num_microbatches, None, 2 * num_microbatches, [False] * num_microbatches)


class EndsAfterThree(OnlyReads):
    """Tells its length, and is asked to begin again."""

    epoch, num_samples, has_epochs = 0, 6, True

    def __init__(self) -> None:
        super().__init__()
        self.taken, self.sought, self.left_out = 0, [], []  # type: ignore[var-annotated]

    def read(self, num_microbatches: int) -> StepBatches:
        self.taken += num_microbatches
        return super().read(num_microbatches)

    def has_next(self, num_microbatches: int) -> bool:
        return self.taken + num_microbatches <= 3

    def seek(self, epoch: int, samples_in_epoch: int) -> None:
        self.sought.append((epoch, samples_in_epoch))
        self.taken = 0

    def leave_out(self, entries: Any) -> None:
        self.left_out.append([list(one) for one in entries])


SOURCES = [
    TrainLoader(RaggedRows(), micro_batch_size=2, global_batch_size=4),
    IterableLoader([1, 2], micro_batch_size=1),
    IteratorReader(iter([torch.zeros(2)])),
    ForeignReader(OnlyReads()),
]


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: type(source).__name__)
def test_readers_of_ours_are_whole_and_stay_as_they_are(source: StepSource) -> None:
    assert isinstance(source, StepSource)
    assert as_step_source(source) is source
    assert source.has_next(1)
    source.leave_out([])
    assert source.has_epochs is not isinstance(source, IteratorReader)
    assert not source.position_is_shared


def test_a_users_source_says_of_its_position_that_it_is_shared() -> None:
    class Shared(OnlyReads):
        position_is_shared = True

    assert as_step_source(Shared()).position_is_shared
    assert not as_step_source(OnlyReads()).position_is_shared


@pytest.mark.parametrize("wrapped", [iter([torch.zeros(3)]), [iter([torch.zeros(3)])]], ids=["plain", "in a list"])
def test_an_iterator_of_micro_batches_is_read_with_the_ranks_counted(wrapped: Any) -> None:
    step = as_step_source(wrapped, world_size=4).read(2)
    assert step is not None
    assert (len(step.micro_batches), step.num_samples) == (1, 12)


def test_what_neither_reads_nor_iterates_is_refused() -> None:
    with pytest.raises(DataError, match="got int"):
        as_step_source(3)


def test_an_object_that_only_reads_trains_and_has_no_length() -> None:
    source = as_step_source(OnlyReads())
    assert (source.epoch, source.samples_in_epoch, source.num_samples, source.steps_per_epoch(2)) == (0, 0, None, None)
    assert source.has_next(10**9)
    state = small_state(train_iters=3)
    run(state, data=OnlyReads())
    assert state.train_state.step == 3


def test_what_an_object_lacks_is_refused_when_it_is_needed() -> None:
    with pytest.raises(DataError, match=r"OnlyReads has no state_dict; .*onstep.data.StepSource"):
        as_step_source(OnlyReads()).state_dict()


def test_what_an_object_has_is_asked() -> None:
    data = EndsAfterThree()
    source = as_step_source(data)
    assert source.num_samples == 6
    state = small_state(2, 2, train_iters=7)
    state.train_state.skip_list = [[0, 5]]
    run(state, data=data)
    assert data.sought == [(1, 0), (2, 0)]
    assert data.left_out == [[[0, 5]]] * 2
    assert (state.train_state.epoch, state.train_state.step) == (2, 7)
