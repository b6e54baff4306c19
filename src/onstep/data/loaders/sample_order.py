"""Computes the order of the samples of an epoch, leaves out skipped ones, and distributes the others to ranks in rows.

A row is one micro-batch on every rank: ``world_size * micro_batch_size`` consecutive positions of the epoch, of which
rank r has the r-th share. A step consists of whole rows, so its samples do not depend on how the global batch is split.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from onstep.errors import DataError

IntArray = npt.NDArray[np.int64]
_Words = npt.NDArray[np.uint64]

_SORTED_UP_TO = 4096
"""Up to this many samples are sorted by a hash instead: a Feistel network over so few bits mixes poorly."""
_NUM_ROUNDS = 8


class SampleOrder:
    """A permutation of ``0 .. num_samples - 1`` that is a pure function of (seed, epoch, position).

    Its memory does not grow with `num_samples`: any slice is computed independently, at the same speed everywhere.
    The permutation is a Feistel network over the next power of two, iterated until the result is in range. It uses only
    64-bit integer arithmetic, so the order is the same on every machine. ``shuffle=False`` is the identity.

    Samples in `leave_out` have no position: the others keep their order and move up, which leaves
    ``num_samples - len(leave_out)`` positions. Memory use is proportional to the number of samples left out.

    Args:
        num_samples: samples of an epoch.
        seed: seed of the order; the same seed gives the same order.
        epoch: the number of the epoch, from 0.
        shuffle: whether each epoch has an order of its own; otherwise the order is that of the data.
        leave_out: the ids that are left out of the epoch.

    Source: Black and Rogaway, "Ciphers with Arbitrary Finite Domains" (2002), section 4 (cycle walking).

    Raises:
        DataError: for a negative `num_samples`, or an id in `leave_out` that is not a sample.
    """

    def __init__(
        self, num_samples: int, seed: int, epoch: int, shuffle: bool = True, leave_out: Collection[int] = ()
    ) -> None:
        if num_samples < 0:
            raise DataError(f"num_samples must be >= 0, got {num_samples}")
        self._domain = num_samples
        self._shuffle = shuffle
        digest = hashlib.blake2b(f"onstep order {seed} {epoch}".encode(), digest_size=8 * _NUM_ROUNDS).digest()
        self._keys = np.frombuffer(digest, dtype="<u8").astype(np.uint64)
        self._table = self._sorted_by_hash() if shuffle and num_samples <= _SORTED_UP_TO else None
        num_bits = max(num_samples - 1, 1).bit_length()
        self._low_bits = np.uint64(num_bits // 2)
        self._low_mask = np.uint64((1 << (num_bits // 2)) - 1)
        self._high_mask = np.uint64((1 << (num_bits - num_bits // 2)) - 1)
        # Before the k-th gap, at position p of the full epoch, there are p - k samples.
        gaps = np.sort(self.positions_of(np.array(sorted(set(leave_out)), dtype=np.int64)))
        self._samples_before_gap = gaps - np.arange(gaps.size)
        self.num_samples = num_samples - gaps.size
        """Number of positions in the epoch."""

    def indices(self, start: int, stop: int) -> IntArray:
        """The dataset indices at the positions ``start <= p < stop``."""
        return self.at(np.arange(start, stop, dtype=np.int64))

    def at(self, positions: IntArray) -> IntArray:
        """The dataset indices at `positions`, an array of any shape.

        Raises:
            DataError: for a position outside the epoch.
        """
        if positions.size and not (positions.min() >= 0 and positions.max() < self.num_samples):
            raise DataError(
                f"positions {positions.min()} to {positions.max()} are outside an epoch of {self.num_samples} samples"
            )
        if self._samples_before_gap.size:
            positions = positions + np.searchsorted(self._samples_before_gap, positions, side="right")
        if not self._shuffle:
            return positions
        if self._table is not None:
            return self._table[positions]
        return self._walk(positions.astype(np.uint64), range(_NUM_ROUNDS)).astype(np.int64)

    def positions_of(self, ids: IntArray) -> IntArray:
        """The positions of the samples `ids` in the full epoch, before any is left out: the inverse permutation.

        Raises:
            DataError: for an id that is not a sample.
        """
        if ids.size and not (ids.min() >= 0 and ids.max() < self._domain):
            raise DataError(
                f"cannot skip samples {ids.min()} to {ids.max()} of a dataset of {self._domain} samples; "
                "resume with the data for which the list of skipped samples was made"
            )
        if not self._shuffle:
            return ids
        if self._table is not None:
            return np.argsort(self._table)[ids]
        return self._walk(ids.astype(np.uint64), range(_NUM_ROUNDS)[::-1]).astype(np.int64)

    def _sorted_by_hash(self) -> IntArray:
        words = _mix(np.arange(self._domain, dtype=np.uint64) ^ self._keys[0])
        return np.argsort(_mix(words ^ self._keys[1]), kind="stable").astype(np.int64)

    def _walk(self, words: _Words, rounds: range) -> _Words:
        """Apply the network until each word is a sample of the dataset: fewer than two times on average."""
        words = self._network(words, rounds)
        outside = np.flatnonzero(words >= self._domain)
        while outside.size:
            words.flat[outside] = self._network(words.flat[outside], rounds)
            outside = outside[words.flat[outside] >= self._domain]
        return words

    def _network(self, words: _Words, rounds: range) -> _Words:
        """Apply the rounds; each is its own inverse, so applying them in reverse order inverts the network."""
        low, high = words & self._low_mask, words >> self._low_bits
        for number in rounds:
            key = self._keys[number]
            if number % 2:
                low ^= _mix(high ^ key) & self._low_mask
            else:
                high ^= _mix(low ^ key) & self._high_mask
        return (high << self._low_bits) | low


@dataclass(frozen=True)
class Share:
    """One of several equal parts of an epoch, for workers that train on the same data without exchanging it."""

    index: int = 0
    count: int = 1
    start: int = 0
    """Position of the part at which its epochs begin; they wrap around, so that each is whole."""

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.count or self.start < 0:
            raise DataError(
                f"a share must have an index >= 0 and < its count, and start at >= 0, got {self.index} of {self.count} "
                f"at {self.start}"
            )

    def size(self, num_samples: int) -> int:
        """Samples of an epoch of `num_samples` that are in it."""
        return max(0, -(-(num_samples - self.index) // self.count))


class SharedOrder:
    """The part of an order that is in a share: every `count`-th position."""

    def __init__(self, order: SampleOrder, share: Share) -> None:
        self.num_samples = share.size(order.num_samples)
        """Number of positions in the part."""
        self._order, self._share = order, share

    def indices(self, start: int, stop: int) -> IntArray:
        """As of `SampleOrder`."""
        return self.at(np.arange(start, stop, dtype=np.int64))

    def at(self, positions: IntArray) -> IntArray:
        """As of `SampleOrder`."""
        share = self._share
        return self._order.at((positions + share.start) % max(self.num_samples, 1) * share.count + share.index)


def skip_samples(entries: list[list[int]], epoch: int, sample_ids: Iterable[int]) -> list[int]:
    """Add the samples of an anomaly to `entries` of `[epoch, sample id]`; returns the ids that were not listed yet.

    An entry becomes effective in the epoch after its own, so the positions of the current epoch never shift.
    """
    new = sorted(set(sample_ids) - {sample_id for _, sample_id in entries})
    entries.extend([epoch, sample_id] for sample_id in new)
    return new


def ids_in_force(entries: Iterable[Sequence[int]], epoch: int) -> list[int]:
    """The ids of the `[epoch, sample id]` entries added before `epoch`, without duplicates, in ascending order."""
    return sorted({sample_id for added_in, sample_id in entries if added_in < epoch})


def _mix(words: _Words) -> _Words:
    """A 64-bit hash of each word. Source: Steele, Lea, Flood (2014), SplitMix64's finalizer (variant 13)."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


_BLOCK_SAMPLES = 4096
"""Number of samples whose indices are computed at once; a NumPy call per row would cost more than reading the row."""


@dataclass(frozen=True)
class MicroBatchLayout:
    """The positions of this rank's samples within a row.

    Raises:
        DataError: for invalid sizes.
    """

    micro_batch_size: int
    """Samples of one forward pass on one rank."""
    rank: int = 0
    """This rank, from 0."""
    world_size: int = 1
    """The number of data-parallel ranks."""

    def __post_init__(self) -> None:
        if self.micro_batch_size < 1:
            raise DataError(f"micro_batch_size must be >= 1, got {self.micro_batch_size}")
        if not 0 <= self.rank < self.world_size:
            raise DataError(f"rank must be >= 0 and < world_size, got rank {self.rank} of {self.world_size}")

    @property
    def row_size(self) -> int:
        """Number of samples in a row over all ranks."""
        return self.micro_batch_size * self.world_size

    @property
    def own_start(self) -> int:
        """Offset of this rank's first sample within a row."""
        return self.rank * self.micro_batch_size

    def num_rows(self, num_samples: int) -> int:
        """Number of rows that hold `num_samples`; the last one may be partly filled."""
        return -(-num_samples // self.row_size)

    def check_global_batch(self, global_batch_size: int) -> None:
        """Check that a global batch consists of whole rows.

        Args:
            global_batch_size: samples of a step, over all ranks and micro-batches.

        Raises:
            DataError: if it does not, naming the sizes.
        """
        if global_batch_size < 1 or global_batch_size % self.row_size:
            near = max(1, round(global_batch_size / self.row_size)) * self.row_size
            raise DataError(
                f"global_batch_size must be a multiple of micro_batch_size * world_size = {self.micro_batch_size} * "
                f"{self.world_size} = {self.row_size}, got {global_batch_size}; the nearest is {near}"
            )


GlobalMicroBatch: TypeAlias = tuple[list[int], bool, int, int]
"""This rank's share of a row, a plain tuple because there is one for every micro-batch:

- the dataset indices to fetch: those of this rank, or the single sample that a filler repeats;
- whether it is a filler;
- the number of samples in the row over all ranks;
- the position of this rank's first sample in the epoch, or for a filler the position it would have; unique per row.
"""


def micro_batches_of_epoch(
    order: SampleOrder | SharedOrder, layout: MicroBatchLayout, start: int
) -> Iterator[GlobalMicroBatch]:
    """The rows from position `start` to the end of the epoch, including a partly filled last one.

    The cost does not depend on `start`. Indices are computed lazily, a block at a time.
    """
    return chain.from_iterable(_blocks_of_epoch(order, layout, start))


def _blocks_of_epoch(
    order: SampleOrder | SharedOrder, layout: MicroBatchLayout, start: int
) -> Iterator[Iterable[GlobalMicroBatch]]:
    row_size = layout.row_size
    end_of_full = start + (order.num_samples - start) // row_size * row_size
    block_size = max(1, _BLOCK_SAMPLES // layout.micro_batch_size) * row_size
    for block_start in range(start, end_of_full, block_size):
        own = np.arange(layout.own_start, layout.own_start + layout.micro_batch_size, dtype=np.int64)
        row_starts = np.arange(block_start, min(block_start + block_size, end_of_full), row_size, dtype=np.int64)
        positions = row_starts[:, None] + own
        yield zip(order.at(positions).tolist(), repeat(False), repeat(row_size), positions[:, 0].tolist())
    if end_of_full < order.num_samples:
        ids = order.indices(end_of_full, order.num_samples).tolist()
        own_ids = ids[layout.own_start : layout.own_start + layout.micro_batch_size]
        yield [(own_ids or ids[:1], not own_ids, len(ids), end_of_full + layout.own_start)]
