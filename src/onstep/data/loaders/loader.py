"""Loads the training data of a map-style dataset, step by step, starting from any position."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

from onstep.data.loaders.collate import Collate
from onstep.data.loaders.micro_batch_reader import MicroBatchReader
from onstep.data.loaders.sample_order import (
    MicroBatchLayout,
    SampleOrder,
    Share,
    SharedOrder,
    ids_in_force,
    micro_batches_of_epoch,
)
from onstep.data.loaders.step_batches import Compared, StepBatches, step_of
from onstep.errors import DataError


class TrainLoader:
    """Reads the steps of a map-style dataset (`__len__` and `__getitem__`), epoch after epoch.

    The samples of a step are a pure function of seed, epoch and position: the number of ranks and workers and the split
    of a global batch into micro-batches do not affect them. The position is ``(epoch, samples_in_epoch)`` of what has
    been handed out, regardless of how far workers read ahead; starting at any position costs the same.

    The random numbers (torch, NumPy, Python) that a dataset or collator draws in workers are a pure function of the
    row as well: any number of workers yields the same batches. With ``num_workers=0`` they come from the random state
    of this process.

    An epoch ends before a tail shorter than a step. ``drop_last=False`` trains on that tail as a step of fewer
    micro-batches, the last of which may be smaller; a rank without a sample repeats one as a filler, so that every rank
    has the same number of micro-batches.

    Args:
        worker_options: further options of torch's DataLoader for the workers, such as `prefetch_factor`.

    Raises:
        DataError: for inconsistent sizes, an empty dataset, or one smaller than a global batch.
    """

    has_epochs = True
    compared_by: Compared = None

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
        collate_fn: Collate | None = None,
        num_workers: int = 0,
        pin_memory: bool = False,
        persistent_workers: bool = False,
        epoch: int = 0,
        samples_in_epoch: int = 0,
        **worker_options: Any,
    ) -> None:
        self._layout = MicroBatchLayout(micro_batch_size, rank, world_size)
        self._layout.check_global_batch(global_batch_size)
        self._row_size = self._layout.row_size
        self._dataset = dataset
        self.num_samples = len(dataset)
        """Number of samples in the dataset."""
        self._share = Share()
        self._left_out: list[tuple[int, int]] = []
        self._out_of_epoch: list[int] = []
        self._count_samples()
        self._drop_last = drop_last
        self._check_size(global_batch_size)
        self._seed = seed
        self._shuffle = shuffle
        self._reader = MicroBatchReader(
            dataset,
            collate_fn,
            num_workers=num_workers,
            pin_memory=pin_memory,
            persistent_workers=persistent_workers,
            seed=seed,
            **worker_options,
        )
        self._stream: Iterator[StepBatches] | None = None
        self.seek(epoch, samples_in_epoch)

    @property
    def dataset(self) -> Any:
        """The dataset that is read."""
        return self._dataset

    @property
    def batch_size(self) -> int:
        """Samples of a micro-batch on one rank."""
        return self._layout.micro_batch_size

    def __len__(self) -> int:
        """Number of micro-batches that this rank reads in the current epoch."""
        rows = self._layout.num_rows(self.samples_per_epoch)
        return self.samples_per_epoch // self._row_size if self._drop_last else rows

    def __iter__(self) -> Iterator[Any]:
        """This rank's micro-batches of the current epoch from its start, on the host; the position is not affected."""
        order = self._order()
        rows = islice(micro_batches_of_epoch(order, self._layout, 0), len(self))
        for step in self._reader.read_aside(rows):
            yield from step.micro_batches

    def steps_per_epoch(self, num_microbatches: int) -> int:
        """Number of steps of `num_microbatches` rows in a whole epoch with as many samples as the current one."""
        step_size = num_microbatches * self._row_size
        num_samples = self.samples_per_epoch
        return num_samples // step_size if self._drop_last else -(-num_samples // step_size)

    def leave_out(self, entries: Iterable[Sequence[int]]) -> None:
        """Set the samples to leave out: the complete list of `[epoch, sample id]`, each effective from the next epoch.

        Call it whenever the list is extended, and before resuming from a saved position. The current epoch is not
        affected, since its own entries only take effect in the next one. Every rank must pass the same list.

        Raises:
            DataError: for an id that is not a sample of this dataset.
        """
        left_out = [(int(added_in), int(sample_id)) for added_in, sample_id in entries]
        beyond = [sample_id for _, sample_id in left_out if not 0 <= sample_id < self.num_samples]
        if beyond:
            raise DataError(
                f"cannot skip sample {beyond[0]} of a dataset of {self.num_samples} samples; resume with the data for "
                "which the list of skipped samples was made"
            )
        self._left_out = left_out
        before, self._out_of_epoch = self._out_of_epoch, ids_in_force(left_out, self.epoch)
        self._count_samples()
        if self._out_of_epoch != before:  # the list comes from a checkpoint, so the order differs
            self._stream = None

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
        self._share = Share(index, count)
        self._count_samples()
        self._check_size(self._row_size)
        self._share = Share(index, count, start % self.samples_per_epoch)
        self.seek(self.epoch, self.samples_in_epoch)

    def read(self, num_microbatches: int) -> StepBatches | None:
        """This rank's micro-batches of the next step; None at the end of the epoch.

        After None the position is the start of the next epoch. Every rank must pass the same `num_microbatches`.

        Raises:
            DataError: if an epoch is shorter than a step of `num_microbatches`.
        """
        samples_left = self.samples_per_epoch - self.samples_in_epoch
        is_integer_from = 0 < num_microbatches * self._row_size <= samples_left
        if not is_integer_from and not self.has_next(num_microbatches):
            self._end_epoch(num_microbatches)
            return None
        # An interrupted read must not leave a half-read stream behind: the next one starts over at the position.
        stream, self._stream = self._stream or self._open(), None
        rows = list(islice(stream, num_microbatches))
        step = rows[0] if len(rows) == 1 else step_of(rows)
        self._stream = stream
        self.samples_in_epoch += step.num_samples or 0
        return step

    def has_next(self, num_microbatches: int) -> bool:
        """Whether this epoch has another step; False exactly when `read` would return None."""
        if num_microbatches < 1:
            raise DataError(f"num_microbatches must be >= 1, got {num_microbatches}")
        samples_left = self.samples_per_epoch - self.samples_in_epoch
        return samples_left >= num_microbatches * self._row_size or (samples_left > 0 and not self._drop_last)

    def seek(self, epoch: int, samples_in_epoch: int) -> None:
        """Continue from this position; the cost does not depend on it.

        Raises:
            DataError: for a position outside this dataset.
        """
        out_of_epoch = ids_in_force(self._left_out, epoch)
        if epoch < 0 or not 0 <= samples_in_epoch <= self._share.size(self.num_samples - len(out_of_epoch)):
            raise DataError(
                f"position (epoch {epoch}, sample {samples_in_epoch}) is outside this dataset of {self.num_samples} "
                "samples; resume with the data that the position was saved with"
            )
        self.epoch = epoch
        """The epoch of the next read; an epoch ends when `read` returns None."""
        self.samples_in_epoch = samples_in_epoch
        """Samples handed out in this epoch over all ranks."""
        self._out_of_epoch = out_of_epoch
        self._count_samples()
        self._stream = None

    def state_dict(self) -> dict[str, Any]:
        """The position after the steps handed out so far."""
        return {"epoch": self.epoch, "samples_in_epoch": self.samples_in_epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a position returned by `state_dict`."""
        self.seek(state["epoch"], state["samples_in_epoch"])

    def close(self) -> None:
        """Stop the workers; a later read continues from the same position with new ones."""
        self._stream = None
        self._reader.close()

    def _end_epoch(self, num_microbatches: int) -> None:
        if self.samples_in_epoch == 0:  # otherwise the caller would loop over empty epochs forever
            self._check_size(num_microbatches * self._row_size)
        self.seek(self.epoch + 1, 0)

    def _open(self) -> Iterator[StepBatches]:
        return self._reader.open(micro_batches_of_epoch(self._order(), self._layout, self.samples_in_epoch), self.epoch)

    def _count_samples(self) -> None:
        self.samples_per_epoch = self._share.size(self.num_samples - len(self._out_of_epoch))
        """Number of samples in the current epoch: those of the dataset, or of the share, minus those left out."""

    def _order(self) -> SampleOrder | SharedOrder:
        order = SampleOrder(self.num_samples, self._seed, self.epoch, self._shuffle, self._out_of_epoch)
        return order if self._share.count == 1 and not self._share.start else SharedOrder(order, self._share)

    def _check_size(self, step_size: int) -> None:
        if self.num_samples == 0:
            raise DataError("the training dataset is empty: it has 0 samples")
        num_left_out = len(self._out_of_epoch)
        if num_left_out == self.num_samples:
            raise DataError(f"all {num_left_out} samples of the training dataset were skipped as anomalies; check it")
        if self._drop_last and self.samples_per_epoch < step_size:
            without = f" ({num_left_out} more were skipped as anomalies)" if num_left_out else ""
            raise DataError(
                f"the training dataset has {self.samples_per_epoch} samples{without}, fewer than one global batch of "
                f"{step_size}; drop_last=True drops a shorter tail: use a smaller global_batch_size, more data, or "
                "drop_last=False"
            )
