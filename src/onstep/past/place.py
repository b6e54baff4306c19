"""Finds from where a step of a run can be repeated and at what cost, and makes the temporary copy that repeats it."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from onstep.analysis.logs.decisions_log import details_of, read_decisions
from onstep.checkpoint import CheckpointInfo, checkpoints, resolve
from onstep.checkpoint.catalog.discovery import newest_verified
from onstep.config import ConfigContainer
from onstep.config.load import from_dict
from onstep.errors import CheckpointError, ConfigError, DataError, OnstepError
from onstep.files.bounded_reading import read_json
from onstep.past.leftovers import temporary_directory
from onstep.record import Record, leading_records
from onstep.record.kinds import FILE_NAME
from onstep.training.checkpointing.starts import asked_start
from onstep.training.runs.identity import IDENTITY_FILE
from onstep.training.runs.run_dir import RunDir

COPIED = (IDENTITY_FILE, "tokenizer.json")
"""What a start of a run reads in its directory, beside run.json, decisions and checkpoints."""


@dataclass(frozen=True)
class Plan:
    """How a step of a run will be repeated."""

    directory: Path
    """The run's directory, which is only read."""
    step: int
    """The step to hold at; it counts from 1."""
    start: CheckpointInfo | None
    """The checkpoint to repeat from; None is the beginning of the run."""
    config: ConfigContainer
    """The configuration with which the run trained the step."""
    run_json: Mapping[str, Any]
    """The content of the run's `run.json`."""
    records: list[Record] = field(repr=False)
    """The run's record, as far as it was written when it was looked at."""
    branch: int = 0
    """The number of rollbacks after which the run trained the step that it kept."""
    rollbacks: tuple[int, ...] = ()
    """The steps that rollbacks, which are repeated too, went back to."""
    began_after: int = 0
    """The step of another run's checkpoint that the run began with."""

    @property
    def start_step(self) -> int:
        """The last step that is not repeated."""
        return self.began_after if self.start is None else self.start.step

    @property
    def num_steps(self) -> int:
        """How many steps are repeated, without those that rollbacks undo."""
        return self.step - self.start_step

    @property
    def is_of_trainer(self) -> bool:
        """Whether a Trainer trained it, whose model and data only its script has."""
        return self.run_json.get("layout") == "hugging_face" or "train_data" in self.run_json.get("identity", {})

    @property
    def num_ranks(self) -> int:
        """The number of processes that trained the step."""
        starts = [one for one in self.records if one.get("kind") == "start" and one.get("global_step", 0) < self.step]
        return int(starts[-1].get("num_ranks", 1)) if starts else 1

    @property
    def seconds(self) -> float | None:
        """The time that these steps took, by the record; None if it has no two logged steps."""
        known = [one for one in self.records if one.get("global_step", 0) <= self.step]
        logs = [one for one in known if one.get("kind") == "log" and "loss" in one]
        times = [
            (after["timestamp"] - before["timestamp"]) / (after["global_step"] - before["global_step"])
            for before, after in pairwise(logs[-50:])
            if after["global_step"] > before["global_step"]
        ]
        return median(times) * self.num_steps if times else None

    @property
    def cost(self) -> str:
        """One line about what it costs."""
        origin = "the beginning of the run" if self.start is None else f"the checkpoint of step {self.start.step}"
        steps = f"{self.num_steps} step{'s' * (self.num_steps != 1)}"
        time = "" if self.seconds is None else f", about {_shown(self.seconds)} by the record"
        undone = f"; {len(self.rollbacks)} rollbacks on the way are repeated too" if self.rollbacks else ""
        return f"repeating {steps} from {origin}{time}, plus loading{undone}"


def plan_rewind(run: str | Path, step: int) -> Plan:
    """Find the nearest verified checkpoint before a step of a run.

    Args:
        run: the run's directory.
        step: counts from 1, as in the record.

    Raises:
        ConfigError: if there is no such run or step, or it cannot be repeated from what the directory holds.
    """
    directory = Path(run)
    run_json = _run_json(directory)
    if not isinstance(step, int) or step < 1:
        raise ConfigError(f"step={step!r} must be an integer >= 1; 1 is the first step of a run.")
    records = leading_records(directory / FILE_NAME)
    last = last_step(directory, run_json, records)
    if step > last:
        raise ConfigError(f"step={step} is beyond {directory}, whose last known step is {last}; choose 1 to {last}.")
    config = _config(run_json, directory)
    found = _known(directory, config)
    branches = rollbacks_of(directory)
    start = _start(directory, config, step)
    began_after = _began_after(config) if start is None else 0
    if step <= began_after:
        raise ConfigError(
            f"step={step} is before {directory}, which began with step {began_after} of {config.checkpoint.load}; "
            f"rewind that run, or choose {began_after + 1} to {last}."
        )
    captured = None if start is None else start.manifest.extra.get("decisions", {}).get("branch", 0)
    passed = [to_step for to_step, bad_step in branches[captured or 0 :] if to_step < step <= bad_step]
    later = min((one for one in found if one.step >= step), key=lambda one: one.step, default=None)
    if later is not None and later.manifest.config:
        config = from_dict(later.manifest.config)
    return Plan(
        directory=directory,
        step=step,
        start=start,
        config=config,
        run_json=run_json,
        records=records,
        branch=max((number for number, (to_step, _) in enumerate(branches, 1) if to_step < step), default=0),
        rollbacks=tuple(passed),
        began_after=began_after,
    )


def last_step(directory: Path, run_json: Mapping[str, Any], records: list[Record]) -> int:
    """The last step that a run is known to have trained, or that failed."""
    steps = [int(one["global_step"]) for one in records if isinstance(one.get("global_step"), int)]
    steps += [int(run_json.get("step", 0)), RunDir(directory).newest_step or 0]
    return max(steps) + (run_json.get("status") == "failed")


@contextmanager
def copied(plan: Plan) -> Iterator[Path]:
    """A temporary copy of the run at the checkpoint, without the checkpoint's files: they are read where they are.

    Yields its directory, which only rank 0 has. What killed rewinds have left is removed.
    """
    if os.environ.get("RANK", "0") != "0":  # the ranks are not connected yet
        yield Path(tempfile.gettempdir()) / "onstep-rewind" / plan.directory.name
        return
    with temporary_directory("onstep-rewind-") as above:
        directory = above / plan.directory.resolve().name
        (directory / "checkpoints").mkdir(parents=True)
        for name in (*COPIED, "decisions.jsonl"):
            if (plan.directory / name).is_file():
                shutil.copyfile(plan.directory / name, directory / name)
        content = {**plan.run_json, "status": "paused", "continued_at": plan.run_json.get("started_at", 0.0)}
        if plan.start is None:
            content.pop("started_from", None)
        content["layout"] = "onstep"
        (directory / "run.json").write_text(json.dumps(content), encoding="utf-8")
        for info in checkpoints(plan.start.path.parent) if plan.start is not None and plan.rollbacks else ():
            if info.step in plan.rollbacks and info.step <= plan.start_step:  # later ones are saved again
                shutil.copytree(info.path, directory / "checkpoints" / info.path.name)
        yield directory


def _run_json(directory: Path) -> dict[str, Any]:
    try:
        content = read_json(directory / "run.json")
    except (OSError, DataError) as error:
        raise ConfigError(
            f"{directory} is not a run that can be rewound: {error}; give the directory of a run."
        ) from None
    if not isinstance(content, dict) or not isinstance(content.get("config"), dict):
        raise ConfigError(f"{directory}/run.json is not the record of a run; give the directory of a run.")
    return content


def _config(run_json: Mapping[str, Any], directory: Path) -> ConfigContainer:
    try:
        return from_dict(run_json["config"])
    except OnstepError as error:
        raise ConfigError(
            f"the configuration in {directory}/run.json cannot be read by this version: {error}"
        ) from None


def _root(directory: Path, config: ConfigContainer) -> Path:
    return RunDir(directory).checkpoints if config.checkpoint.save is None else Path(config.checkpoint.save)


def _known(directory: Path, config: ConfigContainer) -> list[CheckpointInfo]:
    run_id = RunDir(directory).run_id
    return [one for one in checkpoints(_root(directory, config)) if one.manifest.run_id in ("", run_id)]


def _began_after(config: ConfigContainer) -> int:
    """The step of the checkpoint that a run loaded from elsewhere; 0 if it began from scratch or with weights alone."""
    if config.checkpoint.load is None or asked_start(config) is None:
        return 0
    try:
        return resolve(Path(config.checkpoint.load).expanduser(), step=config.checkpoint.ckpt_step).step
    except CheckpointError:
        return 0  # gone since, which matters only where the run itself has no checkpoint


def _start(directory: Path, config: ConfigContainer, step: int) -> CheckpointInfo | None:
    return newest_verified(_root(directory, config), step - 1)


def rollbacks_of(directory: Path) -> list[tuple[int, int]]:
    """(step gone back to, step undone) of each rollback of the run."""
    path = directory / "decisions.jsonl"
    done = [one for one in read_decisions(path) if one.get("flag") == "rolled_back"] if path.is_file() else []
    return [(int(one.get("to_step", 0)), int(one.get("bad_step", 0))) for one in map(details_of, done)]


def _shown(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 7200 else f"{seconds / 3600:.3g} h"
