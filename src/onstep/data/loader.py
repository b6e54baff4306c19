"""The training data of a map-style dataset: which samples a step takes, from any position on."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from onstep.data.fetch import Collate
from onstep.data.order import SampleOrder
from onstep.data.row_reader import RowReader
from onstep.data.rows import FetchedRow, RowLayout, rows_of_epoch
from onstep.data.step_batches import StepBatches, step_of
from onstep.errors import DataError


class TrainLoader:
    """Reads the steps of a map-style dataset (`__len__` and `__getitem__`), epoch after epoch.

    The samples of a step are a pure function of seed, epoch and position: ranks, workers and the split of a global
    batch into micro-batches do not change them. The position is ``(epoch, samples_in_epoch)`` after what was handed
    out, whatever workers read ahead; starting at any position costs the same.

    An epoch ends before the tail that is shorter than a step. ``drop_last=False`` trains on that tail as a step of
    fewer micro-batches, the last ones perhaps smaller; a rank left without a sample repeats one as a filler, so that
    every rank has the same number of micro-batches.

    Raises:
        DataError: for sizes that do not fit together, an empty dataset, or one smaller than a global batch.
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
        collate_fn: Collate | None = None,
        num_workers: int = 0,
        pin_memory: bool = False,
        persistent_workers: bool = False,
        epoch: int = 0,
        samples_in_epoch: int = 0,
    ) -> None:
        self._layout = RowLayout(micro_batch_size, rank, world_size)
        self._layout.check_global_batch(global_batch_size)
        self._num_samples = len(dataset)
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
        self._stream: Iterator[FetchedRow] | None = None
        self.seek(epoch, samples_in_epoch)

    @property
    def epoch(self) -> int:
        """The epoch that the next read takes from; an epoch ends when `read` returns None."""
        return self._epoch

    @property
    def samples_in_epoch(self) -> int:
        """Samples handed out in this epoch, over all ranks."""
        return self._samples_in_epoch

    @property
    def num_samples(self) -> int:
        """Samples of the dataset."""
        return self._num_samples

    def steps_per_epoch(self, num_microbatches: int) -> int:
        """Steps of `num_microbatches` rows in a whole epoch."""
        step_size = num_microbatches * self._layout.row_size
        return self._num_samples // step_size if self._drop_last else -(-self._num_samples // step_size)

    def read(self, num_microbatches: int) -> StepBatches | None:
        """This rank's micro-batches of the next step; None at the end of the epoch.

        After None the position is the start of the next epoch. Every rank must read with the same number.

        Raises:
            DataError: where an epoch has not one step of `num_microbatches`.
        """
        num_rows = self._rows_of_next_step(num_microbatches)
        if num_rows == 0:
            self._end_epoch(num_microbatches)
            return None
        # An interrupted read leaves no half-read stream behind: the next one reads again from the position.
        stream, self._stream = self._stream or self._open(), None
        step = step_of(list(islice(stream, num_rows)))
        self._stream = stream
        self._samples_in_epoch += step.num_samples or 0
        return step

    def has_next(self, num_microbatches: int) -> bool:
        """Whether this epoch has another step; False exactly where `read` would return None."""
        return self._rows_of_next_step(num_microbatches) > 0

    def seek(self, epoch: int, samples_in_epoch: int) -> None:
        """Continue from this position, at a cost that does not depend on it.

        Raises:
            DataError: for a position that this dataset does not have.
        """
        if epoch < 0 or not 0 <= samples_in_epoch <= self._num_samples:
            raise DataError(
                f"position (epoch {epoch}, sample {samples_in_epoch}) is outside this dataset of {self._num_samples} "
                "samples; continue with the data that the position was saved with"
            )
        self._epoch = epoch
        self._samples_in_epoch = samples_in_epoch
        self._stream = None

    def state_dict(self) -> dict[str, Any]:
        """The position after what was handed out."""
        return {"epoch": self._epoch, "samples_in_epoch": self._samples_in_epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a position that `state_dict` gave."""
        self.seek(state["epoch"], state["samples_in_epoch"])

    def close(self) -> None:
        """End the workers; reading goes on from the same position with new ones."""
        self._stream = None
        self._reader.close()

    def _rows_of_next_step(self, num_microbatches: int) -> int:
        if num_microbatches < 1:
            raise DataError(f"num_microbatches must be >= 1, got {num_microbatches}")
        rows_left = self._layout.num_rows(self._num_samples - self._samples_in_epoch)
        is_short = num_microbatches * self._layout.row_size > self._num_samples - self._samples_in_epoch
        return 0 if is_short and self._drop_last else min(num_microbatches, rows_left)

    def _end_epoch(self, num_microbatches: int) -> None:
        if self._samples_in_epoch == 0:  # else the caller would pass through empty epochs for ever
            self._check_size(num_microbatches * self._layout.row_size)
        self.seek(self._epoch + 1, 0)

    def _open(self) -> Iterator[FetchedRow]:
        order = SampleOrder(self._num_samples, self._seed, self._epoch, self._shuffle)
        return self._reader.open(rows_of_epoch(order, self._layout, self._samples_in_epoch))

    def _check_size(self, step_size: int) -> None:
        if self._num_samples == 0:
            raise DataError("the training dataset is empty: it has 0 samples")
        if self._drop_last and self._num_samples < step_size:
            raise DataError(
                f"the training dataset has {self._num_samples} samples, fewer than one global batch of {step_size}; "
                "drop_last=True drops a shorter tail: use a smaller global_batch_size, more data, or drop_last=False"
            )
