"""Packs items of different lengths into bins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Packing:
    """The items of all bins, concatenated."""

    items: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]
    """End of each bin in `items`."""

    def __len__(self) -> int:
        """Number of bins."""
        return int(self.ends.size)

    def bin(self, number: int) -> list[int]:
        """The items of a bin, in input order."""
        start = int(self.ends[number - 1]) if number else 0
        found: list[int] = self.items[start : int(self.ends[number])].tolist()
        return found


def first_fit(lengths: Sequence[int], capacity: int) -> Packing:
    """Put each item, in order, into the first bin with enough room, or else into a new one.

    Every length must be between 1 and `capacity`. A tree over the free room of the bins gives O(items * log(bins)).

    Source: Johnson et al., "Worst-Case Performance Bounds for Simple One-Dimensional Packing Algorithms" (1974).
    """
    size = 1
    while size < len(lengths):
        size *= 2
    room = [capacity] * (2 * size)  # the largest room below each node; node 1 is the root, leaves start at `size`
    bins = np.empty(len(lengths), dtype=np.int64)
    for number, length in enumerate(lengths):
        node = 1
        while node < size:
            node *= 2
            if room[node] < length:
                node += 1
        bins[number] = node - size
        room[node] -= length
        node //= 2
        while node:
            left, right = room[2 * node], room[2 * node + 1]
            largest = left if left > right else right
            if room[node] == largest:
                break
            room[node] = largest
            node //= 2
    return Packing(np.argsort(bins, kind="stable"), np.cumsum(np.bincount(bins)))
