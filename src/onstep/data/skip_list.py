"""The samples that an anomaly left out, which later epochs do not meet again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class SkipList:
    """Sample ids with the epoch in which each was left out, kept in a list of `[epoch, sample id]`.

    An entry is in force from the epoch after its own: the positions of a running epoch never shift. The list that is
    given is the one that grows, so that it can live in a run's saved progress.
    """

    def __init__(self, entries: list[list[int]] | None = None) -> None:
        self.entries = [] if entries is None else entries

    def add(self, epoch: int, sample_ids: Iterable[int]) -> list[int]:
        """Leave `sample_ids` out from the epoch after `epoch` on; gives those that were not in the list yet."""
        known = {sample_id for _, sample_id in self.entries}
        new = sorted(set(sample_ids) - known)
        self.entries.extend([epoch, sample_id] for sample_id in new)
        return new

    def in_force(self, epoch: int) -> list[int]:
        """The ids that `epoch` leaves out, in ascending order."""
        return ids_in_force(self.entries, epoch)


def ids_in_force(entries: Iterable[Sequence[int]], epoch: int) -> list[int]:
    """The ids among `[epoch, sample id]` entries that were added before `epoch`, each once, in ascending order."""
    return sorted({sample_id for added_in, sample_id in entries if added_in < epoch})
