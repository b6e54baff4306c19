"""Data without an index: the position is the iterable's own state, or is reached by reading again."""

from __future__ import annotations

import gc
import logging
import multiprocessing
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

from onstep.data import IterableLoader, StepBatches
from onstep.errors import DataError


class Plain(IterableDataset[dict[str, int]]):
    """Numbers in order, each epoch from another hundred."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples
        self.epoch = 0
        self.num_read = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[dict[str, int]]:
        for number in range(self.num_samples):
            self.num_read += 1
            yield {"x": 100 * self.epoch + number}


class Sized(Plain):
    def __len__(self) -> int:
        return self.num_samples


class Stateful:
    """Continues from its state; starts afresh after its end. A duck type of `datasets.IterableDataset`."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples
        self.next = 0
        self.num_read = 0

    def __iter__(self) -> Iterator[dict[str, int]]:
        while self.next < self.num_samples:
            self.next += 1
            self.num_read += 1
            yield {"x": self.next - 1}
        self.next = 0

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


def numbers(step: StepBatches | None) -> list[list[int]] | None:
    return None if step is None else [batch["x"].tolist() for batch in step.micro_batches]


@pytest.mark.parametrize("source_type", [Plain, Stateful])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_every_split_of_a_global_batch_takes_the_same_samples(source_type: Any, num_workers: int) -> None:
    for world, micro, accumulation in [(1, 4, 1), (1, 2, 2), (2, 2, 1), (2, 1, 2), (4, 1, 1)]:
        ranks = [
            IterableLoader(
                source_type(11),
                micro_batch_size=micro,
                global_batch_size=4,
                rank=rank,
                world_size=world,
                num_workers=num_workers if world == 1 else 0,
            )
            for rank in range(world)
        ]
        taken = []
        for _ in range(2):
            steps = [loader.read(accumulation) for loader in ranks]
            assert {step and step.num_samples for step in steps} == {4}
            assert {step.sample_ids is None for step in steps if step} == {True}
            rows = zip(*[numbers(step) or [] for step in steps], strict=True)
            taken.append([i for row in rows for batch in row for i in batch])
        assert taken == [[0, 1, 2, 3], [4, 5, 6, 7]]
        assert [loader.read(accumulation) for loader in ranks] == [None] * world
        assert {(loader.epoch, loader.samples_in_epoch) for loader in ranks} == {(1, 0)}
        for loader in ranks:
            loader.close()


def test_a_tail_is_a_smaller_step_with_fillers() -> None:
    ranks = [
        IterableLoader(Plain(7), micro_batch_size=2, rank=rank, world_size=2, drop_last=False) for rank in range(2)
    ]
    assert [numbers(loader.read(1)) for loader in ranks] == [[[0, 1]], [[2, 3]]]
    assert [numbers(loader.read(1)) for loader in ranks] == [[[4, 5]], [[6]]]
    assert [loader.read(1) for loader in ranks] == [None, None]
    ranks[0].seek(0, 0)
    short = [
        IterableLoader(Plain(5), micro_batch_size=2, rank=rank, world_size=2, drop_last=False) for rank in range(2)
    ]
    steps = [loader.read(3) for loader in short]
    assert [numbers(step) for step in steps] == [[[0, 1], [4]], [[2, 3], [4]]]
    assert [step and step.is_filler for step in steps] == [[False, False], [False, True]]
    assert [step and step.num_samples for step in steps] == [5, 5]
    assert [step and step.local_samples for step in steps] == [[2, 1], [2, 0]]


def run(loader: IterableLoader, num_reads: int) -> list[tuple[dict[str, Any], list[list[int]] | None]]:
    """The position before each read, and what was read."""
    return [(loader.state_dict(), numbers(loader.read(2))) for _ in range(num_reads)]


def test_a_plain_iterable_is_read_again_up_to_the_position_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    history = run(IterableLoader(Plain(11), micro_batch_size=2), 9)
    assert [batches for _, batches in history[3:5]] == [[[100, 101], [102, 103]], [[104, 105], [106, 107]]]
    assert caplog.records == []
    for number, (state, _) in enumerate(history[:6]):
        caplog.clear()
        loader = IterableLoader(Plain(11), micro_batch_size=2)
        loader.load_state_dict(state)
        assert loader.state_dict() == state
        assert [batches for _, batches in run(loader, 3)] == [batches for _, batches in history[number : number + 3]]
        announced = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
        skipped = state["samples_in_epoch"]
        assert len(announced) == (skipped > 0)
        assert all(f"the first {skipped} samples of epoch {state['epoch']}" in message for message in announced)


def test_a_stateful_iterable_continues_without_reading_again(caplog: pytest.LogCaptureFixture) -> None:
    history = run(IterableLoader(Stateful(11), micro_batch_size=2), 12)
    assert history[1][0] == {"epoch": 0, "samples_in_epoch": 4, "stream": {"next": 4}}
    assert history[3][0] == {"epoch": 1, "samples_in_epoch": 0}
    for number, (state, _) in enumerate(history[:6]):
        loader = IterableLoader(Stateful(11), micro_batch_size=2)
        loader.load_state_dict(state)
        assert loader.state_dict() == state
        assert [batches for _, batches in run(loader, 5)] == [batches for _, batches in history[number : number + 5]]
    source = Stateful(1000)
    loader = IterableLoader(source, micro_batch_size=2)
    loader.load_state_dict({"epoch": 0, "samples_in_epoch": 900, "stream": {"next": 900}})
    assert numbers(loader.read(1)) == [[900, 901]]
    assert source.num_read == 2
    assert caplog.records == []


def test_the_state_is_that_of_what_was_handed_out_even_when_workers_are_asked_for() -> None:
    loader = IterableLoader(Stateful(100), micro_batch_size=2, num_workers=2)
    loader.read(1)
    assert loader.state_dict()["stream"] == {"next": 2}


@pytest.mark.parametrize("source_type", [Plain, Stateful])
def test_reading_goes_on_after_close(source_type: Any) -> None:
    loader = IterableLoader(source_type(20), micro_batch_size=2, num_workers=1)
    assert numbers(loader.read(1)) == [[0, 1]]
    loader.close()
    gc.collect()
    assert multiprocessing.active_children() == []
    assert loader.samples_in_epoch == 2
    assert numbers(loader.read(1)) == [[2, 3]]
    loader.close()


def test_a_streaming_dataset_of_the_datasets_library_continues_from_its_state() -> None:
    datasets = pytest.importorskip("datasets")

    def stream() -> Any:
        rows = datasets.Dataset.from_dict({"x": list(range(40))})
        return rows.to_iterable_dataset(num_shards=10).shuffle(seed=3, buffer_size=1)

    history = run(IterableLoader(stream(), micro_batch_size=3), 9)
    epoch = [i for _, batches in history[:6] for batch in batches or [] for i in batch]
    assert len(set(epoch)) == 36
    assert history[6][1] is None
    assert history[7][1] != history[0][1]  # set_epoch shuffled the shards anew
    for number in (2, 5, 8):
        loader = IterableLoader(stream(), micro_batch_size=3)
        loader.load_state_dict(history[number][0])
        assert numbers(loader.read(2)) == history[number][1]


def tensor_loader(num_samples: int, batch_size: int, **options: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(num_samples)), batch_size=batch_size, **options)


def first_column(step: StepBatches | None) -> list[list[int]] | None:
    return None if step is None else [batch[0].tolist() for batch in step.micro_batches]


def test_ready_batches_are_handed_on_as_they_are() -> None:
    loader = IterableLoader(tensor_loader(10, 4), micro_batch_size=4, already_batched=True, drop_last=False)
    step = loader.read(2)
    assert step is not None
    assert first_column(step) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert (step.num_samples, step.local_samples) == (8, [4, 4])
    assert loader.steps_per_epoch(2) == 2
    assert loader.num_samples == 10
    assert first_column(loader.read(2)) == [[8, 9]]
    assert loader.read(2) is None
    assert loader.epoch == 1


def test_ready_batches_drop_a_step_of_too_few() -> None:
    loader = IterableLoader(tensor_loader(12, 4), micro_batch_size=4, already_batched=True)
    assert first_column(loader.read(2)) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert loader.read(2) is None
    assert loader.steps_per_epoch(2) == 1


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_shuffling_loader_gives_the_same_samples_when_it_is_read_again(num_workers: int) -> None:
    def make() -> IterableLoader:
        ready = tensor_loader(12, 2, shuffle=True, num_workers=num_workers)
        return IterableLoader(ready, micro_batch_size=2, already_batched=True, seed=4)

    torch.manual_seed(1)
    before = torch.get_rng_state()
    loader = make()
    history = [(loader.state_dict(), first_column(loader.read(1))) for _ in range(12)]
    assert torch.equal(torch.get_rng_state(), before)
    assert [batches for _, batches in history[:6]] != [batches for _, batches in history[7:]]
    torch.manual_seed(2)
    for number in (3, 9):
        loader = make()
        loader.load_state_dict(history[number][0])
        assert first_column(loader.read(1)) == history[number][1]
        loader.close()


def test_a_generator_that_the_user_gave_is_left_alone() -> None:
    generator = torch.Generator().manual_seed(9)
    expected = list(tensor_loader(6, 2, shuffle=True, generator=torch.Generator().manual_seed(9)))
    ready = tensor_loader(6, 2, shuffle=True, generator=generator)
    loader = IterableLoader(ready, micro_batch_size=2, already_batched=True)
    assert first_column(loader.read(3)) == [batch[0].tolist() for batch in expected]


def test_a_distributed_sampler_gets_the_epoch() -> None:
    dataset = TensorDataset(torch.arange(12))
    sampler: DistributedSampler[Any] = DistributedSampler(dataset, num_replicas=2, rank=1, seed=0)
    loader = IterableLoader(
        DataLoader(dataset, batch_size=2, sampler=sampler),
        micro_batch_size=2,
        rank=1,
        world_size=2,
        already_batched=True,
    )
    first, _, second = loader.read(3), loader.read(3), loader.read(3)
    assert sampler.epoch == 1
    assert first is not None
    assert first.num_samples == 12
    assert first_column(first) != first_column(second)


def test_lengths_are_known_where_the_iterable_tells() -> None:
    assert IterableLoader(Plain(9), micro_batch_size=2).steps_per_epoch(2) is None
    assert IterableLoader(Plain(9), micro_batch_size=2).num_samples is None
    sized = IterableLoader(Sized(9), micro_batch_size=2)
    assert (sized.num_samples, sized.steps_per_epoch(2)) == (9, 2)
    assert IterableLoader(Sized(9), micro_batch_size=2, drop_last=False).steps_per_epoch(2) == 3
    unsized_loader: DataLoader[Any] = DataLoader(Plain(9), batch_size=2)
    assert IterableLoader(unsized_loader, micro_batch_size=2, already_batched=True).steps_per_epoch(1) is None


def test_a_first_pass_without_a_step_is_an_error_and_later_ones_are_empty() -> None:
    with pytest.raises(DataError, match=r"the iterable ended after 3 samples, less than one step.*start over"):
        IterableLoader(Plain(3), micro_batch_size=2).read(2)
    loader = IterableLoader(iter([{"x": 1}, {"x": 2}]), micro_batch_size=2)  # cannot start over
    assert numbers(loader.read(1)) == [[1, 2]]
    assert [loader.read(1), loader.epoch] == [None, 1]
    assert [loader.read(1), loader.epoch] == [None, 2]


@pytest.mark.parametrize("already_batched", [False, True])
def test_a_position_beyond_the_data_is_an_error(already_batched: bool) -> None:
    source: Any = tensor_loader(6, 2) if already_batched else Plain(6)
    loader = IterableLoader(source, micro_batch_size=2, samples_in_epoch=8, already_batched=already_batched)
    with pytest.raises(DataError, match="ended after 6 samples while replaying to position 8"):
        loader.read(1)


def test_sizes_that_cannot_work_are_refused_at_once() -> None:
    with pytest.raises(DataError, match="multiple of micro_batch_size"):
        IterableLoader(Plain(6), micro_batch_size=2, global_batch_size=3)
    with pytest.raises(DataError, match="num_workers must be >= 0"):
        IterableLoader(Plain(6), micro_batch_size=2, num_workers=-1)
    with pytest.raises(DataError, match="epoch -1"):
        IterableLoader(Plain(6), micro_batch_size=2, epoch=-1)
    with pytest.raises(DataError, match="num_microbatches must be >= 1"):
        IterableLoader(Plain(6), micro_batch_size=2).read(0)


def test_a_spawned_worker_reads_the_stream_too() -> None:
    before = multiprocessing.get_start_method()
    multiprocessing.set_start_method("spawn", force=True)
    try:
        loader = IterableLoader(Plain(4), micro_batch_size=2, num_workers=1)
        assert numbers(loader.read(2)) == [[0, 1], [2, 3]]
        loader.close()
    finally:
        multiprocessing.set_start_method(before, force=True)
