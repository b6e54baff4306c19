"""Training sequences of fixed length, cut from a token file."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset

from onstep.config.parts import DatasetConfig
from onstep.data.corpus import default_corpus_files, find_files
from onstep.data.token_build import build_token_file
from onstep.data.token_file import TokenFile
from onstep.data.tokenizers import Tokenizer
from onstep.errors import DataError

_SPLIT_NAMES = ("train", "validation", "test")

Splits = tuple["TokenDataset", "TokenDataset | None", "TokenDataset | None"]


class TokenDataset(Dataset[dict[str, torch.Tensor]]):
    """Sequences of `seq_length` tokens from the range ``start <= t < end`` of a token file.

    A sample is ``{"tokens": (seq_length,), "labels": (seq_length,)}``, both int64; a label is the token that follows,
    so the model does not shift. Sample i starts at token ``start + i * seq_length``. No label lies outside the range;
    what is left at its end is shorter than a sequence.

    Raises:
        DataError: where the range is too short for one sample.
    """

    def __init__(self, token_file: TokenFile, start: int, end: int, seq_length: int) -> None:
        if seq_length < 1:
            raise DataError(f"seq_length must be >= 1, got {seq_length}")
        if not 0 <= start <= end <= len(token_file):
            raise DataError(f"token range {start} to {end} is not within the {len(token_file)} tokens of the file")
        if end - start < seq_length + 1:
            raise DataError(
                f"seq_length {seq_length} needs {seq_length + 1} tokens (one more for the last label), but there are "
                f"{end - start}; use a shorter seq_length or more text"
            )
        self.token_file = token_file
        self.start = start
        self.end = end
        self.seq_length = seq_length
        self._num_samples = (end - start - 1) // seq_length

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < self._num_samples:
            raise IndexError(f"sample {index} of a dataset of {self._num_samples}")
        first = self.start + index * self.seq_length
        window = torch.from_numpy(self.token_file.tokens[first : first + self.seq_length + 1].astype(np.int64))
        return {"tokens": window[:-1], "labels": window[1:]}

    def get_batch(self, indices: Sequence[int]) -> dict[str, torch.Tensor]:
        """The samples at `indices` as one micro-batch, each entry ``(batch, seq_length)`` and contiguous."""
        all_tokens, length = self.token_file.tokens, self.seq_length
        tokens = np.empty((len(indices), length), dtype=np.int64)
        labels = np.empty_like(tokens)
        for row, index in enumerate(indices):
            if not 0 <= index < self._num_samples:
                raise IndexError(f"sample {index} of a dataset of {self._num_samples}")
            first = self.start + index * length
            tokens[row] = all_tokens[first : first + length]
            labels[row] = all_tokens[first + 1 : first + length + 1]
        return {"tokens": torch.from_numpy(tokens), "labels": torch.from_numpy(labels)}


def parse_split(split: str) -> tuple[float, float, float]:
    """The shares of train, validation and test, summing to 1, of text such as "90,5,5" or "1".

    Raises:
        DataError: for anything but one to three numbers >= 0 with a train share > 0.
    """
    remedy = "give the shares of train, validation and test, for example '90,5,5'"
    try:
        shares = [float(part) for part in split.split(",")]
    except (ValueError, AttributeError) as error:
        raise DataError(f"split must be numbers separated by commas, got {split!r}; {remedy}") from error
    if len(shares) > 3:
        raise DataError(f"split must have at most three shares, got {split!r}; {remedy}")
    if not all(math.isfinite(share) and share >= 0 for share in shares) or shares[0] == 0:
        raise DataError(f"the shares of split must be >= 0 and that of train > 0, got {split!r}; {remedy}")
    train, valid, test = (share / sum(shares) for share in [*shares, 0.0, 0.0][:3])
    return train, valid, test


def split_tokens(token_file: TokenFile, split: str, seq_length: int) -> Splits:
    """Train, validation and test as contiguous ranges of the file; None for a share of 0.

    No token, label tokens included, is in two of them.

    Raises:
        DataError: for a bad `split`, or a range too short for one sequence.
    """
    total = len(token_file)
    train, valid, _ = shares = parse_split(split)
    cuts = [0, round(total * train), round(total * (train + valid)), total]
    parts: list[TokenDataset | None] = []
    for name, share, start, end in zip(_SPLIT_NAMES, shares, cuts[:-1], cuts[1:], strict=True):
        parts.append(_part(token_file, name, split, start, end, seq_length) if share else None)
    first, second, third = parts
    assert first is not None
    return first, second, third


def build_datasets(
    config: DatasetConfig, tokenizer: Tokenizer, *, show_progress: bool, wait_for_other: bool = False
) -> Splits:
    """Train, validation and test of the corpus that `config` names; None for a share of 0.

    Every process that trains calls it; see `build_token_file` for how they share the work.

    Raises:
        DataError: for a corpus or split that cannot be trained on.
    """
    parse_split(config.split)  # before the corpus is read, which may take long
    files: list[Path] = find_files(config.paths) if config.paths else default_corpus_files()
    token_file = build_token_file(
        files,
        tokenizer,
        config.cache_dir,
        config.text_key,
        show_progress=show_progress,
        wait_for_other=wait_for_other,
    )
    return split_tokens(token_file, config.split, config.seq_length)


def _part(token_file: TokenFile, name: str, split: str, start: int, end: int, seq_length: int) -> TokenDataset:
    try:
        return TokenDataset(token_file, start, end, seq_length)
    except DataError as error:
        raise DataError(f"{name} share of split {split!r} of {len(token_file)} tokens: {error}") from error
