"""A run's folder and identity: who may write here, what an earlier run left, and one live process for a run."""

from __future__ import annotations

import itertools
import json
import os
import platform
import socket
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from filelock import lock_descriptor

from onstep.config import ConfigContainer
from onstep.config.differences import Change, changes, decide, of_kind
from onstep.config.part import ChangeClass
from onstep.errors import ConfigError, RunExistsError
from onstep.forking import release_in_forked_children
from onstep.training.protocols import StateDict

Status = Literal["running", "completed", "stopped", "paused", "preempted", "failed", "again"]
"""How a run stands: paused is left by `exit_interval` or `exit_duration_in_mins`, preempted by a signal, again by a
Trainer that is about to start a new run in its own folder."""

EVENT_FILES = "events.out.tfevents.*"
"""What TensorBoard's writers leave, in a folder of any name."""

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
"""What journals and trackers leave in a run's folder, perhaps before it is one."""

FINISHED = ("completed", "stopped")
"""A run that ends so is not continued by the same command."""


class RunFolder:
    """`<output_dir>/<name>/`: run.json, trainer_logs.json, decisions.jsonl, checkpoints/, model/ and the loss plot."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.lock = path / ".run.lock"
        """Held by rank 0 while it works on the run; the system lets go of it however the process ends."""
        self.run_json = path / "run.json"
        """Run id, status and configuration."""
        self.journal = path / "trainer_logs.json"
        """What happened, step by step."""
        self.decisions = path / "decisions.jsonl"
        """What callbacks asked for, and who."""
        self.model = path / "model"
        """The final weights, as a Hugging Face directory."""
        self.adapter = path / "adapter"
        """What LoRA added, as a directory that `peft` opens."""
        self.plot = path / "loss.png"
        """The loss over the steps."""

    @property
    def run_id(self) -> str:
        """What tells this run from any other; all its checkpoints hold it."""
        return str(self.read().get("run_id", ""))

    def has_started_from(self, asked: str) -> bool:
        """Whether the run once continued from the checkpoint that is asked for; it then goes on with its own."""
        return self.read().get("started_from") == asked

    def note_start(self, asked: str) -> None:
        """Record which checkpoint the user asked to start from."""
        self.write({**self.read(), "started_from": asked})

    def read(self) -> StateDict:
        """The content of run.json.

        Raises:
            RunExistsError: when it cannot be read.
        """
        try:
            content = json.loads(self.run_json.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise RunExistsError(
                f"{self.run_json} cannot be read ({error}); rename the folder or choose another run.name."
            ) from None
        if not isinstance(content, dict) or not isinstance(content.get("config"), dict):
            raise RunExistsError(f"{self.run_json} is not the record of a run; choose another run.name.")
        return content

    def write(self, content: StateDict) -> None:
        """Replace run.json in one step: a crash leaves the old or the new one."""
        temporary = self.run_json.with_suffix(".json.tmp")
        with temporary.open("w", encoding="utf-8") as file:
            json.dump(content, file, indent=2)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self.run_json)

    def begin_again(self) -> None:
        """Let the next claim start a new run in this folder."""
        self.write({**self.read(), "status": "again"})

    def set_checkpoints_aside(self) -> None:
        """Keep the checkpoints of the run before in `checkpoints-<n>`."""
        if self.checkpoints.exists():
            self.checkpoints.rename(_next_free(self.checkpoints, 1))

    def finish(self, status: Status, step: int, error: str | None = None) -> None:
        """Record how the run ended, and what error ended it."""
        before = self.read()
        reached = step or before.get("step", 0)  # 0 where it failed before it came to its checkpoint
        content = {**before, "status": status, "step": reached, "ended_at": time.time()}
        content.pop("error", None)
        self.write(content if error is None else {**content, "error": error})


class RunLock:
    """Holds `path` until `release` or the process's end. A forked child (a data loader's worker) does not hold it.

    Raises:
        RunExistsError: when a live process holds it.
    """

    def __init__(self, path: Path) -> None:
        self._descriptor: int | None = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            is_free = lock_descriptor(self._descriptor, blocking=False)
        except OSError:
            is_free = True  # a file system without locks (some network mounts): nothing tells two processes apart there
        if not is_free:
            holder = os.pread(self._descriptor, 200, 0).decode("utf-8", "replace").strip()
            self.release()
            raise RunExistsError(
                f"{path.parent} is being worked on by a live process ({holder or 'unknown'}); wait for it or end it, "
                f"or choose another run.name."
            )
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        release_in_forked_children(self, RunLock.release)

    def release(self) -> None:
        """Let go; doing it twice is harmless."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


@dataclass(frozen=True)
class Claim:
    """The outcome of asking for a run's folder."""

    folder: RunFolder
    config: ConfigContainer
    """What the run works with: today's configuration, or with `checkpoint.on_config_change=keep` the stored values."""
    is_finished: bool = False
    """The same run was completed here already; nothing was changed."""
    changes: tuple[Change, ...] = ()
    """Keys whose value is another one than when the run started."""


def claim_run_folder(config: ConfigContainer) -> tuple[Claim, RunLock | None]:
    """Take the folder of the run that `config` names, on rank 0: a new one, or one to continue.

    Returns:
        The claim, and the lock that keeps other processes out; None for a run that is finished.

    Raises:
        RunExistsError: when the folder holds another run, other files, or one that a live process works on.
        ConfigError: when it cannot be written.
    """
    assert config.run.name is not None
    folder = RunFolder(Path(config.run.output_dir) / config.run.name)
    if config.run.fresh and folder.path.exists():
        folder = RunFolder(_next_free(folder.path, 2))
    if not folder.run_json.exists():
        _make_writable(folder)
    elif not _may_be_replaced(folder):
        claim = _judge(folder, config)
        if claim.is_finished:
            return claim, None
    lock = RunLock(folder.lock)
    try:
        return _take(folder, config), lock
    except BaseException:
        lock.release()
        raise


def _take(folder: RunFolder, config: ConfigContainer) -> Claim:
    """Start a run, or go on with the one that is there; nobody else can by now."""
    if not folder.run_json.exists() or _may_be_replaced(folder):
        if folder.run_json.exists():
            folder.set_checkpoints_aside()
        content: StateDict = {
            "format": 1,
            "run_id": uuid.uuid4().hex,
            "name": folder.path.name,
            "recipe": config.run.recipe,
            "status": "running",
            "step": 0,
            "started_at": time.time(),
            "versions": {"torch": torch.__version__, "python": platform.python_version()},
            "config": config.to_dict(),
        }
        folder.write(content)
        return Claim(folder, config)
    claim = _judge(folder, config)
    folder.write({**folder.read(), "status": "running", "config": claim.config.to_dict(), "continued_at": time.time()})
    return claim


def _judge(folder: RunFolder, config: ConfigContainer) -> Claim:
    """Whether the run that is there is finished, may go on, or is another one than `config` describes."""
    content = folder.read()
    policy = config.checkpoint.on_config_change
    try:
        found = changes(content["config"], config)
    except ConfigError as error:
        raise RunExistsError(f"The stored configuration cannot be read: {error} {_ways_out(folder)}.") from None
    try:
        decided = decide(found, config, policy)
    except ConfigError as error:
        raise RunExistsError(
            f"{folder.path} holds another run: {error} Nothing was touched; {_ways_out(folder)}."
        ) from None
    is_extended = policy == "apply" and bool(of_kind(found, ChangeClass.TRAJECTORY))
    status = content.get("status")
    if status in FINISHED and not is_extended:
        return Claim(folder, decided, is_finished=True)
    if not config.checkpoint.resume:
        raise RunExistsError(
            f"{folder.path} holds an unfinished run (status {status!r}, step {content.get('step', 0)}), and "
            f"checkpoint.resume=false says not to continue it. Nothing was touched; {_ways_out(folder)}."
        )
    return Claim(folder, decided, changes=tuple(found))


def _ways_out(folder: RunFolder) -> str:
    return (
        f"choose another name (run.name={folder.path.name}-new), start {folder.path.name}-2 beside it "
        f"(run.fresh=true), or delete the folder"
    )


def _may_be_replaced(folder: RunFolder) -> bool:
    """Whether the run there never trained (a mended configuration may take its place), or its owner begins again."""
    content = folder.read()
    if content.get("status") == "again":
        return True
    if any(folder.checkpoints.glob("checkpoint-*")):
        return False
    return content.get("status") == "failed" and not content.get("step") and not folder.journal.exists()


def _next_free(path: Path, first: int) -> Path:
    """`<path>-<n>` that does not exist, with the smallest n from `first` on."""
    candidates = (path.with_name(f"{path.name}-{number}") for number in itertools.count(first))
    return next(one for one in candidates if not one.exists())


def _make_writable(folder: RunFolder) -> None:
    there = [one for one in folder.path.iterdir() if one != folder.lock] if folder.path.is_dir() else []
    # an evaluation before training leaves reports, and the folder is still the run's
    if not all(any(one.match(pattern) for pattern in REPORTS) or _holds_only_events(one) for one in there):
        raise RunExistsError(
            f"{folder.path} holds files but no run.json, so they are not a run's. Nothing was touched; choose another "
            f"run.name or run.output_dir, or run.fresh=true."
        )
    try:
        folder.path.mkdir(parents=True, exist_ok=True)
        probe = folder.path / f".write-test-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ConfigError(
            f"The run's folder {folder.path} cannot be written ({error.strerror or error}); choose another "
            f"run.output_dir."
        ) from None


def _holds_only_events(path: Path) -> bool:
    """Whether a folder has event files of TensorBoard, also in folders below, and nothing else."""
    if not path.is_dir() or path.is_symlink():
        return False
    is_all = all(one.is_dir() or one.match(EVENT_FILES) for one in path.rglob("*"))
    return is_all and any(path.rglob(EVENT_FILES))
