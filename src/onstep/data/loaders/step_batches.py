"""Defines the micro-batches of an optimizer step and the interface of the loaders that supply them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Literal, Protocol, TypeAlias, TypeVar, runtime_checkable

from onstep.data.loaders.collate import pin

T = TypeVar("T")

Batch: TypeAlias = Any
"""A micro-batch: whatever the collator or the user's loader produces from samples."""

Compared: TypeAlias = Literal["micro-batches", "samples"] | None
"""What the ranks compare of each step, as only reading reveals where the data of each ends: its micro-batches where
each rank reads data of its own, its samples over all ranks where each reads the whole and keeps its share; None where
all know the end."""


@dataclass
class StepBatches:
    """The micro-batches of one step on this rank, on the host, as collated."""

    micro_batches: list[Batch]
    """The micro-batches of the step on this rank."""
    sample_ids: list[list[int]] | None
    """Dataset indices, one list per micro-batch, empty for a filler. None if the samples have no index."""
    num_samples: int | None
    """Samples of the step over all ranks; None if the size of a ready-made batch is unknown."""
    is_filler: list[bool]
    """True where this rank had no sample and repeats one of another rank, which must count as zero."""
    local_samples: list[int] | None = None
    """Samples of each micro-batch on this rank, 0 for a filler; None if the size of a ready-made batch is unknown."""
    has_data: bool = True
    """False where the caller gave no data: the forward step gets None in place of an iterator."""

    @property
    def num_filler(self) -> int:
        """Number of micro-batches of this rank that must count as zero."""
        return sum(self.is_filler)

    def pin_memory(self) -> StepBatches:
        """The same step in pinned memory; torch's DataLoader calls it too."""
        return replace(self, micro_batches=[pin(batch) for batch in self.micro_batches])


def step_of(rows: Sequence[StepBatches]) -> StepBatches:
    """The step that consists of `rows`, in order."""
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
    """The concatenation of all parts; None if any is unknown."""
    known = [part for part in parts if part is not None]
    return list(chain.from_iterable(known)) if len(known) == len(parts) else None


@runtime_checkable
class StepSource(Protocol):
    """The loader interface of the training loop, implemented by `TrainLoader`, `IterableLoader`, `IteratorReader` and
    the adapters of `as_step_source`.

    A source that ends at the same step on all ranks, whatever it reads, may say so by an attribute `compared_by` of
    None; of any other, the ranks compare each step (see `Compared`).
    """

    @property
    def epoch(self) -> int:
        """The epoch of the next read; an epoch ends when `read` returns None."""

    @property
    def samples_in_epoch(self) -> int:
        """Samples handed out in this epoch over all ranks."""

    @property
    def num_samples(self) -> int | None:
        """Number of samples in the dataset; None if it has no length."""

    @property
    def has_epochs(self) -> bool:
        """Whether another epoch can follow the current one; False if the data ends for good and cannot seek."""

    @property
    def position_is_shared(self) -> bool:
        """Whether `state_dict` is the same on all ranks, so that any number of them can continue from one."""

    def read(self, num_microbatches: int) -> StepBatches | None:
        """The next step; None at the end of the epoch, after which the next read starts the next epoch.

        Args:
            num_microbatches: micro-batches of the step on this rank.
        """

    def has_next(self, num_microbatches: int) -> bool:
        """False if `read` would return None; for data of unknown length, only reading reveals the end.

        Args:
            num_microbatches: micro-batches of the step on this rank.
        """

    def leave_out(self, entries: Iterable[Sequence[int]]) -> None:
        """Leave out the samples of `[epoch, sample id]` entries, each from the epoch after its own.

        A source whose samples have no ids ignores this and yields them again.

        Args:
            entries: (epoch, sample id) of each; it is left out of the epochs after that one.
        """

    def steps_per_epoch(self, num_microbatches: int) -> int | None:
        """Number of steps in a whole epoch; None if the data has no length.

        Args:
            num_microbatches: micro-batches of the step on this rank.
        """

    def seek(self, epoch: int, samples_in_epoch: int) -> None:
        """Continue from this position.

        Args:
            epoch: the number of the epoch, from 0.
            samples_in_epoch: samples of the epoch that have been read, over all ranks.
        """

    def state_dict(self) -> dict[str, Any]:
        """The position after the steps handed out so far."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a position returned by `state_dict`.

        Args:
            state: what `state_dict()` returned.
        """

    def close(self) -> None:
        """Stop worker processes. The loader can be read again afterwards."""
