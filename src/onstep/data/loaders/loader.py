"""The training data of a map-style dataset: which samples a step takes, from any position on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

from onstep.data.loaders.collate import Collate
from onstep.data.loaders.micro_batch_reader import RowReader
from onstep.data.loaders.sample_order import RowLayout, SampleOrder, ids_in_force, rows_of_epoch
from onstep.data.loaders.step_batches import StepBatches, step_of
from onstep.errors import DataError


class TrainLoader:
    """Reads the steps of a map-style dataset (`__len__` and `__getitem__`), epoch after epoch.

    The samples of a step are a pure function of seed, epoch and position: ranks, workers and the split of a global
    batch into micro-batches do not change them. The position is ``(epoch, samples_in_epoch)`` after what was handed
    out, whatever workers read ahead; starting at any position costs the same.

    So are the random numbers (torch, NumPy, Python) that a dataset or a collator draws in workers, for a row: any
    number of workers gives the same batches. With ``num_workers=0`` they come from this process's own state.

    An epoch ends before the tail that is shorter than a step. ``drop_last=False`` trains on that tail as a step of
    fewer micro-batches, the last ones perhaps smaller; a rank left without a sample repeats one as a filler, so that
    every rank has the same number of micro-batches.

    Raises:
        DataError: for sizes that do not fit together, an empty dataset, or one smaller than a global batch.
    """

    has_epochs = True

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
    ) -> None:
        self._layout = RowLayout(micro_batch_size, rank, world_size)
        self._layout.check_global_batch(global_batch_size)
        self._row_size = self._layout.row_size
        self.num_samples = len(dataset)
        """Samples of the dataset."""
        self._left_out: list[tuple[int, int]] = []
        self._out_of_epoch: list[int] = []
        self._drop_last = drop_last
        self._check_size(global_batch_size)
        self._seed = seed
        self._shuffle = shuffle
        self._reader = RowReader(
            dataset,
            collate_fn,
            num_workers=num_workers,
            pin_memory=pin_memory,
            persistent_workers=persistent_workers,
            seed=seed,
        )
        self._stream: Iterator[StepBatches] | None = None
        self.seek(epoch, samples_in_epoch)

    @property
    def samples_per_epoch(self) -> int:
        """Samples of the running epoch: those of the dataset, less those left out of it."""
        return self.num_samples - len(self._out_of_epoch)

    def steps_per_epoch(self, num_microbatches: int) -> int:
        """Steps of `num_microbatches` rows in a whole epoch, with the samples of the running one."""
        step_size = num_microbatches * self._row_size
        num_samples = self.samples_per_epoch
        return num_samples // step_size if self._drop_last else -(-num_samples // step_size)

    def leave_out(self, entries: Iterable[Sequence[int]]) -> None:
        """Leave samples out: the whole list of `[epoch, sample id]`, each in force from the epoch after its own.

        Call it with a list that has grown, and before continuing from a saved position. The running epoch goes on as
        it is, since no entry of its own is in force in it. Every rank must give the same list.

        Raises:
            DataError: for an id that is not a sample of this dataset.
        """
        left_out = [(int(added_in), int(sample_id)) for added_in, sample_id in entries]
        beyond = [sample_id for _, sample_id in left_out if not 0 <= sample_id < self.num_samples]
        if beyond:
            raise DataError(
                f"sample {beyond[0]} is to be left out of a dataset of {self.num_samples} samples; continue with the "
                "data that the list of skipped samples was made with"
            )
        self._left_out = left_out
        before, self._out_of_epoch = self._out_of_epoch, ids_in_force(left_out, self.epoch)
        if self._out_of_epoch != before:  # the list of a checkpoint: the order is another one
            self._stream = None

    def read(self, num_microbatches: int) -> StepBatches | None:
        """This rank's micro-batches of the next step; None at the end of the epoch.

        After None the position is the start of the next epoch. Every rank must read with the same number.

        Raises:
            DataError: where an epoch has not one step of `num_microbatches`.
        """
        samples_left = self.num_samples - len(self._out_of_epoch) - self.samples_in_epoch
        is_whole = 0 < num_microbatches * self._row_size <= samples_left
        if not is_whole and not self.has_next(num_microbatches):
            self._end_epoch(num_microbatches)
            return None
        # An interrupted read leaves no half-read stream behind: the next one reads again from the position.
        stream, self._stream = self._stream or self._open(), None
        rows = list(islice(stream, num_microbatches))
        step = rows[0] if len(rows) == 1 else step_of(rows)
        self._stream = stream
        self.samples_in_epoch += step.num_samples or 0
        return step

    def has_next(self, num_microbatches: int) -> bool:
        """Whether this epoch has another step; False exactly where `read` would return None."""
        if num_microbatches < 1:
            raise DataError(f"num_microbatches must be >= 1, got {num_microbatches}")
        samples_left = self.num_samples - len(self._out_of_epoch) - self.samples_in_epoch
        return samples_left >= num_microbatches * self._row_size or (samples_left > 0 and not self._drop_last)

    def seek(self, epoch: int, samples_in_epoch: int) -> None:
        """Continue from this position, at a cost that does not depend on it.

        Raises:
            DataError: for a position that this dataset does not have.
        """
        out_of_epoch = ids_in_force(self._left_out, epoch)
        if epoch < 0 or not 0 <= samples_in_epoch <= self.num_samples - len(out_of_epoch):
            raise DataError(
                f"position (epoch {epoch}, sample {samples_in_epoch}) is outside this dataset of {self.num_samples} "
                "samples; continue with the data that the position was saved with"
            )
        self.epoch = epoch
        """The epoch that the next read takes from; an epoch ends when `read` returns None."""
        self.samples_in_epoch = samples_in_epoch
        """Samples handed out in this epoch, over all ranks."""
        self._out_of_epoch = out_of_epoch
        self._stream = None

    def state_dict(self) -> dict[str, Any]:
        """The position after what was handed out."""
        return {"epoch": self.epoch, "samples_in_epoch": self.samples_in_epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a position that `state_dict` gave."""
        self.seek(state["epoch"], state["samples_in_epoch"])

    def close(self) -> None:
        """End the workers; reading goes on from the same position with new ones."""
        self._stream = None
        self._reader.close()

    def _end_epoch(self, num_microbatches: int) -> None:
        if self.samples_in_epoch == 0:  # else the caller would pass through empty epochs for ever
            self._check_size(num_microbatches * self._row_size)
        self.seek(self.epoch + 1, 0)

    def _open(self) -> Iterator[StepBatches]:
        order = SampleOrder(self.num_samples, self._seed, self.epoch, self._shuffle, self._out_of_epoch)
        return self._reader.open(rows_of_epoch(order, self._layout, self.samples_in_epoch), self.epoch)

    def _check_size(self, step_size: int) -> None:
        if self.num_samples == 0:
            raise DataError("the training dataset is empty: it has 0 samples")
        num_left_out = self.num_samples - self.samples_per_epoch
        if num_left_out == self.num_samples:
            raise DataError(f"all {num_left_out} samples of the training dataset were skipped as anomalies; look at it")
        if self._drop_last and self.samples_per_epoch < step_size:
            without = f" ({num_left_out} more were skipped as anomalies)" if num_left_out else ""
            raise DataError(
                f"the training dataset has {self.samples_per_epoch} samples{without}, fewer than one global batch of "
                f"{step_size}; drop_last=True drops a shorter tail: use a smaller global_batch_size, more data, or "
                "drop_last=False"
            )
