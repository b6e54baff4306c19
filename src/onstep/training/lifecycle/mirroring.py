"""Uploads a share of each checkpoint on every rank, and ends a run that another process has taken over."""

from __future__ import annotations

from contextlib import AbstractContextManager, closing, nullcontext

from onstep.config.sections.run import IN_A_STORE
from onstep.errors import LostLeaseError
from onstep.training.compute.step import Step
from onstep.training.feature import Feature
from onstep.training.run import Run
from onstep.training.runs.mirrored import helper_of


class Mirroring(Feature[Run]):
    """Helps rank 0 to upload, and looks after each step whether the run is still this process's."""

    name = "mirror"
    when = IN_A_STORE

    @classmethod
    def wanted(cls, host: Run) -> bool:
        """Whether the run's directory is mirrored."""
        return host.run_dir is not None and host.cfg.run.is_in_store

    def session(self) -> AbstractContextManager[object]:
        run = self.host
        if run.world.is_main or run.run_dir is None:
            return nullcontext()
        return closing(helper_of(run.cfg, run.run_dir.path.name))

    def after_iteration(self, step: Step) -> None:
        mirror = None if self.host.run_dir is None else self.host.run_dir.mirror
        if mirror is not None and mirror.lost is not None:
            raise LostLeaseError(mirror.lost)
