"""Checks that all ranks see the directory of a run, into which each of them writes its part of a checkpoint."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

from onstep.distributed import World
from onstep.errors import ConfigError

SEEN_SECONDS = 5.0
"""How long what rank 0 has written may take to be seen on another machine."""


def check_seen(place: Path, world: World, *, is_held: bool) -> None:
    """Check that every rank sees the `run.json` that rank 0 has written to a run's directory. Collective.

    Args:
        place: the directory, as this rank knows it.
        world: the ranks of the run.
        is_held: on rank 0, whether ranks will write there; the repetition of a run on several machines does not.

    Raises:
        ConfigError: on all ranks alike, naming a rank that does not see it.
    """
    if world.size == 1:
        return
    written = world.share(_content(place) if world.is_main and is_held else None)
    found = world.gather((str(place), written is None or _sees(place, written)))
    for rank, (path, sees) in enumerate(found):
        if not sees:
            raise ConfigError(
                f"{world.place(rank)} does not see {path}/run.json, which rank 0 has written to {found[0][0]}: all "
                f"ranks must see the run's directory, as each writes its part of a checkpoint there; set output_dir "
                f"to a shared file system, and start all ranks in the same working directory."
            )


def _sees(place: Path, written: bytes) -> bool:
    deadline = time.monotonic() + SEEN_SECONDS
    while _content(place) != written:
        if time.monotonic() > deadline:
            return False
        with suppress(OSError):
            os.listdir(place)  # a network file system then asks its server
        time.sleep(0.05)
    return True


def _content(place: Path) -> bytes | None:
    try:
        return (place / "run.json").read_bytes()
    except OSError:
        return None
