"""Writes files and directories in place of earlier ones: completely, or not at all."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path

from onstep.checkpoint import FileStore
from onstep.checkpoint.storage.manifest import MANIFEST
from onstep.checkpoint.storage.store import TEMPORARY
from onstep.errors import CheckpointError
from onstep.models.hf.weight_files import INDEX_FILE, WEIGHTS_FILE

_EXPORTED = (".json", ".safetensors", ".txt", ".model", ".jinja", ".md")
"""Suffixes of files in a Hugging Face model directory; a directory that contains anything else is never replaced."""


def check_file(out: Path, example: str, force: bool) -> None:
    """Check that a file can be written.

    Raises:
        CheckpointError: if `out` is a directory, is in a checkpoint, or exists and is not to be replaced.
    """
    if out.is_dir():
        raise CheckpointError(f"{out} is a directory; name a file, such as {out / example}.")
    check_target(out, force)


def check_target(out: Path, force: bool) -> None:
    """Check that a file or directory can be written. Raises like `check_file`."""
    if any((parent / MANIFEST).exists() for parent in (out.resolve(), *out.resolve().parents)):
        raise CheckpointError(f"{out} is inside a checkpoint, where nothing may be written; choose another path.")
    if not os.path.lexists(out):
        return
    if not force:
        raise CheckpointError(f"{out} already exists; choose another name, or pass --force to replace it.")
    if out.is_dir() and not out.is_symlink():
        foreign = sorted(path.name for path in out.iterdir() if path.is_dir() or path.suffix not in _EXPORTED)
        is_known = any((out / name).is_file() for name in ("config.json", WEIGHTS_FILE, INDEX_FILE))
        if foreign or (any(out.iterdir()) and not is_known):
            why = f"it contains {', '.join(foreign[:5])}" if foreign else "it has no config.json"
            raise CheckpointError(
                f"{out} is not an earlier export ({why}), so --force does not replace it; remove it yourself."
            )


def put_in_place(store: FileStore, out: Path, write: Callable[[Path], None]) -> None:
    """Write a temporary file or directory next to `out`, fsync it and rename it; a failure leaves `out` unchanged."""
    store.make_root(out.parent)
    temporary = out.with_name(f"{TEMPORARY}{out.name}-{secrets.token_hex(4)}")
    replaced = out.with_name(f"{temporary.name}-replaced")
    try:
        write(temporary)
        if out.is_dir() and not out.is_symlink():  # a directory cannot be renamed onto a non-empty one
            store.rename(out, replaced)
        store.rename(temporary, out)
        store.sync_dir(out.parent)
    finally:
        _remove(temporary)
        if replaced.exists() and not out.exists():
            replaced.rename(out)
        _remove(replaced)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
