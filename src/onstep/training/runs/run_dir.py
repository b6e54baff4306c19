"""The directory of a run: where its files are, its lock, and the record of the run in run.json."""

from __future__ import annotations

import errno
import itertools
import json
import os
import socket
import stat
import time
from contextlib import suppress
from pathlib import Path
from typing import Literal

from filelock import lock_descriptor

from onstep.bounded_reading import read_json
from onstep.checkpoint.catalog.discovery import ASIDE, named_dirs
from onstep.durability import replace_durably
from onstep.errors import DataError, RunExistsError
from onstep.forking import release_in_forked_children
from onstep.training.protocols import StateDict
from onstep.training.runs.identity import IDENTITY_FILE

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
        path: the directory.
        layout: that of a new run; None is the one that run.json records.
    """

    def __init__(self, path: Path, layout: Layout | None = None) -> None:
        self.path = path
        self.layout: Layout = layout or _recorded_layout(path / "run.json")
        self.checkpoints = path if self.layout == "hugging_face" else path / "checkpoints"
        self.lock = path / ".run.lock"
        """Held by rank 0 while it works on the run; the system releases it however the process ends."""
        self.run_json = path / "run.json"
        """Run id, status and configuration."""
        self.metrics_log = path / "trainer_logs.json"
        """The logged records, step by step."""
        self.decisions = path / "decisions.jsonl"
        """Decisions that callbacks requested, and by which one."""
        self.model = path if self.layout == "hugging_face" else path / "model"
        """The final weights, as a Hugging Face directory."""
        self.adapter = path / "adapter"
        """The LoRA weights, as a directory that `peft` opens."""
        self.plot = path / "loss.png"
        """The loss over the steps."""

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
        return content

    def write(self, content: StateDict) -> None:
        """Replace run.json atomically: a crash leaves the old or the new one."""
        replace_durably(self.run_json, json.dumps(content, indent=2) + "\n")

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


class RunLock:
    """Holds `path` until `release` or the end of the process. A forked child (a data loader's worker) does not hold it.

    Raises:
        RunExistsError: if a live process holds it.
        OSError: if it cannot be written, or is not a file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None
        self.is_new = False
        """Whether nobody has held it before."""
        self._acquire(path)
        while not _is_at(path, self._descriptor):  # its holder, whose start had failed, has removed it
            self.release()
            self._acquire(path)
        release_in_forked_children(self, RunLock.release)

    def _acquire(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        if not stat.S_ISREG(os.fstat(self._descriptor).st_mode):
            self.release()
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        try:
            is_free = lock_descriptor(self._descriptor, blocking=False)
        except OSError:
            is_free = (
                True  # a file system without locks (some network mounts): two processes are indistinguishable there
            )
        if not is_free:
            holder = os.pread(self._descriptor, 200, 0).decode("utf-8", "replace").strip()
            self.release()
            raise RunExistsError(
                f"{path.parent} is in use by a live process ({holder or 'one that has just begun'}); wait for it or "
                f"end it, or choose another directory."
            )
        try:
            self.is_new = not os.pread(self._descriptor, 1, 0)
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        except BaseException:
            self.discard()
            raise

    def discard(self) -> None:
        """Release the lock, and remove its file if nobody has held it before."""
        with suppress(OSError):
            if self.is_new and _is_at(self._path, self._descriptor):
                self._path.unlink()
        self.release()

    def release(self) -> None:
        """Release the lock; calling it twice is harmless."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


def _is_at(path: Path, descriptor: int | None) -> bool:
    """Whether an open file is still the one at this path."""
    try:
        return descriptor is not None and os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


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
