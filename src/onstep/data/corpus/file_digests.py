"""Hashes the content of files: all of it, or blocks spread over a file that is too large to be read at each start."""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path

import numpy as np

from onstep.files.bounded_reading import open_file

_CHECKED_BLOCKS = 64
_SETTLED_SECONDS = 2.0
"""A file that changed more recently than this may change again without a visible change of its time stamps."""

_KNOWN: dict[tuple[int, ...], bytes] = {}
"""The digests of the files that this process has read, by device, inode, size and times of change."""


def stamp_of(status: os.stat_result) -> tuple[int, ...]:
    """What changes when the content of a file does."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def content_digest(path: Path) -> tuple[int, bytes]:
    """The size of a file and the BLAKE2b hash of its content. A process reads an unchanged file only once.

    Raises:
        OSError: if the file cannot be read.
    """
    with open_file(path) as content:
        status = os.fstat(content.fileno())
        stamp = stamp_of(status)
        found = _KNOWN.get(stamp)
        if found is None:
            found = hashlib.file_digest(content, "blake2b").digest()
            if time.time() - max(status.st_mtime, status.st_ctime) > _SETTLED_SECONDS:
                _KNOWN[stamp] = found
    return status.st_size, found


def sampled_digest(path: Path, block_bytes: int) -> str:
    """A hash of a file's size and of 64 blocks spread evenly over it, which are all of a file of up to that size.

    Raises:
        OSError: if the file cannot be read.
    """
    size = path.stat().st_size
    last = max(size - block_bytes, 0)
    digest = hashlib.blake2b(str(size).encode(), digest_size=16)
    with open_file(path) as content:
        for offset in np.linspace(0, last, num=min(_CHECKED_BLOCKS, 1 + last), dtype=np.int64).tolist():
            content.seek(offset)
            digest.update(content.read(block_bytes))
    return digest.hexdigest()
