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

from onstep.config import ConfigContainer, diff, from_dict
from onstep.errors import ConfigError, RunExistsError

Status = Literal["running", "completed", "stopped", "preempted", "failed"]

HARMLESS = (
    "run.",
    "logger.",
    "trainer.",
    "env_vars",
    "dist.",
    "ddp.",
    "train.micro_batch_size",
    "train.manual_gc",
    "validation.eval_micro_batch_size",
    "dataset.num_workers",
    "dataset.pin_memory",
    "dataset.persistent_workers",
)
"""Keys that do not change what is learned; the same run may be asked for on other ranks."""


@dataclass(frozen=True)
class RunFolder:
    """`<output_dir>/<name>/`: run.json, trainer_logs.json, decisions.jsonl, model/ and the loss plot."""

    path: Path

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

    def finish(self, status: Status, step: int) -> None:
        """Record how the run ended."""
        self.write({**self.read(), "status": status, "step": step, "ended_at": time.time()})


@dataclass(frozen=True)
class Claim:
    """The outcome of asking for a run's folder."""

    folder: RunFolder
    is_finished: bool
    """The same run was completed here already; nothing was changed."""


def claim_run_folder(config: ConfigContainer) -> Claim:
    """Take the folder of the run that `config` names, on rank 0.

    Raises:
        RunExistsError: when the folder holds another run, an unfinished one, or other files.
        ConfigError: when it cannot be written.
    """
    assert config.run.name is not None
    folder = RunFolder(Path(config.run.output_dir) / config.run.name)
    if config.run.fresh:
        folder = _next_free(folder)
    if folder.run_json.exists() and not _failed_before_its_first_step(folder):
        _check_same_run(folder, config)
        return Claim(folder, is_finished=True)
    if not folder.run_json.exists():
        _make_writable(folder)
    _start(folder, config)
    return Claim(folder, is_finished=False)


def _failed_before_its_first_step(folder: RunFolder) -> bool:
    """Whether the run there never trained: a mended configuration may take its place."""
    content = folder.read()
    return content.get("status") == "failed" and not content.get("step") and not folder.journal.exists()


def _next_free(folder: RunFolder) -> RunFolder:
    number = 2
    candidate = folder
    while candidate.path.exists():
        candidate = RunFolder(folder.path.with_name(f"{folder.path.name}-{number}"))
        number += 1
    return candidate


def _check_same_run(folder: RunFolder, config: ConfigContainer) -> None:
    """Raise unless the folder holds this very run, completed."""
    content = folder.read()
    ways_out = (
        f"choose another name (run.name={folder.path.name}-new), start {folder.path.name}-2 beside it "
        f"(run.fresh=true), or delete the folder"
    )
    changed = first_difference(content["config"], config)
    if changed is not None:
        key, old, new = changed
        raise RunExistsError(
            f"{folder.path} holds another run: {key} is {old!r} there and {new!r} here. Nothing was touched; "
            f"{ways_out}."
        )
    status = content.get("status")
    if status != "completed":
        raise RunExistsError(
            f"{folder.path} holds an unfinished run (status {status!r}, step {content.get('step', 0)}), and this "
            f"version writes no checkpoints to continue from. Nothing was touched; {ways_out}."
        )


def first_difference(stored: dict[str, Any], config: ConfigContainer) -> tuple[str, Any, Any] | None:
    """The first key that changes what is learned, with its stored value and today's; None where there is none."""
    try:
        before = from_dict(stored)
    except ConfigError as error:
        raise RunExistsError(f"The stored configuration cannot be read: {error} Choose another run.name.") from None
    for key, old, new in diff(before, config):
        if not key.startswith(HARMLESS):
            return key, old, new
    return None


def _make_writable(folder: RunFolder) -> None:
    if folder.path.is_dir() and any(folder.path.iterdir()):
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
