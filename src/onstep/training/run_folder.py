"""A run's folder and identity: who may write here, and what an earlier run left."""

from __future__ import annotations

import json
import os
import platform
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from onstep.config import ConfigContainer
from onstep.config.differences import Change, changes, decide, of_kind
from onstep.config.part import ChangeClass
from onstep.errors import ConfigError, RunExistsError
from onstep.training.run_lock import RunLock

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


@dataclass(frozen=True)
class RunFolder:
    """`<output_dir>/<name>/`: run.json, trainer_logs.json, decisions.jsonl, checkpoints/, model/ and the loss plot."""

    path: Path

    @property
    def checkpoints(self) -> Path:
        """The run's checkpoints."""
        return self.path / "checkpoints"

    @property
    def lock(self) -> Path:
        """Held by rank 0 while it works on the run; the system lets go of it however the process ends."""
        return self.path / ".run.lock"

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

    @property
    def run_json(self) -> Path:
        """Run id, status and configuration."""
        return self.path / "run.json"

    @property
    def journal(self) -> Path:
        """What happened, step by step."""
        return self.path / "trainer_logs.json"

    @property
    def decisions(self) -> Path:
        """What callbacks asked for, and who."""
        return self.path / "decisions.jsonl"

    @property
    def model(self) -> Path:
        """The final weights, as a Hugging Face directory."""
        return self.path / "model"

    @property
    def adapter(self) -> Path:
        """What LoRA added, as a directory that `peft` opens."""
        return self.path / "adapter"

    @property
    def plot(self) -> Path:
        """The loss over the steps."""
        return self.path / "loss.png"

    def read(self) -> dict[str, Any]:
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

    def write(self, content: dict[str, Any]) -> None:
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
        if not self.checkpoints.exists():
            return
        number = 1
        while (aside := self.path / f"checkpoints-{number}").exists():
            number += 1
        self.checkpoints.rename(aside)

    def finish(self, status: Status, step: int, error: str | None = None) -> None:
        """Record how the run ended, and what error ended it."""
        before = self.read()
        reached = step or before.get("step", 0)  # 0 where it failed before it came to its checkpoint
        content = {**before, "status": status, "step": reached, "ended_at": time.time()}
        content.pop("error", None)
        self.write(content if error is None else {**content, "error": error})


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
    if config.run.fresh:
        folder = _next_free(folder)
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
        _start(folder, config)
        return Claim(folder, config)
    claim = _judge(folder, config)
    folder.write({**folder.read(), "status": "running", "config": claim.config.to_dict(), "continued_at": time.time()})
    return claim


def _judge(folder: RunFolder, config: ConfigContainer) -> Claim:
    """Whether the run that is there is finished, may go on, or is another one than `config` describes."""
    content = folder.read()
    policy = config.checkpoint.on_config_change
    found = stored_changes(folder, content, config)
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


def stored_changes(folder: RunFolder, content: dict[str, Any], config: ConfigContainer) -> list[Change]:
    """What differs between the configuration that the run was started with and today's.

    Raises:
        RunExistsError: when the stored one cannot be read.
    """
    try:
        return changes(content["config"], config)
    except ConfigError as error:
        raise RunExistsError(f"The stored configuration cannot be read: {error} {_ways_out(folder)}.") from None


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


def _next_free(folder: RunFolder) -> RunFolder:
    number = 2
    candidate = folder
    while candidate.path.exists():
        candidate = RunFolder(folder.path.with_name(f"{folder.path.name}-{number}"))
        number += 1
    return candidate


def _make_writable(folder: RunFolder) -> None:
    if folder.path.is_dir() and not all(_is_own(folder, each) for each in folder.path.iterdir()):
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


def _is_own(folder: RunFolder, path: Path) -> bool:
    """Whether a file is one that an evaluation before training leaves, so that the folder is still the run's."""
    return path == folder.lock or any(path.match(pattern) for pattern in REPORTS) or _holds_only_events(path)


def _holds_only_events(path: Path) -> bool:
    """Whether a folder has event files of TensorBoard, also in folders below, and nothing else."""
    if not path.is_dir() or path.is_symlink():
        return False
    is_all = all(one.is_dir() or one.match(EVENT_FILES) for one in path.rglob("*"))
    return is_all and any(path.rglob(EVENT_FILES))


def _start(folder: RunFolder, config: ConfigContainer) -> None:
    folder.write(
        {
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
    )
