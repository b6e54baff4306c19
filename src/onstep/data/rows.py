"""Rows: how the samples of an epoch are dealt out to ranks and micro-batches.

A row is one micro-batch on every rank: ``world_size * micro_batch_size`` consecutive positions of the epoch, of which
rank r has its r-th share. A step takes whole rows, so its samples are the same however a global batch is split.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, repeat
from typing import TypeAlias

import numpy as np

from onstep.data.order import SampleOrder
from onstep.errors import DataError

_BLOCK_SAMPLES = 4096
"""Samples whose indices are computed at once; one numpy call for each row would cost more than reading it."""


@dataclass(frozen=True)
class RowLayout:
    """Where the samples of this rank stand in a row.

    Raises:
        DataError: for sizes that cannot be.
    """

    micro_batch_size: int
    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        if self.micro_batch_size < 1:
            raise DataError(f"micro_batch_size must be >= 1, got {self.micro_batch_size}")
        if not 0 <= self.rank < self.world_size:
            raise DataError(f"rank must be >= 0 and < world_size, got rank {self.rank} of {self.world_size}")

    @property
    def row_size(self) -> int:
        """Samples of a row over all ranks."""
        return self.micro_batch_size * self.world_size

    @property
    def own_start(self) -> int:
        """Where this rank's samples start within a row."""
        return self.rank * self.micro_batch_size

    def num_rows(self, num_samples: int) -> int:
        """Rows that hold `num_samples`, the last one perhaps partly filled."""
        return -(-num_samples // self.row_size)

    def check_global_batch(self, global_batch_size: int) -> None:
        """Check that a global batch consists of whole rows.

        Raises:
            DataError: naming the sizes.
        """
        if global_batch_size < 1 or global_batch_size % self.row_size:
            near = max(1, round(global_batch_size / self.row_size)) * self.row_size
            raise DataError(
                f"global_batch_size must be a multiple of micro_batch_size * world_size = {self.micro_batch_size} * "
                f"{self.world_size} = {self.row_size}, got {global_batch_size}; the nearest is {near}"
            )


Row: TypeAlias = tuple[list[int], bool, int, int]
"""What one rank has of one row, a plain tuple because there is one for every micro-batch:

- the dataset indices to fetch: of this rank, or the one sample that a filler repeats;
- whether it is a filler;
- samples of the row over all ranks;
- where this rank's first sample stands in the epoch; for a filler, where it would. No two rows share one.
"""


def rows_of_epoch(order: SampleOrder, layout: RowLayout, start: int) -> Iterator[Row]:
    """The rows from position `start` to the end of the epoch, the partly filled last one included.

    Starting anywhere costs the same. Indices are computed a block at a time, as they are asked for.
    """
    return chain.from_iterable(_blocks_of_epoch(order, layout, start))


def _blocks_of_epoch(order: SampleOrder, layout: RowLayout, start: int) -> Iterator[Iterable[Row]]:
    row_size = layout.row_size
    end_of_full = start + (order.num_samples - start) // row_size * row_size
    block_size = max(1, _BLOCK_SAMPLES // layout.micro_batch_size) * row_size
    own = np.arange(layout.own_start, layout.own_start + layout.micro_batch_size, dtype=np.int64)
    for block_start in range(start, end_of_full, block_size):
        row_starts = np.arange(block_start, min(block_start + block_size, end_of_full), row_size, dtype=np.int64)
        positions = row_starts[:, None] + own
        yield zip(order.at(positions).tolist(), repeat(False), repeat(row_size), positions[:, 0].tolist())
    if end_of_full < order.num_samples:
        yield [_last_row(order.indices(end_of_full, order.num_samples).tolist(), layout, end_of_full)]


def _last_row(ids: list[int], layout: RowLayout, start: int) -> Row:
    own = ids[layout.own_start : layout.own_start + layout.micro_batch_size]
    return own or ids[:1], not own, len(ids), start + layout.own_start
