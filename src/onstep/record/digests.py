"""Hashes the bytes of a metrics log, by which a resumed run recognizes one that has changed since a checkpoint."""

from __future__ import annotations

import os
from pathlib import Path

from blake3 import blake3

_BLOCK = 1 << 20


def hash_of(descriptor: int, num_bytes: int) -> blake3:
    """The hash of the first `num_bytes` bytes of an open file, or of all if it is shorter; more can be added to it."""
    hasher, start = blake3(), 0
    while block := os.pread(descriptor, min(_BLOCK, num_bytes - start), start):
        hasher.update(block)
        start += len(block)
    return hasher


def begins_with(path: Path, num_bytes: int, digest: str) -> bool:
    """Whether the first `num_bytes` bytes of a file have this digest; False for one that is shorter or not a file."""
    if not path.is_file() or path.stat().st_size < num_bytes:
        return False
    with path.open("rb") as file:
        return hash_of(file.fileno(), num_bytes).hexdigest() == digest
