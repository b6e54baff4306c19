"""Several datasets as one, in given shares."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import ceil, floor
from typing import Any

import torch
from torch.utils.data import Dataset

from onstep.errors import DataError


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
