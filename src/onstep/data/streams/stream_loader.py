"""Reads the steps of a stream, from any position."""

from __future__ import annotations

import hashlib
import logging
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import closing
from itertools import groupby, islice
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader

from onstep.data.loaders.collate import as_it_is, pin, should_pin
from onstep.data.loaders.loader import Loader
from onstep.data.loaders.micro_batch_reader import batches_from_workers, outlive_the_group
from onstep.data.loaders.sample_order import MicroBatchLayout, SampleOrder
from onstep.data.loaders.step_batches import Compared, StepBatches
from onstep.data.streams.record_stream import RecordStream, Window, WindowTask
from onstep.errors import DataError
from onstep.processes.heartbeat import HEARTBEAT

_LOGGER = logging.getLogger(__name__)


class Place(NamedTuple):
    """A place in a stream."""

    round: int = 0
    """Passes over the stream before it."""
    file: int = 0
    """Files of this pass before it."""
    window: int = 0
    """Windows of this file before it."""
    taken: int = 0
    """Samples of this window before it."""


class _Sample(NamedTuple):
    dataset: Any
    number: int
    """Its index in the dataset."""
    after: Place


class StreamedRows:
    """The rows of a stream: every rank reads all of it, and keeps its share.

    The order of files, and of the records and samples in a window, is a pure function of seed and pass. The position
    is the place in the stream, the same for all ranks and any number of them.
    """

    compared_by: Compared = "samples"

    def __init__(
        self,
        stream: RecordStream,
        layout: MicroBatchLayout,
        *,
        epoch_samples: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
        num_workers: int = 0,
        pin_memory: bool = False,
        **worker_options: Any,
    ) -> None:
        if num_workers < 0:
            raise DataError(f"num_workers must be >= 0, got {num_workers}; 0 reads in this process")
        self.num_samples = self.size = epoch_samples
        self.row_size = layout.row_size
        self._stream = stream
        self._layout = layout
        self._seed = seed
        self._shuffle = shuffle
        self._num_workers = num_workers
        self._pins_memory = should_pin(pin_memory)
        self._generator = torch.Generator().manual_seed(seed % 2**63)
        self._worker_options = {"worker_init_fn": outlive_the_group, **worker_options}
        self._position = 0, 0
        self._place: Place | None = Place()
        """The place of `_position`; None if it is unknown."""
        self._read_up_to = Place()
        self._is_noted = False

    def count_rows(self, drop_last: bool) -> int | None:
        """Number of rows of an epoch; None if it is a pass over the stream."""
        return None if self.size is None else self.size // self.row_size

    def leave_out(self, entries: list[tuple[int, int]]) -> bool:
        """Does nothing: samples without an index cannot be left out."""
        return False

    def to_come(self, sample_ids: Sequence[int], samples_in_epoch: int) -> None:
        """Unknown: samples have no ids."""

    def start(self, epoch: int, samples_in_epoch: int, saved: dict[str, Any]) -> None:
        """Begin this epoch; a position whose place is neither saved nor known is reached by reading again."""
        position, before = (epoch, samples_in_epoch), self._position
        goes_on = self.size is not None and position == (before[0] + 1, 0)
        if saved.get("stream") == self._fingerprint and "place" in saved:
            self._place = Place(*saved["place"])
        elif samples_in_epoch == 0 and (self.size is None or epoch == 0):
            self._place = Place(epoch)
        elif position != before and not goes_on:
            self._place = None
        self._position = position

    def commit(self, epoch: int, samples_in_epoch: int) -> None:
        """Note that all rows up to here were handed out."""
        self._position, self._place = (epoch, samples_in_epoch), self._read_up_to

    def state(self, is_open: bool = True) -> dict[str, Any]:
        """The place in the stream."""
        return {} if self._place is None else {"stream": self._fingerprint, "place": list(self._place)}

    def rows(self, samples_in_epoch: int) -> Iterator[StepBatches]:
        """The rows of the current epoch from this position on."""
        samples = self._samples() if self._place is not None else self._samples_again(samples_in_epoch)
        if self.size is not None:
            samples = islice(samples, self.size - samples_in_epoch)
        start, size = self._layout.own_start, self._layout.micro_batch_size
        while row := list(islice(samples, self.row_size)):
            own = row[start : start + size]
            HEARTBEAT.beats += 1
            self._read_up_to = row[-1].after
            batch = _collated(own or row[:1])
            yield StepBatches([pin(batch) if self._pins_memory else batch], None, len(row), [not own], [len(own)])

    def check_end(self, step_size: int, num_dropped: int) -> None:
        """Refuse a stream that has no step.

        Raises:
            DataError: for such a stream.
        """
        raise DataError(
            f"the stream ended after {num_dropped} samples, less than one step of {step_size}; use more data, or a "
            "smaller global batch"
        )

    def close(self) -> None:
        """Close the open file; workers end with their rows."""
        self._stream.close()

    @property
    def _fingerprint(self) -> str:
        return f"{self._stream.fingerprint}-{self._seed}-{self._shuffle}"

    def _samples_again(self, samples_in_epoch: int) -> Iterator[_Sample]:
        """The samples from a position on, up to which the stream is read."""
        epoch = self._position[0]
        skipped = samples_in_epoch + (0 if self.size is None else epoch * self.size)
        self._place = Place(epoch if self.size is None else 0)
        _LOGGER.warning(
            "the place of sample %d of epoch %d in the stream is not known (the position was saved with other files, "
            "windows or seed, or by another kind of data); the stream is read up to it",
            samples_in_epoch,
            epoch,
        )
        samples = self._samples()
        for number in range(skipped):
            if next(samples, None) is None:
                raise DataError(
                    f"the stream ended after {number} samples, before position {skipped}; resume with the data that "
                    "the position was saved with"
                )
        return samples

    def _samples(self) -> Iterator[_Sample]:
        """The samples from the place on, to the end of the pass, or endlessly if epochs have a size."""
        assert self._place is not None
        place = self._place
        while True:
            is_empty = place == Place(place.round)
            for sample in self._pass_from(place):
                is_empty = False
                yield sample
            if self.size is None:
                return
            place = Place(place.round + 1)
            if is_empty:
                raise DataError("the stream has no samples; give files with records")

    def _pass_from(self, place: Place) -> Iterator[_Sample]:
        """The samples of a pass from a place on."""
        taken = place.taken
        for at, window in self._windows(place):
            self._tell(window)
            count = len(window.samples or ())
            order = SampleOrder(count, _seed_of(self._seed, at, "samples"), 0, self._shuffle)
            for number, index in enumerate(order.indices(min(taken, count), count).tolist(), taken + 1):
                yield _Sample(window.samples, index, at._replace(taken=number))
            taken = 0

    def _windows(self, place: Place) -> Iterator[tuple[Place, Window]]:
        """The windows of a pass from a place on, and where each begins."""
        feed = _Feed(self._stream, place, self._seed, self._shuffle)
        if not self._num_workers:
            windows: Iterator[Window] = (self._stream[task] for task in feed)
        else:
            self._stream.close()
            windows = batches_from_workers(
                DataLoader(
                    self._stream,
                    batch_size=None,
                    sampler=feed,
                    collate_fn=as_it_is,
                    num_workers=self._num_workers,
                    generator=self._generator,
                    **self._worker_options,
                )
            )
        with closing(self._stream):
            for window in windows:
                at = feed.begun.popleft()
                if window.problem is not None:
                    raise DataError(window.problem)
                if window.is_last:
                    feed.ended = max(feed.ended, at.file)
                yield at, window

    def _tell(self, window: Window) -> None:
        """Warn of records that were left out, on one rank; of those without an answer in the first such window."""
        if self._layout.rank:
            return
        for reason in window.damaged:
            _LOGGER.warning("a record is left out (dataset.stream_skip_damaged): %s", reason)
        if window.note and not self._is_noted:
            self._is_noted = True
            _LOGGER.warning("in a window of the stream, %s; there may be more in others", window.note)


class StreamLoader(Loader):
    """Reads the steps of a stream of any size, with the interface of `TrainLoader`.

    Each rank reads the whole stream, window by window, in worker processes ahead of the training, and keeps its share
    of each row: the samples of a step do not depend on the number of ranks or workers. Its state is the place in the
    stream, from which any number of ranks continues without reading what comes before.

    Args:
        reading: `seed`, `shuffle`, `num_workers`, `pin_memory`, and options of torch's DataLoader for the workers.
        micro_batch_size: samples of one forward pass on one rank.
        global_batch_size: samples of a step, over all ranks and micro-batches.
        rank: this rank, from 0.
        world_size: the number of data-parallel ranks.

    Raises:
        DataError: for inconsistent sizes.
    """

    position_is_shared = True

    def __init__(
        self,
        stream: RecordStream,
        *,
        micro_batch_size: int,
        global_batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        drop_last: bool = True,
        **reading: Any,
    ) -> None:
        layout = MicroBatchLayout(micro_batch_size, rank, world_size)
        layout.check_global_batch(global_batch_size)
        self.dataset = stream
        self.batch_size = micro_batch_size
        epoch = stream.epoch_samples
        if epoch is not None:
            epoch -= epoch % global_batch_size
            if not epoch:
                raise DataError(
                    f"an epoch of {stream.epoch_samples} sequences is shorter than a step of {global_batch_size}; "
                    "increase dataset.stream_epoch_tokens, or use a smaller global_batch_size"
                )
        self._rows = StreamedRows(stream, layout, epoch_samples=epoch, **reading)
        super().__init__(self._rows, drop_last=drop_last)

    def read(self, num_microbatches: int) -> StepBatches | None:
        """This rank's micro-batches of the next step; None at the end of the epoch."""
        step = super().read(num_microbatches)
        if step is not None:
            self._rows.commit(self.epoch, self.samples_in_epoch)
        return step

    def state_dict(self) -> dict[str, Any]:
        """The position after the steps handed out so far, and its place in the stream."""
        return {"epoch": self.epoch, "samples_in_epoch": self.samples_in_epoch, **self._rows.state()}


class _Feed:
    """The windows of a pass from a place on, handed out until the last of each file is known to be read."""

    def __init__(self, stream: RecordStream, place: Place, seed: int, shuffle: bool) -> None:
        self.begun: deque[Place] = deque()
        """Where the windows begin that were handed out and did not come back."""
        self.ended = -1
        """The last file whose end is known."""
        self._place = place
        self._seed = seed
        self._shuffle = shuffle
        self._order = SampleOrder(len(stream.files), _seed_of(seed, Place(), "files"), place.round, shuffle)

    def __iter__(self) -> Iterator[WindowTask]:
        start = self._place
        for file in range(start.file, self._order.num_samples):
            window = start.window if file == start.file else 0
            (index,) = self._order.indices(file, file + 1).tolist()
            while self.ended < file:
                at = Place(start.round, file, window)
                self.begun.append(at)
                yield WindowTask(index, window, _seed_of(self._seed, at, "records") if self._shuffle else None)
                window += 1


def _seed_of(seed: int, place: Place, what: str) -> int:
    text = f"onstep stream {what} {seed} {place.round} {place.file} {place.window}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _collated(samples: Sequence[_Sample]) -> dict[str, torch.Tensor]:
    """The samples as one micro-batch; most are of one window."""
    parts = [
        group[0].dataset.get_batch([sample.number for sample in group])
        for _, found in groupby(samples, key=lambda sample: id(sample.dataset))
        for group in [list(found)]
    ]
    return parts[0] if len(parts) == 1 else {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
