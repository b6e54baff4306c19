"""Rows: how the samples of an epoch are dealt out to ranks and micro-batches.

A row is one micro-batch on every rank: ``world_size * micro_batch_size`` consecutive positions of the epoch, of which
rank r has its r-th share. A step takes whole rows, so its samples are the same however a global batch is split.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

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


class Row(NamedTuple):
    """What one rank has of one row."""

    ids: list[int]
    """Dataset indices to fetch: of this rank, or the one sample that a filler repeats."""
    is_filler: bool
    num_samples: int
    """Samples of the row over all ranks."""
    position: int
    """Where this rank's first sample stands in the epoch; for a filler, where it would. No two rows share one."""


class FetchedRow(NamedTuple):
    """A row with its micro-batch."""

    batch: Any
    ids: list[int] | None
    """Dataset indices of this rank's samples, none for a filler; None where samples have no index."""
    is_filler: bool
    num_samples: int | None
    """Samples of the row over all ranks; None where the batch does not tell."""
    local_samples: int | None


def rows_of_epoch(order: SampleOrder, layout: RowLayout, start: int) -> Iterator[Row]:
    """The rows from position `start` to the end of the epoch, the partly filled last one included.

    Starting anywhere costs the same. Indices are computed a block at a time, as they are asked for.
    """
    end_of_full = start + (order.num_samples - start) // layout.row_size * layout.row_size
    rows_per_block = max(1, _BLOCK_SAMPLES // layout.micro_batch_size)
    block_size = rows_per_block * layout.row_size
    for block_start in range(start, end_of_full, block_size):
        row_starts = np.arange(block_start, min(block_start + block_size, end_of_full), layout.row_size, dtype=np.int64)
        own = np.arange(layout.own_start, layout.own_start + layout.micro_batch_size, dtype=np.int64)
        positions = row_starts[:, None] + own
        for ids, position in zip(order.at(positions).tolist(), positions[:, 0].tolist(), strict=True):
            yield Row(ids, False, layout.row_size, position)
    if end_of_full < order.num_samples:
        yield _last_row(order.indices(end_of_full, order.num_samples).tolist(), layout, end_of_full)


def _last_row(ids: list[int], layout: RowLayout, start: int) -> Row:
    own = ids[layout.own_start : layout.own_start + layout.micro_batch_size]
    return Row(own or ids[:1], not own, len(ids), start + layout.own_start)
