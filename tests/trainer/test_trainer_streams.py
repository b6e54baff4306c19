"""Streams of the `datasets` library: trained on in their order, and continued at the very sample."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import transformers

from onstep import Callback, Trainer
from onstep.errors import DataError
from tests.support.small_models import Regression, arguments, losses_of, quiet

OPTIONS = {"per_device_train_batch_size": 2, "max_steps": 24, "logging_steps": 1}
"""Two epochs of ten steps, and four steps more."""


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """Two files of ten rows."""
    paths = []
    for number in range(2):
        rows = [
            {"x": [0.1 * index, 1.0, -1.0], "labels": float(index)} for index in range(10 * number, 10 * number + 10)
        ]
        path = tmp_path / f"{number}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        paths.append(str(path))
    return paths


def stream_of(files: list[str]) -> Any:
    return datasets.load_dataset("json", data_files=files, split="train", streaming=True)


KINDS: dict[str, Callable[[Any], Any]] = {
    "plain": lambda stream: stream,
    "shuffled": lambda stream: stream.shuffle(seed=1, buffer_size=6),
    "mapped": lambda stream: stream.map(lambda row: {"labels": row["labels"] + 1}).filter(
        lambda row: row["labels"] > 1
    ),
    "torch": lambda stream: stream.with_format("torch"),
}


class Read(Callback):
    """Notes the labels of every step, and ends the process after step `until`."""

    def __init__(self, until: int = 0) -> None:
        self.steps: list[list[float]] = []
        self._until = until

    def on_train_step_start(self, context: Any) -> None:
        self.steps.append([float(x) for batch in context.micro_batches for x in batch["labels"]])

    def on_step_end(self, context: Any) -> None:
        if context.state.train_state.step == self._until:
            raise KeyboardInterrupt


def steps_of(directory: Path, stream: Any, until: int = 0, resume: Any = None) -> list[list[float]]:
    read = Read(until)
    args = arguments(directory, **OPTIONS, save_strategy="steps", save_steps=1)
    trainer = quiet(Regression(), args, stream, callbacks=[read])
    try:
        trainer.train(resume_from_checkpoint=resume)
    except KeyboardInterrupt:
        assert until
    return read.steps


@pytest.mark.filterwarnings("ignore:.*copy construct.*")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("killed_at", [pytest.param(4, marks=pytest.mark.slow), 15])
def test_a_stream_continues_at_the_very_sample(tmp_path: Path, files: list[str], kind: str, killed_at: int) -> None:
    def made() -> Any:
        return KINDS[kind](stream_of(files))

    whole = steps_of(tmp_path / "whole", made())
    first = steps_of(tmp_path / "killed", made(), until=killed_at)
    rest = steps_of(tmp_path / "killed", made(), resume=True)
    assert first == whole[:killed_at]
    assert rest == whole[killed_at - 1 :]  # the step that was not saved, again


def test_each_epoch_of_a_shuffled_stream_has_another_order(tmp_path: Path, files: list[str]) -> None:
    steps = steps_of(tmp_path, KINDS["shuffled"](stream_of(files)))
    first, second = (list(chain.from_iterable(epoch)) for epoch in (steps[:10], steps[10:20]))
    assert sorted(first) == sorted(second) == [float(number) for number in range(20)]
    assert first != second


def test_a_stream_that_was_continued_starts_over_in_the_next_training(tmp_path: Path, files: list[str]) -> None:
    stream = stream_of(files)
    steps_of(tmp_path / "killed", stream, until=4)
    steps_of(tmp_path / "killed", stream, resume=True)
    assert steps_of(tmp_path / "next", stream)[0] == [0.0, 1.0]


def test_losses_over_a_shuffled_stream_are_those_of_transformers(tmp_path: Path, files: list[str]) -> None:
    """Over one epoch: accelerate sets the epoch of a stream from the second on."""
    options = {"learning_rate": 0.05, "max_grad_norm": 1.0, "optim": "adamw_torch", "max_steps": 10}
    args = transformers.TrainingArguments(
        str(tmp_path / "theirs"),
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
        **{**OPTIONS, **options},
    )
    theirs = transformers.Trainer(Regression(), args, train_dataset=KINDS["shuffled"](stream_of(files)))
    theirs.remove_callback(transformers.PrinterCallback)
    theirs.train()
    ours: Trainer = quiet(
        Regression(), arguments(tmp_path, **{**OPTIONS, **options}), KINDS["shuffled"](stream_of(files))
    )
    ours.train()
    expected = [record["loss"] for record in theirs.state.log_history if "loss" in record]
    assert losses_of(ours) == pytest.approx(expected, rel=1e-5)


def test_a_part_of_another_number_of_ranks_is_refused(tmp_path: Path, files: list[str]) -> None:
    from datasets.distributed import split_dataset_by_node

    part = split_dataset_by_node(stream_of(files), rank=1, world_size=2)
    with pytest.raises(DataError, match="made part 1 of 2 of the stream, and this is rank 0 of 1"):
        steps_of(tmp_path, part)


def test_the_numbers_of_a_stream_are_tensors(tmp_path: Path, files: list[str]) -> None:
    batches: list[Any] = []

    class Keep(Callback):
        def on_train_step_start(self, context: Any) -> None:
            batches.extend(context.micro_batches)

    quiet(Regression(), arguments(tmp_path, max_steps=1), stream_of(files), callbacks=[Keep()]).train()
    assert isinstance(batches[0]["x"], torch.Tensor)
