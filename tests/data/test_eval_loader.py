"""Evaluation reads all of a dataset in order, each time from its start."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from onstep.data import EvalLoader, StepBatches
from onstep.errors import DataError


class Squares:
    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": index * index}


@pytest.mark.parametrize("rank", [0, 1])
def test_micro_batches_far_larger_than_the_dataset_take_no_memory(rank: int) -> None:
    loader = EvalLoader(Squares(8), micro_batch_size=10**12, rank=rank, world_size=2)
    (step,) = loader.batches()
    assert (step.is_filler, step.num_samples) == ([rank == 1], 8)


class Stream(IterableDataset[dict[str, int]]):
    def __iter__(self) -> Iterator[dict[str, int]]:
        return ({"x": i * i} for i in range(7))


def values(steps: list[StepBatches]) -> list[list[list[int]]]:
    return [[batch["x"].tolist() for batch in step.micro_batches] for step in steps]


@pytest.mark.parametrize("dataset", [Squares(7), Stream()], ids=["indexed", "iterable"])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_each_pass_reads_everything_in_order(dataset: Any, num_workers: int) -> None:
    loader = EvalLoader(dataset, micro_batch_size=2, num_microbatches=2, num_workers=num_workers)
    for _ in range(2):
        steps = list(loader.batches())
        assert values(steps) == [[[0, 1], [4, 9]], [[16, 25], [36]]]
        assert [step.num_samples for step in steps] == [4, 3]
    assert values(list(loader.batches(max_batches=1))) == [[[0, 1], [4, 9]]]
    assert values(list(loader.batches(max_batches=1))) == [[[0, 1], [4, 9]]]
    assert list(loader.batches(max_batches=0)) == []


def test_persistent_workers_are_kept_over_passes_until_closed() -> None:
    loader = EvalLoader(Squares(40), micro_batch_size=2, num_workers=2, persistent_workers=True)
    processes, firsts = [], []
    for limit in (None, 1, 3):  # a pass that ends early has read ahead
        firsts.append(values(list(loader.batches(limit)))[0])
        processes.append({child.pid for child in multiprocessing.active_children()})

    assert firsts == [[[0, 1]]] * 3
    assert len(processes[0]) == 2
    assert processes[1:] == processes[:1] * 2
    loader.close()
    assert multiprocessing.active_children() == []
    assert values(list(loader.batches(1))) == [[[0, 1]]]
    loader.close()


def test_workers_end_with_the_pass_of_a_dataset_that_changes() -> None:
    class Epochs(Squares):
        def set_epoch(self, epoch: int) -> None:
            self.num_samples = epoch

    for dataset in (Epochs(4), Stream()):
        loader = EvalLoader(dataset, micro_batch_size=2, num_workers=1, persistent_workers=True)
        assert not loader.keeps_workers
        list(loader.batches())
        assert multiprocessing.active_children() == []


@pytest.mark.parametrize("dataset", [Squares(7), Stream()], ids=["indexed", "iterable"])
def test_the_tail_gives_every_rank_equally_many_micro_batches(dataset: Any) -> None:
    ranks = [EvalLoader(dataset, micro_batch_size=1, num_microbatches=2, rank=rank, world_size=3) for rank in range(3)]
    steps = [list(loader.batches()) for loader in ranks]
    assert [values(s) for s in steps] == [[[[0], [9]], [[36]]], [[[1], [16]], [[36]]], [[[4], [25]], [[36]]]]
    assert [s[-1].is_filler for s in steps] == [[False], [True], [True]]
    assert [s[-1].num_samples for s in steps] == [1, 1, 1]
    assert sum(sum(step.local_samples or []) for s in steps for step in s) == 7


def test_the_number_of_batches_is_known_where_the_dataset_has_a_length() -> None:
    loader = EvalLoader(Squares(13), micro_batch_size=2, num_microbatches=2, world_size=2)
    assert len(loader) == loader.num_batches == len(list(loader.batches())) == 2
    assert loader.num_samples == 13
    stream = EvalLoader(Stream(), micro_batch_size=2)
    assert (stream.num_batches, stream.num_samples) == (None, None)
    with pytest.raises(TypeError, match="Stream has no length"):
        len(stream)


def test_a_ready_loader_gives_its_batches() -> None:
    ready = DataLoader(TensorDataset(torch.arange(5)), batch_size=2)
    loader = EvalLoader(ready, micro_batch_size=2, already_batched=True)
    steps = list(loader.batches())
    assert [step.micro_batches[0][0].tolist() for step in steps] == [[0, 1], [2, 3], [4]]
    assert [step.num_samples for step in steps] == [2, 2, 1]
    assert (len(loader), loader.num_samples) == (3, 5)


def test_torchs_global_random_state_is_left_alone() -> None:
    before = torch.get_rng_state()
    list(EvalLoader(Squares(7), micro_batch_size=2, num_workers=1).batches())
    list(EvalLoader(Stream(), micro_batch_size=2, num_workers=1).batches())
    assert torch.equal(torch.get_rng_state(), before)


def test_what_cannot_be_evaluated_is_refused() -> None:
    with pytest.raises(DataError, match="the evaluation dataset is empty"):
        EvalLoader(Squares(0), micro_batch_size=2)
    with pytest.raises(DataError, match="num_microbatches must be >= 1, got 0"):
        EvalLoader(Squares(3), micro_batch_size=2, num_microbatches=0)
    with pytest.raises(DataError, match="micro_batch_size must be >= 1, got 0"):
        EvalLoader(Squares(3), micro_batch_size=0)
