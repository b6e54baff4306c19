"""Counts the steps of workers that no round has and none will have, by the reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

TOO_OLD = "too old"
WENT_BACK = "begun before an operator went back"
NOT_THEIRS = "on samples that another worker was given"
GIVEN_UP = "given up by their worker, since they were too old"
ENDED = "of processes that ended before they submitted them"


class Losses:
    """The lost steps of a run. Those of fragment 0 are counted, although each is in a submission of every fragment."""

    def __init__(self) -> None:
        self.steps: Counter[str] = Counter()
        """By reason."""
        self.on_lost: Callable[[str, int, str], None] = lambda worker_id, steps, reason: None
        """Called with the worker, the steps and the reason."""

    def note(self, worker_id: str, steps: int, reason: str, fragment: int = 0) -> None:
        """Count steps of a worker as lost."""
        if steps > 0:
            self.steps[reason] += 0 if fragment else steps
            self.on_lost(worker_id, steps, f"{reason} (of fragment {fragment} alone)" if fragment else reason)

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Restore the `steps` of another server."""
        self.steps = Counter(state)
