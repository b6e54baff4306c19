"""Copies of what commands read from an object store, in the user's cache: a run's files, and its checkpoints."""

from __future__ import annotations

import os
import re
import shutil
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path, PurePosixPath

from filelock import FileLock

from onstep.checkpoint import Retention, best, verify
from onstep.checkpoint.storage.manifest import MANIFEST
from onstep.errors import CheckpointError, StoreError
from onstep.mirror.remote_checkpoints import DIRECTORY, RemoteCheckpoint, RemoteCheckpoints
from onstep.mirror.run_files import RunFiles
from onstep.stores.bucket import Bucket
from onstep.stores.lease import LEASE, parse_lease
from onstep.stores.urls import check_url, copies_directory, is_url, joined, local_place

_CHOSEN = re.compile(r"(?P<url>.+)@(?P<choice>[0-9]+|best)")
_CHECKPOINT = re.compile(rf"(?P<run>.+?)(/{DIRECTORY})?/checkpoint-(?P<step>[0-9]+)(-e[0-9]+-[0-9a-f]{{8}})?")
_WEIGHTS = re.compile(r"(model|adapter)/.*|(model|adapter_model)[^/]*\.safetensors")
"""Names of files of final weights, of which those of a Trainer's run are in its directory itself."""


@dataclass(frozen=True)
class Named:
    """What a URL on a command line names."""

    run: str
    """The URL of the run."""
    choice: str | None = None
    """A step, or `best`; None is the newest checkpoint."""


def named(words: str) -> Named:
    """Read `URL`, `URL@STEP`, `URL@best`, or the URL of a checkpoint in the store.

    Args:
        words: as given.

    Raises:
        ConfigError: for a URL that has credentials.
    """
    match = _CHOSEN.fullmatch(words)
    url, choice = (words, None) if match is None else (match["url"], match["choice"])
    check_url("the URL", url)
    url = url.rstrip("/").removesuffix(f"/{DIRECTORY}")
    of_step = _CHECKPOINT.fullmatch(url)
    return Named(url, choice) if of_step is None else Named(of_step["run"], of_step["step"])


def run_copy(words: str, *, weights: bool = False) -> Path:
    """The local directory of a run in a store, with what its logs, records and reports are now.

    Args:
        words: see `named`; which checkpoint does not matter.
        weights: whether the final weights are fetched, too.

    Raises:
        StoreError: if there is no run at the URL, or it cannot be read.
    """
    url = named(words).run
    bucket, directory = Bucket(url), local_place(url, copies_directory())
    listed = RunFiles(bucket, directory).remote()
    if not listed:
        raise StoreError(f"{url} holds no run; give the URL of one, as run.output_dir and run.name make it.")
    with _alone(directory):
        wanted = [one for one in listed if weights or _WEIGHTS.fullmatch(one.name) is None]
        for gone in [path for path in directory.rglob("*") if path.is_file() and DIRECTORY not in path.parts]:
            with suppress(FileNotFoundError):
                gone.unlink()
        bucket.download(wanted, directory)
    return directory


def copy_of_runs(url: str) -> Path:
    """The local directory of what `run_copy` gives for each of the runs directly below a URL.

    Raises:
        StoreError: if there are none, or they cannot be read.
    """
    check_url("the URL", url)
    url, directory = url.rstrip("/"), local_place(url, copies_directory())
    records = [PurePosixPath(one.name) for one in Bucket(url).list()]
    names = {str(path.parent) for path in records if path.name == "run.json" and len(path.parts) == 2}
    if not names:
        raise StoreError(f"{url} has no runs; give the URL of a directory of runs, as run.output_dir has it.")
    for name in sorted(names):
        run_copy(joined(url, name))
    for gone in [path.parent for path in directory.glob("*/run.json") if path.parent.name not in names]:
        shutil.rmtree(gone, ignore_errors=True)
    return directory


def checkpoint_copies(words: str, *, every: bool = False) -> Path:
    """The local copy of a run in a store with the checkpoint that `words` name, or with all; verified.

    Args:
        words: see `named`.
        every: fetch all checkpoints.

    Raises:
        CheckpointError: if there is no such checkpoint, or it is damaged.
        StoreError: if the store cannot be read.
    """
    asked = named(words)
    directory = run_copy(asked.run)
    remote = RemoteCheckpoints(Bucket(asked.run))
    valid = _newest_of_each_step(remote)
    chosen = valid if every else [_chosen(remote, valid, asked)]
    with _alone(directory):
        _forget_others(directory / DIRECTORY, valid)
        for one in chosen:
            _fetch(remote, one, directory / DIRECTORY)
    return directory


def local_words(words: str) -> str:
    """The same words with the path of a local copy, for what reads checkpoints: `URL@STEP` is `PATH@STEP`.

    Args:
        words: a path, a name, or a URL.

    Raises:
        CheckpointError: if there is no such checkpoint, or it is damaged.
        StoreError: if the store cannot be read.
    """
    if not is_url(words):
        return words
    choice = named(words).choice
    directory = checkpoint_copies(words)
    return str(directory) if choice is None else f"{directory}@{choice}"


@lru_cache(maxsize=32)
def trained_copy(words: str) -> Path:
    """The local copy of what a URL names to take weights from: a run with its final weights, or a checkpoint.

    A run without final weights has its newest checkpoint. Fetched once in a process.

    Raises:
        CheckpointError: if there is no such checkpoint, or it is damaged.
        StoreError: if the store cannot be read.
    """
    asked = named(words)
    if asked.choice is not None:
        return local_checkpoint(words)
    directory = run_copy(asked.run, weights=True)
    has_final = any((directory / place / "config.json").is_file() for place in (".", "model"))
    return directory if has_final else checkpoint_copies(words)


def local_checkpoint(words: str) -> Path:
    """The local copy of the checkpoint that a URL names, the newest by default.

    Raises:
        CheckpointError: if there is no such checkpoint, or it is damaged.
        StoreError: if the store cannot be read.
    """
    asked = named(words)
    directory = checkpoint_copies(words)
    remote = RemoteCheckpoints(Bucket(asked.run))
    return directory / DIRECTORY / f"checkpoint-{_chosen(remote, _newest_of_each_step(remote), asked).step}"


def outline(words: str, directory: Path) -> Path:
    """A directory of checkpoints whose files have the sizes that the store lists, but of which only manifests are read.

    Args:
        words: the URL of a run.
        directory: an empty one, where it is made.

    Raises:
        StoreError: if the store cannot be read.
    """
    remote = RemoteCheckpoints(Bucket(named(words).run))
    for one in _newest_of_each_step(remote):
        target = directory / f"checkpoint-{one.step}"
        for path, listed in one.files.items():
            (target / path).parent.mkdir(parents=True, exist_ok=True)
            (target / path).touch()
            os.truncate(target / path, listed.size)
        found = remote.bucket.get(f"{one.name}/{MANIFEST}")
        (target / MANIFEST).write_bytes(b"" if found is None else found[0])
    return directory


def _newest_of_each_step(remote: RemoteCheckpoints) -> list[RemoteCheckpoint]:
    found = remote.bucket.get(LEASE)
    valid = remote.valid(None if found is None else parse_lease(found[0], remote.bucket.url))
    return list({one.step: one for one in reversed(valid)}.values())[::-1]


def _chosen(remote: RemoteCheckpoints, valid: list[RemoteCheckpoint], asked: Named) -> RemoteCheckpoint:
    wanted = [one for one in valid if asked.choice in (None, "best") or one.step == int(asked.choice or 0)]
    if not wanted:
        steps = ", ".join(str(one.step) for one in valid) or "none"
        what = "checkpoint" if asked.choice is None else f"checkpoint of step {asked.choice}"
        raise CheckpointError(f"{asked.run} has no {what}; available steps: {steps}.")
    if asked.choice != "best":
        return wanted[0]
    infos = remote.infos(wanted)
    stored = infos[0].manifest.config_section("validation") if infos else {}
    metric, greater = stored.get("metric_for_best_model") or "loss", stored.get("greater_is_better")
    found = best(infos, Retention(metric=str(metric), greater_is_better=greater))
    if found is None:
        raise CheckpointError(f"{asked.run} has no best checkpoint: none has a value for {metric!r}; choose a step.")
    return next(one for one in wanted if one.step == found.step)


def _fetch(remote: RemoteCheckpoints, one: RemoteCheckpoint, root: Path) -> None:
    target = root / f"checkpoint-{one.step}"
    found = remote.bucket.get(f"{one.name}/{MANIFEST}")
    if target.exists():
        with suppress(CheckpointError, OSError):
            if found is not None and (target / MANIFEST).read_bytes() == found[0]:
                verify(target)
                return
        shutil.rmtree(target)
    remote.fetch(one, root)


def _forget_others(root: Path, valid: list[RemoteCheckpoint]) -> None:
    """Delete copies of checkpoints that the store does not have any more."""
    kept = {f"checkpoint-{one.step}" for one in valid}
    for path in root.glob("checkpoint-*"):
        if path.name not in kept:
            shutil.rmtree(path, ignore_errors=True)


def _alone(directory: Path) -> FileLock:
    """Keeps other processes out of a copy while it is made."""
    directory.mkdir(parents=True, exist_ok=True)
    return FileLock(f"{directory}.copy.lock")
