"""A failure on one rank becomes the same failure on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from onstep.distributed.world import World
from onstep.errors import CheckpointError, ConfigError

T = TypeVar("T")


def attempt(work: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """What the work gives, or the error it ends with: for work whose end all ranks must hear of."""
    try:
        return work(), None
    except Exception as error:  # noqa: BLE001 - the caller raises it on every rank with `raise_together`
        return None, error


def raise_together(world: World, error: Exception | None, doing: str) -> None:
    """Raise on all ranks if there is an error on any. Collective.

    Raises:
        CheckpointError: naming each rank that failed and why; on a failed rank with the error as its cause.
        ConfigError: likewise, where the first failed rank met one.
    """
    notes = world.gather(None if error is None else (isinstance(error, ConfigError), _described(error)))
    failed = [(rank, note) for rank, note in enumerate(notes) if note is not None]
    if not failed:
        return
    kind = ConfigError if failed[0][1][0] else CheckpointError
    texts = [(rank, text.rstrip(".")) for rank, (_, text) in failed]
    causes = "; ".join(f"rank {rank}: {text}" if world.size > 1 else text for rank, text in texts)
    raise kind(f"{doing} failed: {causes}.") from error


def _described(error: Exception) -> str:
    kind = "" if isinstance(error, (CheckpointError, ConfigError)) else f"{type(error).__name__}: "
    notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
    return f"{kind}{error}{notes}"
