"""Datasets of many kinds: columns, collators, epochs, workers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

from onstep import Callback
from onstep.errors import DataError
from tests.support.small_models import Regression, Stream, TokenModel, arguments, quiet, ragged_rows, regression_rows


class Batches(Callback):
    """Notes the micro-batches that are trained on, and their sample ids."""

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.ids: list[Any] = []

    def on_train_step_start(self, context: Any) -> None:
        self.seen.extend(context.micro_batches)
        self.ids.append(context.sample_ids)


def batches_of(directory: Path, model: nn.Module, rows: Any, *, options: Any = None, **given: Any) -> Batches:
    batches = Batches()
    quiet(model, arguments(directory, **(options or {})), rows, callbacks=[batches], **given).train()
    return batches


def test_columns_that_the_model_does_not_take_are_left_out(tmp_path: Path) -> None:
    rows = [{**row, "text": "a", "length": 3} for row in regression_rows(4)]
    assert list(batches_of(tmp_path, Regression(), rows).seen[0]) == ["x", "labels"]


def test_columns_that_are_left_out_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [{**row, "text": "a", "length": 3} for row in regression_rows(4)]
    with caplog.at_level("INFO"):
        batches_of(tmp_path, Regression(), rows)
    assert "columns that Regression.forward does not accept are dropped: text, length" in caplog.text


def test_all_columns_reach_a_users_collator_that_asks_for_them(tmp_path: Path) -> None:
    given: list[Any] = []

    def collate(samples: Any) -> dict[str, Tensor]:
        given.append(list(samples[0]))
        return {key: torch.stack([sample[key] for sample in samples]) for key in ("x", "labels")}

    rows = [{**row, "text": "a"} for row in regression_rows(4)]
    batches_of(tmp_path / "all", Regression(), rows, options={"remove_unused_columns": False}, data_collator=collate)
    batches_of(tmp_path / "used", Regression(), rows, data_collator=collate)
    assert given == [["x", "labels", "text"], ["x", "labels"]]


def test_a_model_that_takes_everything_gets_everything(tmp_path: Path) -> None:
    class Anything(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Regression()

        def forward(self, **inputs: Tensor) -> Any:
            assert set(inputs) == {"x", "labels", "extra"}
            return self.inner(inputs["x"], inputs["labels"])

    batches_of(tmp_path, Anything(), [{**row, "extra": 1.0} for row in regression_rows(4)])


def test_a_compiled_model_keeps_the_columns_of_the_module_inside(tmp_path: Path) -> None:
    model = torch.compile(Regression(), backend="eager")
    rows = [{**row, "length": 3} for row in regression_rows(4)]
    assert list(batches_of(tmp_path, model, rows).seen[0]) == ["x", "labels"]  # type: ignore[arg-type]


def test_a_dataset_of_the_datasets_library_is_read_as_it_comes(tmp_path: Path) -> None:
    table = datasets.Dataset.from_dict(
        {
            "x": [row["x"].tolist() for row in regression_rows(6)],
            "label": [row["labels"].item() for row in regression_rows(6)],
            "text": ["a"] * 6,
        }
    )
    batches = batches_of(tmp_path, Regression(), table)
    assert [sorted(batch) for batch in batches.seen] == [["labels", "x"]] * 2
    torch.testing.assert_close(batches.seen[0]["x"], torch.stack([row["x"] for row in regression_rows(6)[:4]]))
    trainer = quiet(Regression(), arguments(tmp_path / "stream", max_steps=2), table.to_iterable_dataset())
    assert trainer.train().global_step == 2


def test_a_dataset_without_a_usable_column_is_refused_before_training(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"No column of the dataset \(text\) is a parameter of Regression.forward"):
        batches_of(tmp_path, Regression(), datasets.Dataset.from_dict({"text": ["a", "b"]}))
    with pytest.raises(ValueError, match=r"no column that Regression.forward accepts"):
        batches_of(tmp_path, Regression(), Stream([{"text": "a"}]), options={"max_steps": 1})


class NoIterator(IterableDataset[Any]):
    """Its `__iter__` forgets to yield."""

    def __iter__(self) -> Any:
        return None


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ({2 * n: row for n, row in enumerate(regression_rows(4))}, "the dict has no sample .*: pass a list"),
        ([{**row, "x": row["x"].to("meta")} for row in regression_rows(4)], "cannot be moved to cpu: .*'meta'"),
        ([{**row, "x": [[1.0], [1.0, 2.0]]} for row in regression_rows(4)], "'x' has nested lists of unequal length"),
        (NoIterator(), r"NoIterator\.__iter__ returned an object that is not an iterator .*yield the samples"),
    ],
)
def test_samples_that_cannot_be_read_are_named(tmp_path: Path, rows: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        quiet(Regression(), arguments(tmp_path, max_steps=2), rows).train()


class NoPath(Dataset[Any]):
    """Its samples cannot be read."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: Any) -> Any:
        files: dict[str, Any] = {}
        return files["path"]


@pytest.mark.parametrize("keeps_columns", [True, False])
def test_an_error_of_the_first_sample_names_it(tmp_path: Path, keeps_columns: bool) -> None:
    args = arguments(tmp_path, max_steps=2, remove_unused_columns=not keeps_columns)
    with pytest.raises(KeyError, match="path") as error:
        quiet(Regression(), args, NoPath()).train()
    assert re.search(r"raised by the sample at index \d of the NoPath, whose length is 4", error.value.__notes__[0])


def test_a_tokenizer_pads_the_samples(tmp_path: Path) -> None:
    import tokenizers
    import transformers

    vocabulary = {token: number for number, token in enumerate(["<pad>", "<unk>", *"abcdefgh"])}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", unk_token="<unk>")

    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(1, 1)

        def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> dict[str, Tensor]:
            used = attention_mask.sum(1, keepdim=True).float()
            return {"loss": (self.layer(used).squeeze(-1) - labels).square().mean()}

    rows = [{**tokenizer(text), "label": float(len(text))} for text in ("a b c", "d", "e f", "g h a b")]
    (batch,) = batches_of(tmp_path, Counts(), rows, processing_class=tokenizer).seen
    assert batch["input_ids"].tolist() == [[2, 3, 4, 0], [5, 0, 0, 0], [6, 7, 0, 0], [8, 9, 2, 3]]
    assert batch["attention_mask"].sum(1).tolist() == [3, 1, 2, 4]


def test_the_order_is_the_same_for_every_split_and_another_in_each_epoch(tmp_path: Path) -> None:
    options = {"num_train_epochs": 2, "train_sampling_strategy": "random"}
    whole = batches_of(tmp_path / "whole", Regression(), regression_rows(12), options=options).ids
    split = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}
    parts = batches_of(tmp_path / "parts", Regression(), regression_rows(12), options={**options, **split}).ids
    flat = [[i for micro in step for i in micro] for step in whole]
    assert [[i for micro in step for i in micro] for step in parts] == flat
    first, second = ([i for step in epoch for i in step] for epoch in (flat[:3], flat[3:]))
    assert sorted(first) == sorted(second) == list(range(12))
    assert first != second != list(range(12))


def test_data_seed_chooses_another_order(tmp_path: Path) -> None:
    options = {"train_sampling_strategy": "random"}
    one = batches_of(tmp_path / "1", Regression(), regression_rows(12), options={**options, "data_seed": 1}).ids
    other = batches_of(tmp_path / "2", Regression(), regression_rows(12), options={**options, "data_seed": 2}).ids
    again = batches_of(tmp_path / "3", Regression(), regression_rows(12), options={**options, "seed": 1}).ids
    assert one == again != other


class EpochRows:
    """Yields rows by the epoch that it was given."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.full((3,), float(self.calls[-1])), "labels": torch.ones(())}

    def set_epoch(self, epoch: int) -> None:
        self.calls.append(epoch)


def test_a_dataset_gets_the_epoch_before_its_samples_are_read(tmp_path: Path) -> None:
    rows = EpochRows()
    rows.calls.append(7)
    batches = batches_of(tmp_path, Regression(), rows, options={"num_train_epochs": 3})
    assert [batch["x"][0, 0].item() for batch in batches.seen] == [0.0, 1.0, 2.0]


def test_persistent_workers_get_the_epoch_too(tmp_path: Path) -> None:
    rows = EpochRows()
    rows.calls.append(7)
    workers = {"dataloader_num_workers": 1, "dataloader_persistent_workers": True}
    batches = batches_of(tmp_path, Regression(), rows, options={"num_train_epochs": 3, **workers})
    assert [batch["x"][0, 0].item() for batch in batches.seen] == [0.0, 1.0, 2.0]


class EpochStream(Stream):
    epoch = 7

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Any:
        return ({**row, "x": torch.full((3,), float(self.epoch))} for row in self.rows)


def test_a_stream_gets_the_epoch(tmp_path: Path) -> None:
    batches = batches_of(tmp_path, Regression(), EpochStream(regression_rows(4)), options={"max_steps": 3})
    assert [batch["x"][0, 0].item() for batch in batches.seen] == [0.0, 1.0, 2.0]


@pytest.mark.parametrize(("drop_last", "sizes"), [(True, [4, 4]), (False, [4, 4, 2])])
def test_the_tail_of_a_streams_epoch_is_dropped_or_used(tmp_path: Path, drop_last: bool, sizes: list[int]) -> None:
    class Sized(Stream):
        def __len__(self) -> int:
            return len(self.rows)

    batches = batches_of(
        tmp_path, Regression(), Sized(regression_rows(10)), options={"dataloader_drop_last": drop_last}
    )
    assert [len(batch["x"]) for batch in batches.seen] == sizes


def test_workers_give_the_same_batches(tmp_path: Path) -> None:
    options = {"train_sampling_strategy": "random", "num_train_epochs": 2}
    here = batches_of(tmp_path / "here", TokenModel(), ragged_rows(8), options=options)
    there = batches_of(
        tmp_path / "there", TokenModel(), ragged_rows(8), options={**options, "dataloader_num_workers": 1}
    )
    assert there.ids == here.ids
    for one, other in zip(there.seen, here.seen, strict=True):
        torch.testing.assert_close(one, other)


def test_a_generator_that_ends_before_max_steps_ends_the_training_which_is_saved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options: Any = {"max_steps": 10, "config_overrides": {}}
    trainer = quiet(Regression(), arguments(tmp_path, **options), (row for row in regression_rows(20)))
    assert trainer.train().global_step == 5
    assert trainer.state.epoch == 1
    assert "exhausted at step 5 of 10, so training ends and is saved there: a generator" in caplog.text
    assert {"checkpoint-5", "model.safetensors"} <= {path.name for path in (tmp_path / "run").iterdir()}
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "completed"
