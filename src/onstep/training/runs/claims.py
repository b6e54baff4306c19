"""Claims the directory of a run: decides whether it is new, continued, finished or another run's, and locks it."""

from __future__ import annotations

import errno
import os
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from onstep.checkpoint import CheckpointInfo
from onstep.config import ChangeClass, ConfigContainer
from onstep.config.differences import Change, changes, decide, of_kind
from onstep.config.trackers import TRACKERS
from onstep.errors import ConfigError, RunExistsError
from onstep.trackers import tracker_class
from onstep.trackers.services.tensorboard_tracker import EVENT_FILES
from onstep.training.protocols import StateDict
from onstep.training.runs.hold import MEMORY_NOTE, PROBES, Hold, abandoned_on_error, missing_directories, remove_empty
from onstep.training.runs.hub import hub_revisions, recorded_revisions
from onstep.training.runs.identity import IDENTITY_FILE, Comparison, Identify, Identity, compare, ways_to_continue
from onstep.training.runs.lock import LEASE
from onstep.training.runs.mirrored import MirroredRun
from onstep.training.runs.provenance import provenance
from onstep.training.runs.run_dir import FINISHED, RunDir, next_free
from onstep.training.runs.stalled_starts import starts_at_step

REPORTS = ("record*.jsonl", "trackers", "trainer_logs*.json", "gradient_norms*.json", "parameter_norms*.json")
"""What metrics logs write into a run's directory, perhaps before it becomes one, as trackers do."""

LEFTOVERS = (
    "run.json.tmp",
    IDENTITY_FILE,
    f"{IDENTITY_FILE}.tmp",
    MEMORY_NOTE,
    f"{MEMORY_NOTE}.tmp",
    PROBES,
    LEASE,
    ".trainer_logs*.json.*.tmp",
    ".metrics*.csv.*.tmp",
)
"""Files of ours that a process leaves behind if it is killed before it has written run.json, or while replacing one."""

_ELSEWHERE = "another run.output_dir"
_ATTEMPTS = 10
"""To take hold of a directory, as others whose start failed may remove it meanwhile."""


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
    start: CheckpointInfo | None = None
    """The verified checkpoint that a repeated run begins with, in the directory of the original; None looks for one."""


def acquire_run_dir(
    config: ConfigContainer,
    identify: Identify | None = None,
    revisions: Mapping[str, str] | None = None,
    user_code: Mapping[str, object] | None = None,
) -> tuple[Claim, Hold | None]:
    """Claim the directory of the run that `config` names, on rank 0: a new one, or one to continue.

    Args:
        config: the run's configuration.
        identify: determines what the run is trained on; None records and compares nothing but the configuration.
        revisions: the commits of its datasets on the Hub, by name.
        user_code: what run.json has of the user's callbacks and functions, by kind.

    Returns:
        The claim, and the hold that keeps other processes out; None for a finished run.

    Raises:
        RunExistsError: if the directory holds another run, other files, or one that a live process works on; also if
            the data of the run has changed, unless `checkpoint.on_config_change` is apply.
        ConfigError: if it cannot be written.
    """
    acquire = partial(_acquire_local, config, identify, revisions or {}, user_code or {})
    return in_store(config, acquire) if config.run.is_in_store else acquire()


def in_store(config: ConfigContainer, acquire: Callable[[], tuple[Claim, Hold | None]]) -> tuple[Claim, Hold | None]:
    """Claim a directory that is mirrored in an object store, once this machine has what is there.

    Args:
        config: the run's configuration.
        acquire: claims the local directory.
    """
    mirrored = MirroredRun(config)
    try:
        claim, hold = acquire()
    except BaseException:
        mirrored.close()
        raise
    if hold is None:  # the run is finished, and perhaps not uploaded
        mirrored.finish()
    else:
        hold.mirrored = mirrored
        mirrored.mirror.start()
    return claim, hold


def _acquire_local(
    config: ConfigContainer,
    identify: Identify | None,
    revisions: Mapping[str, str],
    user_code: Mapping[str, object],
) -> tuple[Claim, Hold | None]:
    directory = named_dir(config)
    try:
        finished = _finished(directory, config, identify)
    except OSError as error:
        raise _not_writable(directory, error) from None
    if finished is not None:
        return finished, None
    return hold_and_claim(directory, lambda: _start_or_continue(directory, config, identify, revisions, user_code))


def hold_and_claim(
    directory: RunDir,
    claim: Callable[[], Claim],
    *,
    shares: bool = False,
    elsewhere: str = _ELSEWHERE,
) -> tuple[Claim, Hold]:
    """Take hold of a directory, which is made if it is missing, and claim it. If that fails, it is as before.

    Args:
        directory: of a run or of a new one.
        claim: decides what happens there, and records it; no other process is in the directory then.
        shares: whether a new run may have its place among other files.
        elsewhere: what the user can choose if the directory cannot be written.

    Raises:
        RunExistsError: if it holds other files, or a live process works on it.
        ConfigError: if it cannot be written.
    """
    try:
        hold = _hold(directory, shares)
        with abandoned_on_error(hold):
            return claim(), hold
    except OSError as error:
        raise _not_writable(directory, error, elsewhere) from None


def _hold(directory: RunDir, shares: bool, attempts: int = _ATTEMPTS) -> Hold:
    made = missing_directories(directory.path)
    try:
        if not directory.run_json.exists():
            _make_writable(directory, shares)
        return Hold(directory.path, made)
    except BaseException as error:
        remove_empty(made)
        if not isinstance(error, FileNotFoundError) or attempts == 1:
            raise
    return _hold(directory, shares, attempts - 1)


def named_dir(config: ConfigContainer) -> RunDir:
    """The directory that a configuration names; with `run.fresh` one beside it that does not exist yet."""
    assert config.run.name is not None
    directory = RunDir(config.run.local_output_dir / config.run.name)
    is_taken = config.run.fresh and directory.path.exists()
    return RunDir(next_free(directory.path, 2)) if is_taken else directory


def _finished(directory: RunDir, config: ConfigContainer, identify: Identify | None) -> Claim | None:
    """The claim of a finished run, whose directory is only read."""
    try:
        if not directory.run_json.exists() or may_be_replaced(directory):
            return None
        claim, _ = _inspect(directory, config, identify)
    except RunExistsError:
        if directory.run_json.exists():
            raise
        return None  # its start has just failed
    return claim if claim.is_finished else None


def _start_or_continue(
    directory: RunDir,
    config: ConfigContainer,
    identify: Identify | None,
    revisions: Mapping[str, str],
    user_code: Mapping[str, object],
) -> Claim:
    """Start a run, or continue the existing one; no other process can by now."""
    if not directory.run_json.exists() or may_be_replaced(directory):
        directory, identity = RunDir(directory.path, "onstep"), Identity() if identify is None else identify(config)
        model = hub_revisions(config.checkpoint.pretrained_checkpoint)
        return start(directory, config, identity, hub_revisions={**model, **revisions}, user_code=user_code)
    claim, identity = _inspect(directory, config, identify)
    commits = {**recorded_revisions(directory), **revisions}
    go_on(claim, identity, hub_revisions=commits, user_code=user_code)
    return claim


def start(directory: RunDir, config: ConfigContainer, identity: Identity, **further: object) -> Claim:
    """Record a new run in its directory.

    Args:
        directory: where; this process holds its lock.
        config: the run's configuration.
        identity: what it is trained on.
        further: entries of run.json.
    """
    content: StateDict = {
        "format": 1,
        "run_id": uuid.uuid4().hex,
        "name": directory.path.name,
        "recipe": config.run.recipe,
        "status": "running",
        "step": 0,
        "started_at": time.time(),
        **provenance(),
        **further,
        "config": config.to_dict(),
    }
    directory.write(_with_identity(directory, content, identity))
    return Claim(directory, config, identity=identity.digests)


def go_on(claim: Claim, identity: Identity, **further: object) -> None:
    """Record that this process continues a run; see `start`.

    Raises:
        RunExistsError: if its SLURM job was requeued too often without a step.
    """
    before = claim.directory.read()
    counted = starts_at_step(before, claim.directory.newest_step or 0)
    content = {**before, "status": "running", "config": claim.config.to_dict()}
    content |= {"continued_at": time.time(), **counted, **further}
    changed = {name: facts for name, facts in provenance().items() if content.get(name) != facts}
    content.pop("continued_with", None)
    content |= {"continued_with": changed} if changed else {}
    claim.directory.write(_with_identity(claim.directory, content, identity))


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


def without_effect(config: ConfigContainer) -> str:
    """A note about options that choose where a run continues, for a run that is finished; empty if none is set."""
    options = {
        "run.without_commands_from": config.run.without_commands_from,
        "checkpoint.ckpt_step": config.checkpoint.ckpt_step,
    }
    given = " and ".join(f"{key}={value}" for key, value in options.items() if value is not None)
    return given and f"{given} had no effect: a finished run continues from there only if it is extended"


def _ways_out(directory: RunDir) -> str:
    return (
        f"choose another name (run.name={directory.path.name}-new), start {directory.path.name}-2 beside it "
        f"(run.fresh=true), or delete the directory"
    )


def may_be_replaced(directory: RunDir) -> bool:
    """Whether the run there never trained (a fixed configuration may replace it), or its owner starts again."""
    content = directory.read()
    if content.get("status") == "again":
        return True
    if directory.has_checkpoints:
        return False
    return content.get("status") == "failed" and not content.get("step") and not directory.metrics_log.exists()


def _make_writable(directory: RunDir, shares: bool) -> None:
    """Create the directory of a new run, and check that it can be written.

    Raises:
        RunExistsError: if it holds other files, unless it `shares` its place with them.
        OSError: if it cannot be written.
    """
    there = [one for one in directory.path.iterdir() if one != directory.lock] if directory.path.is_dir() else []
    if directory.run_json.exists():
        return  # another process has begun it just now
    if not shares and not all(map(_is_ours, there)):
        raise RunExistsError(
            f"{directory.path} contains files but no run.json, so it is not a run's directory. Nothing was touched; "
            "choose "
            f"another run.name or run.output_dir, or run.fresh=true."
        )
    directory.path.mkdir(parents=True, exist_ok=True)
    (directory.path / f".write-test-{os.getpid()}").touch()
    for probe in directory.path.glob(PROBES):  # this one, and those of killed processes
        probe.unlink(missing_ok=True)


def _not_writable(directory: RunDir, error: OSError, elsewhere: str = _ELSEWHERE) -> ConfigError:
    """The error for a directory that cannot be written, with its cause and remedy."""
    file = "" if error.filename in (None, str(directory.path)) else f"{error.filename}: "
    reason = f"{file}{error.strerror or error}"
    is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    remedy = "free space on its disk" if is_full else f"choose {elsewhere}, or make it writable"
    return ConfigError(f"The run's directory {directory.path} cannot be written ({reason}); {remedy}.")


def _is_ours(path: Path) -> bool:
    """Whether a file in a directory without run.json is a leftover, or a report of an evaluation before training."""
    if any(path.match(pattern) for pattern in LEFTOVERS):
        return (path.is_file() and not path.is_symlink()) or not os.path.lexists(path)
    reports = (*REPORTS, *(pattern for name in TRACKERS for pattern in tracker_class(name).artifacts))
    return any(path.match(pattern) for pattern in reports) or _holds_only_events(path)


def _holds_only_events(path: Path) -> bool:
    """Whether a directory contains only event files of TensorBoard, including in subdirectories."""
    if not path.is_dir() or path.is_symlink():
        return False
    is_all = all(one.is_dir() or one.match(EVENT_FILES) for one in path.rglob("*"))
    return is_all and any(path.rglob(EVENT_FILES))
