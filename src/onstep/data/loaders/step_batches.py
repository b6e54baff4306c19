"""What a loader hands to one optimizer step, and what the training loop asks of a loader."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Protocol, TypeAlias, TypeVar, runtime_checkable

from onstep.data.loaders.collate import pin

T = TypeVar("T")

Batch: TypeAlias = Any
"""A micro-batch: whatever the collator or the user's loader makes of samples."""


@dataclass
class StepBatches:
    """The micro-batches of one step on this rank, on the host, as collated."""

    micro_batches: list[Batch]
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

    def pin_memory(self) -> StepBatches:
        """The same step in pinned memory; torch's DataLoader calls it too."""
        return replace(self, micro_batches=[pin(batch) for batch in self.micro_batches])


def step_of(rows: Sequence[StepBatches]) -> StepBatches:
    """The step that consists of `rows`, one after the other."""
    if len(rows) == 1:
        return rows[0]
    counts = [row.num_samples for row in rows if row.num_samples is not None]
    return StepBatches(
        micro_batches=[batch for row in rows for batch in row.micro_batches],
        sample_ids=_joined([row.sample_ids for row in rows]),
        num_samples=sum(counts) if len(counts) == len(rows) else None,
        is_filler=[is_filler for row in rows for is_filler in row.is_filler],
        local_samples=_joined([row.local_samples for row in rows]),
    )


def _joined(parts: list[list[T] | None]) -> list[T] | None:
    """All parts in one list; None where one is not known."""
    known = [part for part in parts if part is not None]
    return list(chain.from_iterable(known)) if len(known) == len(parts) else None


@runtime_checkable
class StepSource(Protocol):
    """What the training loop reads from: `TrainLoader`, `IterableLoader`, `IteratorReader`, and what
    `as_step_source` makes of a user's object.
    """

    @property
    def epoch(self) -> int:
        """The epoch that the next read takes from; an epoch ends when `read` returns None."""

    @property
    def samples_in_epoch(self) -> int:
        """Samples handed out in this epoch, over all ranks."""

    @property
    def num_samples(self) -> int | None:
        """Samples of the dataset; None where it has no length."""

    @property
    def has_epochs(self) -> bool:
        """Whether another epoch follows the end of one; False where the data ends for good and cannot seek."""

    def read(self, num_microbatches: int) -> StepBatches | None:
        """The next step; None at the end of the epoch, after which the next read starts the next epoch."""

    def has_next(self, num_microbatches: int) -> bool:
        """False where `read` would return None; data without a length tells only when it is read."""

    def leave_out(self, entries: Iterable[Sequence[int]]) -> None:
        """Leave out the samples of `[epoch, sample id]` entries from the epoch after their own on.

        A source whose samples have no ids meets them again.
        """

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
