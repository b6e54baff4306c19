"""What a loader hands to one optimizer step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from onstep.data.rows import FetchedRow


@dataclass
class StepBatches:
    """The micro-batches of one step on this rank, on the host, as collated."""

    micro_batches: list[Any]
    sample_ids: list[list[int]] | None
    """Dataset indices, one list a micro-batch; a filler's list is empty. None where the samples have no index."""
    num_samples: int | None
    """Samples of the step over all ranks; None where a ready batch does not tell its size."""
    is_filler: list[bool]
    """True: this rank had no sample there and repeats one of another rank; it must count as zero."""
    local_samples: list[int] | None = None
    """Samples of each micro-batch on this rank, 0 for a filler; None where a ready batch does not tell its size."""

    @property
    def num_filler(self) -> int:
        """Micro-batches of this rank that must count as zero."""
        return sum(self.is_filler)


class StepSource(Protocol):
    """What the training loop reads from: `TrainLoader`, `IterableLoader` and `IteratorReader` are such."""

    @property
    def epoch(self) -> int:
        """The epoch that the next read takes from; an epoch ends when `read` returns None."""

    @property
    def samples_in_epoch(self) -> int:
        """Samples handed out in this epoch, over all ranks."""

    @property
    def num_samples(self) -> int | None:
        """Samples of the dataset; None where it has no length."""

    def read(self, num_microbatches: int) -> StepBatches | None:
        """The next step; None at the end of the epoch, after which the next read starts the next epoch."""

    def steps_per_epoch(self, num_microbatches: int) -> int | None:
        """Steps of a whole epoch; None where the data has no length."""

    def seek(self, epoch: int, samples_in_epoch: int) -> None:
        """Continue from this position."""

    def state_dict(self) -> dict[str, Any]:
        """The position after what was handed out."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a position that `state_dict` gave."""

    def close(self) -> None:
        """End worker processes. The loader may be read again afterwards."""


def step_of(rows: Sequence[FetchedRow]) -> StepBatches:
    """The step that consists of `rows`."""
    counts = [row.num_samples for row in rows]
    local = [row.local_samples for row in rows]
    return StepBatches(
        micro_batches=[row.batch for row in rows],
        sample_ids=None if any(row.ids is None for row in rows) else [row.ids or [] for row in rows],
        num_samples=None if None in counts else sum(count or 0 for count in counts),
        is_filler=[row.is_filler for row in rows],
        local_samples=None if None in local else [count or 0 for count in local],
    )
