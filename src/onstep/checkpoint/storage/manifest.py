"""Reads, writes and verifies the manifest, which lists a checkpoint's files with sizes and hashes and seals it."""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from io import BufferedReader
from pathlib import Path, PurePosixPath
from typing import Any, NoReturn

from blake3 import blake3

from onstep.checkpoint.components import SharingPattern
from onstep.checkpoint.format.tensor_file import FileDigest
from onstep.errors import CheckpointError
from onstep.files.bounded_reading import open_regular_file, parse_json
from onstep.processes.heartbeat import HEARTBEAT

MANIFEST = "manifest.json"
FORMAT = 1
MANIFEST_BYTES = 64 * 1024**2
"""Larger manifests are refused unread; one that lists 100,000 files has about 15 MB."""
READ_BYTES = 8 * 1024**2
READ_THREADS = min(16, os.cpu_count() or 1)
"""Threads that hash a file of at least `READ_BYTES`. Explicit: a hasher then has its own. On those of `blake3.AUTO`,
which all hashers share, a process would hang that is forked after their first use."""
MAX_LEVELS = 16
"""Limit for the depth of a file in a checkpoint; those of Onstep are 2 to 4 deep."""
Progress = Callable[[int], object]
"""Called with the number of bytes read since the previous call."""
_HASH = re.compile(r"[0-9a-f]{64}")
_SEAL = re.compile(rb',\n  "blake3": "([0-9a-f]{64})"\n}\n\Z')
"""The last entry of a manifest: the hash of all bytes before it."""
_SEAL_BYTES = len(b',\n  "blake3": ""\n}\n') + 64


@dataclass(frozen=True)
class ComponentEntry:
    """The manifest's entry for one component."""

    sharing_pattern: str
    """A value of `SharingPattern`."""
    ranks: list[int]
    """Ranks that saved it."""
    files: list[str]
    """Its files, relative to the checkpoint."""
    size_bytes: int
    required: bool = True
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Manifest:
    """The content of `manifest.json`."""

    step: int
    """The step (optimizer updates) that the checkpoint is of."""
    run_id: str
    """The id of the run that saved it."""
    created_at: str
    """ISO 8601."""
    world_size: int
    """The number of ranks that saved it."""
    components: dict[str, ComponentEntry]
    """The stored components by name, with their files."""
    files: dict[str, FileDigest]
    """Every file of the checkpoint except the manifest, by its path relative to the checkpoint."""
    layout: dict[str, Any] = field(default_factory=dict)
    """How the run was distributed over its ranks."""
    config: dict[str, Any] = field(default_factory=dict)
    """The configuration of the run, by section."""
    versions: dict[str, str] = field(default_factory=dict)
    """Versions of the libraries that wrote it."""
    metrics: dict[str, float] = field(default_factory=dict)
    """The newest metrics of the run."""
    persistent: bool = True
    """Whether retention never deletes it."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Other facts, by name."""

    @property
    def size_bytes(self) -> int:
        """Total bytes of all files except the manifest."""
        return sum(digest.size for digest in self.files.values())

    @property
    def data_ranks(self) -> int:
        """The number of ranks with samples of their own in the run that saved it."""
        found = self.layout.get("world_size")
        return found if isinstance(found, int) else self.world_size

    def config_section(self, name: str) -> dict[str, Any]:
        """A section of the stored configuration, unchecked; empty if there is none, or something else in its place.

        Args:
            name: the section of the configuration.
        """
        section = self.config.get(name)
        return section if isinstance(section, dict) else {}

    def to_bytes(self) -> bytes:
        """The file's content: JSON whose last entry is the BLAKE3 hash of all bytes before it.

        Raises:
            CheckpointError: for an entry that JSON cannot represent or that reading would refuse.
        """
        content = {"format": FORMAT, **asdict(self), "complete": True}
        try:
            content["metrics"] = {name: float(value) for name, value in self.metrics.items()}
            body = json.dumps(content, indent=2, ensure_ascii=True).encode("ascii").removesuffix(b"\n}")
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise CheckpointError(f"the manifest of step {self.step} cannot be written as JSON: {error}.") from None
        sealed = body + b',\n  "blake3": "' + blake3(body).hexdigest().encode("ascii") + b'"\n}\n'
        parse_manifest(sealed, MANIFEST)
        return sealed


def read_manifest(directory: Path) -> Manifest:
    """Read and check the manifest of a checkpoint; does not check the files it lists.

    Args:
        directory: the directory of a checkpoint.

    Raises:
        CheckpointError: if the manifest is missing or not exactly as it was written.
    """
    path = directory / MANIFEST
    with _opened(path) as file:
        try:
            size = os.fstat(file.fileno()).st_size
            content = file.read(MANIFEST_BYTES) if size <= MANIFEST_BYTES else b""
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read ({error.strerror}).") from error
    if size > MANIFEST_BYTES:
        raise CheckpointError(f"{path} has {size} bytes; a manifest must have at most {MANIFEST_BYTES}.")
    return parse_manifest(content, str(path))


def verify(directory: Path, *, progress: Progress | None = None) -> Manifest:
    """Check every file of a checkpoint against its manifest, by size and hash.

    Args:
        directory: the directory of a checkpoint.
        progress: called after each block that was hashed, with the block's number of bytes.

    Raises:
        CheckpointError: naming the first file that is missing or not as it was written.
    """
    manifest = read_manifest(directory)
    for name, digest in manifest.files.items():  # all sizes first, which is quick
        check_file(directory, name, digest, hashed=False)
    for name, digest in manifest.files.items():
        check_file(directory, name, digest, progress)
    return manifest


def check_file(
    directory: Path, name: str, expected: FileDigest, progress: Progress | None = None, *, hashed: bool = True
) -> None:
    """Check one listed file by its size and, if `hashed`, its content.

    Raises:
        CheckpointError: if it differs, is missing, or is reached through a symbolic link.
    """
    path = directory / name
    _check_parents(directory, name)
    with _opened(path) as file:
        try:
            size = os.fstat(file.fileno()).st_size
            has_changed = hashed and size == expected.size and _hash(file, size, progress) != expected.blake3
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read ({error.strerror}).") from error
    if size != expected.size:
        raise CheckpointError(f"{path} has {size} bytes, but its manifest lists {expected.size}; it is damaged.")
    if has_changed:
        raise CheckpointError(f"{path} does not have the BLAKE3 hash in its manifest; its content has changed.")


def _check_parents(directory: Path, name: str) -> None:
    for parent in list(PurePosixPath(name).parents)[:-1]:
        path = directory / parent
        try:
            mode = os.lstat(path).st_mode
        except OSError as error:
            raise CheckpointError(f"cannot find {path} ({error.strerror}), but the manifest lists {name}.") from error
        if not stat.S_ISDIR(mode):
            raise CheckpointError(f"{path} must be a directory inside the checkpoint, not a file or symbolic link.")


def _opened(path: Path) -> BufferedReader:
    try:
        return open_regular_file(path)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing.") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be opened ({error.strerror}); it must be a regular file.") from error


def _hash(file: BufferedReader, size: int, progress: Progress | None) -> str:
    hasher = blake3(max_threads=READ_THREADS if size >= READ_BYTES else 1)
    buffer = memoryview(bytearray(min(READ_BYTES, max(1, size))))
    while count := file.readinto(buffer):
        hasher.update(buffer[:count])
        HEARTBEAT.beats += 1
        if progress is not None:
            progress(count)
    return hasher.hexdigest()


def parse_manifest(content: bytes, path: str) -> Manifest:
    """The content of a manifest.

    Args:
        content: the bytes of the file.
        path: where they are from, for messages.

    Raises:
        CheckpointError: if it is not exactly as it was written.
    """
    seal = _SEAL.search(content[-_SEAL_BYTES:])
    if seal is None:
        raise CheckpointError(f"{path} does not end with its own hash: it is truncated, damaged or not a manifest.")
    if blake3(content[:-_SEAL_BYTES]).hexdigest().encode() != seal[1]:
        raise CheckpointError(f"{path} does not match the BLAKE3 hash at its end; its content has changed.")
    document = parse_json(content, path, error=CheckpointError)
    try:
        return _manifest(document)
    except _RefusedError as error:
        raise CheckpointError(f"{path} is invalid: {error}.") from None


class _RefusedError(ValueError):
    """A problem in a manifest; `parse_manifest` adds the path."""


def _manifest(document: Any) -> Manifest:
    _check_keys("the manifest", document, _KEYS)
    if document["format"] != FORMAT or type(document["format"]) is not int:
        raise _RefusedError(
            f"format={document['format']!r} is not supported by this version of Onstep, which reads {FORMAT}"
        )
    if document["complete"] is not True:
        raise _RefusedError("complete must be true")
    files = {name: _digest(name, entry) for name, entry in _of(document, "files", dict).items()}
    for name in files:
        inside = [str(parent) for parent in PurePosixPath(name).parents if str(parent) in files]
        if inside:
            raise _RefusedError(f"{name!r} is inside {inside[0]!r}, which is a file")
    components = {key: _component(key, entry, files) for key, entry in _of(document, "components", dict).items()}
    return Manifest(
        step=_count(document, "step"),
        run_id=_of(document, "run_id", str),
        created_at=_of(document, "created_at", str),
        world_size=_count(document, "world_size"),
        components=components,
        files=files,
        layout=_of(document, "layout", dict),
        config=_of(document, "config", dict),
        versions=_values(document, "versions", str),
        metrics=_values(document, "metrics", float),
        persistent=_of(document, "persistent", bool),
        extra=_of(document, "extra", dict),
    )


_KEYS = {"format", *Manifest.__dataclass_fields__, "complete", "blake3"}


def _digest(name: str, entry: Any) -> FileDigest:
    _check_path(name)
    _check_keys(name, entry, {"size", "blake3"})
    digest = _of(entry, "blake3", str)
    if not _HASH.fullmatch(digest):
        raise _RefusedError(f"blake3={digest[:80]!r} of {name} must be 64 hexadecimal digits")
    return FileDigest(_count(entry, "size"), digest)


def _component(key: str, entry: Any, files: dict[str, FileDigest]) -> ComponentEntry:
    _check_keys(f"component {key}", entry, set(ComponentEntry.__dataclass_fields__))
    pattern = _of(entry, "sharing_pattern", str)
    known = [item.value for item in SharingPattern]
    if pattern not in known:
        raise _RefusedError(f"sharing_pattern={pattern!r} of {key} must be one of {known}")
    names, ranks = _of(entry, "files", list), _of(entry, "ranks", list)
    unknown = [name for name in names if not isinstance(name, str) or name not in files]
    if unknown:
        raise _RefusedError(f"component {key} has {unknown[0]!r}, which `files` does not list")
    if any(type(rank) is not int or rank < 0 for rank in ranks):
        raise _RefusedError(f"ranks of {key} must be integers >= 0")
    size, required = _count(entry, "size_bytes"), _of(entry, "required", bool)
    return ComponentEntry(pattern, ranks, names, size, required, _of(entry, "metadata", dict))


def _check_path(name: str) -> None:
    parts = name.split("/")
    if len(parts) > MAX_LEVELS:
        raise _RefusedError(f"path {name[:200]!r} has {len(parts)} levels; at most {MAX_LEVELS} are allowed")
    if name == MANIFEST or any(part in ("", ".", "..") or len(part.encode(errors="replace")) > 255 for part in parts):
        raise _RefusedError(f"path {name[:200]!r} must be relative and inside the checkpoint, without '..'")
    if len(name) > 4096 or not name.isprintable() or "\\" in name:
        raise _RefusedError(f"path {name[:200]!r} must be at most 4096 printable characters, without a backslash")


def _check_keys(where: str, entry: Any, expected: set[str]) -> None:
    if not isinstance(entry, dict):
        _wrong(where, "a dictionary", entry)
    if entry.keys() != expected:
        raise _RefusedError(f"{where} must have the keys {sorted(expected)}, got {sorted(entry)[:50]}")


def _of(entry: dict[str, Any], key: str, kind: type[Any]) -> Any:
    if type(entry[key]) is not kind:
        _wrong(key, kind.__name__, entry[key])
    return entry[key]


def _values(entry: dict[str, Any], key: str, kind: type[Any]) -> dict[str, Any]:
    values: dict[str, Any] = _of(entry, key, dict)
    for name, value in values.items():
        if type(value) is not kind:
            _wrong(f"{key}.{name}", kind.__name__, value)
    return values


def _count(entry: dict[str, Any], key: str) -> int:
    value = _of(entry, key, int)
    if not 0 <= value < 2**63:
        _wrong(key, "an integer from 0 to 2**63 - 1", value)
    return int(value)


def _wrong(key: str, rule: str, value: Any) -> NoReturn:
    raise _RefusedError(f"{key} must be {rule}, got {str(value)[:100]!r}")
