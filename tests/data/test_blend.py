"""A blend has the shares that were asked for, and each sample's dataset follows from its index."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from onstep.config import DatasetConfig
from onstep.data import BlendedDataset, ByteTokenizer, build_datasets, write_indexed_dataset
from onstep.errors import DataError


class Numbered:
    """Sample i of dataset n is the tokens [n, i]."""

    def __init__(self, number: int, size: int) -> None:
        self.number, self.size = number, size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {key: rows[0] for key, rows in self.get_batch([index]).items()}

    def get_batch(self, indices: Sequence[int]) -> dict[str, torch.Tensor]:
        assert all(0 <= index < self.size for index in indices)
        return {"tokens": torch.tensor([[self.number, index] for index in indices])}


def blend_of(*sizes: int, weights: Sequence[float] | None = None, repeats: bool = True) -> BlendedDataset:
    return BlendedDataset([Numbered(n, size) for n, size in enumerate(sizes)], weights, repeats=repeats)


def places(blend: BlendedDataset) -> list[tuple[int, int]]:
    return [blend.locate(index) for index in range(len(blend))]


def test_without_weights_each_sample_comes_once() -> None:
    found = places(blend_of(5, 1, 17))
    assert len(found) == len(set(found)) == 23


@pytest.mark.parametrize("weights", [[0.5, 0.3, 0.2], [1, 1, 1], [7, 0.01, 2], [0.1, 0.2, 0.7]])
def test_weights_give_the_shares_to_within_one_sample(weights: list[float]) -> None:
    sizes = [50, 31, 77]
    found = places(blend_of(*sizes, weights=weights))
    for number, weight in enumerate(weights):
        share = len(found) * weight / sum(weights)
        assert abs(sum(place[0] == number for place in found) - share) < 1
        # Every sample at least once, none more than once oftener than another.
        times = Counter(sample for dataset, sample in found if dataset == number)
        assert len(times) == sizes[number]
        assert max(times.values()) - min(times.values()) <= 1
    # The dataset that is scarcest for its share comes once: that is the length.
    assert min(max(Counter(s for d, s in found if d == n).values()) for n in range(3)) == 1


def test_any_stretch_from_the_start_is_mixed() -> None:
    weights = [0.5, 0.3, 0.2]
    found = places(blend_of(100, 100, 100, weights=weights))
    for count in range(1, len(found)):
        for number, weight in enumerate(weights):
            assert abs(sum(place[0] == number for place in found[:count]) - count * weight) <= 2


def test_an_evaluation_meets_no_sample_twice() -> None:
    found = places(blend_of(50, 31, 77, weights=[0.6, 0.3, 0.1], repeats=False))
    assert len(found) == len(set(found)) == 83
    assert Counter(number for number, _ in found) == {0: 50, 1: 25, 2: 8}


def test_batches_hold_the_samples_asked_for() -> None:
    blend = blend_of(3, 4, weights=[1, 2])
    rows = [blend[index]["tokens"].tolist() for index in range(len(blend))]
    assert rows == [list(place) for place in places(blend)]
    assert blend.get_batch([4, 0, 4])["tokens"].tolist() == [rows[4], rows[0], rows[4]]
    with pytest.raises(IndexError):
        blend[len(blend)]


@pytest.mark.parametrize("weights", [[1.0], [1.0, 0.0], [1.0, -1.0], [1.0, float("inf")], [float("nan"), 1.0]])
def test_weights_that_do_not_fit_are_refused(weights: list[float]) -> None:
    with pytest.raises(DataError, match="a blend of 2 datasets requires as many finite weights > 0"):
        blend_of(3, 4, weights=weights)


def test_weights_that_make_an_endless_blend_are_refused() -> None:
    with pytest.raises(DataError, match="would be longer than 281,474,976,710,656 samples; give weights that are less"):
        blend_of(3, 4, weights=[1.0, 1e-300])


def test_a_configuration_blends_files_by_weights(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name, token, count in (("a", 1, 30), ("b", 2, 60)):
        write_indexed_dataset(tmp_path / name, [[token] * 10] * count, vocab_size=10)
    config = DatasetConfig(
        kind="megatron",
        paths=[str(tmp_path / "a"), str(tmp_path / "b.bin")],
        weights=[3, 1],
        split="50,50",
        seq_length=5,
    )
    with caplog.at_level("INFO"):
        train, valid, test = build_datasets(config, ByteTokenizer(), show_progress=False)
    own = [one.getMessage() for one in caplog.records if one.name.startswith("onstep")]
    assert own == ["by dataset.weights, the validation set is a blend of 38 of its 88 samples"]
    assert test is None
    # 29 and 59 sequences; those of the second come once, those of the first as often as its share takes.
    assert (train.sizes, valid.sizes) == ([177, 59], [29, 9])
    first = train.get_batch(range(len(train)))["tokens"][:, 0]
    assert [(first == token).sum().item() for token in (1, 2)] == [177, 59]
