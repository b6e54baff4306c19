"""Counts the ranks that work together along each axis of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class ParallelSizes:
    """The number of ranks along each axis of a run; `tp` ranks are neighbors, `pp` ranks are farthest apart."""

    pp: int = 1
    """Stages of a pipeline."""
    dp_replicate: int = 1
    """Replicas of the model, each of `dp_shard` ranks."""
    dp_shard: int = 1
    """Ranks that hold one replica in shards; like replicas, each has samples of its own."""
    cp: int = 1
    """Ranks that divide the sequences of one micro-batch."""
    tp: int = 1
    """Ranks that divide the tensors of a layer."""
    ep: int = 1
    """Ranks that divide the experts of a layer: some of those that `dp_replicate`, `dp_shard` and `cp` count."""

    @property
    def ranks(self) -> int:
        """The number of ranks in all."""
        return self.pp * self.dp_replicate * self.dp_shard * self.cp * self.tp

    @property
    def data(self) -> int:
        """The number of ranks with different samples."""
        return self.dp_replicate * self.dp_shard

    def data_rank(self, rank: int) -> int:
        """Which of the `data` shares of the samples a rank has; ranks along `tp`, `cp` and `pp` have the same."""
        return rank // (self.tp * self.cp) % self.data

    def place(self, rank: int) -> str:
        """A rank and its coordinates on axes of several ranks, such as `rank 5, tp 1, dp_replicate 2`.

        With replicas as the only axis, its number says it all.
        """
        found, rest = [], rank
        for axis in ("tp", "cp", "dp_shard", "dp_replicate", "pp"):
            rest, coordinate = divmod(rest, getattr(self, axis))
            if getattr(self, axis) > 1:
                found.append(f"{axis} {coordinate}")
        return f"rank {rank}" if self.dp_replicate == self.ranks else ", ".join([f"rank {rank}", *found])


def places(ranks: Iterable[int], place: Callable[[int], str]) -> str:
    """Several ranks in one phrase: `ranks 1, 3`, or with their coordinates `rank 1, dp_shard 1; rank 3, dp_shard 1`.

    Args:
        ranks: the ranks.
        place: names one of them, as `ParallelSizes.place` does.
    """
    numbers = list(ranks)
    if len(numbers) > 1 and all(place(one) == f"rank {one}" for one in numbers):
        return f"ranks {', '.join(map(str, numbers))}"
    return "; ".join(map(place, numbers))
