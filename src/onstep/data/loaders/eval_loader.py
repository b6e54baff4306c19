"""Loads the data of an evaluation: the whole dataset in order, from the start on each pass."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from onstep.data.loaders.collate import Collate, is_map_style, length_of, samples_in
from onstep.data.loaders.epoch_orders import EpochBatches
from onstep.data.loaders.iterable_loader import StreamReader
from onstep.data.loaders.micro_batch_reader import MicroBatchReader
from onstep.data.loaders.sample_order import MicroBatchLayout, SampleOrder, micro_batches_of_epoch
from onstep.data.loaders.step_batches import Compared, StepBatches, step_of
from onstep.errors import DataError


class EvalLoader:
    """Yields the global batches of a dataset in order, including a shorter last one.

    A global batch is `num_microbatches` rows (see `onstep.data.loaders.sample_order`); in the last one, a rank without
    a sample repeats one as a filler, so that every rank has the same number of micro-batches. Iterable datasets also
    work, and so do loaders of ready-made batches with ``already_batched=True``; they must restart each time they are
    iterated. Random numbers drawn in workers are the same in each pass. `listed` gives the micro-batches of a map-style
    dataset, which are dealt to the ranks in turn.

    Args:
        persistent_workers: whether the workers of a map-style dataset are kept for the next pass, until `close`; never
            those of a dataset with `set_epoch`, as their copies would not change with it.
        dataset: the map-style dataset.
        micro_batch_size: samples of one forward pass on one rank.
        num_microbatches: micro-batches of one evaluation step on this rank.
        rank: this rank, from 0.
        world_size: the number of data-parallel ranks.
        collate_fn: makes a batch of a list of samples.
        num_workers: worker processes; 0 reads in this one.
        pin_memory: whether batches are copied to page-locked memory.
        already_batched: whether the source yields whole micro-batches, which are not collated again.
        listed: the rows of a batch sampler, in place of an order of samples.
        worker_options: further keywords of `DataLoader` for worker processes.

    Raises:
        DataError: for invalid sizes or an empty dataset.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        micro_batch_size: int,
        num_microbatches: int = 1,
        rank: int = 0,
        world_size: int = 1,
        collate_fn: Collate | None = None,
        num_workers: int = 0,
        pin_memory: bool = False,
        persistent_workers: bool = False,
        already_batched: bool = False,
        listed: EpochBatches | None = None,
        **worker_options: Any,
    ) -> None:
        if num_microbatches < 1:
            raise DataError(f"num_microbatches must be >= 1, got {num_microbatches}")
        self.layout = MicroBatchLayout(micro_batch_size, rank, world_size)
        self._num_microbatches = num_microbatches
        self._already_batched = already_batched
        self._dataset = dataset
        self._listed = listed
        self._reader: MicroBatchReader | StreamReader
        reads_rows = is_map_style(dataset) and not already_batched
        may_keep = reads_rows and not callable(getattr(dataset, "set_epoch", None))
        self.keeps_workers = persistent_workers and num_workers > 0 and may_keep
        """Whether worker processes remain after a pass, until `close`."""
        if reads_rows:
            self._reader = MicroBatchReader(
                dataset,
                collate_fn,
                num_workers=num_workers,
                pin_memory=pin_memory,
                persistent_workers=self.keeps_workers,
                **worker_options,
            )
        else:
            self._reader = StreamReader(
                dataset,
                self.layout,
                collate_fn,
                already_batched,
                num_workers=num_workers,
                pin_memory=pin_memory,
                **worker_options,
            )
        if length_of(dataset) == 0 or (listed is not None and not listed.ends.size):
            raise DataError("the evaluation dataset is empty: it has 0 samples; give it data or disable evaluation")

    @property
    def compared_by(self) -> Compared:
        """See `Compared`."""
        if isinstance(self._reader, MicroBatchReader):
            return None
        return "micro-batches" if self._already_batched else "samples"

    @property
    def dataset(self) -> Any:
        """The dataset that is read, or that a loader of ready-made batches reads."""
        return getattr(self._dataset, "dataset", self._dataset) if self._already_batched else self._dataset

    @property
    def batch_size(self) -> int:
        """Samples of a micro-batch on one rank."""
        return self.layout.micro_batch_size

    def __iter__(self) -> Iterator[Any]:
        """This rank's micro-batches from the start of the dataset, on the host; a pass in progress is not affected."""
        for step in self._open(aside=True):
            yield from step.micro_batches

    @property
    def num_samples(self) -> int | None:
        """Number of samples of the dataset over all ranks; None if it has no length."""
        if self._listed is not None:
            return int(self._listed.ends[-1])
        return samples_in(self._dataset, self._already_batched)

    @property
    def num_batches(self) -> int | None:
        """Number of global batches in the whole dataset; None if it has no length."""
        if self._listed is not None:
            num_rows = self._listed.row_ends(self.layout.world_size).size
            return -(-num_rows // self._num_microbatches)
        length = length_of(self._dataset)
        if length is None:
            return None
        num_rows = length if self._already_batched else self.layout.num_rows(length)
        return -(-num_rows // self._num_microbatches)

    def __len__(self) -> int:
        """Number of global batches in the whole dataset.

        Raises:
            TypeError: if the dataset has no length.
        """
        if self.num_batches is None:
            raise TypeError(f"{type(self._dataset).__name__} has no length")
        return self.num_batches

    def batches(self, max_batches: int | None = None) -> Iterator[StepBatches]:
        """This rank's micro-batches of the global batches, from the start of the dataset, at most `max_batches`."""
        rows = self._open()
        num_read = 0
        while max_batches is None or num_read < max_batches:
            taken = list(islice(rows, self._num_microbatches))
            if not taken:
                return
            num_read += 1
            yield step_of(taken)

    def read_in_order_of(self, other: EvalLoader) -> None:
        """Read the samples in the order of another loader of the same dataset from now on.

        Args:
            other: a loader of the same dataset.
        """
        self._listed = other._listed

    def close(self) -> None:
        """Stop persistent workers; a later pass starts new ones."""
        if isinstance(self._reader, MicroBatchReader):
            self._reader.close()

    def _open(self, *, aside: bool = False) -> Iterator[StepBatches]:
        if isinstance(self._reader, StreamReader):
            return self._reader.open()
        if self._listed is not None:
            rows = self._listed.rows(0, self.layout.rank, self.layout.world_size)
            return self._reader.read_aside(rows) if aside else self._reader.open(rows, epoch=0)
        order = SampleOrder(len(self._dataset), seed=0, epoch=0, shuffle=False)
        rows = micro_batches_of_epoch(order, self.layout, start=0)
        return self._reader.read_aside(rows) if aside else self._reader.open(rows, epoch=0)
