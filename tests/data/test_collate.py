"""Samples of any usual kind become a micro-batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from onstep.data import PaddingCollator, default_data_collator
from onstep.errors import DataError


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1, 2], torch.tensor([1, 2])),
        ([1.5, 2.0], torch.tensor([1.5, 2.0])),
        ([True, False], torch.tensor([True, False])),
        ([[1, 2], [3, 4]], torch.tensor([[1, 2], [3, 4]])),
        ([torch.ones(2), torch.zeros(2)], torch.tensor([[1.0, 1.0], [0.0, 0.0]])),
        ([np.float32(1), np.float32(2)], torch.tensor([1.0, 2.0])),
        ([np.arange(2), np.arange(2)], torch.tensor([[0, 1], [0, 1]])),
    ],
)
def test_values_of_mappings_are_stacked(values: list[Any], expected: torch.Tensor) -> None:
    batch = default_data_collator([{"x": value} for value in values])
    assert torch.equal(batch["x"], expected)
    assert batch["x"].dtype == expected.dtype


@pytest.mark.parametrize("key", ["label", "label_ids", "labels"])
def test_labels_have_one_name(key: str) -> None:
    assert default_data_collator([{key: 1}, {key: 0}])["labels"].tolist() == [1, 0]


def test_strings_and_none_are_left_out_and_nested_mappings_kept() -> None:
    batch = default_data_collator([{"text": "a", "n": None, "image": {"pixels": [1, 2]}}] * 3)
    assert batch.keys() == {"image"}
    assert batch["image"]["pixels"].shape == (3, 2)


def test_tuples_and_tensors_are_collated_as_torch_does() -> None:
    inputs, targets = default_data_collator([(torch.zeros(3), 1), (torch.ones(3), 2)])
    assert inputs.shape == (2, 3)
    assert targets.tolist() == [1, 2]
    assert default_data_collator([torch.zeros(2), torch.ones(2)]).shape == (2, 2)


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
def test_unequal_lengths_name_the_key_and_the_remedy(kind: Any) -> None:
    with pytest.raises(DataError, match=r"'input_ids' has \(2,\), \(3,\) .*PaddingCollator"):
        default_data_collator([{"input_ids": kind([1, 2])}, {"input_ids": kind([1, 2, 3])}])


def test_a_key_that_some_samples_lack_is_named() -> None:
    with pytest.raises(DataError, match="key 'x' is missing"):
        default_data_collator([{"x": 1}, {"y": 1}])


def test_a_key_that_only_the_first_sample_lacks_is_not_lost() -> None:
    with pytest.raises(DataError, match="key 'labels' is missing from some samples"):
        default_data_collator([{"x": 1}, {"x": 2, "labels": 1}])
    with pytest.raises(DataError, match="key 'labels' is missing from some samples"):
        PaddingCollator(pad_id=0)([{"input_ids": [1]}, {"input_ids": [2], "labels": [1]}])


def test_a_value_that_only_the_first_sample_lacks_is_not_lost() -> None:
    with pytest.raises(DataError, match="key 'weight' is None in some samples"):
        default_data_collator([{"x": 1, "weight": None}, {"x": 2, "weight": 0.5}])
    assert list(default_data_collator([{"x": 1, "weight": None}, {"x": 2, "weight": None}])) == ["x"]


def test_two_keys_for_the_labels_are_refused() -> None:
    with pytest.raises(DataError, match="'labels' and another key both become 'labels'"):
        default_data_collator([{"label": 1, "labels": 2}])


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
def test_padding_fills_each_field_with_its_own_value(kind: Any) -> None:
    features = [
        {"input_ids": kind([5, 6, 7]), "labels": kind([6, 7, 8]), "weight": 1.0},
        {"input_ids": kind([9]), "labels": kind([4]), "weight": 2.0},
    ]
    batch = PaddingCollator(pad_id=1)(features)
    assert batch["input_ids"].tolist() == [[5, 6, 7], [9, 1, 1]]
    assert batch["labels"].tolist() == [[6, 7, 8], [4, -100, -100]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert batch["weight"].tolist() == [1.0, 2.0]
    assert features[0].keys() == {"input_ids", "labels", "weight"}


def test_padding_keeps_a_given_mask_and_labels_that_are_numbers() -> None:
    features = [
        {"input_ids": [5, 6], "attention_mask": [0, 1], "label": 1},
        {"input_ids": [9], "attention_mask": [1], "label": 0},
    ]
    batch = PaddingCollator(pad_id=0, label_pad=-1)(features)
    assert batch["attention_mask"].tolist() == [[0, 1], [1, 0]]
    assert batch["labels"].tolist() == [1, 0]
    with pytest.raises(DataError, match="got list"):
        PaddingCollator(pad_id=0)([[1, 2]])  # type: ignore[list-item]
