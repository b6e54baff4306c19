"""A raw iterator of micro-batches."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from onstep.data import IteratorReader
from onstep.errors import DataError


def micro_batches(count: int) -> Iterator[dict[str, torch.Tensor]]:
    return ({"x": torch.full((2, 3), i)} for i in range(count))


class StatefulIterator:
    def __init__(self) -> None:
        self.next = 0

    def __iter__(self) -> StatefulIterator:
        return self

    def __next__(self) -> torch.Tensor:
        self.next += 1
        return torch.tensor([self.next - 1])

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


def values(step: Any) -> list[int]:
    return [int(batch["x"][0, 0]) for batch in step.micro_batches]


def test_steps_are_taken_in_order_and_the_last_may_be_short() -> None:
    reader = IteratorReader(micro_batches(5), world_size=3)
    step = reader.read(3)
    assert step is not None
    assert (values(step), step.num_samples, step.local_samples) == ([0, 1, 2], 18, [2, 2, 2])
    assert (step.sample_ids, step.is_filler) == (None, [False] * 3)
    assert values(reader.read(3)) == [3, 4]
    assert (reader.epoch, reader.samples_in_epoch) == (0, 30)
    assert [reader.read(3), reader.read(3)] == [None, None]
    assert reader.epoch == 0
    assert (reader.num_samples, reader.steps_per_epoch(1)) == (None, None)
    reader.close()


def test_batches_that_do_not_tell_their_size_are_handed_on_with_an_unknown_number_of_samples() -> None:
    reader = IteratorReader(iter(["abc", "def"]))
    step = reader.read(2)
    assert step is not None
    assert (step.micro_batches, step.num_samples, step.local_samples) == (["abc", "def"], None, None)
    assert reader.samples_in_epoch == 0


def test_the_size_is_found_in_nested_batches() -> None:
    nested = [{"name": "a", "scale": torch.tensor(1.0), "parts": (torch.zeros(4, 2), torch.zeros(9))}]
    step = IteratorReader(iter(nested)).read(1)
    assert step is not None
    assert step.num_samples == 4


def test_a_plain_iterator_takes_its_items_again_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    reader = IteratorReader(micro_batches(9))
    reader.read(3)
    state = reader.state_dict()
    again = IteratorReader(micro_batches(9))
    again.load_state_dict(state)
    assert values(again.read(2)) == [3, 4]
    assert again.samples_in_epoch == 10
    assert [r.levelno for r in caplog.records] == [logging.WARNING]
    assert "reading 3 micro-batches" in caplog.text
    with pytest.raises(DataError, match="ended after 2 micro-batches while replaying 3"):
        IteratorReader(micro_batches(2)).load_state_dict(state)
    with pytest.raises(DataError, match="is 2 micro-batches past"):
        again.load_state_dict(state)


def test_a_stateful_iterator_continues_from_its_state(caplog: pytest.LogCaptureFixture) -> None:
    reader = IteratorReader(StatefulIterator())
    reader.read(4)
    again = IteratorReader(StatefulIterator())
    again.load_state_dict(reader.state_dict())
    assert again.state_dict() == reader.state_dict()
    step = again.read(1)
    assert step is not None
    assert step.micro_batches[0].item() == 4
    assert caplog.records == []


def test_it_cannot_seek_and_takes_only_iterators() -> None:
    reader = IteratorReader(micro_batches(3))
    reader.seek(0, 0)
    with pytest.raises(DataError, match="cannot seek to epoch 1, sample 4"):
        reader.seek(1, 4)
    with pytest.raises(DataError, match="got list"):
        IteratorReader([1, 2])  # type: ignore[arg-type]
