"""Loads training data that has no index: iterable datasets, and loaders of ready-made batches."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from onstep.data.loaders.collate import Collate, as_it_is, default_data_collator, length_of, samples_in, should_pin
from onstep.data.loaders.end_of_data import call, items_of
from onstep.data.loaders.loader import Loader
from onstep.data.loaders.micro_batch_reader import batches_from_workers, outlive_the_group, seed_globals, seeded_aside
from onstep.data.loaders.sample_order import MicroBatchLayout
from onstep.data.loaders.step_batches import Compared, StepBatches
from onstep.errors import DataError
from onstep.processes.heartbeat import HEARTBEAT

_LOGGER = logging.getLogger(__name__)


def is_stateful(owner: Any) -> bool:
    """Whether an object has a state that can be saved and loaded; classes and Python modules do not."""
    methods = (getattr(owner, "state_dict", None), getattr(owner, "load_state_dict", None))
    return not isinstance(owner, type) and all(callable(one) for one in methods)


def restores_exactly(owner: Any) -> bool:
    """Whether the state of a stateful iterable is its exact position.

    The samples in the buffer of a shuffled stream of `datasets` are not part of its state, and are lost on resume.
    """
    return is_stateful(owner) and not _has_shuffle_buffer(getattr(owner, "_ex_iterable", None))


def _has_shuffle_buffer(examples: Any) -> bool:
    """Whether one of nested iterables of the `datasets` library shuffles in a buffer."""
    if examples is None:
        return False
    inner = [getattr(examples, "ex_iterable", None), *(getattr(examples, "ex_iterables", None) or ())]
    return "BufferShuffled" in type(examples).__name__ or any(map(_has_shuffle_buffer, inner))


def count_samples(batch: Any) -> int | None:
    """Number of samples in a collated batch: the first dimension of its first tensor or array; None if it has none."""
    if type(batch) is dict:
        batch = batch.values()
    elif isinstance(batch, (torch.Tensor, np.ndarray)):
        return int(batch.shape[0]) if batch.ndim else None
    elif isinstance(batch, Mapping):
        batch = batch.values()
    elif not isinstance(batch, (list, tuple)):
        return None
    for part in batch:
        if isinstance(part, torch.Tensor) and part.ndim:  # in most batches, the first value
            return int(part.shape[0])
        count = count_samples(part)
        if count is not None:
            return count
    return None


class StreamReader:
    """Arranges the samples or batches of an iterable in rows, one pass at a time.

    Samples: each rank reads the whole stream and keeps its share, so the samples of a step do not depend on the number
    of ranks. Ready-made batches (``already_batched``): each batch is a micro-batch of this rank; the iterable itself is
    responsible for sharding.

    With ``num_workers`` > 0 one worker reads ahead; more would change the order or read samples twice. Stateful
    sources and ready-made batches are read in this process: the saved state must match what was handed out, and a
    loader of ready-made batches has its own workers.
    """

    def __init__(
        self,
        source: Iterable[Any],
        layout: MicroBatchLayout,
        collate_fn: Collate | None = None,
        already_batched: bool = False,
        *,
        num_workers: int = 0,
        pin_memory: bool = False,
        seed: int = 0,
        **worker_options: Any,
    ) -> None:
        if num_workers < 0:
            raise DataError(f"num_workers must be >= 0, got {num_workers}; 0 reads in this process")
        self._source = source
        self._layout = layout
        self._collate = collate_fn or default_data_collator
        self._already_batched = already_batched
        self._has_worker = num_workers > 0 and not already_batched and not is_stateful(source)
        self._pins_memory = should_pin(pin_memory)
        self._seed = seed
        self._generator = torch.Generator().manual_seed(seed % 2**63)
        self._worker_options = {"worker_init_fn": outlive_the_group, **worker_options}

    def open(self, skip_samples: int = 0, *, epoch: int = 0) -> Iterator[StepBatches]:
        """The rows of a new pass, after reading and discarding its first `skip_samples` samples (over all ranks).

        Raises:
            DataError: if the pass has fewer samples.
        """
        if self._has_worker:
            return batches_from_workers(
                DataLoader(
                    _RowsInWorker(partial(self._rows_of_samples, skip_samples, (self._seed, epoch))),
                    batch_size=None,
                    collate_fn=as_it_is,
                    num_workers=1,
                    pin_memory=self._pins_memory,
                    generator=self._generator,
                    **self._worker_options,
                )
            )
        rows = self._rows_of_batches(skip_samples) if self._already_batched else self._rows_of_samples(skip_samples)
        return (row.pin_memory() for row in rows) if self._pins_memory else rows

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_generator": None}  # a spawned worker cannot map a generator's memory

    def _rows_of_samples(self, skip_samples: int, seeds: tuple[int, int] | None = None) -> Iterator[StepBatches]:
        """The rows of a pass; `seeds` are the seed and epoch from which a worker process sets its random state.

        The state is set once for the samples, which are always read from the start, and at each row for the collator,
        which is not called for skipped rows. The samples that a source draws are therefore the same on every rank and
        for every micro-batch size.
        """
        if seeds is not None:
            seed_globals("stream", *seeds)
        samples = items_of(self._source)
        _check_replayed(sum(1 for _ in islice(samples, skip_samples)), skip_samples)
        collate = self._collate
        start, size = self._layout.own_start, self._layout.micro_batch_size
        position = skip_samples + start
        while row := list(islice(samples, self._layout.row_size)):
            own = row[start : start + size]
            with nullcontext() if seeds is None else seeded_aside(*seeds, position):
                batch = call(collate, own or row[:1])
            HEARTBEAT.beats += 1
            yield StepBatches([batch], None, len(row), [not own], [len(own)])
            position += len(row)

    def _rows_of_batches(self, skip_samples: int) -> Iterator[StepBatches]:
        batches = items_of(self._source)
        skipped = 0
        while skipped < skip_samples and (batch := next(batches, _END)) is not _END:
            skipped += self._size_of(batch) * self._layout.world_size
        _check_replayed(skipped, skip_samples)
        for batch in batches:
            HEARTBEAT.beats += 1
            local = self._size_of(batch)
            yield StepBatches([batch], None, local * self._layout.world_size, [False], [local])

    def _size_of(self, batch: Any) -> int:
        count = count_samples(batch)
        return self._layout.micro_batch_size if count is None else count


_END = object()


class _RowsInWorker(IterableDataset[Any]):
    def __init__(self, rows: Callable[[], Iterator[StepBatches]]) -> None:
        self._rows = rows

    def __iter__(self) -> Iterator[Any]:
        return self._rows()


def _check_replayed(num_skipped: int, skip_samples: int) -> None:
    if num_skipped < skip_samples:
        raise DataError(
            f"the data ended after {num_skipped} samples while replaying to position {skip_samples}; "
            "resume with the data that the position was saved with"
        )


class EpochSeeding:
    """Calls `set_epoch` on `source`, its dataset and its samplers where they have it.

    A plain `torch.utils.data.DataLoader` without a generator shuffles by torch's global random state, so replaying it
    would yield different samples. It is given generators seeded from (seed, epoch, rank) at each epoch; a generator
    supplied by the user is left alone.
    """

    def __init__(self, source: Any, seed: int, rank: int) -> None:
        self._seed = seed
        self._rank = rank
        self._epoch_aware = [part for part in _parts(source) if callable(getattr(part, "set_epoch", None))]
        self._seeded = []
        if isinstance(source, DataLoader) and not is_stateful(source):
            self._seeded = [p for p in _parts(source) if hasattr(p, "generator") and p.generator is None]

    def start_epoch(self, epoch: int) -> None:
        """Call before iterating over the source."""
        for part in self._epoch_aware:
            part.set_epoch(epoch)
        digest = hashlib.blake2b(f"onstep loader {self._seed} {epoch} {self._rank}".encode(), digest_size=7).digest()
        for part in self._seeded:
            part.generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))


def _parts(source: Any) -> list[Any]:
    batch_sampler = getattr(source, "batch_sampler", None)
    sampler = getattr(batch_sampler, "sampler", None) or getattr(source, "sampler", None)
    return [p for p in (source, getattr(source, "dataset", None), batch_sampler, sampler) if p is not None]


class StreamRows:
    """The rows of an iterable, one pass an epoch.

    The position is the state of a stateful iterable; another one is read again up to it, and a log line says so.
    """

    def __init__(
        self,
        source: Iterable[Any],
        layout: MicroBatchLayout,
        already_batched: bool = False,
        *,
        seed: int = 0,
        **reading: Any,
    ) -> None:
        self._source: Any = source
        self._layout = layout
        self._already_batched = already_batched
        self.compared_by: Compared = "micro-batches" if already_batched else "samples"
        self.row_size = 0 if already_batched else layout.row_size
        self.size = None
        self._has_state = restores_exactly(source)
        self._reader = StreamReader(source, layout, already_batched=already_batched, seed=seed, **reading)
        self._seeding = EpochSeeding(source, seed, layout.rank)
        self._epoch = 0
        self._saved: Any = None

    @property
    def num_samples(self) -> int | None:
        """Number of samples in one pass; None if the iterable has no length."""
        return samples_in(self._source, self._already_batched)

    def count_rows(self, drop_last: bool) -> int | None:
        """Number of rows in one pass; None if the iterable has no length."""
        length = length_of(self._source)
        if length is None or self._already_batched:
            return length
        return length // self.row_size if drop_last else self._layout.num_rows(length)

    def leave_out(self, entries: list[tuple[int, int]]) -> bool:
        """Does nothing: samples without an index cannot be left out."""
        return False

    def to_come(self, sample_ids: Sequence[int], samples_in_epoch: int) -> None:
        """Unknown: samples have no ids."""

    def start(self, epoch: int, samples_in_epoch: int, saved: dict[str, Any]) -> None:
        """Begin this epoch; only reading finds out whether it has the position."""
        self._epoch = epoch
        self._saved = saved.get("stream") if self._has_state else None

    def rows(self, samples_in_epoch: int) -> Iterator[StepBatches]:
        """The rows from the saved state on, or from this position, up to which the samples are read again."""
        self._seeding.start_epoch(self._epoch)
        saved, self._saved = self._saved, None
        if saved is not None:
            self._source.load_state_dict(saved)
            return self._reader.open(epoch=self._epoch)
        if hasattr(self._source, "_starting_state_dict"):  # datasets would start at a state that was loaded before
            self._source.load_state_dict(None)
        if samples_in_epoch:
            _LOGGER.warning(
                "reading the first %d samples of epoch %d again to reach the position; "
                "an iterable with state_dict and load_state_dict resumes without this",
                samples_in_epoch,
                self._epoch,
            )
        return self._reader.open(samples_in_epoch, epoch=self._epoch)

    def state(self, is_open: bool) -> dict[str, Any]:
        """The state of a stateful iterable."""
        saved = self._source.state_dict() if is_open and self._has_state else self._saved
        return {} if saved is None else {"stream": saved}

    def check_end(self, step_size: int, num_dropped: int) -> None:
        """Refuse an iterable whose first pass has no step; a later one may be empty.

        Raises:
            DataError: for such an iterable.
        """
        if self._epoch == 0:
            raise DataError(
                f"the iterable ended after {num_dropped} samples, less than one step; use more data or a smaller "
                "global batch, and make __iter__ start over each time it is called"
            )

    def close(self) -> None:
        """Do nothing: a worker ends with its rows."""


class IterableLoader(Loader):
    """Reads the steps of an iterable, epoch after epoch, with the interface of `TrainLoader`.

    Samples are batched here, in rows as in `TrainLoader`: every rank reads the whole stream, which must be the same on
    all, and keeps its share. With ``already_batched=True`` each item is used unchanged as a micro-batch of this rank;
    the iterable must then give each rank different samples. Training ends an epoch with the rank whose stream ends
    first (`compared_by`).

    If the iterable has `state_dict` and `load_state_dict`, its state is the position, saved in this loader's state
    under "stream" (per rank, for ready-made batches). Any other iterable, and a stream of `datasets` that shuffles in a
    buffer, is read again up to the position, and a log line says how much that is. `num_workers` > 0 reads a plain
    dataset ahead in one worker; others are read in this process. Random numbers (torch, NumPy, Python) drawn in the
    worker depend only on seed, epoch and position, so reading again reproduces them.

    Args:
        source: the iterable over samples or batches.
        micro_batch_size: samples of one forward pass on one rank.
        global_batch_size: samples of a step, over all ranks and micro-batches: a multiple of the micro-batch times
            the ranks; None, and whole micro-batches, are not checked.
        rank: this rank, from 0.
        world_size: the number of data-parallel ranks.
        already_batched: whether the source yields whole micro-batches, which are not collated again.
        epoch: the number of the epoch, from 0.
        samples_in_epoch: samples of the epoch that have been read, over all ranks.

    Raises:
        DataError: for inconsistent sizes.
    """

    def __init__(
        self,
        source: Iterable[Any],
        *,
        micro_batch_size: int,
        global_batch_size: int | None = None,
        rank: int = 0,
        world_size: int = 1,
        already_batched: bool = False,
        drop_last: bool = True,
        epoch: int = 0,
        samples_in_epoch: int = 0,
        **reading: Any,
    ) -> None:
        layout = MicroBatchLayout(micro_batch_size, rank, world_size)
        if global_batch_size is not None and not already_batched:
            layout.check_global_batch(global_batch_size)
        rows = StreamRows(source, layout, already_batched, **reading)
        super().__init__(rows, drop_last=drop_last, epoch=epoch, samples_in_epoch=samples_in_epoch)
        self.layout = layout
