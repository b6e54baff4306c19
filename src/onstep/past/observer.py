"""The feature that holds a repeated run at the steps that its caller wants to see."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from onstep.checkpoint import RngState
from onstep.events import Request
from onstep.past.turns import Turns
from onstep.training.compute.step import Step
from onstep.training.feature import Feature
from onstep.training.protocols import StateDict
from onstep.training.runs.decisions import DecisionLog
from onstep.training.stages.forward_backward import BufferGuard
from onstep.training.stages.job import Job

UPDATE = "before the update"
UPDATED = "after the update"
END = "after the step"


class Watch:
    """What the caller wants to see, and what the training shows it. Lives in a room of the run."""

    def __init__(self) -> None:
        self.turns = Turns()
        self.job: Job
        self.step: Step
        """The step that is held."""
        self.wanted = 0
        """The step to hold at; every step from there on, as the caller continues."""
        self.began_at: float | None = None
        """The time, by `time.perf_counter`, when the first repeated step began."""
        self.seconds = 0.0
        """The time from then to the step that is held, without what the caller has spent in between."""
        self.branch = 0
        """The number of rollbacks after which it is held."""
        self.holds_before_update = True
        self.holds_at_end = False
        """Whether the caller wants to see the end of the step that is held."""
        self.random_state: StateDict = {}
        """The random generators right before the step's first forward pass."""
        self.buffers: BufferGuard | None = None
        """The buffers at that time."""
        self.around_step: Callable[[int], AbstractContextManager[object]] = lambda number: nullcontext()
        """Context around the forward and backward passes and the update of each step that is repeated."""
        self.tell: Callable[[str, Step], None] = lambda place, step: None
        """Called at the places of each step that is repeated: `UPDATE` and `UPDATED`."""
        self.on_rollback: Callable[[int], None] = lambda to_step: None

    def is_wanted(self, number: int) -> bool:
        """Whether to hold at this step."""
        return number >= self.wanted and self.job.run.features.room(DecisionLog).branch >= self.branch


class Observer(Feature[Job]):
    """Holds the training before the update of each wanted step, and at its end if that is asked for."""

    name = "rewind"
    when = "a run that `onstep.rewind` repeats"
    needs_grad_norm = True
    reads_weights = True

    @classmethod
    def wanted(cls, host: Job) -> bool:
        """Only runs that are repeated have it in their table."""
        return True

    def __init__(self, host: Job) -> None:
        super().__init__(host)
        self._watch = host.run.features.room(Watch)
        self._watch.job = host
        self._random = RngState(host.run.world.device)

    def wrap_step(self, train_step: Callable[[Step], None]) -> Callable[[Step], None]:
        """Enter the caller's context around each step."""

        def watched(step: Step) -> None:
            with self._watch.around_step(step.number):
                train_step(step)

        return watched

    def before_iteration(self) -> None:
        """End here if the caller has given up, as by Ctrl-C."""
        self._watch.turns.check()
        if self._watch.began_at is None:
            self._watch.began_at = time.perf_counter()

    def after_zero_grad(self) -> None:
        """Keep the random state and the buffers of a step that will be held."""
        if self._watch.is_wanted(self.host.run.train_state.step + 1):
            self._watch.random_state = self._random.state_dict()
            self._watch.buffers = self._watch.buffers or BufferGuard(self.host.model, saved_only=False)
            self._watch.buffers.keep()

    def before_update(self, step: Step) -> None:
        """Hold a wanted step: its gradients are ready, and its weights are those that computed them."""
        self._watch.tell(UPDATE, step)
        if self._watch.is_wanted(step.number):
            self._watch.step = step
            if self._watch.holds_before_update:
                self._hold(UPDATE)
            else:
                self._watch.holds_at_end = True

    def after_update(self, step: Step) -> None:
        """Tell of it."""
        self._watch.tell(UPDATED, step)

    def after_iteration(self, step: Step) -> None:
        """Hold at the end of a step."""
        if self._watch.holds_at_end:
            self._watch.holds_at_end = False
            self._hold(END)

    def _hold(self, place: str) -> None:
        now = time.perf_counter()
        self._watch.seconds += now - (self._watch.began_at or now)
        try:
            self._watch.turns.hold(place)
        finally:
            self._watch.began_at = time.perf_counter()

    def rolled_back(self, bad_step: int, request: Request) -> None:
        """What was logged since is not part of the run any more."""
        self._watch.on_rollback(self.host.run.train_state.step)


def attach(run: Any) -> Watch:
    """Let a run that is not open yet be watched."""
    run.features.instruments = (*run.features.instruments, Observer)
    watch: Watch = run.features.room(Watch)
    return watch
