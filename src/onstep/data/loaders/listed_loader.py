"""Loads the training data of a map-style dataset in the micro-batches that a user's sampler lists for each epoch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np

from onstep.data.loaders.collate import Collate
from onstep.data.loaders.epoch_orders import EpochBatches, EpochOrders
from onstep.data.loaders.micro_batch_reader import MicroBatchReader
from onstep.data.loaders.sample_order import ids_in_force
from onstep.data.loaders.step_batches import Compared, StepBatches, step_of
from onstep.errors import DataError


class ListedLoader:
    """Reads the steps of a map-style dataset in the micro-batches of `orders`, with the interface of `TrainLoader`.

    Micro-batches are dealt to the ranks in turn, one to each; in the last row of an epoch, a rank without one repeats a
    sample as a filler. With ``is_share=True`` the sampler lists this rank's micro-batches only, and every rank must
    have equally many. A tail of fewer micro-batches than a step needs is a step of its own.

    The state holds a digest of the order. Starting at any position reads no samples before it.

    Args:
        micro_batch_size: the size for which the length of a run is computed; the listed ones may differ.
        reading: options of `MicroBatchReader`.

    Raises:
        DataError: where the position or the order is not that of the saved state; for an epoch without a micro-batch.
    """

    has_epochs = True
    compared_by: Compared = None

    def __init__(
        self,
        dataset: Any,
        orders: EpochOrders,
        *,
        micro_batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        is_share: bool = False,
        collate_fn: Collate | None = None,
        persistent_workers: bool = False,
        **reading: Any,
    ) -> None:
        self._orders = orders
        self._set_epoch = getattr(dataset, "set_epoch", None)
        # workers of a dataset that follows the epoch have copies of it, which are not updated
        persists = persistent_workers and not callable(self._set_epoch)
        self._reader = MicroBatchReader(dataset, collate_fn, persistent_workers=persists, **reading)
        self._row_samples = micro_batch_size * world_size
        self._rank, self._row_size = (0, 1) if is_share else (rank, world_size)
        self._ranks_alike = world_size if is_share else 1
        self._own_rank = rank
        self._left_out: list[tuple[int, int]] = []
        self._expected_digest: str | None = None
        self._rows: tuple[EpochBatches, Any] | None = None
        self._stream: Iterator[StepBatches] | None = None
        self.seek(0, 0)

    @property
    def num_samples(self) -> int | None:
        """Samples of an epoch, counted as if all micro-batches were full; None if the sampler has no length."""
        num_rows = self._num_rows
        return None if num_rows is None else num_rows * self._row_samples

    @property
    def _num_rows(self) -> int | None:
        num_batches = self._orders.num_batches
        return None if num_batches is None else -(-num_batches // self._row_size)

    def steps_per_epoch(self, num_microbatches: int) -> int | None:
        """Number of steps in an epoch; None if the sampler has no length."""
        return None if self._num_rows is None else -(-self._num_rows // num_microbatches)

    def leave_out(self, entries: Iterable[Sequence[int]]) -> None:
        """Leave out the samples of `[epoch, sample id]` entries, each from the epoch after its own.

        A share of one rank is left as it is: the ranks would get different numbers of micro-batches.
        """
        if self._ranks_alike == 1:
            self._left_out = [(int(epoch), int(sample_id)) for epoch, sample_id in entries]

    def read(self, num_microbatches: int) -> StepBatches | None:
        """This rank's micro-batches of the next step; None at the end of the epoch."""
        if not self.has_next(num_microbatches):
            self._end_epoch()
            return None
        # An interrupted read must not leave a half-read stream behind: the next one starts over at the position.
        stream, self._stream = self._stream or self._open(), None
        step = step_of(list(islice(stream, num_microbatches)))
        self._stream = stream
        self.samples_in_epoch += step.num_samples or 0
        return step

    def has_next(self, num_microbatches: int) -> bool:
        """Whether this epoch has another step."""
        if num_microbatches < 1:
            raise DataError(f"num_microbatches must be >= 1, got {num_microbatches}")
        _, row_ends = self._current()
        return bool(row_ends.size) and self.samples_in_epoch < row_ends[-1]

    def seek(self, epoch: int, samples_in_epoch: int) -> None:
        """Continue from this position, which must be the end of a row."""
        if epoch < 0 or samples_in_epoch < 0:
            raise DataError(f"a position must be >= 0, got epoch {epoch}, sample {samples_in_epoch}")
        self.epoch = epoch
        """The epoch of the next read; an epoch ends when `read` returns None."""
        self.samples_in_epoch = samples_in_epoch
        """Samples handed out in this epoch over all ranks."""
        self._rows = self._stream = self._expected_digest = None
        if callable(self._set_epoch):
            self._set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """The position after the steps handed out so far, and the digest of the epoch's order."""
        state: dict[str, Any] = {"epoch": self.epoch, "samples_in_epoch": self.samples_in_epoch}
        return {**state, "order": self._orders.of(self.epoch).digest} if self.samples_in_epoch else state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a position returned by `state_dict`."""
        self.seek(state["epoch"], state["samples_in_epoch"])
        self._expected_digest = state.get("order")

    def close(self) -> None:
        """Stop the workers; a later read continues from the same position with new ones."""
        self._stream = None
        self._reader.close()

    def _current(self) -> tuple[EpochBatches, Any]:
        if self._rows is None:
            listed = self._orders.of(self.epoch)
            if self._expected_digest not in (None, listed.digest):
                raise DataError(
                    f"the sampler gives epoch {self.epoch} another order than in the run that saved this position, so "
                    "some samples would be read twice and others never; seed its generator, and let its order depend "
                    "on nothing but set_epoch, or start a new run"
                )
            listed = listed.without(ids_in_force(self._left_out, self.epoch))
            self._rows = listed, listed.row_ends(self._row_size) * self._ranks_alike
        return self._rows

    def _open(self) -> Iterator[StepBatches]:
        batches, row_ends = self._current()
        start = int(np.searchsorted(row_ends, self.samples_in_epoch, side="right"))
        if self.samples_in_epoch != (row_ends[start - 1] if start else 0):
            raise DataError(
                f"sample {self.samples_in_epoch} of epoch {self.epoch} is not between two micro-batches of the "
                "sampler; resume with the sampler and the number of ranks that the position was saved with"
            )
        rows = batches.rows(start, self._rank, self._row_size)
        if self._ranks_alike > 1:
            rows = (
                (ids, is_filler, count * self._ranks_alike, position * self._ranks_alike + self._own_rank)
                for ids, is_filler, count, position in rows
            )
        return self._reader.open(rows, self.epoch)

    def _end_epoch(self) -> None:
        if self.samples_in_epoch == 0:  # otherwise the caller would loop over empty epochs forever
            raise DataError(f"epoch {self.epoch} has no micro-batch: the sampler is empty; give it samples")
        self.seek(self.epoch + 1, 0)
