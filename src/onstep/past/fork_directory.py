"""Makes the directory of a fork, as if its parent had been killed at its newest checkpoint up to the step."""

from __future__ import annotations

import json
import os
import shutil
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

from onstep.analysis.logs.decisions_log import details_of, read_decisions
from onstep.checkpoint import CheckpointInfo, checkpoints, newest_verified
from onstep.checkpoint.storage.manifest import MANIFEST
from onstep.errors import CheckpointError, RunExistsError
from onstep.files.durability import replace_durably, sync_dir
from onstep.past.forks import FORKED_FROM, Fork
from onstep.past.leftovers import owned_name
from onstep.past.place import COPIED
from onstep.training.runs.decisions import BRANCH, WITHDRAWN, DecisionLog, Sent, content_of
from onstep.training.runs.run_dir import RunDir
from onstep.training.runs.sent_commands import branch_at, everything_sent, ids_to_repeat, steps_to_keep

AUTHOR = "onstep fork"
_OF_ITS_END = ("error", "ended_at", "continued_at", "continued_with", FORKED_FROM)
"""Entries of the parent's run.json that a fork does not continue."""
_LOGS = ("record.jsonl", "trainer_logs.json", "gradient_norms.json", "parameter_norms.json")
"""Logs of which a checkpoint has a position, and the path."""


def prepare(fork: Fork) -> bool:
    """Make the fork's directory, or find it as an earlier start has made it; whether it is new.

    The checkpoint's files are hard links where the file system has them. A directory appears under its name once
    everything is in it.

    Raises:
        RunExistsError: if another run has the name.
        CheckpointError: if the parent has deleted its checkpoint meanwhile.
    """
    path = fork.directory.path
    if is_prepared(fork):
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    with _made_aside(path) as aside:
        _link_checkpoints(fork, aside)
        write_decisions(fork, aside, has_state=fork.is_exact)
        for name in (*COPIED, *(_LOGS if _was_moved(fork) else ())):
            for found in fork.parent.path.glob(name):
                shutil.copyfile(found, aside / found.name)
        content = {key: value for key, value in fork.parent.read().items() if key not in _OF_ITS_END}
        config = fork.config if fork.is_exact else fork.before
        content |= {
            "run_id": _run_id(aside),
            "name": path.name,
            "status": "paused",
            "step": fork.begin,
            FORKED_FROM: {**asdict(fork.origin), "at": time.time(), "is_reached": fork.is_exact},
            "config": config.to_dict(),
        }
        replace_durably(aside / "run.json", json.dumps(content, indent=2) + "\n")
        try:
            aside.rename(path)
        except OSError:
            if is_prepared(fork):  # by another process, just now
                return False
            raise
        sync_dir(path.parent)
    return True


def is_prepared(fork: Fork) -> bool:
    """Whether the directory is this fork's already.

    Raises:
        RunExistsError: if it is another run's, or holds other files.
    """
    path = fork.directory.path
    if not path.exists():
        return False
    origin = fork.directory.read().get(FORKED_FROM) if fork.directory.run_json.exists() else None
    wanted = json.loads(json.dumps(asdict(fork.origin)))
    if isinstance(origin, dict) and {key: origin.get(key) for key in wanted} == wanted:
        return True
    raise RunExistsError(f"{path} exists and is not this fork; choose another --name.")


def has_reached_step(fork: Fork) -> bool:
    """Whether the fork's own part has begun, or begins next."""
    origin = fork.directory.read()[FORKED_FROM]
    newest = fork.directory.newest_step
    return bool(origin.get("is_reached")) or (newest is not None and newest >= fork.origin.step)


def begin_own_part(fork: Fork) -> None:
    """Record that the fork continues with its own configuration."""
    content = fork.directory.read()
    content[FORKED_FROM]["is_reached"] = True
    content |= {"status": "paused", "config": fork.config.to_dict()}
    fork.directory.write(content)


def discard(fork: Fork) -> None:
    """Remove the directory of a fork that has not trained."""
    shutil.rmtree(fork.directory.path, ignore_errors=True)


@contextmanager
def _made_aside(path: Path) -> Iterator[Path]:
    """A new directory beside `path`, without those that killed processes of this machine have left."""
    aside = path.parent / owned_name(path.parent, f".{path.name}.fork-")
    try:
        aside.mkdir()
        yield aside
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _was_moved(fork: Fork) -> bool:
    """Whether the parent's logs are not any more where its checkpoint says."""
    place = None if fork.start is None else fork.start.manifest.config_section("logger").get("logging_dir")
    return isinstance(place, str) and not Path(place).exists()


def _run_id(aside: Path) -> str:
    """The id that the fork's checkpoints have, or a new one."""
    found = checkpoints(aside / "checkpoints")
    return found[0].manifest.run_id if found else uuid.uuid4().hex


def _link_checkpoints(fork: Fork, aside: Path) -> None:
    """Link the checkpoint that the fork begins with, and those that rollbacks which it repeats go back to."""
    if fork.start is None:
        return
    run_id, root = uuid.uuid4().hex, fork.start.path.parent
    needed: set[object] = {*steps_to_keep(everything_sent(fork.parent.decisions))}
    decisions = read_decisions(fork.parent.decisions)
    needed |= {details_of(one).get("to_step") for one in decisions if one.get("flag") == "rolled_back"}
    for info in checkpoints(root):
        if info.step == fork.start.step or (info.step < fork.start.step and info.step in needed):
            _link(info, aside / "checkpoints" / f"checkpoint-{info.step}", run_id)
    newest = newest_verified(aside / "checkpoints")
    if newest is None or newest.step != fork.start.step:
        raise CheckpointError(f"{fork.start.path} was deleted meanwhile; try again, or fork at another step.")


def _link(info: CheckpointInfo, target: Path, run_id: str) -> None:
    for name in info.manifest.files:
        place = target / name
        place.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(info.path / name, place)
        except OSError:  # another file system, or one without hard links
            shutil.copyfile(info.path / name, place)
    manifest = replace(info.manifest, run_id=run_id)
    replace_durably(target / MANIFEST, manifest.to_bytes())
    sync_dir(target)


def _sets_rate(sent: Sent) -> bool:
    return sent.request.flag == "set" and sent.request.details.get("key") == "lr_factor"


def write_decisions(fork: Fork, aside: Path, *, has_state: bool) -> None:
    """Write what the parent was sent, which the fork repeats, and what differs in it.

    Args:
        fork: the fork.
        aside: its directory.
        has_state: whether it begins with a checkpoint of its step; what differs is then not part of that.
    """
    own = RunDir(aside, "onstep").decisions
    text = content_of(fork.parent.decisions)
    if text:
        own.write_bytes(text if text.endswith(b"\n") else text + b"\n")
    step, origin, log = fork.origin.step, fork.origin, DecisionLog()
    head = {"timestamp": time.time(), "step": step, BRANCH: branch_at(own, step), "author": AUTHOR, "event": ""}
    head |= {"rank": 0}
    saves = (details_of(one) for one in read_decisions(own) if one.get("flag") == "saved")
    if has_state and not any(one.get("checkpoint_step") == step for one in saves):
        captured = log.captured_now(own) | {BRANCH: head[BRANCH]}
        log.append(own, {**head, "flag": "saved", "reason": "", "details": {"checkpoint_step": step, **captured}})
    log.append(own, {**head, "flag": "forked", "reason": "", "details": asdict(origin)})
    if origin.lr_factor is not None:
        replaced = [one for one in everything_sent(own) if one.step >= step and _sets_rate(one)]
        if replaced:
            ids = {"command_ids": ids_to_repeat(replaced)}
            log.append(own, {**head, "flag": WITHDRAWN, "reason": "--lr-factor replaces them", "details": ids})
        details = {"key": "lr_factor", "value": origin.lr_factor, "command_id": uuid.uuid4().hex}
        log.append(own, {**head, "flag": "set", "reason": "--lr-factor", "details": details})
    if origin.without_samples:
        samples = {"sample_ids": origin.without_samples, "command_id": uuid.uuid4().hex}
        log.append(own, {**head, "flag": "leave_out", "reason": "--without-samples", "details": samples})
