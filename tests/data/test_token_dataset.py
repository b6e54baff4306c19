"""Sequences cut from a token file, and its split into train, validation and test."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch

from onstep.config import DatasetConfig
from onstep.data import (
    ByteTokenizer,
    TokenDataset,
    TokenFile,
    TrainLoader,
    build_datasets,
    build_token_file,
    default_data_collator,
    split_tokens,
)
from onstep.errors import DataError


class Numbers(ByteTokenizer):
    """Two bytes are a token, so that each token can be told by its value; no end token."""

    vocab_size = 2**16
    eos_id = None
    fingerprint = "numbers"

    def encode(self, document: bytes):  # type: ignore[no-untyped-def]
        return super().encode(document).view("<u2")


@pytest.fixture
def token_file(tmp_path: Path) -> TokenFile:
    """Token t is t, for 1000 tokens."""
    path = tmp_path / "numbers.bin"
    path.write_bytes(b"".join(number.to_bytes(2, "little") for number in range(1000)))
    return build_token_file([path], Numbers(), tmp_path, "text", show_progress=False)


def test_a_sample_is_a_window_and_its_labels_are_the_next_tokens(token_file: TokenFile) -> None:
    dataset = TokenDataset(token_file, start=100, end=131, seq_length=10)
    assert len(dataset) == 3
    sample = dataset[1]
    assert sample["tokens"].tolist() == list(range(110, 120))
    assert sample["labels"].tolist() == list(range(111, 121))
    assert {value.dtype for value in sample.values()} == {torch.int64}
    assert [s["labels"][-1].item() for s in (dataset[0], dataset[2])] == [110, 130]


@pytest.mark.parametrize(("num_tokens", "num_samples"), [(11, 1), (20, 1), (21, 2), (30, 2), (31, 3)])
def test_the_last_label_is_within_the_range(token_file: TokenFile, num_tokens: int, num_samples: int) -> None:
    assert len(TokenDataset(token_file, 0, num_tokens, 10)) == num_samples


def test_a_batch_at_once_is_the_collated_samples(token_file: TokenFile) -> None:
    dataset = TokenDataset(token_file, 5, 1000, 16)
    ids = [3, 0, 61, 3]
    at_once, one_by_one = dataset.get_batch(ids), default_data_collator([dataset[i] for i in ids])
    assert at_once.keys() == one_by_one.keys() == {"tokens", "labels"}
    for key, value in at_once.items():
        assert value.shape == (4, 16)
        assert value.is_contiguous()
        assert torch.equal(value, one_by_one[key])


def test_samples_outside_are_refused(token_file: TokenFile) -> None:
    dataset = TokenDataset(token_file, 0, 31, 10)
    for index in (-1, 3):
        with pytest.raises(IndexError, match=f"sample {index} of a dataset of 3"):
            dataset[index]
        with pytest.raises(IndexError, match=f"sample {index} of a dataset of 3"):
            dataset.get_batch([0, index])
    assert sum(1 for _ in dataset) == 3


def test_it_travels_to_workers_by_path(token_file: TokenFile) -> None:
    dataset = TokenDataset(token_file, 0, 1000, 10)
    dataset[0]
    travelled = pickle.dumps(dataset)
    assert len(travelled) < 1500
    assert pickle.loads(travelled)[7]["tokens"].tolist() == list(range(70, 80))


@pytest.mark.parametrize("split", ["90,5,5", "1,1,1", "60, 40", "0.7,0.2,0.1", "90,0,10", "1", "949,17,34"])
@pytest.mark.parametrize("seq_length", [1, 7, 16])
def test_splits_share_no_token(token_file: TokenFile, split: str, seq_length: int) -> None:
    seen: list[set[int]] = []
    for dataset in split_tokens(token_file, split, seq_length):
        if dataset is not None:
            samples = [dataset[i] for i in range(len(dataset))]
            seen.append({t for s in samples for part in s.values() for t in part.tolist()})
            assert dataset.end - dataset.start - len(seen[-1]) < seq_length
    assert sum(map(len, seen)) == len(set.union(*seen))


def test_shares_are_kept_and_a_share_of_zero_is_none(token_file: TokenFile) -> None:
    train, valid, test = split_tokens(token_file, "90,0,10", 10)
    assert (train.start, train.end) == (0, 900)
    assert valid is None
    assert test is not None
    assert (test.start, test.end) == (900, 1000)
    assert split_tokens(token_file, "3", 10)[1:] == (None, None)


@pytest.mark.parametrize(
    ("split", "message"),
    [
        ("90;5;5", "must be numbers separated by commas, got '90;5;5'"),
        ("", "must be numbers separated by commas, got ''"),
        ("1,2,3,4", "at most three shares"),
        ("90,-5,15", "must be >= 0 and that of train > 0, got '90,-5,15'"),
        ("0,5,5", "that of train > 0"),
        ("nan,1", "must be >= 0"),
    ],
)
def test_a_bad_split_is_refused(token_file: TokenFile, split: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        split_tokens(token_file, split, 10)


def test_a_sequence_longer_than_its_share_is_refused_by_name(token_file: TokenFile) -> None:
    with pytest.raises(DataError, match=r"validation share of split '90,5,5' .* 50 requires 51 .* only 50 are"):
        split_tokens(token_file, "90,5,5", 50)
    with pytest.raises(DataError, match="train share of split '1' of 1000 tokens: seq_length 1000 requires 1001"):
        split_tokens(token_file, "1", 1000)
    with pytest.raises(DataError, match="seq_length must be >= 1, got 0"):
        split_tokens(token_file, "1", 0)
    with pytest.raises(DataError, match="token range 0 to 1001 is not within the 1000 tokens"):
        TokenDataset(token_file, 0, 1001, 10)


def test_datasets_are_built_from_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abcdefgh" * 50)
    config = DatasetConfig(paths=[str(tmp_path / "*.txt")], seq_length=8, cache_dir=str(tmp_path), split="8,2")
    train, valid, test = build_datasets(config, ByteTokenizer(), show_progress=False)
    assert ByteTokenizer().decode(train[1]["tokens"].tolist()) == "abcdefgh"
    assert valid is not None
    assert test is None
    loader = TrainLoader(train, micro_batch_size=2, global_batch_size=2, num_workers=1)
    step = loader.read(1)
    assert step is not None
    assert step.micro_batches[0]["tokens"].shape == (2, 8)
    loader.close()


def test_a_bad_split_is_reported_before_the_corpus_is_read(tmp_path: Path) -> None:
    config = DatasetConfig(paths=[str(tmp_path / "missing")], split="x", cache_dir=str(tmp_path))
    with pytest.raises(DataError, match="split must be numbers"):
        build_datasets(config, ByteTokenizer(), show_progress=False)


def test_the_default_corpus_needs_no_paths(tmp_path: Path) -> None:
    config = DatasetConfig(cache_dir=str(tmp_path), seq_length=256)
    train, valid, test = build_datasets(config, ByteTokenizer(), show_progress=False)
    assert len(train) > 20_000
    assert valid is not None
    assert test is not None
    assert len(valid) > 1000
    text = ByteTokenizer().decode(train.token_file.tokens[:2_000_000].tolist())
    assert "def " in text
