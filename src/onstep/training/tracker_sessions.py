"""The trackers of a run, open while it trains and evaluates."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from onstep.training.feature import Feature
from onstep.training.run import Run
from onstep.training.seams import StateDict


class TrackerSessions(Feature[Run]):
    """Opens the trackers where training begins, and closes them as the run ended."""

    name = "trackers"
    when = "always; logger.report_to, logger.tensorboard_dir and the like say which trackers"
    collective = True
    per_rank = True

    @classmethod
    def wanted(cls, host: Run) -> bool:
        """Always: a callback may put a tracker in place later."""
        return True

    def __init__(self, host: Run) -> None:
        super().__init__(host)
        self.has_state = bool(host.trackers.configured)

    def session(self) -> AbstractContextManager[Any]:
        """Close them at the end."""
        return self.host.trackers.held(lambda: self.host.ending.ended)

    def begin(self) -> None:
        """Give every rank the id of the run, and open the trackers. Collective."""
        trackers, progress = self.host.trackers, self.host.train_state
        trackers.agree_on_run()
        trackers.open(progress.step, progress.consumed_train_samples)

    def rolled_back(self) -> None:
        """Go on from the step of the checkpoint."""
        progress = self.host.train_state
        self.host.trackers.reopen(progress.step, progress.consumed_train_samples)

    def state_dict(self) -> StateDict:
        """What continues the trackers' runs."""
        return self.host.trackers.state_dict()

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Continue them when they are opened."""
        self.host.trackers.load_state_dict(dict(state_dict))
