"""Training sequences of fixed length, cut from token files, where the documents in them end, and blends of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, floor
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset

from onstep.errors import DataError

IGNORE_INDEX = -100
"""A label that has no loss."""

_Ids = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Boundaries:
    """How the end token of a document is treated."""

    end_id: int
    masks_loss: bool = False
    """No loss at the end token's own position, where the label is the first token of another document."""
    resets_attention: bool = False
    """Add `document_ids` and `position_ids` to a batch: attention within documents, positions from 0 in each."""

    def mark(self, tokens: _Ids, labels: _Ids) -> dict[str, _Ids]:
        """What a batch of `tokens` and `labels` (batch, seq) gains; `labels` are changed in place.

        A document reaches to its end token, which is the last of it.
        """
        ends = tokens == self.end_id
        if self.masks_loss:
            labels[ends] = IGNORE_INDEX
        if not self.resets_attention:
            return {}
        begins = np.zeros_like(ends)
        begins[:, 1:] = ends[:, :-1]
        return {"position_ids": positions_from(begins), "document_ids": np.cumsum(begins, axis=1, dtype=np.int64)}


def positions_from(begins: npt.NDArray[Any]) -> _Ids:
    """Positions (batch, seq) that count from 0 wherever `begins` (batch, seq) is True, and from the first token."""
    counter = np.broadcast_to(np.arange(begins.shape[1], dtype=np.int64), begins.shape)
    return counter - np.maximum.accumulate(np.where(begins, counter, 0), axis=1)


class TokenSource(Protocol):
    """Tokens that can be read anywhere: `TokenFile` and `IndexedFile`."""

    def __len__(self) -> int:
        """All tokens."""

    def read(self, start: int, stop: int) -> npt.NDArray[Any]:
        """The tokens ``start <= t < stop``."""


class TokenDataset(Dataset[dict[str, torch.Tensor]]):
    """Sequences of `seq_length` tokens from the range ``start <= t < end`` of a token file.

    A sample is ``{"tokens": (seq_length,), "labels": (seq_length,)}``, both int64; a label is the token that follows,
    so the model does not shift. Sample i starts at token ``start + i * seq_length``. No label lies outside the range;
    what is left at its end is shorter than a sequence. With `boundaries` labels of -100 have no loss, and a sample may
    have `position_ids` and `document_ids`, too (see `Boundaries`).

    Raises:
        DataError: where the range is too short for one sample.
    """

    def __init__(
        self, token_file: TokenSource, start: int, end: int, seq_length: int, boundaries: Boundaries | None = None
    ) -> None:
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
        self.boundaries = boundaries
        self._num_samples = (end - start - 1) // seq_length

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {key: rows[0] for key, rows in self.get_batch([index]).items()}

    def get_batch(self, indices: Sequence[int]) -> dict[str, torch.Tensor]:
        """The samples at `indices` as one micro-batch, each entry ``(batch, seq_length)`` and contiguous."""
        read, length = self.token_file.read, self.seq_length
        tokens = np.empty((len(indices), length), dtype=np.int64)
        labels = np.empty_like(tokens)
        for row, index in enumerate(indices):
            if not 0 <= index < self._num_samples:
                raise IndexError(f"sample {index} of a dataset of {self._num_samples}")
            first = self.start + index * length
            window = read(first, first + length + 1)
            tokens[row] = window[:-1]
            labels[row] = window[1:]
        marks = {} if self.boundaries is None else self.boundaries.mark(tokens, labels)
        arrays = {"tokens": tokens, "labels": labels, **marks}
        return {key: torch.from_numpy(array) for key, array in arrays.items()}


class BlendedDataset(Dataset[dict[str, torch.Tensor]]):
    """The samples of several datasets, evenly mixed; which one a sample is of is a pure function of its index.

    Without `weights` each sample of each dataset comes once. With them a dataset's samples are its share of the whole,
    to within one sample, and so they are of any stretch from the start, to within one for each dataset. The whole is
    as long as it takes to meet every sample at least once: datasets that are smaller than their share begin again.
    ``repeats=False`` ends before any would begin again.

    Args:
        datasets: map-style, each with `get_batch(indices)` that gives a dict of tensors of the same shapes.
        weights: numbers > 0, divided by their sum.

    Raises:
        DataError: for weights that do not fit, and a blend without samples.
    """

    def __init__(
        self, datasets: Sequence[Any], weights: Sequence[float] | None = None, *, repeats: bool = True
    ) -> None:
        self.datasets = list(datasets)
        self._lengths = [len(dataset) for dataset in datasets]
        self.sizes = list(self._lengths) if weights is None else sizes_of_blend(self._lengths, weights, repeats=repeats)
        """Samples of each dataset in the whole."""
        if not sum(self.sizes):
            raise DataError("a blend without samples: give datasets with samples, or weights that are less uneven")

    def __len__(self) -> int:
        return sum(self.sizes)

    def locate(self, index: int) -> tuple[int, int]:
        """The dataset of a sample, and which of its samples it is."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of a blend of {len(self)}")
        total = len(self)
        for number, size in enumerate(self.sizes[:-1]):
            # Of any first k samples, floor(k * size / total) are of this dataset; the others are dealt out further.
            before, after = index * size // total, (index + 1) * size // total
            if after > before:
                return number, before % self._lengths[number]
            index, total = index - before, total - size
        return len(self.sizes) - 1, index % self._lengths[-1]

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        number, sample = self.locate(index)
        found: dict[str, torch.Tensor] = self.datasets[number][sample]
        return found

    def get_batch(self, indices: Sequence[int]) -> dict[str, torch.Tensor]:
        """The samples at `indices` as one micro-batch."""
        places = [self.locate(index) for index in indices]
        rows = [self.datasets[number].get_batch([sample]) for number, sample in places]
        return {key: torch.cat([row[key] for row in rows]) for key in rows[0]}


def sizes_of_blend(lengths: Sequence[int], weights: Sequence[float], *, repeats: bool = True) -> list[int]:
    """Samples of each dataset in a blend by `weights`: whole numbers, each within one of its exact share.

    Raises:
        DataError: where `weights` are not as many numbers > 0 as there are datasets, or a dataset is empty.
    """
    if len(weights) != len(lengths) or not all(weight > 0 for weight in weights):
        raise DataError(f"a blend of {len(lengths)} datasets takes as many weights > 0, got {list(weights)}")
    if not all(lengths):
        raise DataError(f"a blend takes datasets with samples, got lengths {list(lengths)}")
    exact = [Fraction(weight) for weight in weights]
    shares = [weight / sum(exact) for weight in exact]
    needed = [length / share for length, share in zip(lengths, shares, strict=True)]
    total = ceil(max(needed)) if repeats else floor(min(needed))
    sizes = [floor(share * total) for share in shares]
    by_rest = sorted(range(len(sizes)), key=lambda number: (sizes[number] - shares[number] * total, number))
    for number in by_rest[: total - sum(sizes)]:
        sizes[number] += 1
    return sizes
