"""Train, validation and test: shares of one corpus, no token in two of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

from onstep.data.boundaries import Boundaries
from onstep.data.indexed_file import IndexedFile
from onstep.data.token_dataset import TokenDataset, TokenSource
from onstep.errors import DataError

SPLIT_NAMES = ("train", "validation", "test")

T = TypeVar("T")

Splits = tuple[T, T | None, T | None]
"""Train, validation, test; None for a share of 0."""


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


def split_tokens(
    token_file: TokenSource, split: str, seq_length: int, boundaries: Boundaries | None = None
) -> Splits[TokenDataset]:
    """Train, validation and test as contiguous ranges of the file; None for a share of 0.

    No token, label tokens included, is in two of them.

    Raises:
        DataError: for a bad `split`, or a range too short for one sequence.
    """

    def part(start: int, end: int) -> TokenDataset:
        return TokenDataset(token_file, start, end, seq_length, boundaries)

    return ranges(len(token_file), parse_split(split), part, f"split {split!r} of {len(token_file)} tokens")


def split_documents(
    indexed_file: IndexedFile, split: str, seq_length: int, boundaries: Boundaries | None = None
) -> Splits[TokenDataset]:
    """Train, validation and test as contiguous ranges of whole documents; None for a share of 0.

    Raises:
        DataError: for a bad `split`, or a range too short for one sequence.
    """

    def part(start: int, end: int) -> TokenDataset:
        first, last = indexed_file.document_start(start), indexed_file.document_start(end)
        return TokenDataset(indexed_file, first, last, seq_length, boundaries)

    count = indexed_file.num_documents
    what = f"split {split!r} of {count} documents of {indexed_file.tokens_path}"
    return ranges(count, parse_split(split), part, what)


def ranges(total: int, shares: tuple[float, float, float], part: Callable[[int, int], T], what: str) -> Splits[T]:
    """`part(start, end)` of three contiguous ranges of `total` things; None for a share of 0.

    Raises:
        DataError: what `part` raises, with the name of the split before it.
    """
    train, valid, _ = shares
    cuts = [0, round(total * train), round(total * (train + valid)), total]
    parts: list[T | None] = []
    for name, share, start, end in zip(SPLIT_NAMES, shares, cuts[:-1], cuts[1:], strict=True):
        try:
            parts.append(part(start, end) if share else None)
        except DataError as error:
            raise DataError(f"{name} share of {what}: {error}") from error
    first, second, third = parts
    assert first is not None
    return first, second, third


def split_without(split: str, *, has_valid: bool, has_test: bool) -> str:
    """The split of a corpus that comes with a validation or test set of its own: train takes their shares."""
    train, valid, test = parse_split(split)
    own = (valid if has_valid else 0.0) + (test if has_test else 0.0)
    shares = (train + own, 0.0 if has_valid else valid, 0.0 if has_test else test)
    return ",".join(f"{100 * share:g}" for share in shares)
