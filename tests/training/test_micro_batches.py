"""Micro-batches reach the device in the form in which they were collated."""

from __future__ import annotations

import sys
from collections import OrderedDict, UserDict, defaultdict
from types import FrameType
from typing import Any, NamedTuple

import pytest
import torch

from onstep.data import IteratorReader, StepBatches, StepSource, TrainLoader
from onstep.training.compute.step import MicroBatches, to_device

META = torch.device("meta")


class Pair(NamedTuple):
    inputs: Any
    name: str


@pytest.mark.parametrize("kind", [dict, OrderedDict, UserDict, lambda items: defaultdict(list, items)])
def test_mappings_keep_their_type(kind: Any) -> None:
    batch = kind({"x": torch.ones(2), "names": ["a"], "nested": {"y": torch.ones(1)}})
    moved = to_device(batch, META)
    assert type(moved) is type(batch)
    assert (moved["x"].device, moved["nested"]["y"].device, moved["names"]) == (META, META, ["a"])
    assert batch["x"].device.type == "cpu"


def test_tuples_and_lists_keep_their_type() -> None:
    moved = to_device(Pair([torch.ones(1), (torch.ones(1),)], "a"), META)
    assert isinstance(moved, Pair)
    assert (moved.inputs[0].device, moved.inputs[1][0].device, moved.name) == (META, META, "a")


def test_a_batch_that_is_there_already_is_handed_on_as_it_is() -> None:
    batch = {"x": torch.ones(1), "name": "a"}
    assert to_device(batch, torch.device("cpu")) is batch
    beyond = {"x": torch.ones(1), "y": torch.ones(1, device=META)}
    with pytest.raises(NotImplementedError, match="meta tensor"):
        to_device(beyond, torch.device("cpu"))


def test_a_forward_step_may_read_beyond_its_own_micro_batch() -> None:
    given = [{"x": torch.tensor(number)} for number in range(3)]
    batches = MicroBatches(StepBatches(given, None, 3, [False, True, False]), torch.device("cpu"))
    assert batches.stage(1) is given[1]
    assert next(batches) is given[1]
    assert batches.is_filler()
    assert next(batches) is given[2]
    assert not batches.is_filler()
    with pytest.raises(StopIteration):
        next(batches)
    assert batches.stage(0) is next(batches)


@pytest.mark.parametrize("kind", ["loader", "iterator"])
def test_a_step_of_one_micro_batch_is_read_and_staged_in_few_calls(kind: str) -> None:
    rows = [{"x": torch.tensor(number), "labels": torch.tensor(1)} for number in range(8)]
    source: StepSource = IteratorReader(iter([{"x": torch.ones(2, 2)}] * 3))
    if kind == "loader":
        source = TrainLoader(rows, micro_batch_size=2, global_batch_size=2)
    source.read(1)
    calls: list[str] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and "/onstep/" in frame.f_code.co_filename:
            calls.append(frame.f_code.co_qualname)

    sys.setprofile(note)
    try:
        step = source.read(1) if source.has_next(1) else None
        assert step is not None
        batches = MicroBatches(step, torch.device("cpu"))
        batches.stage(0)
        next(batches)
    finally:
        sys.setprofile(None)
    assert len(calls) <= {"loader": 9, "iterator": 7}[kind], calls
