"""Ends a run in an object store that another process has taken over."""

from __future__ import annotations

from onstep.config.sections.run import IN_A_STORE
from onstep.errors import LostLeaseError
from onstep.training.compute.step import Step
from onstep.training.feature import Feature
from onstep.training.run import Run


class Mirroring(Feature[Run]):
    """Looks after each step whether the run is still this process's."""

    name = "mirror"
    when = IN_A_STORE

    @classmethod
    def wanted(cls, host: Run) -> bool:
        """Whether the run's directory is mirrored."""
        return host.run_dir is not None and host.cfg.run.is_in_store

    def after_iteration(self, step: Step) -> None:
        mirror = None if self.host.run_dir is None else self.host.run_dir.mirror
        if mirror is not None and mirror.lost is not None:
            raise LostLeaseError(mirror.lost)
