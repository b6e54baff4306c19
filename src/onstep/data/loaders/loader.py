"""Reads the steps of any training data, epoch after epoch, from any position."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, Protocol

from onstep.data.loaders.sample_order import MicroBatchLayout
from onstep.data.loaders.step_batches import Compared, StepBatches, step_of
from onstep.errors import DataError


class RowSource(Protocol):
    """The data that a `Loader` reads, one epoch at a time, in rows: one micro-batch on every rank."""

    compared_by: Compared

    @property
    def num_samples(self) -> int | None:
        """Number of samples in the dataset over all ranks; None if it has no length."""

    @property
    def size(self) -> int | None:
        """Samples of the current epoch over all ranks; None where only reading reveals the end."""

    @property
    def row_size(self) -> int:
        """Samples of a full row over all ranks; 0 where rows of any size are full."""

    def count_rows(self, drop_last: bool) -> int | None:
        """Number of rows of an epoch, with or without one that is partly filled; None if it has no length.

        Args:
            drop_last: whether an incomplete last row is dropped.
        """

    def start(self, epoch: int, samples_in_epoch: int, saved: dict[str, Any]) -> None:
        """Begin this epoch, from a position in it; `saved` has what `state` returned there, if that is known.

        Args:
            epoch: the number of the epoch, from 0.
            samples_in_epoch: samples of the epoch that have been read, over all ranks.

        Raises:
            DataError: for a position outside the epoch.
        """

    def rows(self, samples_in_epoch: int) -> Iterator[StepBatches]:
        """The rows of the current epoch from this position on. Iterators opened earlier must no longer be used.

        Args:
            samples_in_epoch: samples of the epoch that have been read, over all ranks.
        """

    def state(self, is_open: bool) -> dict[str, Any]:
        """What a resumed run needs beside the numbers of the position; not called at the start of an epoch.

        Args:
            is_open: whether the latest `rows` are still read, and nothing else has been read from them than the rows
                that were handed out.
        """

    def check_end(self, step_size: int, num_dropped: int) -> None:
        """Check an epoch that ended before its first step, of which `num_dropped` samples were read.

        Args:
            step_size: samples of a step over all ranks.

        Raises:
            DataError: if every epoch after it would end like that.
        """

    def leave_out(self, entries: list[tuple[int, int]]) -> bool:
        """Leave out the samples of ``(epoch, sample id)`` entries; whether that affects the current epoch.

        Args:
            entries: (epoch, sample id) of each; it is left out of the epochs after that one.
        """

    def to_come(self, sample_ids: Sequence[int], samples_in_epoch: int) -> list[bool] | None:
        """Which of these samples the current epoch has from this position on; None if samples have no ids.

        Args:
            sample_ids: the ids to look for.
            samples_in_epoch: samples of the epoch that have been read, over all ranks.
        """

    def close(self) -> None:
        """Stop the workers."""


class Loader:
    """Reads the steps of a source; every kind of training data is read by this class.

    The position is ``(epoch, samples_in_epoch)`` of what has been handed out, regardless of how far workers read ahead.

    Args:
        drop_last: whether an epoch ends before a tail that is shorter than a step.
        source: where the samples come from.
        epoch: the number of the epoch, from 0.
        samples_in_epoch: samples of the epoch that have been read, over all ranks.

    Raises:
        DataError: for a position outside the data.
    """

    has_epochs = True
    position_is_shared = False

    def __init__(self, source: RowSource, *, drop_last: bool = True, epoch: int = 0, samples_in_epoch: int = 0) -> None:
        self._source = source
        self._drop_last = drop_last
        self.layout: MicroBatchLayout | None = None
        """The part of each row that this rank reads, if the samples are dealt out here."""
        self.compared_by: Compared = source.compared_by
        self.before_epoch: Callable[[], None] | None = None
        """Called before the first step of an epoch is read, but not where a run resumes inside of it."""
        self._has_begun = False
        self._stream: Iterator[StepBatches] | None = None
        self.seek(epoch, samples_in_epoch)

    @property
    def num_samples(self) -> int | None:
        """Number of samples in the dataset; None if it has no length."""
        return self._source.num_samples

    def steps_per_epoch(self, num_microbatches: int) -> int | None:
        """Number of steps of `num_microbatches` rows in a whole epoch; None if the data has no length."""
        num_rows = self._source.count_rows(self._drop_last)
        if num_rows is None:
            return None
        return num_rows // num_microbatches if self._drop_last else -(-num_rows // num_microbatches)

    def leave_out(self, entries: Iterable[Sequence[int]]) -> None:
        """Set the samples to leave out: the complete list of `[epoch, sample id]`, each effective from the next epoch.

        Call it whenever the list is extended, and before resuming from a saved position. The current epoch is not
        affected, since its own entries only take effect in the next one. Every rank must pass the same list. Data whose
        samples have no index yields them again.

        Args:
            entries: (epoch, sample id) of each; it is left out of the epochs after that one.

        Raises:
            DataError: for an id that is not a sample of this dataset.
        """
        if self._source.leave_out([(int(added_in), int(sample_id)) for added_in, sample_id in entries]):
            self._stream = None  # the list comes from a checkpoint, so the order differs

    def to_come(self, sample_ids: Sequence[int]) -> list[bool] | None:
        """Which of these samples this epoch still has; None for data whose samples have no ids.

        Args:
            sample_ids: the ids to look for.
        """
        return self._source.to_come(sample_ids, self.samples_in_epoch)

    def read(self, num_microbatches: int) -> StepBatches | None:
        """This rank's micro-batches of the next step; None at the end of the epoch.

        After None the position is the start of the next epoch. Every rank must pass the same `num_microbatches`. A
        later epoch of an iterable may be empty: a generator cannot be read twice.

        Raises:
            DataError: if an epoch is shorter than a step, or an iterable ends before the position.
        """
        source = self._source
        size, row_size = source.size, source.row_size
        is_whole = size is not None and 0 < num_microbatches * row_size <= size - self.samples_in_epoch
        if not is_whole and not self.has_next(num_microbatches):
            self._end_epoch(num_microbatches * row_size, 0)
            return None
        if self.before_epoch is not None and not self._has_begun:
            self._has_begun = True
            self.before_epoch()
        # An interrupted read must not leave a half-read stream behind: the next one starts over at the position.
        stream, self._stream = self._stream or source.rows(self.samples_in_epoch), None
        rows = list(islice(stream, num_microbatches))
        is_short = len(rows) < num_microbatches or (row_size > 0 and rows[-1].num_samples != row_size)
        if not rows or (self._drop_last and is_short):
            self._end_epoch(num_microbatches * row_size, sum(row.num_samples or 0 for row in rows))
            return None
        step = rows[0] if len(rows) == 1 else step_of(rows)
        self._stream = stream
        self.samples_in_epoch += step.num_samples or 0
        return step

    def has_next(self, num_microbatches: int) -> bool:
        """False if `read` would return None; for data of unknown length, only reading reveals the end.

        Args:
            num_microbatches: micro-batches of the step on this rank.
        """
        if num_microbatches < 1:
            raise DataError(f"num_microbatches must be >= 1, got {num_microbatches}")
        size = self._source.size
        if size is None:
            return True
        left = size - self.samples_in_epoch
        return left >= num_microbatches * self._source.row_size > 0 or (left > 0 and not self._drop_last)

    def seek(self, epoch: int, samples_in_epoch: int) -> None:
        """Continue from this position; an iterable is read again up to it.

        Raises:
            DataError: for a position outside the data.
        """
        self.load_state_dict({"epoch": epoch, "samples_in_epoch": samples_in_epoch})

    def state_dict(self) -> dict[str, Any]:
        """The position after the steps handed out so far, and what else the source needs to continue from it."""
        position = {"epoch": self.epoch, "samples_in_epoch": self.samples_in_epoch}
        return position | (self._source.state(self._stream is not None) if self.samples_in_epoch else {})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a position returned by `state_dict`.

        Args:
            state: what `state_dict()` returned.
        """
        epoch, samples_in_epoch = state["epoch"], state["samples_in_epoch"]
        if epoch < 0 or samples_in_epoch < 0:
            raise DataError(f"a position must be >= 0, got epoch {epoch}, sample {samples_in_epoch}")
        self._source.start(epoch, samples_in_epoch, state)
        self.epoch = epoch
        """The epoch of the next read; an epoch ends when `read` returns None."""
        self.samples_in_epoch = samples_in_epoch
        """Samples handed out in this epoch over all ranks."""
        self._has_begun = samples_in_epoch > 0
        self._stream = None

    def close(self) -> None:
        """Stop the workers; a later read continues from the same position with new ones."""
        self.load_state_dict(self.state_dict())
        self._source.close()

    def _end_epoch(self, step_size: int, num_dropped: int) -> None:
        if self.samples_in_epoch == 0:  # otherwise the caller would loop over empty epochs forever
            self._source.check_end(step_size, num_dropped)
        self.seek(self.epoch + 1, 0)
