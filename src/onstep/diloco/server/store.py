"""Keeps the state of a server on disk, so that it continues after any crash with the last committed rounds.

A directory has a file of tensors for the newest version of each fragment, and for some before it, and `server.json`,
which names them with their hashes and has everything else. A commit writes the file of its fragment, then replaces
`server.json`: with that, the round is committed, along with the ids of its submissions and the roster, or not at all.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import lock_descriptor

from onstep.checkpoint import FileDigest, FileStore, decode_state, encode_state, read_tensors, write_tensors
from onstep.checkpoint.format.codec import document_to_bytes
from onstep.checkpoint.format.decoding import document_from_bytes
from onstep.checkpoint.storage.manifest import check_file
from onstep.errors import CheckpointError, RunExistsError
from onstep.files.bounded_reading import read_bytes
from onstep.files.durability import replace_durably

STATE, LOCK = "server.json", "lock"
FORMAT = 1
_MOST_BYTES = 256 << 20
_FRAGMENT = re.compile(r"fragment-(\d+)-version-(\d+)\.safetensors")


@dataclass(frozen=True)
class Saved:
    """What a directory has."""

    origin: dict[str, Any]
    """What the run was started with."""
    rest: dict[str, Any]
    """Everything that changes, but the fragments."""
    fragments: dict[int, dict[str, Any]]
    """The state of each."""


class Store:
    """The directory of one server, which holds a lock on it.

    Args:
        directory: made if it is missing.
        num_kept: versions of each fragment that are kept beside the newest.

    Raises:
        RunExistsError: if another live process uses it.
        CheckpointError: if it cannot be written.
    """

    def __init__(self, directory: Path, num_kept: int = 0) -> None:
        self.directory, self._num_kept = directory, num_kept
        self._files = FileStore()
        self.origin: Mapping[str, Any] = {}
        """What the run was started with, JSON-safe; set by the owner before the first commit, and by `load`."""
        self._fragments: dict[str, Any] = {}
        """By number, as text: file, digest, document."""
        self._earlier: dict[str, list[Any]] = {}
        """The same of earlier versions, the oldest first."""
        self._files.make_root(directory)
        self._lock: int | None = _locked(directory / LOCK)

    def load(self) -> Saved | None:
        """Everything; None for a new directory, or one whose first server was killed before it had saved all fragments.

        Raises:
            CheckpointError: for anything but what `save` and `commit` left there.
        """
        path = self.directory / STATE
        if not os.path.lexists(path):
            return None
        document = document_from_bytes(read_bytes(path, _MOST_BYTES, error=CheckpointError), str(path))
        if not isinstance(document, dict) or document.get("format") != FORMAT:
            raise CheckpointError(f"{path} is not the state of a DiLoCo server of format {FORMAT}; give another one.")
        self._fragments = _dict(document, "fragments", path)
        self._earlier = _dict(document, "earlier", path) if "earlier" in document else {}
        if not all(
            isinstance(one, list) and all(isinstance(each, dict) for each in one) for one in self._earlier.values()
        ):
            raise CheckpointError(f"{path} has a malformed object 'earlier'; restore the directory.")
        fragments = {int(number): self._read(entry) for number, entry in self._fragments.items()}
        self._remove_others()
        self.origin = origin = _dict(document, "origin", path)
        saved = Saved(origin, _dict(document, "rest", path), fragments)
        return saved if len(fragments) == len(saved.rest["fragments"]) else None

    def commit(self, fragment: int, version: int, state: Mapping[str, Any], rest: Mapping[str, Any]) -> None:
        """Make a new version of a fragment and everything else durable, together.

        Raises:
            CheckpointError: if the disk refuses; the last commit is then still what counts.
        """
        tensors, document = encode_state(dict(state), "the server's state")
        path = self.directory / f"fragment-{fragment}-version-{version}.safetensors"
        self._files.unlink(path)  # of a commit that did not come to its end
        with self._files.open(path) as file:
            write_tensors(file, tensors)
        self._files.sync_dir(self.directory)
        before, digest, key = (dict(self._fragments), dict(self._earlier)), file.digest, str(fragment)
        had = [one for one in (*self._earlier.get(key, ()), self._fragments.get(key)) if one is not None]
        had = [one for one in had if one["file"] != path.name]
        self._earlier[key] = had[len(had) - min(self._num_kept, len(had)) :]
        entry = {"file": path.name, "size": digest.size, "blake3": digest.blake3, "document": document}
        self._fragments[key] = entry
        try:
            self.save(rest)
        except BaseException:
            self._fragments, self._earlier = before
            raise
        for replaced in had[: len(had) - len(self._earlier[key])]:
            with suppress(CheckpointError):  # the next start removes it
                self._files.unlink(self.directory / replaced["file"])

    def versions(self, fragment: int) -> list[int]:
        """The versions of a fragment that `read` can give, the oldest first."""
        return [_version(one) for one in self._entries(fragment)]

    def read(self, fragment: int, version: int) -> dict[str, Any]:
        """The state of a fragment at a version.

        Raises:
            CheckpointError: if it is not kept, or its file is damaged.
        """
        for entry in self._entries(fragment):
            if _version(entry) == version:
                return self._read(entry)
        raise CheckpointError(
            f"{self.directory} has no version {version} of fragment {fragment}; give one that it has."
        )

    def _entries(self, fragment: int) -> list[Any]:
        newest = self._fragments.get(str(fragment))
        return [*self._earlier.get(str(fragment), ()), *([] if newest is None else [newest])]

    def save(self, rest: Mapping[str, Any]) -> None:
        """Make everything but the fragments durable.

        Raises:
            CheckpointError: if the disk refuses.
        """
        path = self.directory / STATE
        content = {
            "format": FORMAT,
            "origin": dict(self.origin),
            "fragments": self._fragments,
            "earlier": self._earlier,
            "rest": dict(rest),
        }
        try:
            replace_durably(path, document_to_bytes(content).decode())
            self._files.sync_dir(self.directory)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be written ({error.strerror}); check its disk.") from error

    def close(self) -> None:
        """Let another process use the directory; closing twice is harmless."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _read(self, entry: Any) -> dict[str, Any]:
        path = self.directory / STATE
        if not isinstance(entry, dict) or not _FRAGMENT.fullmatch(str(entry.get("file"))):
            raise CheckpointError(f"{path} names a file that no server writes; restore the directory.")
        check_file(self.directory, entry["file"], FileDigest(entry["size"], entry["blake3"]))
        where = self.directory / entry["file"]
        state: dict[str, Any] = decode_state(read_tensors(where), entry["document"], str(where))
        return state

    def _remove_others(self) -> None:
        """Remove files of commits that did not come to their end, and of versions that are not kept."""
        named = {entry["file"] for number in self._fragments for entry in self._entries(int(number))}
        for path in self.directory.iterdir():
            if _FRAGMENT.fullmatch(path.name) and path.name not in named:
                self._files.unlink(path)


def _version(entry: Any) -> int:
    found = _FRAGMENT.fullmatch(str(entry.get("file")))
    return -1 if found is None else int(found[2])


def _locked(path: Path) -> int:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        if lock_descriptor(descriptor, blocking=False):
            return descriptor
        os.close(descriptor)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be locked ({error.strerror}); use a disk of this machine.") from error
    raise RunExistsError(f"{path.parent} is in use by another server; stop that one or give another directory.")


def _dict(document: dict[str, Any], key: str, path: Path) -> dict[str, Any]:
    value = document.get(key)
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} has no object {key!r}; restore the directory.")
    return value
