"""Going back to a checkpoint while the run goes on: what is carried over, and where the data continues."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

from onstep.errors import AnomalyError
from onstep.events import Request
from onstep.progress import TrainState
from onstep.training.anomaly import shorten_ids


@dataclass(frozen=True)
class RollBack:
    """A decided rollback: weights, optimizer, scheduler and random state come from a checkpoint, the data goes on.

    The data position is the one after the bad step: what lies between the checkpoint and the bad step, which the
    abandoned branch was trained on, is passed over with it.
    """

    bad_step: int
    """The step that is undone."""
    request: Request
    """Who asked, and why."""
    lr_factor: float
    """The learning-rate factor that holds from here on."""
    abandoned: TrainState
    """The progress of the branch that is left, as a copy."""

    @classmethod
    def at(cls, progress: TrainState, bad_step: int, request: Request, factor: float) -> RollBack:
        """The rollback of `bad_step`, with `progress` as it is after that step."""
        lr_factor: float = progress.overrides.get("lr_factor", 1.0) * factor
        return cls(bad_step, request, lr_factor, deepcopy(progress))

    @property
    def last_good_step(self) -> int:
        """A checkpoint of this step or an earlier one is to be loaded."""
        return self.bad_step - 1

    @property
    def position(self) -> tuple[int, int]:
        """(epoch, samples taken in it): where the data goes on."""
        return self.abandoned.epoch, self.abandoned.samples_in_epoch

    def carry_over(self, progress: TrainState) -> None:
        """Bring into the loaded `progress` what is not undone.

        That is the data position with its counters, the skip list, the numbers of skips and rollbacks, and every value
        that was set while running; the samples that are passed over count as skipped.
        """
        left = self.abandoned
        passed_over = left.consumed_train_samples - progress.consumed_train_samples
        progress.skipped_train_samples += passed_over
        for name in ("epoch", "samples_in_epoch", "steps_in_epoch", "consumed_train_samples"):
            setattr(progress, name, getattr(left, name))
        progress.num_skips, progress.num_rollbacks = left.num_skips, left.num_rollbacks
        progress.skip_list[:] = left.skip_list
        progress.overrides.clear()
        progress.overrides.update(_set_factor(left.overrides, self.lr_factor))

    def record(self, to_step: int) -> Request:
        """The decision as it is recorded, done: the progress is at `to_step` now."""
        details = {"bad_step": self.bad_step, "to_step": to_step, "lr_factor": self.lr_factor}
        return replace(self.request, flag="rolled_back", details={**self.request.details, **details})

    def without_checkpoint(self) -> AnomalyError:
        """The error of a run that has nothing to go back to."""
        why = shorten_ids(self.request.reason or str(self.request))
        return AnomalyError(
            f"step {self.bad_step} is to be undone ({why}), and there is no verified "
            f"checkpoint of step {self.last_good_step} or before to go back to; save more often with "
            f"checkpoint.save_interval, or leave such steps out with train.on_nonfinite=skip."
        )


def _set_factor(overrides: dict[str, Any], factor: float) -> dict[str, Any]:
    """The overrides with the learning-rate factor, which is not written where it is 1 and was never set."""
    return overrides if factor == 1.0 and "lr_factor" not in overrides else {**overrides, "lr_factor": factor}
