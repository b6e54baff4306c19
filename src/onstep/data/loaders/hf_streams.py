"""Reads streams of the `datasets` library that are split over ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from onstep.data.loaders.iterable_loader import IterableLoader
from onstep.data.loaders.step_batches import Compared, StepBatches
from onstep.errors import DataError


def node_split(dataset: Any) -> tuple[int, int] | None:
    """The (rank, number of ranks) of a stream that `split_dataset_by_node` has split; None of any other."""
    split = getattr(dataset, "_distributed", None)
    ranks = getattr(split, "rank", None), getattr(split, "world_size", None)
    return ranks if isinstance(ranks[0], int) and isinstance(ranks[1], int) else None  # type: ignore[return-value]


def check_split(dataset: Any, rank: int, world_size: int) -> None:
    """Check that a stream that was split over ranks is the part of this one.

    Raises:
        DataError: if it is not.
    """
    if node_split(dataset) not in (None, (rank, world_size)):
        part, parts = node_split(dataset) or (0, 1)
        raise DataError(
            f"split_dataset_by_node made part {part} of {parts} of the stream, and this is rank {rank} of "
            f"{world_size}; call it with rank={rank} and world_size={world_size}, or pass the whole stream, of which "
            "each rank reads its share"
        )


class SplitRows:
    """The rows of a stream of which `split_dataset_by_node` gave this rank a part.

    The ranks agree on each row, because their parts may differ in length: an epoch ends for all as soon as one of them
    has no sample left. Every rank must read the same number of rows.

    Args:
        part: reads this rank's part as if it were the only one, without dropping a tail.
        gather_numbers: `World.gather_numbers`.
        least: samples that a rank must have in a row.
    """

    compared_by: Compared = None  # `rows` compares the parts itself
    num_samples = size = None
    row_size = 0

    def __init__(
        self, part: IterableLoader, gather_numbers: Callable[[list[float]], list[list[float]]], least: int
    ) -> None:
        self._part = part
        self._gather_numbers = gather_numbers
        self._least = least

    def count_rows(self, drop_last: bool) -> None:
        """Unknown."""

    def leave_out(self, entries: list[tuple[int, int]]) -> bool:
        """Do nothing: samples without an index cannot be left out."""
        return False

    def to_come(self, sample_ids: Sequence[int], samples_in_epoch: int) -> None:
        """Unknown: samples have no ids."""

    def start(self, epoch: int, samples_in_epoch: int, saved: dict[str, Any]) -> None:
        """Begin this epoch.

        Raises:
            DataError: for a position within it that was not saved: it depends on the parts.
        """
        if samples_in_epoch and "part" not in saved:
            raise DataError(
                f"sample {samples_in_epoch} of epoch {epoch} cannot be found in a stream that is split by node for "
                "another number of ranks; resume with as many ranks as before, or pass the whole stream"
            )
        self._part.load_state_dict(saved.get("part", {"epoch": epoch, "samples_in_epoch": 0}))

    def rows(self, samples_in_epoch: int) -> Iterator[StepBatches]:
        """The rows from the position of this rank's part on. Collective at each row."""
        while True:
            row = self._part.read(1)
            own = 0 if row is None or row.num_samples is None else row.num_samples
            counts = [int(count) for (count,) in self._gather_numbers([float(own)])]
            if row is None or min(counts) < self._least:
                return
            yield replace(row, num_samples=sum(counts))

    def state(self, is_open: bool) -> dict[str, Any]:
        """The position in this rank's part."""
        return {"part": self._part.state_dict()}

    def check_end(self, step_size: int, num_dropped: int) -> None:
        """Do nothing: the part has checked itself."""

    def close(self) -> None:
        """Stop the worker."""
        self._part.close()
