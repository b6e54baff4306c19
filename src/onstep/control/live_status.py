"""Describes the present state of a run on request, at no cost to the training thread."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

from onstep.control.inbox import Inbox
from onstep.events import RunView
from onstep.events.settings import SETTABLE, Setting
from onstep.events.views import configured_values

_WINDOW_SECONDS = 60.0


class LiveStatus:
    """The status of a run. Reads its counters from the server's thread, without a lock: each is a plain attribute.

    Args:
        run: the run, which is about to train.
        inbox: the commands that wait for it.
        clock: seconds.
    """

    def __init__(self, run: RunView, inbox: Inbox, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._paused_seconds = 0.0
        self._paused_at: float | None = None
        self._run = run
        self._inbox = inbox
        self._configured = configured_values(run)
        self._declared = {key: one.value for key, one in run.control.declared.items()}
        self._started = (self._now(), run.train_state.step)
        self._looks: deque[tuple[float, int]] = deque([self._started], maxlen=1000)

    def __call__(self) -> dict[str, Any]:
        """The status, as JSON."""
        run = self._run
        progress, state = run.train_state, run.trainer_state
        limit = state.max_steps or None
        rate = self._steps_per_second(progress.step)
        left = max(0, limit - progress.step) if limit else None
        return {
            "global_step": progress.step,
            "epoch": state.epoch,
            "max_steps": limit,
            "progress": min(1.0, progress.step / limit) if limit else None,
            "steps_per_second": rate,
            "eta_seconds": left / rate if left is not None and rate else None,
            "queue": self._inbox.num_waiting,
            "overrides": dict(progress.overrides),
            "settable": self._settable(),
        }

    def pause(self) -> None:
        """Stop the time by which speeds are measured."""
        self._paused_at = self._clock()

    def resume(self) -> None:
        """Start it again."""
        if self._paused_at is not None:
            self._paused_seconds += self._clock() - self._paused_at
            self._paused_at = None

    def _now(self) -> float:
        """Seconds without those of pauses."""
        paused_at = self._paused_at
        return (self._clock() if paused_at is None else paused_at) - self._paused_seconds

    def _settable(self) -> dict[str, dict[str, Any]]:
        overrides, declared = dict(self._run.train_state.overrides), dict(self._run.control.declared)
        own = {
            key: _described(one, overrides.get(key, self._configured.get(key)), configured)
            for key, one in SETTABLE.items()
            for configured in [self._configured.get(key)]
        }
        theirs = {
            key: _described(one.setting, one.value, self._declared.get(key, one.value)) for key, one in declared.items()
        }
        return own | theirs

    def _steps_per_second(self, step: int) -> float | None:
        now = self._now()
        looks = self._looks
        while len(looks) > 1 and now - looks[0][0] > _WINDOW_SECONDS:
            looks.popleft()
        since, step_then = looks[0] if looks[0][1] < step else self._started
        if step < looks[-1][1]:  # rolled back
            looks.clear()
        if not looks or now - looks[-1][0] > 0.5:
            looks.append((now, step))
        return (step - step_then) / (now - since) if step > step_then and now > since else None


def _described(setting: Setting, value: Any, configured: Any) -> dict[str, Any]:
    return {
        "kind": "integer" if setting.kind is int else "number",
        "minimum": setting.least,
        "maximum": setting.most,
        "help": setting.help,
        "value": value,
        "configured": configured,
    }
