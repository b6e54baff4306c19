"""Manages a run's directory and identity: claims and locks it, and records the state of the run in run.json."""

from __future__ import annotations

import errno
import itertools
import json
import os
import platform
import socket
import stat
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from filelock import lock_descriptor

from onstep.bounded_reading import read_json
from onstep.config import ChangeClass, ConfigContainer
from onstep.config.differences import Change, changes, decide, of_kind
from onstep.durability import replace_durably
from onstep.errors import ConfigError, DataError, RunExistsError
from onstep.forking import release_in_forked_children
from onstep.training.protocols import StateDict
from onstep.training.runs.identity import IDENTITY_FILE, Comparison, Identify, Identity, compare, ways_to_continue

Status = Literal["running", "completed", "stopped", "paused", "preempted", "failed", "again"]
"""A run's status: `paused` by `exit_interval` or `exit_duration_in_mins`, `preempted` by a signal, `again` by a Trainer
that is about to start a new run in its own directory."""

EVENT_FILES = "events.out.tfevents.*"
"""Files of TensorBoard's writers, in a directory with any name."""

REPORTS = (
    "trainer_logs*.json",
    "gradient_norms*.json",
    "parameter_norms*.json",
    "metrics*.csv",
    EVENT_FILES,
    "tensorboard",
    "wandb",
    "mlruns",
    "comet",
)
"""What metrics logs and trackers write into a run's directory, perhaps before it becomes one."""

LEFTOVERS = (
    "run.json.tmp",
    IDENTITY_FILE,
    f"{IDENTITY_FILE}.tmp",
    ".write-test-*",
    ".trainer_logs*.json.*.tmp",
    ".metrics*.csv.*.tmp",
)
"""Files of ours that a process leaves behind if it is killed before it has written run.json, or while replacing one."""

FINISHED = ("completed", "stopped")
"""A run with one of these statuses is not continued by the same command."""


class RunDir:
    """`<output_dir>/<name>/`: run.json, trainer_logs.json, decisions.jsonl, checkpoints/, model/ and the loss plot."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.lock = path / ".run.lock"
        """Held by rank 0 while it works on the run; the system releases it however the process ends."""
        self.run_json = path / "run.json"
        """Run id, status and configuration."""
        self.metrics_log = path / "trainer_logs.json"
        """The logged records, step by step."""
        self.decisions = path / "decisions.jsonl"
        """Decisions that callbacks requested, and by which one."""
        self.model = path / "model"
        """The final weights, as a Hugging Face directory."""
        self.adapter = path / "adapter"
        """The LoRA weights, as a directory that `peft` opens."""
        self.plot = path / "loss.png"
        """The loss over the steps."""

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
                f"cannot read {self.run_json} ({error}); rename the directory or choose another run.name."
            ) from None
        if not isinstance(content, dict) or not isinstance(content.get("config"), dict):
            raise RunExistsError(f"{self.run_json} is not the record of a run; choose another run.name.")
        return content

    def write(self, content: StateDict) -> None:
        """Replace run.json atomically: a crash leaves the old or the new one."""
        replace_durably(self.run_json, json.dumps(content, indent=2) + "\n")

    def begin_again(self) -> None:
        """Let the next claim start a new run in this directory."""
        self.write({**self.read(), "status": "again"})

    def set_checkpoints_aside(self) -> None:
        """Move the checkpoints of the previous run to `checkpoints-<n>`."""
        if self.checkpoints.exists():
            self.checkpoints.rename(_next_free(self.checkpoints, 1))

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
        self._descriptor: int | None = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
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
                f"{path.parent} is in use by a live process ({holder or 'unknown'}); wait for it or end it, "
                f"or choose another run.name."
            )
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        release_in_forked_children(self, RunLock.release)

    def release(self) -> None:
        """Release the lock; calling it twice is harmless."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


@dataclass(frozen=True)
class Claim:
    """The outcome of claiming a run's directory."""

    directory: RunDir
    config: ConfigContainer
    """The configuration to run with: the current one, or with `checkpoint.on_config_change=keep` the stored values."""
    is_finished: bool = False
    """The same run was already completed here; nothing was changed."""
    changes: tuple[Change, ...] = ()
    """Keys whose value differs from that at the start of the run."""
    identity: Mapping[str, str] = field(default_factory=dict)
    """Digests of what the run is trained on."""
    notes: tuple[str, ...] = ()
    """What the user should know about the data of a run that exists: it has changed, or could not be compared."""


def acquire_run_dir(config: ConfigContainer, identify: Identify | None = None) -> tuple[Claim, RunLock | None]:
    """Claim the directory of the run that `config` names, on rank 0: a new one, or one to continue.

    Args:
        config: the run's configuration.
        identify: determines what the run is trained on; None records and compares nothing but the configuration.

    Returns:
        The claim, and the lock that keeps other processes out; None for a finished run.

    Raises:
        RunExistsError: if the directory holds another run, other files, or one that a live process works on; also if
            the data of the run has changed, unless `checkpoint.on_config_change` is apply.
        ConfigError: if it cannot be written.
    """
    assert config.run.name is not None
    directory = RunDir(Path(config.run.output_dir) / config.run.name)
    if config.run.fresh and directory.path.exists():
        directory = RunDir(_next_free(directory.path, 2))
    try:
        return _acquired(directory, config, identify)
    except OSError as error:
        raise _not_writable(directory, error) from None


def _acquired(directory: RunDir, config: ConfigContainer, identify: Identify | None) -> tuple[Claim, RunLock | None]:
    """What `acquire_run_dir` returns, for this directory."""
    if not directory.run_json.exists():
        _make_writable(directory)
    elif not _may_be_replaced(directory):
        claim, _ = _inspect(directory, config, identify)
        if claim.is_finished:
            return claim, None
    lock = RunLock(directory.lock)
    try:
        return _start_or_continue(directory, config, identify), lock
    except BaseException:
        lock.release()
        raise


def _start_or_continue(directory: RunDir, config: ConfigContainer, identify: Identify | None) -> Claim:
    """Start a run, or continue the existing one; no other process can by now."""
    if not directory.run_json.exists() or _may_be_replaced(directory):
        if directory.run_json.exists():
            directory.set_checkpoints_aside()
        identity = Identity() if identify is None else identify(config)
        content: StateDict = {
            "format": 1,
            "run_id": uuid.uuid4().hex,
            "name": directory.path.name,
            "recipe": config.run.recipe,
            "status": "running",
            "step": 0,
            "started_at": time.time(),
            "versions": {"torch": torch.__version__, "python": platform.python_version()},
            "config": config.to_dict(),
        }
        directory.write(_with_identity(directory, content, identity))
        return Claim(directory, config, identity=identity.digests)
    claim, identity = _inspect(directory, config, identify)
    content = {**directory.read(), "status": "running", "config": claim.config.to_dict(), "continued_at": time.time()}
    directory.write(_with_identity(directory, content, identity))
    return claim


def _with_identity(directory: RunDir, content: StateDict, identity: Identity) -> StateDict:
    """The content of run.json with the digests of what the run is trained on; what is unknown is not replaced."""
    if not identity.parts:
        return content
    if content.get("identity") != identity.digests or not identity.is_written(directory.path):
        identity.write(directory.path)
    return {**content, "identity": identity.digests}


def _inspect(directory: RunDir, config: ConfigContainer, identify: Identify | None) -> tuple[Claim, Identity]:
    """Determine whether the existing run is finished, may continue, or differs from the one in `config`.

    Returns:
        The claim, and what the run is trained on now.
    """
    content = directory.read()
    policy = config.checkpoint.on_config_change
    try:
        found = changes(content["config"], config)
    except ConfigError as error:
        raise RunExistsError(f"The stored configuration cannot be read: {error} {_ways_out(directory)}.") from None
    try:
        decided = decide(found, config, policy)
    except ConfigError as error:
        raise RunExistsError(
            f"{directory.path} holds another run: {error} Nothing was touched; {_ways_out(directory)}."
        ) from None
    inputs = Comparison() if identify is None else compare(content.get("identity"), identify(decided), directory.path)
    if inputs.changed and policy != "apply":
        raise RunExistsError(
            f"{directory.path} holds a run that was started on other files: {inputs.changed}. "
            f"{ways_to_continue(policy)} Nothing was touched; you can also {_ways_out(directory)}."
        )
    is_extended = policy == "apply" and bool(of_kind(found, ChangeClass.TRAJECTORY))
    status = content.get("status")
    if status in FINISHED and not is_extended:
        return Claim(directory, decided, is_finished=True, notes=inputs.notes), inputs.current
    if not config.checkpoint.resume:
        raise RunExistsError(
            f"{directory.path} holds an unfinished run (status {status!r}, step {content.get('step', 0)}), and "
            f"checkpoint.resume=false says not to continue it. Nothing was touched; {_ways_out(directory)}."
        )
    claim = Claim(directory, decided, changes=tuple(found), identity=inputs.current.digests, notes=inputs.notes)
    return claim, inputs.current


def _ways_out(directory: RunDir) -> str:
    return (
        f"choose another name (run.name={directory.path.name}-new), start {directory.path.name}-2 beside it "
        f"(run.fresh=true), or delete the directory"
    )


def _may_be_replaced(directory: RunDir) -> bool:
    """Whether the run there never trained (a fixed configuration may replace it), or its owner starts again."""
    content = directory.read()
    if content.get("status") == "again":
        return True
    if any(directory.checkpoints.glob("checkpoint-*")):
        return False
    return content.get("status") == "failed" and not content.get("step") and not directory.metrics_log.exists()


def _next_free(path: Path, first: int) -> Path:
    """A path `<path>-<n>` that does not exist, with the smallest n starting at `first`."""
    candidates = (path.with_name(f"{path.name}-{number}") for number in itertools.count(first))
    return next(one for one in candidates if not one.exists())


def _make_writable(directory: RunDir) -> None:
    there = [one for one in directory.path.iterdir() if one != directory.lock] if directory.path.is_dir() else []
    if not all(map(_is_ours, there)):
        raise RunExistsError(
            f"{directory.path} contains files but no run.json, so it is not a run's directory. Nothing was touched; "
            "choose "
            f"another run.name or run.output_dir, or run.fresh=true."
        )
    try:
        directory.path.mkdir(parents=True, exist_ok=True)
        (directory.path / f".write-test-{os.getpid()}").touch()
        for probe in directory.path.glob(".write-test-*"):  # this one, and those of killed processes
            probe.unlink(missing_ok=True)
    except OSError as error:
        raise _not_writable(directory, error) from None


def _not_writable(directory: RunDir, error: OSError) -> ConfigError:
    file = "" if error.filename in (None, str(directory.path)) else f"{error.filename}: "
    reason = f"{file}{error.strerror or error}"
    is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    remedy = "free space on its disk" if is_full else "choose another run.output_dir, or make it writable"
    return ConfigError(f"The run's directory {directory.path} cannot be written ({reason}); {remedy}.")


def _is_ours(path: Path) -> bool:
    """Whether a file in a directory without run.json is a leftover, or a report of an evaluation before training."""
    if any(path.match(pattern) for pattern in LEFTOVERS):
        return path.is_file() and not path.is_symlink()
    return any(path.match(pattern) for pattern in REPORTS) or _holds_only_events(path)


def _holds_only_events(path: Path) -> bool:
    """Whether a directory contains only event files of TensorBoard, including in subdirectories."""
    if not path.is_dir() or path.is_symlink():
        return False
    is_all = all(one.is_dir() or one.match(EVENT_FILES) for one in path.rglob("*"))
    return is_all and any(path.rglob(EVENT_FILES))
