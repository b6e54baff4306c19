"""Lists the micro-batches of an epoch in the order of a torch sampler, so that every run of the same script has it."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice
from typing import Any, cast

import numpy as np
import torch
from torch.utils.data import RandomSampler, Sampler

from onstep.data.loaders.collate import length_of
from onstep.data.loaders.sample_order import GlobalMicroBatch, IntArray, SampleOrder
from onstep.errors import DataError


class OrderRandomness:
    """Random states of torch (CPU), NumPy and Python for samplers alone.

    They start from `seed` as a script does after `transformers.set_seed(seed)`, and nothing else draws from them: the
    order of an epoch does not depend on dropout, on the rank, or on where a run was interrupted.

    Args:
        seed: seed of the order; the same seed gives the same order.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._states: tuple[Any, Any, Any] | None = None

    def again(self) -> OrderRandomness:
        """States that start from the same seed."""
        return OrderRandomness(self._seed)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Use these states within the context, and restore the process's own afterwards."""
        outside = _global_states()
        if self._states is None:
            random.seed(self._seed)
            np.random.seed(self._seed % 2**32)
            torch.default_generator.manual_seed(self._seed)
        else:
            _set_global_states(self._states)
        try:
            yield
        finally:
            self._states = _global_states()
            _set_global_states(outside)


def _global_states() -> tuple[Any, Any, Any]:
    return torch.default_generator.get_state(), random.getstate(), np.random.get_state()


def _set_global_states(states: tuple[Any, Any, Any]) -> None:
    torch.default_generator.set_state(states[0])
    random.setstate(states[1])
    np.random.set_state(states[2])


@dataclass(frozen=True)
class EpochBatches:
    """The micro-batches of an epoch: batch number i has the samples ``ids[ends[i - 1] : ends[i]]``."""

    ids: IntArray
    """The ids of all samples of the epoch, in order."""
    ends: IntArray
    """The end of each batch in `ids`."""

    @cached_property
    def digest(self) -> str:
        """Identifies the order."""
        return hashlib.blake2b(self.ids.tobytes() + self.ends.tobytes(), digest_size=8).hexdigest()

    def without(self, left_out: Sequence[int]) -> EpochBatches:
        """The same without these samples; batches that become empty are removed.

        Args:
            left_out: the ids that are removed.
        """
        if not left_out:
            return self
        kept = ~np.isin(self.ids, np.array(left_out, dtype=np.int64))
        return EpochBatches(self.ids[kept], np.unique(np.concatenate([[0], np.cumsum(kept)])[self.ends]))

    def row_ends(self, row_size: int) -> IntArray:
        """The number of samples up to the end of each row of `row_size` batches; the last row may be partly filled."""
        if not self.ends.size:
            return self.ends
        last = np.minimum(np.arange(row_size, self.ends.size + row_size, row_size), self.ends.size) - 1
        return cast(IntArray, self.ends[last])

    def rows(self, start: int, rank: int, row_size: int) -> Iterator[GlobalMicroBatch]:
        """The share of `rank` in the rows from number `start` on: one batch of each, or a filler.

        Args:
            row_size: samples of a row: a micro-batch of every rank.
        """
        starts = np.concatenate([[0], self.ends])
        for first in range(start * row_size, self.ends.size, row_size):
            own, end = first + rank, min(first + row_size, self.ends.size)
            num_samples = int(starts[end] - starts[first])
            if own < end:
                yield self.ids[starts[own] : starts[own + 1]].tolist(), False, num_samples, int(starts[own])
            else:
                yield [int(self.ids[starts[first]])], True, num_samples, int(starts[end]) + rank


class EpochOrders:
    """The micro-batches of each epoch, as a torch batch sampler yields them.

    An epoch is read from the sampler as a whole, after `set_epoch`, with the random states of `OrderRandomness`.
    Samplers continue from one epoch to the next (a generator that advances), so epochs are read in order from the first
    on, also by a run that resumes; the order is therefore that of the uninterrupted run, without being saved.

    Args:
        batch_sampler: yields lists of dataset indices.
        reseeds_shuffling: a plain `RandomSampler` is seeded with `shuffle_seed` + epoch, as accelerate does.
        generator: the DataLoader's, from which it draws a seed for its workers before each epoch.
        max_batches: where to end an epoch of a sampler without a length, which might never end.
    """

    def __init__(
        self,
        batch_sampler: Any,
        randomness: OrderRandomness,
        *,
        shuffle_seed: int = 0,
        reseeds_shuffling: bool = False,
        generator: torch.Generator | None = None,
        max_batches: int | None = None,
    ) -> None:
        self.batch_sampler = batch_sampler
        self._randomness = randomness
        self._shuffle_seed = shuffle_seed
        self._reseeds_shuffling = reseeds_shuffling
        self._generator = generator
        self._max_batches = max_batches
        self._parts = list(_nested_samplers(batch_sampler))
        self._num_read = 0
        self._current: EpochBatches | None = None

    def again(self) -> EpochOrders:
        """The same from the first epoch on, for another reader; itself while no other epoch has been read."""
        if self._num_read <= 1:  # reading the first again would advance the sampler's generator
            return self
        return EpochOrders(
            self.batch_sampler,
            self._randomness.again(),
            shuffle_seed=self._shuffle_seed,
            reseeds_shuffling=self._reseeds_shuffling,
            generator=self._generator,
            max_batches=self._max_batches,
        )

    @property
    def sampler_name(self) -> str:
        """The class of the sampler that gives the order, for messages."""
        return type(self._parts[-1]).__name__

    @property
    def num_batches(self) -> int | None:
        """Number of micro-batches of an epoch, of all ranks that the sampler covers; None if it has no length."""
        return length_of(self.batch_sampler)

    def of(self, epoch: int, *, to_length: bool = True) -> EpochBatches:
        """The micro-batches of an epoch.

        Args:
            to_length: leave out what the sampler yields beyond its length, by which the length of a run is planned.
            epoch: the number of the epoch, from 0.

        Raises:
            DataError: for an epoch before the last one that was read, or a sampler that does not yield integers.
        """
        if epoch < self._num_read - 1:
            raise DataError(
                f"the order of epoch {epoch} is past: the sampler has been read up to epoch {self._num_read - 1}; "
                "create the loader again"
            )
        while self._num_read <= epoch:
            self._current = self._read(self._num_read, to_length)
            self._num_read += 1
        assert self._current is not None
        return self._current

    def _read(self, epoch: int, to_length: bool) -> EpochBatches:
        for part in self._parts:
            if callable(getattr(part, "set_epoch", None)):
                part.set_epoch(epoch)
        limit = self._max_batches if self.num_batches is None else self.num_batches if to_length else None
        with self._randomness.applied(), self._reseeded(epoch):
            torch.empty((), dtype=torch.int64).random_(generator=self._generator)  # as DataLoader.__iter__ does
            batches = [_integers(batch, self.sampler_name) for batch in islice(self.batch_sampler, limit)]
        ends = np.cumsum(np.fromiter(map(len, batches), dtype=np.int64, count=len(batches)))
        return EpochBatches(np.fromiter(chain.from_iterable(batches), dtype=np.int64), ends)

    @contextmanager
    def _reseeded(self, epoch: int) -> Iterator[None]:
        plain = [one for one in self._parts if type(one) is RandomSampler] if self._reseeds_shuffling else []
        given = [one.generator for one in plain]
        for one in plain:
            one.generator = torch.Generator().manual_seed(self._shuffle_seed + epoch)
        try:
            yield
        finally:
            for one, generator in zip(plain, given, strict=True):
                one.generator = generator


def _nested_samplers(sampler: Any) -> Iterator[Any]:
    """A sampler and those that it reads from."""
    while sampler is not None:
        yield sampler
        inner = getattr(sampler, "batch_sampler", None)
        sampler = getattr(sampler, "sampler", None) if inner is None else inner


def _integers(batch: Iterable[Any], sampler_name: str) -> list[int]:
    try:
        return [int(one) for one in batch]
    except (TypeError, ValueError) as error:
        raise DataError(
            f"the sampler {sampler_name} must yield integers, the indices of samples, got {batch!r}; a "
            "dataset with other keys can be read by an IterableDataset"
        ) from error


class OrderedBatches(Sampler[list[int]]):
    """A batch sampler of this rank's micro-batches of an epoch in `orders`: those that a training reads.

    `set_epoch` selects the epoch. In the last row, a rank without a micro-batch has a single sample.

    Args:
        orders: gives the batches of each epoch.
        rank: this rank, from 0.
        world_size: the number of data-parallel ranks.
    """

    def __init__(self, orders: EpochOrders, rank: int = 0, world_size: int = 1) -> None:
        self.orders = orders
        self.sampler = getattr(orders.batch_sampler, "sampler", orders.batch_sampler)
        self.batch_size = getattr(orders.batch_sampler, "batch_size", None)
        self.drop_last = getattr(orders.batch_sampler, "drop_last", False)
        self.rank = rank
        self.world_size = world_size
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Yield the micro-batches of this epoch from the next iteration on.

        Args:
            epoch: the number of the epoch, from 0, whose order follows.
        """
        self.epoch = epoch

    def __len__(self) -> int:
        return -(-len(self.orders.batch_sampler) // self.world_size)

    def __iter__(self) -> Iterator[list[int]]:
        return (row[0] for row in self.orders.of(self.epoch).rows(0, self.rank, self.world_size))


class OrderedSamples(Sampler[int]):
    """A sampler of the samples of `batches`, in their order; for a DataLoader with the same `batch_size`.

    Args:
        batches: the batches whose samples are yielded one by one.
    """

    def __init__(self, batches: OrderedBatches) -> None:
        self.batches = batches
        self.sampler = batches.sampler
        self._length: int | None = None

    def set_epoch(self, epoch: int) -> None:
        """Yield the samples of this epoch from the next iteration on.

        Args:
            epoch: the number of the epoch, from 0, whose order follows.
        """
        self.batches.set_epoch(epoch)

    def __len__(self) -> int:
        if self._length is None:
            self._length = sum(map(len, self.batches))
        return self._length

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(self.batches)


class ShuffledSampler(RandomSampler):
    """A sampler of a dataset in the order in which `TrainLoader` shuffles it; `set_epoch` selects the epoch.

    Args:
        data_source: the dataset whose indices are drawn.
        seed: seed of the order; the same seed gives the same order.
    """

    def __init__(self, data_source: Any, seed: int) -> None:
        super().__init__(data_source)
        self._seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Shuffle for this epoch from the next iteration on.

        Args:
            epoch: the number of the epoch, from 0, whose order follows.
        """
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        num_samples = len(self.data_source)
        return iter(SampleOrder(num_samples, self._seed, self.epoch).indices(0, num_samples).tolist())
