"""Torch's profiler, of which a process has one: a second one that records would end it."""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from torch.profiler import ProfilerAction, profile

logger: logging.Logger = logging.getLogger(__name__)


class SoleProfiler:
    """A profiler of torch's that gives way, with a warning, where somebody else's records already.

    Args:
        profile: not started yet.
        user: who profiles, for the warning.
    """

    def __init__(self, profile: profile, user: str) -> None:
        self.profile = profile
        self._user = user
        self._is_started = False
        self.gave_way = False

    def start(self) -> None:
        """Begin with the action of step 0."""
        if not self._gives_way():
            self._is_started = True
            self.profile.start()

    def step(self) -> None:
        """The next step begins."""
        if not self._gives_way():
            self.profile.step()

    def stop(self) -> None:
        """End; what was recorded is handed to `on_trace_ready`."""
        if not self._gives_way():
            self.profile.stop()

    def _gives_way(self) -> bool:
        """Whether ours is dropped; it is not stopped, since stopping one that has warmed up starts it first."""
        recording = (ProfilerAction.RECORD, ProfilerAction.RECORD_AND_SAVE)
        is_ours = self._is_started and self.profile.current_action in recording
        if not self.gave_way and not is_ours and is_recording():
            logger.warning("%s profiles nothing: another profiler records in this process", self._user)
            self.gave_way = True
        return self.gave_way


def is_recording() -> bool:
    """Whether a profiler records in this process, whosever it is."""
    recording: bool = torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
    return recording


def write_trace(profile: profile, path: Path) -> bool:
    """Write a trace, and tell whether it is there as a whole, which the profiler does not say; else with a warning."""
    why = "it is not complete; is the disk full?"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)  # it may have been removed since training began
        path.unlink(missing_ok=True)  # so that an earlier one is not taken for this one
        profile.export_chrome_trace(str(path))
        if path.suffix == ".gz" or _ends_as_json(path):
            return True
    except (OSError, RuntimeError) as error:
        why = str(error)
    logger.warning("the trace %s could not be written: %s", path, why)
    return False


def _ends_as_json(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 64))
        return file.read().rstrip().endswith(b"}")
