"""Tells names of datasets on the Hugging Face Hub from local paths, and finds the commits that they stand for."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Sequence
from pathlib import Path, PurePath
from typing import Any

from onstep.config.suggestions import nearest_path
from onstep.errors import DataError, text_of

COMMIT = re.compile(r"[0-9a-f]{40}")
"""The hash of a commit."""
_HUB_NAME = re.compile(r"([\w-][\w.-]*(?:/[\w-][\w.-]*)?)(?:@([\w./-]+))?")
_OF_RECORDS = (".json", ".jsonl", ".ndjson", ".jsonlines", ".parquet", ".arrow", ".csv", ".tsv", ".txt")
_OF_ARCHIVES = (".gz", ".zst", ".bz2", ".xz", ".zip", ".tar", ".tgz")
_SUFFIXES = frozenset((*_OF_RECORDS, *_OF_ARCHIVES))
"""Those of files of data, which no name on the Hub is assumed to end in."""
_HUB_SECONDS = 30


class HubUnreachableError(DataError):
    """A name on the Hub cannot be looked up, since the Hub did not answer."""


def hub_name(path: str) -> tuple[str, str | None] | None:
    """The name and revision of a dataset on the Hub; None for what is or must be a local path.

    `parent/name` without a revision is local where the directory `parent` exists.
    """
    named = _HUB_NAME.fullmatch(path)
    if named is None or Path(path).exists() or PurePath(named[1]).suffix.lower() in _SUFFIXES:
        return None
    return None if named[2] is None and "/" in path and Path(path).parent.is_dir() else (named[1], named[2])


def check_exists(path: str) -> None:
    """Refuse a local path without a file or directory; URLs, patterns and names on the Hub are not looked up.

    Raises:
        DataError: with the nearest path that exists.
    """
    given = Path(os.path.expanduser(path))
    if given.exists() or "://" in path or glob.has_magic(path) or hub_name(path) is not None:
        return
    on_hub = f", or pass {path}@main for the dataset on the Hub" if hub_name(f"{path}@main") else ""
    raise DataError(
        f"dataset.paths: {path!r} does not exist (working directory: {Path.cwd()}); check the path{on_hub}."
        f"{nearest_path(path)}"
    )


def commit_of(name: str, revision: str | None = None) -> str:
    """The commit that a revision of a dataset is now; None is the default branch. Asks the Hub once.

    Raises:
        HubUnreachableError: if it does not answer.
        DataError: if it has no such dataset or revision.
    """
    of = f"the dataset {name!r}" if revision is None else f"revision {revision!r} of the dataset {name!r}"
    try:
        from huggingface_hub import HfApi

        return str(HfApi().dataset_info(name, revision=revision, timeout=_HUB_SECONDS).sha)
    except Exception as error:  # the errors of connections have no base class in common
        reason = f"{type(error).__name__}: {text_of(error).strip().partition(chr(10))[0]}"
        status = getattr(getattr(error, "response", None), "status_code", 500)
        if status < 500:
            remedy = (
                "check both, or name a commit by its 40 digits" if revision else "check it, or log in: hf auth login"
            )
            raise DataError(f"cannot find {of} on the Hub ({reason}); {remedy}.{nearest_path(name)}") from error
        raise HubUnreachableError(
            f"cannot find {of}: the Hub does not answer ({reason}); the Hub requires network access, a local path does "
            f"not.{nearest_path(name)}"
        ) from error


def pinned(path: str, *, requires_hub: bool = False) -> str:
    """A dataset on the Hub as NAME@COMMIT, with the commit that its revision is now; any other path as it is.

    A name without a revision, the default branch, remains as it is where the Hub does not tell its commit.

    Args:
        path: a path of `dataset.paths`.
        requires_hub: whether the dataset cannot be read without the Hub, as from a cache.

    Raises:
        DataError: for a branch or tag that the Hub does not have, or if it cannot be reached.
    """
    name, revision = hub_name(path) or (None, None)
    if name is None or COMMIT.fullmatch(revision or ""):
        return path
    try:
        return f"{name}@{commit_of(name, revision)}"
    except DataError:
        if revision is None and not requires_hub:
            return path
        raise


def hub_commits(dataset: Any) -> dict[str, str]:
    """The commits on the Hub that a dataset was loaded from, by name; the library keeps them only in its cache's paths.

    The name is that of the directory in the cache: `me/my_rows` for `me/MyRows`.
    """
    places = [PurePath(file["filename"]).parts for file in dataset.cache_files]  # .../me___rows/default/0.0.0/COMMIT/x
    return {at[-5].replace("___", "/"): at[-2] for at in places if len(at) > 4 and COMMIT.fullmatch(at[-2])}


def check_subset(paths: Sequence[str], subset: str | None) -> None:
    """Refuse a configuration of a dataset on the Hub if there is none.

    Raises:
        DataError: if all paths are local.
    """
    if subset is not None and all(Path(os.path.expanduser(path)).exists() or glob.has_magic(path) for path in paths):
        raise DataError(
            f"dataset.hf_subset={subset!r} is a configuration of a dataset on the Hub, but dataset.paths={list(paths)} "
            "are local; drop it"
        )
