"""Wraps torch's profiler, of which a process can only run one: starting a second one would end the first."""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from torch.profiler import ProfilerAction, profile

logger: logging.Logger = logging.getLogger(__name__)


class SoleProfiler:
    """A torch profiler that is dropped with a warning if another one is already recording.

    Args:
        profile: a profiler that has not been started.
        user: name of the caller, for the warning.
    """

    def __init__(self, profile: profile, user: str) -> None:
        self.profile = profile
        self._user = user
        self._is_started = False
        self.gave_way = False

    def start(self) -> None:
        """Start with the action of step 0."""
        if not self._gives_way():
            self._is_started = True
            self.profile.start()

    def step(self) -> None:
        """Advance to the next step."""
        if not self._gives_way():
            self.profile.step()

    def stop(self) -> None:
        """Stop; the recording is passed to `on_trace_ready`."""
        if not self._gives_way():
            self.profile.stop()

    def _gives_way(self) -> bool:
        """Whether this profiler is dropped. It is not stopped, since stopping a warmed-up profiler would start it."""
        recording = (ProfilerAction.RECORD, ProfilerAction.RECORD_AND_SAVE)
        is_ours = self._is_started and self.profile.current_action in recording
        if not self.gave_way and not is_ours and is_recording():
            logger.warning("%s profiles nothing: another profiler is already recording in this process", self._user)
            self.gave_way = True
        return self.gave_way


def is_recording() -> bool:
    """Whether any profiler is recording in this process."""
    recording: bool = torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
    return recording


def write_trace(profile: profile, path: Path) -> bool:
    """Write a trace and return whether the file is complete, which the profiler does not report; warn if not."""
    why = "it is incomplete; check for free disk space"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)  # may have been removed since training began
        path.unlink(missing_ok=True)  # so that an earlier trace is not mistaken for this one
        profile.export_chrome_trace(str(path))
        if path.suffix == ".gz" or _ends_as_json(path):
            return True
    except (OSError, RuntimeError) as error:
        why = str(error)
    logger.warning("could not write the trace %s: %s", path, why)
    return False


def _ends_as_json(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 64))
        return file.read().rstrip().endswith(b"}")


class NextSteps:
    """Records the next steps of this rank, from its creation on, and writes a trace of them.

    Args:
        num_steps: steps to record.
        path: the trace, for Perfetto or chrome://tracing.
        user: name of the caller, for warnings.
    """

    def __init__(self, num_steps: int, path: Path, user: str) -> None:
        cpu, gpu = torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA
        activities = {cpu, gpu} & torch.profiler.supported_activities()  # type: ignore[no-untyped-call]
        self.path = path
        self._left = self._wanted = num_steps
        self._profiler = SoleProfiler(profile(activities=activities, record_shapes=True, with_flops=True), user)
        self._profiler.start()

    def end_step(self) -> bool:
        """Note the end of a step; True once all steps are recorded, or the recording was dropped: then close it."""
        self._left -= 1
        if self._left <= 0 or self._profiler.gave_way:
            return True
        self._profiler.step()
        return False

    def close(self) -> bool:
        """Stop, and write what was recorded; returns whether there is a trace, of at least one step."""
        self._profiler.stop()
        return (
            self._left < self._wanted and not self._profiler.gave_way and write_trace(self._profiler.profile, self.path)
        )
