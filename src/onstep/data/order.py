"""The order in which the samples of an epoch are taken, and those that it leaves out."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from onstep.errors import DataError

IntArray = npt.NDArray[np.int64]
_Words = npt.NDArray[np.uint64]

_SORTED_UP_TO = 4096
"""Orders up to this many samples are sorted by a hash: a Feistel network over so few bits mixes poorly."""
_NUM_ROUNDS = 8


class SampleOrder:
    """A permutation of ``0 .. num_samples - 1`` that is a pure function of (seed, epoch, position).

    It needs no memory that grows with `num_samples`: any slice is computed on its own, equally fast everywhere.
    The permutation is a Feistel network over the next power of two, walked until it lands inside. The arithmetic is
    64-bit integers alone, so that the order is the same on every machine. ``shuffle=False`` is the identity.

    Samples in `leave_out` have no position: the others keep their order and close ranks, so that there are
    ``num_samples - len(leave_out)`` positions. That takes memory for the positions left out, and no other.

    Source: Black and Rogaway, "Ciphers with Arbitrary Finite Domains" (2002), section 4 (cycle walking).

    Raises:
        DataError: for a negative `num_samples`, or one to leave out that is not a sample.
    """

    def __init__(
        self, num_samples: int, seed: int, epoch: int, shuffle: bool = True, leave_out: Collection[int] = ()
    ) -> None:
        if num_samples < 0:
            raise DataError(f"num_samples must be >= 0, got {num_samples}")
        self._domain = num_samples
        self._shuffle = shuffle
        self._keys = _keys_of(seed, epoch)
        self._table = self._sorted_by_hash() if shuffle and num_samples <= _SORTED_UP_TO else None
        num_bits = max(num_samples - 1, 1).bit_length()
        self._low_bits = np.uint64(num_bits // 2)
        self._low_mask = np.uint64((1 << (num_bits // 2)) - 1)
        self._high_mask = np.uint64((1 << (num_bits - num_bits // 2)) - 1)
        # Positions of the whole epoch before the k-th gap hold as many samples as that position minus k.
        gaps = np.sort(self.positions_of(np.array(sorted(set(leave_out)), dtype=np.int64)))
        self._samples_before_gap = gaps - np.arange(gaps.size)
        self.num_samples = num_samples - gaps.size
        """Positions of the epoch."""

    def indices(self, start: int, stop: int) -> IntArray:
        """The dataset indices at the positions ``start <= p < stop``."""
        return self.at(np.arange(start, stop, dtype=np.int64))

    def at(self, positions: IntArray) -> IntArray:
        """The dataset indices at `positions`, any shape.

        Raises:
            DataError: for a position outside the epoch.
        """
        if positions.size and not (positions.min() >= 0 and positions.max() < self.num_samples):
            raise DataError(
                f"positions {positions.min()} to {positions.max()} lie outside an epoch of {self.num_samples} samples"
            )
        if self._samples_before_gap.size:
            positions = positions + np.searchsorted(self._samples_before_gap, positions, side="right")
        if not self._shuffle:
            return positions
        if self._table is not None:
            return self._table[positions]
        return self._walk(positions.astype(np.uint64), self._network).astype(np.int64)

    def positions_of(self, ids: IntArray) -> IntArray:
        """Where the samples `ids` stand in the whole epoch, before any is left out: the inverse of the permutation.

        Raises:
            DataError: for an id that is not a sample.
        """
        if ids.size and not (ids.min() >= 0 and ids.max() < self._domain):
            raise DataError(
                f"samples {ids.min()} to {ids.max()} are to be left out of a dataset of {self._domain} samples; "
                "continue with the data that the list of skipped samples was made with"
            )
        if not self._shuffle:
            return ids
        if self._table is not None:
            return np.argsort(self._table)[ids]
        return self._walk(ids.astype(np.uint64), self._inverse_network).astype(np.int64)

    def _sorted_by_hash(self) -> IntArray:
        words = _mix(np.arange(self._domain, dtype=np.uint64) ^ self._keys[0])
        return np.argsort(_mix(words ^ self._keys[1]), kind="stable").astype(np.int64)

    def _walk(self, words: _Words, network: Callable[[_Words], _Words]) -> _Words:
        """Applies the network until each word is a sample of the dataset: fewer than two rounds on average."""
        words = network(words)
        outside = np.flatnonzero(words >= self._domain)
        while outside.size:
            words.flat[outside] = network(words.flat[outside])
            outside = outside[words.flat[outside] >= self._domain]
        return words

    def _network(self, words: _Words) -> _Words:
        return self._rounds(words, range(_NUM_ROUNDS))

    def _inverse_network(self, words: _Words) -> _Words:
        return self._rounds(words, reversed(range(_NUM_ROUNDS)))

    def _rounds(self, words: _Words, numbers: Iterable[int]) -> _Words:
        """Each round is its own inverse, so the network backwards is its rounds in reverse."""
        low, high = words & self._low_mask, words >> self._low_bits
        for number in numbers:
            key = self._keys[number]
            if number % 2:
                low ^= _mix(high ^ key) & self._low_mask
            else:
                high ^= _mix(low ^ key) & self._high_mask
        return (high << self._low_bits) | low


def skip_samples(entries: list[list[int]], epoch: int, sample_ids: Iterable[int]) -> list[int]:
    """Add what an anomaly leaves out to `entries` of `[epoch, sample id]`; gives those that were not in it yet.

    An entry is in force from the epoch after its own: the positions of a running epoch never shift.
    """
    new = sorted(set(sample_ids) - {sample_id for _, sample_id in entries})
    entries.extend([epoch, sample_id] for sample_id in new)
    return new


def ids_in_force(entries: Iterable[Sequence[int]], epoch: int) -> list[int]:
    """The ids among `[epoch, sample id]` entries that were added before `epoch`, each once, in ascending order."""
    return sorted({sample_id for added_in, sample_id in entries if added_in < epoch})


def _keys_of(seed: int, epoch: int) -> _Words:
    digest = hashlib.blake2b(f"onstep order {seed} {epoch}".encode(), digest_size=8 * _NUM_ROUNDS).digest()
    return np.frombuffer(digest, dtype="<u8").astype(np.uint64)


def _mix(words: _Words) -> _Words:
    """A 64-bit hash of each word. Source: Steele, Lea, Flood (2014), SplitMix64's finalizer (variant 13)."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
