"""Loads the training data of a map-style dataset in shuffled order, starting from any position."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np

from onstep.data.loaders.loader import Loader
from onstep.data.loaders.micro_batch_reader import MicroBatchReader
from onstep.data.loaders.sample_order import (
    GlobalMicroBatch,
    MicroBatchLayout,
    SampleOrder,
    Share,
    SharedOrder,
    ids_in_force,
    micro_batches_of_epoch,
)
from onstep.data.loaders.step_batches import Compared, StepBatches
from onstep.errors import DataError


class IndexedRows:
    """The rows of a map-style dataset in the order of `SampleOrder`, of which any position costs the same.

    `set_epoch` of a dataset that has it is called at each epoch. Its workers then do not persist over epochs: they have
    copies of it, which are not updated.

    Args:
        reading: options of `MicroBatchReader`.

    """

    compared_by: Compared = None

    def __init__(
        self,
        dataset: Any,
        layout: MicroBatchLayout,
        *,
        seed: int,
        shuffle: bool,
        drop_last: bool,
        persistent_workers: bool,
        **reading: Any,
    ) -> None:
        self.dataset = dataset
        self.num_samples = len(dataset)
        """Number of samples in the dataset."""
        self.layout = layout
        self.row_size = layout.row_size
        self._seed = seed
        self._shuffle = shuffle
        self._drop_last = drop_last
        self._epoch = 0
        self._share = Share()
        self._left_out: list[tuple[int, int]] = []
        self._out_of_epoch: list[int] = []
        self._count_samples()
        self._set_epoch = getattr(dataset, "set_epoch", None)
        persists = persistent_workers and not callable(self._set_epoch)
        self._reader = MicroBatchReader(dataset, persistent_workers=persists, seed=seed, **reading)

    def count_rows(self, drop_last: bool) -> int:
        """Number of rows of the current epoch."""
        return self.size // self.row_size if drop_last else self.layout.num_rows(self.size)

    def leave_out(self, entries: list[tuple[int, int]]) -> bool:
        """Set the complete list of samples to leave out; whether that affects the current epoch.

        Raises:
            DataError: for an id that is not a sample of this dataset.
        """
        beyond = [sample_id for _, sample_id in entries if not 0 <= sample_id < self.num_samples]
        if beyond:
            raise DataError(
                f"cannot skip sample {beyond[0]} of a dataset of {self.num_samples} samples; resume with the data for "
                "which the list of skipped samples was made"
            )
        self._left_out = entries
        before, self._out_of_epoch = self._out_of_epoch, ids_in_force(entries, self._epoch)
        self._count_samples()
        return self._out_of_epoch != before

    def to_come(self, sample_ids: Sequence[int], samples_in_epoch: int) -> list[bool] | None:
        """Which of these samples the current epoch has from this position on; None for a share of an epoch."""
        if self._share.count > 1:
            return None
        ids = np.array(sample_ids, dtype=np.int64)
        is_sample = (ids >= 0) & (ids < self.num_samples) & ~np.isin(ids, self._out_of_epoch)
        order = SampleOrder(self.num_samples, self._seed, self._epoch, self._shuffle)
        gaps = np.sort(order.positions_of(np.array(self._out_of_epoch, dtype=np.int64)))
        positions = order.positions_of(np.where(is_sample, ids, 0))
        positions -= np.searchsorted(gaps, positions)
        return list((is_sample & (positions >= samples_in_epoch)).tolist())

    def take_share(self, index: int, count: int, start: int) -> None:
        """Read only one of `count` parts of each epoch, from its sample `start` on.

        Raises:
            DataError: for an invalid share, or one smaller than a row.
        """
        self._share = Share(index, count)
        self._count_samples()
        self.check_end(self.row_size)
        self._share = Share(index, count, start % self.size)

    def start(self, epoch: int, samples_in_epoch: int, saved: dict[str, Any]) -> None:
        """Begin this epoch, from a position in it.

        Raises:
            DataError: for a position outside the epoch.
        """
        out_of_epoch = ids_in_force(self._left_out, epoch)
        if samples_in_epoch > self._share.size(self.num_samples - len(out_of_epoch)):
            raise DataError(
                f"position (epoch {epoch}, sample {samples_in_epoch}) is outside this dataset of {self.num_samples} "
                "samples; resume with the data that the position was saved with"
            )
        self._epoch, self._out_of_epoch = epoch, out_of_epoch
        self._count_samples()
        if callable(self._set_epoch):
            self._set_epoch(epoch)

    def rows(self, samples_in_epoch: int) -> Iterator[StepBatches]:
        """The rows of the current epoch from this position on."""
        return self._reader.open(self._rows(samples_in_epoch), self._epoch)

    def rows_aside(self) -> Iterator[StepBatches]:
        """The rows of the whole epoch, read in this process; other iterators can still be used."""
        return self._reader.read_aside(self._rows(0))

    def state(self, is_open: bool) -> dict[str, Any]:
        """Nothing: the position is all."""
        return {}

    def check_end(self, step_size: int, num_dropped: int = 0) -> None:
        """Check that an epoch has a step of `step_size` samples.

        Raises:
            DataError: if it has none.
        """
        if self.num_samples == 0:
            raise DataError("the training dataset is empty: it has 0 samples")
        num_left_out = len(self._out_of_epoch)
        if num_left_out == self.num_samples:
            raise DataError(f"all {num_left_out} samples of the training dataset were skipped as anomalies; check it")
        if self._drop_last and self.size < step_size:
            without = f" ({num_left_out} more were skipped as anomalies)" if num_left_out else ""
            raise DataError(
                f"the training dataset has {self.size} samples{without}, fewer than one global batch of "
                f"{step_size}; drop_last=True drops a shorter tail: use a smaller global_batch_size, more data, or "
                "drop_last=False"
            )

    def close(self) -> None:
        """Stop persistent workers."""
        self._reader.close()

    def _count_samples(self) -> None:
        self.size = self._share.size(self.num_samples - len(self._out_of_epoch))
        """Number of samples in the current epoch: those of the dataset, or of the share, minus those left out."""

    def _rows(self, samples_in_epoch: int) -> Iterator[GlobalMicroBatch]:
        order = SampleOrder(self.num_samples, self._seed, self._epoch, self._shuffle, self._out_of_epoch)
        is_whole = self._share.count == 1 and not self._share.start
        shared = order if is_whole else SharedOrder(order, self._share)
        return micro_batches_of_epoch(shared, self.layout, samples_in_epoch)


class TrainLoader(Loader):
    """Reads the steps of a map-style dataset (`__len__` and `__getitem__`), epoch after epoch.

    The samples of a step are a pure function of seed, epoch and position: the number of ranks and workers and the split
    of a global batch into micro-batches do not affect them. Starting at any position costs the same. `set_epoch` of a
    dataset that has it is called at each epoch.

    The random numbers (torch, NumPy, Python) that a dataset or collator draws in workers are a pure function of the
    row as well: any number of workers yields the same batches. With ``num_workers=0`` they come from the random state
    of this process.

    An epoch ends before a tail shorter than a step. ``drop_last=False`` trains on that tail as a step of fewer
    micro-batches, the last of which may be smaller; a rank without a sample repeats one as a filler, so that every rank
    has the same number of micro-batches.

    Args:
        reading: options of `MicroBatchReader`, and of torch's DataLoader for the workers, such as `prefetch_factor`.
        dataset: the map-style dataset.
        micro_batch_size: samples of one forward pass on one rank.
        global_batch_size: samples of a step, over all ranks and micro-batches.
        rank: this rank, from 0.
        world_size: the number of data-parallel ranks.
        seed: seed of the order; the same seed gives the same order.
        shuffle: whether each epoch has an order of its own; otherwise the order is that of the data.
        persistent_workers: whether worker processes outlive an epoch.
        epoch: the number of the epoch, from 0.
        samples_in_epoch: samples of the epoch that have been read, over all ranks.

    Raises:
        DataError: for inconsistent sizes, an empty dataset, or one smaller than a global batch.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        micro_batch_size: int,
        global_batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = True,
        persistent_workers: bool = False,
        epoch: int = 0,
        samples_in_epoch: int = 0,
        **reading: Any,
    ) -> None:
        layout = MicroBatchLayout(micro_batch_size, rank, world_size)
        layout.check_global_batch(global_batch_size)
        self._rows = IndexedRows(
            dataset,
            layout,
            seed=seed,
            shuffle=shuffle,
            drop_last=drop_last,
            persistent_workers=persistent_workers,
            **reading,
        )
        self._rows.check_end(global_batch_size)
        super().__init__(self._rows, drop_last=drop_last, epoch=epoch, samples_in_epoch=samples_in_epoch)
        self.layout = layout

    @property
    def dataset(self) -> Any:
        """The dataset that is read."""
        return self._rows.dataset

    @property
    def batch_size(self) -> int:
        """Samples of a micro-batch on one rank."""
        return self._rows.layout.micro_batch_size

    @property
    def samples_per_epoch(self) -> int:
        """Number of samples in the current epoch: those of the dataset, or of the share, minus those left out."""
        return self._rows.size

    def __len__(self) -> int:
        """Number of micro-batches that this rank reads in the current epoch."""
        return self._rows.count_rows(self._drop_last)

    def __iter__(self) -> Iterator[Any]:
        """This rank's micro-batches of the current epoch from its start, on the host; the position is not affected."""
        for row in islice(self._rows.rows_aside(), len(self)):
            yield from row.micro_batches

    def take_share(self, index: int, count: int, start: int = 0) -> None:
        """Read only one of `count` parts of each epoch; no two indices have a sample of an epoch in common.

        Call it before the first step. Positions are those within the share from then on.

        Args:
            index: which part, from 0.
            count: how many parts there are.
            start: samples of the part that others have read already: its epochs begin after them, and wrap around.

        Raises:
            DataError: for an invalid share, or one smaller than a global batch.
        """
        self._rows.take_share(index, count, start)
        self.seek(self.epoch, self.samples_in_epoch)
