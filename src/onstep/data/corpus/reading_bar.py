"""Shows how much of a corpus has been read."""

from __future__ import annotations

import logging
import sys
from typing import Any

from tqdm import tqdm

logger = logging.getLogger(__name__)

_LONG = {"B": 2**28, " rows": 10**6}
"""Sizes, by unit, from which on reading is so long that a log says so."""


def reading_bar(label: str | None, total: int, unit: str) -> Any:
    """A bar on a terminal; elsewhere it shows nothing, but long work is logged in a line.

    Args:
        label: what is being done, in front of the bar; None shows nothing anywhere.
        total: the size of what is read.
        unit: `B` or ` rows`.
    """
    is_shown = label is not None and sys.stderr.isatty()
    if label is not None and not is_shown and total >= _LONG[unit]:
        size = f"{total / 1e9:,.1f} GB" if unit == "B" else f"{total:,} rows"
        logger.info("%s: %s", label, size)
    return tqdm(total=total, desc=label, unit=unit, unit_scale=unit == "B", disable=not is_shown)
