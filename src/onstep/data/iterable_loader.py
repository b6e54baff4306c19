"""The training data of an iterable dataset, or of a loader that gives ready batches."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

from onstep.data.fetch import Collate, length_of, samples_in
from onstep.data.rows import RowLayout
from onstep.data.step_batches import StepBatches, step_of
from onstep.data.stream import EpochSeeding, StreamReader, is_stateful
from onstep.errors import DataError

_LOGGER = logging.getLogger(__name__)


class IterableLoader:
    """Reads the steps of an iterable, epoch after epoch, with the interface of `TrainLoader`.

    Samples are batched here, in rows as in `TrainLoader`: every rank reads the whole stream and keeps its own samples.
    With ``already_batched=True`` each item is this rank's micro-batch as it is; then the iterable must give every rank
    other samples and equally many batches.

    Where the iterable has `state_dict` and `load_state_dict`, its state is the position, kept in ours under "stream"
    (of this rank, for ready batches). A plain one is read again up to the position, and the log says how much that is.
    `num_workers` > 0 reads a plain dataset ahead in one worker; others are read in this process. Random numbers (torch,
    NumPy, Python) drawn in the worker depend on seed, epoch and position alone, so that reading again draws them again.

    Raises:
        DataError: for sizes that do not fit together.
    """

    has_epochs = True

    def __init__(
        self,
        source: Iterable[Any],
        *,
        micro_batch_size: int,
        global_batch_size: int | None = None,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
        drop_last: bool = True,
        collate_fn: Collate | None = None,
        num_workers: int = 0,
        pin_memory: bool = False,
        already_batched: bool = False,
        epoch: int = 0,
        samples_in_epoch: int = 0,
    ) -> None:
        self._layout = RowLayout(micro_batch_size, rank, world_size)
        if global_batch_size is not None and not already_batched:
            self._layout.check_global_batch(global_batch_size)
        self._source: Any = source
        self._already_batched = already_batched
        self._drop_last = drop_last
        self._reader = StreamReader(
            source,
            self._layout,
            collate_fn,
            already_batched,
            num_workers=num_workers,
            pin_memory=pin_memory,
            seed=seed,
        )
        self._seeding = EpochSeeding(source, seed, rank)
        self._stream: Iterator[StepBatches] | None = None
        self._stream_state: Any = None
        self.seek(epoch, samples_in_epoch)

    @property
    def num_samples(self) -> int | None:
        """Samples of one pass; None where the iterable has no length."""
        return samples_in(self._source, self._already_batched)

    def steps_per_epoch(self, num_microbatches: int) -> int | None:
        """Steps of `num_microbatches` in a whole epoch; None where the iterable has no length."""
        length = length_of(self._source)
        if length is None:
            return None
        step_size = num_microbatches * (1 if self._already_batched else self._layout.row_size)
        return length // step_size if self._drop_last else -(-length // step_size)

    def read(self, num_microbatches: int) -> StepBatches | None:
        """This rank's micro-batches of the next step; None at the end of the epoch.

        Raises:
            DataError: where an epoch has not one step, or ends before the position.
        """
        if num_microbatches < 1:
            raise DataError(f"num_microbatches must be >= 1, got {num_microbatches}")
        # An interrupted read leaves no half-read stream behind.
        stream, self._stream = self._stream or self._open(), None
        rows = list(islice(stream, num_microbatches))
        if not rows or (self._drop_last and self._is_short(rows, num_microbatches)):
            self._end_epoch(rows)
            return None
        step = rows[0] if len(rows) == 1 else step_of(rows)
        self._stream = stream
        self.samples_in_epoch += step.num_samples or 0
        return step

    def has_next(self, num_microbatches: int) -> bool:
        """True: only reading tells where an iterable ends."""
        return True

    def leave_out(self, entries: Iterable[Sequence[int]]) -> None:
        """Nothing: samples without an index are met again."""

    def seek(self, epoch: int, samples_in_epoch: int) -> None:
        """Continue from this position, by reading the epoch again up to it."""
        if epoch < 0 or samples_in_epoch < 0:
            raise DataError(f"a position must be >= 0, got epoch {epoch}, sample {samples_in_epoch}")
        self.epoch = epoch
        """The epoch that the next read takes from; an epoch ends when `read` returns None."""
        self.samples_in_epoch = samples_in_epoch
        """Samples handed out in this epoch, over all ranks."""
        self._stream_state = None
        self._stream = None

    def state_dict(self) -> dict[str, Any]:
        """The position after what was handed out; the state of a stateful iterable is under "stream"."""
        state = {"epoch": self.epoch, "samples_in_epoch": self.samples_in_epoch}
        stream_state = self._current_stream_state()
        return state if stream_state is None else {**state, "stream": stream_state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a position that `state_dict` gave."""
        self.seek(state["epoch"], state["samples_in_epoch"])
        self._stream_state = state.get("stream") if is_stateful(self._source) else None

    def close(self) -> None:
        """End the worker; reading goes on from the same position."""
        self._stream_state = self._current_stream_state()
        self._stream = None

    def _current_stream_state(self) -> Any:
        is_read_here = self._stream is not None and is_stateful(self._source)
        return self._source.state_dict() if is_read_here else self._stream_state

    def _open(self) -> Iterator[StepBatches]:
        self._seeding.start_epoch(self.epoch)
        state, self._stream_state = self._stream_state, None
        if state is not None:
            self._source.load_state_dict(state)
            return self._reader.open(epoch=self.epoch)
        if self.samples_in_epoch:
            _LOGGER.warning(
                "reading the first %d samples of epoch %d again to reach the position; "
                "an iterable with state_dict and load_state_dict continues without",
                self.samples_in_epoch,
                self.epoch,
            )
        return self._reader.open(self.samples_in_epoch, epoch=self.epoch)

    def _is_short(self, rows: list[StepBatches], num_microbatches: int) -> bool:
        is_partial = not self._already_batched and rows[-1].num_samples != self._layout.row_size
        return is_partial or len(rows) < num_microbatches

    def _end_epoch(self, dropped: list[StepBatches]) -> None:
        if self.samples_in_epoch == 0:  # else the caller would pass through empty epochs for ever
            num_dropped = sum(row.num_samples or 0 for row in dropped)
            raise DataError(
                f"epoch {self.epoch} of the iterable ended after {num_dropped} samples, before one step; give more "
                "data or a smaller global batch, and let __iter__ start afresh each time it is called"
            )
        self.seek(self.epoch + 1, 0)
