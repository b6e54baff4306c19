"""The commands to a running job as methods, and what they return."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass
class ControlResponse:
    """The outcome of a command."""

    success: bool
    """Whether the job queued the command; if the call waited, whether the job applied it."""
    message: str
    data: dict[str, Any] | None = None
    """The server's answer; if the call waited, the ticket: `status`, `step`, `message`, `result`, ..."""
    timestamp: float | None = None
    """Unix time in seconds; None becomes the current time."""

    def __post_init__(self) -> None:
        self.timestamp = time.time() if self.timestamp is None else self.timestamp


class TrainerControlClient(ABC):
    """Sends commands to running jobs; what they report is read by `HTTPTrainerControlClient`.

    Every command has an argument `wait`: None returns as soon as the command is queued, a number of seconds waits until
    the job has applied or refused it, `math.inf` without limit. What it gives (texts, stacks, ...) is then in
    `data["result"]` of the response.
    """

    @abstractmethod
    def send_command(
        self, job_id: str, command: str, data: dict[str, Any] | None = None, wait: float | None = None
    ) -> ControlResponse:
        """Send a command, one of `onstep.commands.COMMANDS` or of the job's callbacks.

        Raises:
            ConfigError: if there is no such job. All else that fails is a response whose `success` is False.
        """

    # generated: methods
    def save_checkpoint(self, job_id: str, wait: float | None = None) -> ControlResponse:
        """Save a checkpoint after this step."""
        return self.send_command(job_id, "save_checkpoint", wait=wait)

    def evaluate(self, job_id: str, wait: float | None = None) -> ControlResponse:
        """Evaluate after this step."""
        return self.send_command(job_id, "evaluate", wait=wait)

    def pause(self, job_id: str, wait: float | None = None) -> ControlResponse:
        """Pause after this step until resumed; nothing is released."""
        return self.send_command(job_id, "pause", wait=wait)

    def resume(self, job_id: str, wait: float | None = None) -> ControlResponse:
        """Continue a paused run."""
        return self.send_command(job_id, "resume", wait=wait)

    def skip_batch(self, job_id: str, count: int = 1, wait: float | None = None) -> ControlResponse:
        """Read the batches of the next steps without training on them."""
        return self.send_command(job_id, "skip_batch", {"count": count}, wait)

    def set_value(self, job_id: str, key: str, value: float | None, wait: float | None = None) -> ControlResponse:
        """Change a value from the next step on; none restores the configured one."""
        return self.send_command(job_id, "set", {"key": key, "value": value}, wait)

    def generate(
        self, job_id: str, prompts: Sequence[str], max_new_tokens: int = 64, wait: float | None = 60.0
    ) -> ControlResponse:
        """Continue prompts with the current weights."""
        data = {"prompts": _texts(prompts), "max_new_tokens": max_new_tokens}
        return self.send_command(job_id, "generate", data, wait)

    def profile(self, job_id: str, steps: int = 3, wait: float | None = None) -> ControlResponse:
        """Record the next steps with PyTorch's profiler, on every rank."""
        return self.send_command(job_id, "profile", {"steps": steps}, wait)

    def stacks(self, job_id: str, wait: float | None = 30.0) -> ControlResponse:
        """Show the Python stacks of all threads of all ranks, at once, even if training hangs."""
        return self.send_command(job_id, "stacks", wait=wait)

    def graceful_stop(self, job_id: str, wait: float | None = None) -> ControlResponse:
        """Stop after this step, with the final checkpoint, as if the run were complete."""
        return self.send_command(job_id, "graceful_stop", wait=wait)

    def save_and_stop(self, job_id: str, wait: float | None = None) -> ControlResponse:
        """Save a checkpoint after this step, then stop."""
        return self.send_command(job_id, "save_and_stop", wait=wait)

    def rollback(
        self, job_id: str, step: int | None = None, lr_factor: float = 1.0, wait: float | None = None
    ) -> ControlResponse:
        """Go back to the newest checkpoint at or before a step; data continues after the current one."""
        return self.send_command(job_id, "rollback", {"step": step, "lr_factor": lr_factor}, wait)

    def abort(self, job_id: str, wait: float | None = None) -> ControlResponse:
        """Stop after this step without saving anything."""
        return self.send_command(job_id, "abort", wait=wait)

    # end of generated part


def _texts(given: Sequence[str]) -> list[str]:
    return [given] if isinstance(given, str) else list(given)
