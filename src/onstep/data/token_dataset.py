"""Provides fixed-length training sequences from token files, document boundaries in them, and blends of datasets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, floor, isfinite
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset

from onstep.errors import DataError

IGNORE_INDEX = -100
"""Label of positions without a loss."""
_MAX_BLEND = 1 << 48
"""Limit for the samples of a blend; more than can be trained on, and what 64-bit arithmetic on indices allows."""

_Ids = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Boundaries:
    """The treatment of the documents' end tokens."""

    end_id: int
    """The id of the token that ends a document."""
    masks_loss: bool = False
    """No loss at the position of the end token, whose label is the first token of the next document."""
    resets_attention: bool = False
    """Add `document_ids` and `position_ids` to a batch: attention within documents, positions from 0 in each."""

    def mark(self, tokens: _Ids, labels: _Ids) -> dict[str, _Ids]:
        """Extra entries for a batch of `tokens` and `labels` (batch, seq); modifies `labels` in place.

        The end token is the last token of its document.
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
    """Positions (batch, seq) that start at 0 at the first token and restart wherever `begins` (batch, seq) is True."""
    counter = np.broadcast_to(np.arange(begins.shape[1], dtype=np.int64), begins.shape)
    return counter - np.maximum.accumulate(np.where(begins, counter, 0), axis=1)


class TokenSource(Protocol):
    """Tokens with random access: `TokenFile` and `IndexedFile`."""

    def __len__(self) -> int:
        """Number of tokens."""

    def read(self, start: int, stop: int) -> npt.NDArray[Any]:
        """The tokens ``start <= t < stop``."""


class TokenDataset(Dataset[dict[str, torch.Tensor]]):
    """Sequences of `seq_length` tokens from the range ``start <= t < end`` of a token file.

    A sample is ``{"tokens": (seq_length,), "labels": (seq_length,)}``, both int64; a label is the next token, so the
    model must not shift labels. Sample i starts at token ``start + i * seq_length``. Labels stay within the range; a
    remainder shorter than a sequence is not used. With `boundaries`, labels of -100 have no loss, and samples may also
    have `position_ids` and `document_ids` (see `Boundaries`).

    Args:
        token_file: the file of tokens.
        start: the first token of this split.
        end: the token after the last one of this split.
        seq_length: tokens of a sample.
        boundaries: where documents begin and end, for position resets and masks; None to let attention cross them.

    Raises:
        DataError: if the range is too short for one sample.
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
                f"seq_length {seq_length} requires {seq_length + 1} tokens (one more for the last label), but only "
                f"{end - start} are available; use a shorter seq_length or more text"
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
    """The samples of several datasets, evenly mixed; a sample's dataset is a pure function of its index.

    Without `weights`, each sample of each dataset occurs once. With them, each dataset contributes its share of the
    blend to within one sample, and its share of any prefix to within one sample per dataset. The blend is long enough
    for every sample to occur at least once: datasets smaller than their share are repeated. ``repeats=False`` ends the
    blend before any dataset would be repeated.

    Args:
        datasets: map-style, each with a `get_batch(indices)` that returns a dict of tensors of the same shapes.
        weights: numbers > 0, normalized by their sum; None for the datasets' own sizes.
        repeats: whether datasets that are smaller than their share are repeated; without `weights` nothing is.

    Raises:
        DataError: for invalid weights, or a blend without samples.
    """

    def __init__(
        self, datasets: Sequence[Any], weights: Sequence[float] | None = None, *, repeats: bool = True
    ) -> None:
        self.datasets = list(datasets)
        self._lengths = [len(dataset) for dataset in datasets]
        self.sizes = list(self._lengths) if weights is None else sizes_of_blend(self._lengths, weights, repeats=repeats)
        """Number of samples from each dataset in the blend."""
        if not sum(self.sizes):
            raise DataError("the blend has no samples: give datasets with samples, or weights that are less uneven")

    def __len__(self) -> int:
        return sum(self.sizes)

    def locate(self, index: int) -> tuple[int, int]:
        """The index of a sample's dataset, and the sample's index within it.

        Args:
            index: the index in the blend.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of a blend of {len(self)}")
        total = len(self)
        for number, size in enumerate(self.sizes[:-1]):
            # Of any first k samples, floor(k * size / total) are from this dataset; the others are distributed further.
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
    """Number of samples of each dataset in a blend by `weights`, each within one of its exact share.

    Raises:
        DataError: if `weights` does not have one finite number > 0 per dataset, a dataset is empty, or the weights are
            so uneven that the blend would be too long.
    """
    if len(weights) != len(lengths) or not all(weight > 0 and isfinite(weight) for weight in weights):
        raise DataError(f"a blend of {len(lengths)} datasets requires as many finite weights > 0, got {list(weights)}")
    if not all(lengths):
        raise DataError(f"a blend requires non-empty datasets, got lengths {list(lengths)}")
    exact = [Fraction(weight) for weight in weights]
    shares = [weight / sum(exact) for weight in exact]
    needed = [length / share for length, share in zip(lengths, shares, strict=True)]
    total = ceil(max(needed)) if repeats else floor(min(needed))
    if total > _MAX_BLEND:
        raise DataError(
            f"a blend of {list(lengths)} samples by the weights {list(weights)} would be longer than {_MAX_BLEND:,} "
            "samples; give weights that are less uneven"
        )
    sizes = [floor(share * total) for share in shares]
    by_rest = sorted(range(len(sizes)), key=lambda number: (sizes[number] - shares[number] * total, number))
    for number in by_rest[: total - sum(sizes)]:
        sizes[number] += 1
    return sizes
