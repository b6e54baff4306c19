"""Lets all ranks learn how the work of each of them ended."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

from onstep.distributed.world import World
from onstep.errors import CheckpointError, ConfigError

T = TypeVar("T")

_REMEDY = "call the collective on all ranks before it, and pass the result"


def attempt(work: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """The result of the work, or the error it raised: for work whose outcome must be known to all ranks.

    Args:
        work: what is called, without arguments.
    """
    try:
        return work(), None
    except Exception as error:  # noqa: BLE001 - the caller raises it on every rank with `raise_together`
        return None, error


def raise_together(world: World, error: Exception | None, doing: str) -> None:
    """Raise on all ranks if there is an error on any rank. Collective.

    Args:
        world: the ranks of the run.
        error: the error of this rank; None if it has none.
        doing: what was done, for the errors of the other ranks.

    Raises:
        CheckpointError: naming each rank that failed and why; on a failed rank, with the error as its cause.
        ConfigError: likewise, if the first failed rank raised one.
    """
    notes = world.gather(None if error is None else (isinstance(error, ConfigError), _described(error)))
    failed = [(rank, note) for rank, note in enumerate(notes) if note is not None]
    if not failed:
        return
    kind = ConfigError if failed[0][1][0] else CheckpointError
    texts = [(rank, text.rstrip(".")) for rank, (_, text) in failed]
    causes = "; ".join(f"{world.place(rank)}: {text}" if world.size > 1 else text for rank, text in texts)
    raise kind(f"{doing} failed: {causes}.") from error


def together(world: World, work: Callable[[], T], doing: str) -> T:
    """This rank's result of the work, once it has succeeded on all ranks; else as `raise_together`. Collective."""
    result, error = attempt(work)
    raise_together(world, error, doing)
    return cast(T, result)


def on_main(world: World, work: Callable[[], T]) -> T:
    """What the work gives on rank 0, on all ranks; its error is raised on all of them. Collective.

    Args:
        world: the ranks of the run.
        work: what rank 0 calls, without arguments.
    """
    result, error = None, None
    if world.is_main:
        with world.main_only("work of rank 0", _REMEDY):
            result, error = attempt(work)
    result, error = world.share((result, error))
    if error is not None:
        raise error
    return cast(T, result)


def _described(error: Exception) -> str:
    kind = "" if isinstance(error, (CheckpointError, ConfigError)) else f"{type(error).__name__}: "
    notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
    return f"{kind}{error}{notes}"
