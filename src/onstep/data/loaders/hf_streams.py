"""Reads streams of the `datasets` library that are split over ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from onstep.data.loaders.iterable_loader import IterableLoader, Unindexed
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


class SplitStreamLoader(Unindexed):
    """Reads steps from the part of a stream that `split_dataset_by_node` gave this rank, with the interface of
    `TrainLoader`.

    The ranks agree on each step, because their parts may differ in length: an epoch ends for all as soon as one of them
    has no sample left. Every rank must call `read`.

    Args:
        part: reads this rank's part as if it were the only one, without dropping a tail.
        gather_numbers: `World.gather_numbers`.
    """

    has_epochs = True
    compared_by: Compared = None  # `read` compares the parts itself

    def __init__(
        self,
        part: IterableLoader,
        gather_numbers: Callable[[list[float]], list[list[float]]],
        *,
        micro_batch_size: int,
        drop_last: bool,
    ) -> None:
        self._part = part
        self._gather_numbers = gather_numbers
        self._micro_batch_size = micro_batch_size
        self._drop_last = drop_last
        self.epoch = 0
        """The epoch of the next read; an epoch ends when `read` returns None."""
        self.samples_in_epoch = 0
        """Samples handed out in this epoch over all ranks."""

    num_samples = None

    def steps_per_epoch(self, num_microbatches: int) -> None:
        """Unknown."""
        return

    def read(self, num_microbatches: int) -> StepBatches | None:
        """This rank's micro-batches of the next step; None at the end of the epoch. Collective."""
        step = self._part.read(num_microbatches)
        own: Sequence[int] = [] if step is None else step.local_samples or []
        ranks = self._gather_numbers([float(count) for count in own] + [0.0] * (num_microbatches - len(own)))
        least = self._micro_batch_size if self._drop_last else 1
        num_read = min(sum(count >= least for count in counts) for counts in ranks)
        if step is None or num_read == 0 or (self._drop_last and num_read < num_microbatches):
            self.seek(self.epoch + 1, 0)
            return None
        num_samples = int(sum(sum(counts[:num_read]) for counts in ranks))
        self.samples_in_epoch += num_samples
        return replace(
            step,
            micro_batches=step.micro_batches[:num_read],
            num_samples=num_samples,
            is_filler=step.is_filler[:num_read],
            local_samples=list(own[:num_read]),
        )

    def seek(self, epoch: int, samples_in_epoch: int) -> None:
        """Continue at the start of an epoch.

        Raises:
            DataError: for a position within one, which depends on the parts.
        """
        if samples_in_epoch:
            raise DataError(
                f"sample {samples_in_epoch} of epoch {epoch} cannot be found in a stream that is split by node for "
                "another number of ranks; resume with as many ranks as before, or pass the whole stream"
            )
        self.epoch, self.samples_in_epoch = epoch, 0
        self._part.seek(epoch, 0)

    def state_dict(self) -> dict[str, Any]:
        """The position after the steps handed out so far; that in this rank's part is under "part"."""
        return {"epoch": self.epoch, "samples_in_epoch": self.samples_in_epoch, "part": self._part.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a position returned by `state_dict`."""
        self._part.load_state_dict(state["part"])
        self.epoch, self.samples_in_epoch = state["epoch"], state["samples_in_epoch"]

    def close(self) -> None:
        """Stop the worker."""
        self._part.close()
