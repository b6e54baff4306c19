"""Small checkpoints for tests of the store: real files, written by a real transaction."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from onstep.checkpoint import CheckpointManager
from onstep.checkpoint.catalog.discovery import CheckpointInfo
from onstep.checkpoint.format.tensor_file import FileDigest
from onstep.checkpoint.storage.manifest import ComponentEntry, Manifest
from onstep.checkpoint.storage.store import FileStore
from onstep.checkpoint.storage.transaction import SaveTransaction

FILES = {"model/model.safetensors": b"weights " * 50, "model/state.json": b"{}", "rng/rank_0.json": b"[1, 2]"}


def make_manifest(step: int, files: dict[str, FileDigest] | None = None, **changes: Any) -> Manifest:
    """A manifest of one component."""
    files = files or {}
    component = ComponentEntry("global", [0], list(files), sum(digest.size for digest in files.values()))
    content: dict[str, Any] = {"run_id": "run", "created_at": "2026-01-01T00:00:00", "world_size": 1, **changes}
    return Manifest(step=step, components={"model": component}, files=files, **content)


def prepared(root: Path, step: int, files: dict[str, bytes] = FILES) -> tuple[SaveTransaction, dict[str, FileDigest]]:
    """A save with all files written and not yet committed."""
    store = FileStore()
    transaction = SaveTransaction(store, root, step)
    transaction.prepare()
    digests = {}
    for name, content in files.items():
        store.make_dir((transaction.directory / name).parent)
        digests[name] = store.write_file(transaction.directory / name, content)
    return transaction, digests


def write_checkpoint(root: Path, step: int, files: dict[str, bytes] = FILES, **changes: Any) -> Path:
    """A whole checkpoint; `changes` go into its manifest."""
    transaction, digests = prepared(root, step, files)
    return transaction.commit(make_manifest(step, digests, **changes))


class Box:
    """A state of any content."""

    def __init__(self, **content: Any) -> None:
        self.content = content

    def state_dict(self) -> dict[str, Any]:
        return self.content

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.content = state_dict


def newest(manager: CheckpointManager) -> CheckpointInfo:
    """The newest verified checkpoint, which there must be."""
    info = manager.newest()
    assert info is not None
    return info
