"""Trains one trial of a search with Ray Tune, in a process that Ray has started for it."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any

from ray.tune import Trainable
from ray.tune.result import RESULT_DUPLICATE

from onstep.errors import OnstepError, RunExistsError
from onstep.record.kinds import Metrics
from onstep.trainer.search.ray_log import PastTrial, TrialLog, trials_in
from onstep.trainer.search.ray_trials import OBJECTIVE
from onstep.trainer.search.trial_run import found_run, objective_of_run
from onstep.trainer.trials.objective import objective_of
from onstep.training.runs.lock import RunLock
from onstep.training.runs.run_dir import RunDir

_ENDING_SECONDS = 60.0
"""How long Ray may take to end the process of a trial whose search was killed."""


@dataclass(frozen=True)
class Place:
    """Where a search is."""

    root: Path
    """The directory of its trials."""
    working_directory: Path
    """That of the script: Ray starts trials elsewhere."""
    stopped_by: str
    """What may stop a trial, for the record of its run."""


class RayTrial(Trainable):  # type: ignore[misc]
    """A trial, whose run trains in a thread and waits after each evaluation until Ray says whether to continue."""

    def setup(self, config: dict[str, Any], trainer: Any = None, place: Place | None = None) -> None:
        """Receive the parameters, and the Trainer of the search."""
        assert place is not None
        self._trainer, self._place, self._parameters = trainer, place, config
        self._results: SimpleQueue[dict[str, Any] | BaseException | None] = SimpleQueue()
        """Each result, then None, or the error."""
        self._turns: SimpleQueue[bool] = SimpleQueue()
        """Whether the run continues, after each result."""
        self._thread = Thread(target=self._run, name=f"trial {self.trial_id}", daemon=True)
        self._reached = -1
        """The last step whose evaluation Ray knows."""
        self._is_known = False
        """Whether Ray has had all results of an earlier process."""
        self._is_stopped = False

    # ---- what Ray calls

    def step(self) -> dict[str, Any]:
        """Train until the next evaluation; its metrics."""
        if self._thread.ident is None:
            if self._place.working_directory.is_dir():
                os.chdir(self._place.working_directory)
            self._thread.start()
        else:
            self._turns.put(True)
        found = self._results.get()
        if isinstance(found, BaseException):
            raise found
        return {RESULT_DUPLICATE: True} if found is None else found

    def cleanup(self) -> None:
        """End the run, if Ray has stopped the trial.

        One that is interrupted with its search, or paused, is left as by a kill, and continues from its checkpoint.
        """
        if self._thread.is_alive() and self._past().has_ended:
            self._turns.put(False)
            self._thread.join()

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Save nothing for a pause: the directory of the run has its checkpoints."""

    def load_checkpoint(self, checkpoint: object) -> None:
        """Continue after a pause."""
        self._is_known = True

    # ---- what the Trainer calls, as of a search in progress

    def parameters_of(self, trial: Any) -> Mapping[str, object]:
        """The parameters, which the trial itself is."""
        parameters: Mapping[str, object] = trial
        return parameters

    def report(self, trial: object, step: int, metrics: Metrics) -> str | None:
        """Report an evaluation to Ray, unless an earlier process did; returns why the run should stop, if so."""
        objective = objective_of(self._trainer.compute_objective, metrics, 1)
        self._trainer.objective = objective
        if step > self._reached and not self._is_stopped:
            numbers = {name: value for name, value in metrics.items() if isinstance(value, int | float)}
            self._hand_over({**numbers, OBJECTIVE: objective, "step": step})
        if not self._is_stopped:
            return None
        return f"trial {self.trial_id} is stopped by {self._place.stopped_by}: its objective is {objective:g}"

    # ---- the run

    def _past(self) -> PastTrial:
        return trials_in(TrialLog(self._place.root).lines())[self.trial_id]

    def _run(self) -> None:
        try:
            self._train()
        except SystemExit:
            self._results.put(OnstepError(f"The run of trial {self.trial_id} has paused; the same call continues it."))
        except BaseException as error:  # noqa: BLE001 - raised in the thread that Ray calls
            self._results.put(error)
        else:
            self._results.put(None)

    def _train(self) -> None:
        past, trainer = self._past(), self._trainer
        for result in past.results:
            self._reached = result["step"]
            if not self._is_known:
                self._hand_over(result)
                if self._is_stopped:
                    return
        _wait_for(RunDir(self._place.root / past.name))
        has_ended, resumes = found_run(self._place.root, past.name)
        if has_ended and past.results:
            return
        trainer.sweep = self
        objective = objective_of_run(trainer, self._parameters, past.name, 1, resumes=resumes)
        if self._reached < 0:  # no evaluation was due
            self._hand_over({OBJECTIVE: objective, "step": trainer.state.global_step})

    def _hand_over(self, result: dict[str, Any]) -> None:
        """Give Ray a result, and wait for what it decides."""
        self._reached = result["step"]
        self._results.put(result)
        self._is_stopped = not self._turns.get()


def _wait_for(run: RunDir) -> None:
    """Wait until the process of a search that was killed has left the run; the run itself refuses one that stays."""
    deadline = time.monotonic() + _ENDING_SECONDS
    while run.path.is_dir() and time.monotonic() < deadline:
        try:
            RunLock(run.lock).release()
        except RunExistsError:
            time.sleep(0.2)
        else:
            return
