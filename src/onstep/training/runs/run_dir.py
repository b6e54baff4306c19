"""The directory of a run: where its files are, its lock, and the record of the run in run.json."""

from __future__ import annotations

import itertools
import json
import logging
import time
from pathlib import Path
from typing import Literal

from onstep.checkpoint.catalog.discovery import ASIDE, named_dirs
from onstep.errors import DataError, RunExistsError
from onstep.files.bounded_reading import read_json
from onstep.files.durability import replace_durably
from onstep.mirror.mirror import Mirror
from onstep.training.protocols import StateDict
from onstep.training.runs.identity import IDENTITY_FILE
from onstep.training.runs.lock import LOCK, RunLock

logger = logging.getLogger(__name__)

Layout = Literal["onstep", "hugging_face"]
"""Where checkpoints and final weights are: in `checkpoints/` and `model/`, or as Hugging Face's Trainer has them, in
the run's directory itself."""

Status = Literal["running", "completed", "stopped", "paused", "preempted", "failed", "again"]
"""A run's status: `paused` by `exit_interval` or `exit_duration_in_mins`, `preempted` by a signal; `again` by a Trainer
of an earlier version that was about to start a new run in its own directory."""

FINISHED = ("completed", "stopped")
"""A run with one of these statuses is not continued by the same command."""


class RunDir:
    """`<output_dir>/<name>/`: run.json, trainer_logs.json, decisions.jsonl, checkpoints/, model/ and the loss plot.

    Args:
        path: `<output_dir>/<name>`; it need not exist yet.
        layout: that of a new run; None is the one that run.json records.
    """

    def __init__(self, path: Path, layout: Layout | None = None) -> None:
        self._path = path
        self._content: StateDict | None = None
        self.layout: Layout = layout or _recorded_layout(path / "run.json")
        self.held: RunLock | None = None
        """The lock that this process holds on it; None on other ranks than 0, and where it is only read."""
        self.mirror: Mirror | None = None
        """What uploads it to an object store, on rank 0."""

    def work_in(self, held: RunLock | None, mirror: Mirror | None = None) -> None:
        """Keep the place, as user code may change the working directory, and the lock, which only rank 0 has."""
        self._path, self.held, self.mirror = self._path.absolute(), held, mirror

    @property
    def path(self) -> Path:
        """Where it is now: a process that holds it notices that it was moved."""
        place = None if self.held is None else self.held.place
        if place is not None and place != self._path:
            logger.warning(
                "%s was moved to %s while the run works on it; it continues there. To continue it later: run.name=%s",
                self._path,
                place,
                place.name,
            )
            self._path = place
        return self._path

    @property
    def checkpoints(self) -> Path:
        """The directory of its checkpoints."""
        return self.path if self.layout == "hugging_face" else self.path / "checkpoints"

    @property
    def lock(self) -> Path:
        """Held by rank 0 while it works on the run; the system releases it however the process ends."""
        return self.path / LOCK

    @property
    def run_json(self) -> Path:
        """Run id, status and configuration."""
        return self.path / "run.json"

    @property
    def metrics_log(self) -> Path:
        """The logged records, step by step."""
        return self.path / "trainer_logs.json"

    @property
    def decisions(self) -> Path:
        """Decisions that callbacks requested, and by which one."""
        return self.path / "decisions.jsonl"

    @property
    def model(self) -> Path:
        """The final weights, as a Hugging Face directory."""
        return self.path if self.layout == "hugging_face" else self.path / "model"

    @property
    def adapter(self) -> Path:
        """The LoRA weights, as a directory that `peft` opens."""
        return self.path / "adapter"

    @property
    def plot(self) -> Path:
        """The loss over the steps."""
        return self.path / "loss.png"

    @property
    def has_checkpoints(self) -> bool:
        """Whether there is a checkpoint, in whatever state."""
        return self.newest_step is not None

    @property
    def newest_step(self) -> int | None:
        """The step of the newest checkpoint, in whatever state; None without any."""
        return next((step for step, kind, _ in named_dirs(self.checkpoints) if not kind), None)

    @property
    def run_id(self) -> str:
        """The id of this run, which all its checkpoints record."""
        return str(self.read().get("run_id", ""))

    def has_started_from(self, asked: str) -> bool:
        """Whether the run already started from the requested checkpoint; it then continues from its own."""
        return self.read().get("started_from") == asked

    def note_start(self, asked: str) -> None:
        """Record which checkpoint the user requested to start from."""
        self.write({**self.read(), "started_from": asked})

    def read(self) -> StateDict:
        """The content of run.json.

        Raises:
            RunExistsError: if it cannot be read.
        """
        try:
            content = read_json(self.run_json)
        except (OSError, DataError) as error:
            raise RunExistsError(
                f"cannot read {self.run_json} ({error}); rename the directory or choose another one."
            ) from None
        if not isinstance(content, dict) or not isinstance(content.get("config"), dict):
            raise RunExistsError(f"{self.run_json} is not the record of a run; choose another directory.")
        self._content = content
        return content

    def write(self, content: StateDict) -> None:
        """Replace run.json atomically: a crash leaves the old or the new one."""
        replace_durably(self.run_json, json.dumps(content, indent=2) + "\n")
        self._content = content

    def make_again_if_removed(self) -> None:
        """Make a directory for the run, with its record, if somebody has removed the one that this process holds.

        Raises:
            OSError: if it cannot be written.
        """
        if self.held is None or self.held.place is not None or self._content is None:
            return
        place = next_free(self._path, 2) if self._path.exists() else self._path
        place.mkdir(parents=True)
        self.held.take(place / LOCK)
        logger.error(
            "%s was removed while the run works on it, with its checkpoints and its metrics log; what it writes from "
            "now on is in %s",
            self._path,
            place,
        )
        self._path = place
        self.write(self._content)

    def set_checkpoints_aside(self) -> Path | None:
        """Move the checkpoints and decisions of the previous run to `checkpoints-<n>`, with a copy of its run.json.

        Returns:
            The new directory; None if there was nothing to move.
        """
        if not self.has_checkpoints:
            return None
        aside = next_free(self.path / "checkpoints", 1)
        if self.checkpoints != self.path:
            self.checkpoints.rename(aside)
        else:
            aside.mkdir()
            moved = [path for _, kind, path in named_dirs(self.path) if not kind]  # the newest first
            for path in [*moved, *filter(Path.is_dir, [self.path / ASIDE])]:
                path.rename(aside / path.name)
        if self.decisions.exists():
            self.decisions.rename(aside / self.decisions.name)
        for name in ("run.json", IDENTITY_FILE):
            if (self.path / name).is_file():
                replace_durably(aside / name, (self.path / name).read_text(encoding="utf-8"))
        return aside

    def finish(self, status: Status, step: int, error: str | None = None) -> None:
        """Record how the run ended, and the error that ended it."""
        before = self.read()
        reached = step or before.get("step", 0)  # 0 if it failed before loading its checkpoint
        content = {**before, "status": status, "step": reached, "ended_at": time.time()}
        content.pop("error", None)
        self.write(content if error is None else {**content, "error": error})


def next_free(path: Path, first: int) -> Path:
    """A path `<path>-<n>` that does not exist, with the smallest n starting at `first`."""
    candidates = (path.with_name(f"{path.name}-{number}") for number in itertools.count(first))
    return next(one for one in candidates if not one.exists())


def _recorded_layout(run_json: Path) -> Layout:
    try:
        content = read_json(run_json)
    except (OSError, DataError):
        return "onstep"
    is_shared = isinstance(content, dict) and content.get("layout") == "hugging_face"
    return "hugging_face" if is_shared else "onstep"
