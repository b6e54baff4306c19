"""Rows of data that has no index: iterable datasets, and loaders that give ready batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from onstep.data.collate import default_data_collator
from onstep.data.fetch import Collate, as_it_is, pin, should_pin
from onstep.data.row_seeding import seed_globals, seeded_aside
from onstep.data.rows import FetchedRow, RowLayout
from onstep.data.workers import batches_from_workers, outlive_the_group
from onstep.errors import DataError
from onstep.pulse import PULSE


def is_stateful(source: Any) -> bool:
    """Whether `source` can tell and take its position (`state_dict` and `load_state_dict`)."""
    return hasattr(source, "state_dict") and hasattr(source, "load_state_dict")


def count_samples(batch: Any) -> int | None:
    """Samples of a collated batch: the first dimension of its first tensor or array; None where it has none."""
    if isinstance(batch, (torch.Tensor, np.ndarray)):
        return int(batch.shape[0]) if batch.ndim else None
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (list, tuple)) else ()
    return next((count for count in map(count_samples, parts) if count is not None), None)


@dataclass(frozen=True)
class RowStream:
    """How the samples or batches of an iterable are dealt out in rows.

    Samples: each rank reads the whole stream and keeps its own, so that the samples of a step do not depend on ranks.
    Ready batches (``already_batched``): each batch is this rank's micro-batch; sharing out is the iterable's matter.
    """

    source: Iterable[Any]
    layout: RowLayout
    collate_fn: Collate | None = None
    already_batched: bool = False

    def rows(self, skip_samples: int = 0, seeds: tuple[int, int] | None = None) -> Iterator[FetchedRow]:
        """The rows of one pass, after reading and dropping the first `skip_samples` of it (over all ranks).

        `seeds`, for a worker process only, are the seed and the epoch that its random state is set from: once for the
        samples, which are always read from the start, and at each row for the collator, which skipped rows do not call.
        The samples that a source draws so are the same on every rank and for every micro-batch size.

        Raises:
            DataError: where the pass has fewer samples than that.
        """
        if self.already_batched:
            return self._rows_of_batches(skip_samples)
        return self._rows_of_samples(skip_samples, seeds)

    def rows_from_worker(
        self, skip_samples: int, seeds: tuple[int, int], pin_memory: bool, generator: torch.Generator
    ) -> Iterator[FetchedRow]:
        """The same rows, read ahead by one worker process; more would change the order or read samples twice."""
        loader = DataLoader(
            _RowsInWorker(self, skip_samples, seeds),
            batch_size=None,
            collate_fn=as_it_is,
            num_workers=1,
            pin_memory=pin_memory,
            generator=generator,
            worker_init_fn=outlive_the_group,
        )
        for row in batches_from_workers(loader):
            PULSE.beats += 1
            yield FetchedRow(*row)

    def _rows_of_samples(self, skip_samples: int, seeds: tuple[int, int] | None) -> Iterator[FetchedRow]:
        if seeds is not None:
            seed_globals("stream", *seeds)
        samples = iter(self.source)
        _check_replayed(sum(1 for _ in islice(samples, skip_samples)), skip_samples)
        collate = self.collate_fn or default_data_collator
        start, size = self.layout.own_start, self.layout.micro_batch_size
        position = skip_samples + start
        while row := list(islice(samples, self.layout.row_size)):
            own = row[start : start + size]
            with nullcontext() if seeds is None else seeded_aside(*seeds, position):
                batch = collate(own or row[:1])
            PULSE.beats += 1
            yield FetchedRow(batch, None, not own, len(row), len(own))
            position += len(row)

    def _rows_of_batches(self, skip_samples: int) -> Iterator[FetchedRow]:
        batches = iter(self.source)
        skipped = 0
        while skipped < skip_samples:
            batch = next(batches, _END)
            if batch is _END:
                break
            skipped += self._size_of(batch) * self.layout.world_size
        _check_replayed(skipped, skip_samples)
        for batch in batches:
            PULSE.beats += 1
            local = self._size_of(batch)
            yield FetchedRow(batch, None, False, local * self.layout.world_size, local)

    def _size_of(self, batch: Any) -> int:
        count = count_samples(batch)
        return self.layout.micro_batch_size if count is None else count


class StreamReader:
    """Opens passes over a `RowStream`, with a worker where that keeps the position right.

    A stateful source and ready batches are read in this process: the state has to be that of what was handed out, and
    a ready loader has workers of its own.
    """

    def __init__(self, stream: RowStream, *, num_workers: int = 0, pin_memory: bool = False, seed: int = 0) -> None:
        if num_workers < 0:
            raise DataError(f"num_workers must be >= 0, got {num_workers}; 0 reads in this process")
        self._stream = stream
        self._has_worker = num_workers > 0 and not stream.already_batched and not is_stateful(stream.source)
        self._pins_memory = should_pin(pin_memory)
        self._seed = seed
        self._generator = torch.Generator().manual_seed(seed % 2**63)

    def open(self, skip_samples: int = 0, *, epoch: int = 0) -> Iterator[FetchedRow]:
        """A new pass over the source, from after the first `skip_samples`."""
        if self._has_worker:
            seeds = self._seed, epoch
            return self._stream.rows_from_worker(skip_samples, seeds, self._pins_memory, self._generator)
        rows = self._stream.rows(skip_samples)
        return (row._replace(batch=pin(row.batch)) for row in rows) if self._pins_memory else rows


_END = object()


class _RowsInWorker(IterableDataset[Any]):
    def __init__(self, stream: RowStream, skip_samples: int, seeds: tuple[int, int]) -> None:
        self._stream = stream
        self._skip_samples = skip_samples
        self._seeds = seeds

    def __iter__(self) -> Iterator[Any]:
        return self._stream.rows(self._skip_samples, self._seeds)


def _check_replayed(num_skipped: int, skip_samples: int) -> None:
    if num_skipped < skip_samples:
        raise DataError(
            f"the data ended after {num_skipped} samples while replaying to position {skip_samples}; "
            "continue with the data that the position was saved with"
        )
