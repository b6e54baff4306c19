"""Lists a map-style dataset in the rows that a user's sampler gives for each epoch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from onstep.data.loaders.epoch_orders import EpochBatches, EpochOrders
from onstep.data.loaders.micro_batch_reader import MicroBatchReader
from onstep.data.loaders.sample_order import IntArray, MicroBatchLayout, ids_in_force
from onstep.data.loaders.step_batches import Compared, StepBatches
from onstep.errors import DataError


class ListedRows:
    """The rows of a map-style dataset in the micro-batches of `orders`; a source of a `Loader` that drops no tail.

    Micro-batches are dealt to the ranks in turn, one to each; in the last row of an epoch, a rank without one repeats a
    sample as a filler. With ``is_share=True`` the sampler lists this rank's micro-batches only, and every rank must
    have equally many. A tail of fewer micro-batches than a step needs is a step of its own.

    The state holds a digest of the order. Starting at any position reads no samples before it.

    Args:
        layout: the micro-batch size for which the length of a run is computed; the listed ones may differ.
        reading: options of `MicroBatchReader`.
        dataset: the map-style dataset.
        orders: gives the order of each epoch.
        is_share: whether the order is already this rank's share.
        persistent_workers: whether worker processes outlive an epoch.

    Raises:
        DataError: where the position or the order is not that of the saved state; for an epoch without a micro-batch.
    """

    compared_by: Compared = None
    row_size = 0

    def __init__(
        self,
        dataset: Any,
        orders: EpochOrders,
        layout: MicroBatchLayout,
        *,
        is_share: bool = False,
        persistent_workers: bool = False,
        **reading: Any,
    ) -> None:
        self._orders = orders
        self._set_epoch = getattr(dataset, "set_epoch", None)
        # workers of a dataset that follows the epoch have copies of it, which are not updated
        persists = persistent_workers and not callable(self._set_epoch)
        self._reader = MicroBatchReader(dataset, persistent_workers=persists, **reading)
        self._layout = layout
        self._rank, self._num_dealt = (0, 1) if is_share else (layout.rank, layout.world_size)
        self._ranks_alike = layout.world_size if is_share else 1
        self._left_out: list[tuple[int, int]] = []
        self._epoch = 0
        self._expected_digest: str | None = None
        self._listed: tuple[EpochBatches, IntArray] | None = None

    @property
    def num_samples(self) -> int | None:
        """Samples of an epoch, counted as if all micro-batches were full; None if the sampler has no length."""
        num_rows = self.count_rows()
        return None if num_rows is None else num_rows * self._layout.row_size

    @property
    def size(self) -> int:
        """Samples of the current epoch over all ranks."""
        _, row_ends = self._current()
        return int(row_ends[-1]) if row_ends.size else 0

    def count_rows(self, drop_last: bool = False) -> int | None:
        """Number of rows in an epoch; None if the sampler has no length.

        Args:
            drop_last: whether an incomplete last row is dropped.
        """
        num_batches = self._orders.num_batches
        return None if num_batches is None else -(-num_batches // self._num_dealt)

    def leave_out(self, entries: list[tuple[int, int]]) -> bool:
        """Leave out the samples of ``(epoch, sample id)`` entries, each from the epoch after its own.

        A share of one rank is left as it is: the ranks would get different numbers of micro-batches.

        Args:
            entries: (epoch, sample id) of each; it is left out of the epochs after that one.
        """
        if self._ranks_alike == 1:
            self._left_out = entries
        return False

    def to_come(self, sample_ids: Sequence[int], samples_in_epoch: int) -> list[bool] | None:
        """Which of these samples the current epoch has from this position on; None for a share of one rank.

        Args:
            sample_ids: the ids to look for.
            samples_in_epoch: samples of the epoch that have been read, over all ranks.
        """
        batches, _ = self._current()
        left = batches.ids[samples_in_epoch:]
        return None if self._ranks_alike > 1 else list(np.isin(np.array(sample_ids, dtype=np.int64), left).tolist())

    def start(self, epoch: int, samples_in_epoch: int, saved: dict[str, Any]) -> None:
        """Begin this epoch; the position in it must be the end of a row.

        Args:
            epoch: the number of the epoch, from 0.
            samples_in_epoch: samples of the epoch that have been read, over all ranks.
            saved: the saved position of the source; None at the beginning.
        """
        self._epoch, self._expected_digest, self._listed = epoch, saved.get("order"), None
        if callable(self._set_epoch):
            self._set_epoch(epoch)

    def state(self, is_open: bool) -> dict[str, Any]:
        """The digest of the epoch's order."""
        return {"order": self._orders.of(self._epoch).digest}

    def check_end(self, step_size: int, num_dropped: int) -> None:
        """Refuse an epoch without a micro-batch.

        Args:
            step_size: samples of a step over all ranks.
            num_dropped: samples at the end of the epoch that no step reads.
        """
        raise DataError(f"epoch {self._epoch} has no micro-batch: the sampler is empty; give it samples")

    def close(self) -> None:
        """Stop persistent workers."""
        self._reader.close()

    def rows(self, samples_in_epoch: int) -> Iterator[StepBatches]:
        """The rows of the current epoch from this position on.

        Args:
            samples_in_epoch: samples of the epoch that have been read, over all ranks.
        """
        batches, row_ends = self._current()
        start = int(np.searchsorted(row_ends, samples_in_epoch, side="right"))
        if samples_in_epoch != (row_ends[start - 1] if start else 0):
            raise DataError(
                f"sample {samples_in_epoch} of epoch {self._epoch} is not between two micro-batches of the "
                "sampler; resume with the sampler and the number of ranks that the position was saved with"
            )
        rows = batches.rows(start, self._rank, self._num_dealt)
        if self._ranks_alike > 1:
            rows = (
                (ids, is_filler, count * self._ranks_alike, position * self._ranks_alike + self._layout.rank)
                for ids, is_filler, count, position in rows
            )
        return self._reader.open(rows, self._epoch)

    def _current(self) -> tuple[EpochBatches, IntArray]:
        if self._listed is None:
            listed = self._orders.of(self._epoch)
            if self._expected_digest not in (None, listed.digest):
                raise DataError(
                    f"the sampler gives epoch {self._epoch} another order than in the run that saved this position, so "
                    "some samples would be read twice and others never; seed its generator, and let its order depend "
                    "on nothing but set_epoch, or start a new run"
                )
            listed = listed.without(ids_in_force(self._left_out, self._epoch))
            self._listed = listed, listed.row_ends(self._num_dealt) * self._ranks_alike
        return self._listed
