"""When something is due: pure functions of progress."""

from __future__ import annotations


def is_due(step: int, every: int | None, *, start: int = 0) -> bool:
    """Whether something that happens every `every` steps, from `start` on, happens at `step`.

    `every` of None or 0 is never. The phase counts from step 0, so that a resumed run keeps it.
    """
    return bool(every) and step >= start and step % (every or 1) == 0
