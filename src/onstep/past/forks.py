"""Prepares the directory of a fork: a new run that begins at the end of a step of another run, whose files are kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onstep.checkpoint import CheckpointInfo, checkpoints, newest_verified
from onstep.config import ChangeClass, ConfigContainer, apply_overrides, from_dict, resolve
from onstep.config.differences import Change, changes, decide, describe, of_kind
from onstep.config.keys import typed_copy
from onstep.errors import ConfigError
from onstep.events.settings import check_setting
from onstep.past.place import plan_rewind
from onstep.training.runs.run_dir import RunDir

FORKED_FROM = "forked_from"
"""The entry of run.json that says where a fork comes from."""
_OWN_KEYS = (
    "run.name",
    "run.fresh",
    "logger.logging_dir",
    "checkpoint.load",
    "checkpoint.ckpt_step",
    "checkpoint.resume",
)
"""Keys that a fork sets itself; it logs in its own directory."""
_PLACES = ("checkpoint.save", "logger.logging_dir", "logger.tensorboard_dir", "logger.wandb_save_dir")
"""Keys of directories that a run writes to."""


@dataclass(frozen=True)
class Origin:
    """Where a fork comes from and what differs, as its run.json has it."""

    run: str
    """The parent's directory."""
    run_id: str
    step: int
    """The fork begins at the end of this step."""
    changes: dict[str, list[Any]]
    """The keys of the configuration that differ: the parent's value and the fork's."""
    without_samples: list[int]
    lr_factor: float | None

    def __str__(self) -> str:
        differing = [f"{key} {old!r} -> {new!r}" for key, (old, new) in self.changes.items()]
        if self.without_samples:
            differing.append(f"without samples {', '.join(map(str, self.without_samples))}")
        if self.lr_factor is not None:
            differing.append(f"learning rate times {self.lr_factor:g}")
        return f"from {self.run} at the end of step {self.step}: {'; '.join(differing) or 'nothing changed'}"


@dataclass(frozen=True)
class Fork:
    """A fork that can be started."""

    parent: RunDir
    start: CheckpointInfo | None
    """The parent's newest checkpoint up to the step; None to begin at its seed."""
    directory: RunDir
    before: ConfigContainer
    """The configuration up to the step."""
    config: ConfigContainer
    """The configuration from the step on."""
    found: list[Change]
    origin: Origin
    was_worker: bool = False
    """Whether the parent was a worker of a DiLoCo server."""

    @property
    def is_exact(self) -> bool:
        """Whether there is a checkpoint of the step itself, so that nothing is repeated."""
        return self.begin == self.origin.step

    @property
    def begin(self) -> int:
        """The step of the state that it begins with."""
        return 0 if self.start is None else self.start.step

    def up_to_step(self) -> ConfigContainer:
        """The configuration of the steps that are repeated, which exits at the end of them with a checkpoint."""
        config = typed_copy(self.before)
        config.train.exit_interval, config.logger.console = self.origin.step, "quiet"
        return config

    def describe(self) -> str:
        """What the fork is, and what it costs, in a line each."""
        number = self.origin.step - self.begin
        cost = f"\n{number} steps are repeated first, from step {self.begin}, as the parent did them" if number else ""
        table = f"\n{describe(self.found)}" if self.found else ""
        alone = "\nits parent was a worker of a DiLoCo server; the fork trains alone, on all samples" * self.was_worker
        return f"{self.directory.path.name} is forked {self.origin}{cost}{alone}{table}"


def plan_fork(
    parent: Path,
    step: int,
    name: str | None = None,
    *,
    overrides: Sequence[str] = (),
    without_samples: Sequence[int] = (),
    lr_factor: float | None = None,
) -> Fork:
    """Check everything that can be checked of a fork before its directory is made.

    Args:
        parent: the directory of the run.
        step: the fork begins at the end of this step; 0 is before the first one.
        name: of the fork, beside its parent; None for the parent's name with the step.
        overrides: `key=value` items of the configuration that differ.
        without_samples: ids of samples that the fork leaves out, from this step on.
        lr_factor: factor on the learning rate from this step on, as `onstep control set lr_factor` has it.

    Raises:
        ConfigError: for a step beyond the run, or a change that the parent's state does not allow.
        CheckpointError: if the parent's checkpoints cannot be read.
    """
    own, content = RunDir(parent.absolute()), RunDir(parent).read()
    if own.layout == "hugging_face":
        raise ConfigError(
            f"{parent} is a run of a Trainer, whose model and data are in its script; fork it there: copy the "
            f"checkpoint into another output_dir and call train(resume_from_checkpoint=True)."
        )
    undone = plan_rewind(parent, step).rollbacks if step else ()
    check_setting("lr_factor", lr_factor)
    root = _checkpoints_of(own, content)
    start = newest_verified(root, step)
    is_worker = _was_worker(root)
    if (undone or is_worker) and (start is None or start.step != step):
        had = "had rounds of a DiLoCo server" if is_worker else "was rolled back"
        raise ConfigError(
            f"{parent} {had} between its checkpoint and step {step}, which cannot be repeated; fork at a step with a "
            f"checkpoint: {', '.join(str(one.step) for one in reversed(checkpoints(root)))}."
        )
    before = _continued_with(own, root, content, step)
    if step in before.train.iterations_to_skip:
        raise ConfigError(f"step {step} of {parent} was skipped (train.iterations_to_skip); fork at another step.")
    name = f"{own.path.name}-at-{step}" if name is None else name
    before = _in_place_of(before, own, name, keeps_load=start is None)
    config, found = _changed(before, overrides)
    origin = Origin(
        str(own.path),
        str(content.get("run_id", "")),
        step,
        {one.key: [_plain(one.old), _plain(one.new)] for one in found},
        sorted(set(without_samples)),
        lr_factor,
    )
    directory = RunDir(Path(config.run.output_dir).absolute() / str(config.run.name), "onstep")
    return Fork(own, start, directory, before, config, found, origin, is_worker)


def _checkpoints_of(run: RunDir, content: Mapping[str, Any]) -> Path:
    checkpoint = content["config"].get("checkpoint")
    save = checkpoint.get("save") if isinstance(checkpoint, dict) else None
    return Path(save) if isinstance(save, str) else run.checkpoints


def _was_worker(root: Path) -> bool:
    """Whether the newest checkpoint is that of a DiLoCo worker."""
    return any("diloco" in one.manifest.components for one in checkpoints(root)[:1])


def _continued_with(run: RunDir, root: Path, content: Mapping[str, Any], step: int) -> ConfigContainer:
    """The configuration with which the run continued after a step: that of the next checkpoint, else its last one.

    What a checkpoint records is completed by paths and derived values, so only what changes the trajectory counts.
    """
    current = resolve(from_dict(content["config"]))
    later = [one for one in reversed(checkpoints(root)) if one.step > step and one.manifest.config]
    if not later:
        return current
    stored = of_kind(changes(later[0].manifest.config, current), ChangeClass.TRAJECTORY)
    return decide(stored, current, "keep")


def _in_place_of(config: ConfigContainer, parent: RunDir, name: str, *, keeps_load: bool) -> ConfigContainer:
    """The parent's configuration for a run of another name, which writes to no place of the parent's."""
    config = typed_copy(config)
    config.run.name, config.run.output_dir, config.run.fresh = name, str(parent.path.parent), False
    config.run.without_commands_from = None
    config.checkpoint.resume, config.checkpoint.on_config_change = True, "error"
    if not keeps_load:
        config.checkpoint.load = config.checkpoint.ckpt_step = None
    own = parent.path.parent / name
    for key in _PLACES:
        section, _, field = key.partition(".")
        place = getattr(getattr(config, section), field)
        if place is None:
            continue
        path = Path(place).absolute()
        if key in ("checkpoint.save", "logger.logging_dir"):
            moved = None
        elif path.is_relative_to(parent.path):
            moved = str(own / path.relative_to(parent.path))
        else:
            moved = str(path.with_name(f"{path.name}-{name}"))
        setattr(getattr(config, section), field, moved)
    return config


def _changed(before: ConfigContainer, overrides: Sequence[str]) -> tuple[ConfigContainer, list[Change]]:
    config = typed_copy(before)
    values = apply_overrides(config, overrides)
    for key in values:
        if key in _OWN_KEYS:
            raise ConfigError(f"{key} cannot change in a fork, which sets it itself; drop it (--name names the fork).")
    config = resolve(config)
    found = [one for one in changes(before, config) if not one.key.startswith(("run.", "logger.console"))]
    decide(found, config, "apply")  # refuses what the state does not fit
    if any(one.key.startswith(("dataset.", "tokenizer.")) for one in found):
        config.checkpoint.on_config_change = "apply"
    return config, found


def _plain(value: Any) -> Any:
    """A value of the configuration as JSON has it."""
    return value if isinstance(value, (str, int, float, bool, list, type(None))) else str(value)
