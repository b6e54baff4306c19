"""Decides when periodic actions are due, as pure functions of progress."""

from __future__ import annotations


def is_due(step: int, every: int | None, *, start: int = 0) -> bool:
    """Whether an action that happens every `every` steps, from `start` on, is due at `step`.

    If `every` is None or 0, it is never due. The phase is counted from step 0, so a resumed run keeps it.
    """
    return bool(every) and step >= start and step % (every or 1) == 0
