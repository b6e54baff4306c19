"""Training sequences of fixed length, cut from a token file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset

from onstep.data.boundaries import Boundaries
from onstep.errors import DataError


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
