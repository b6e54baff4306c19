"""The order of runs: that which was asked for, unless it is the alphabet's."""

from __future__ import annotations

import re
from collections.abc import Sequence

from onstep.analysis.training_log import TrainingLog


def natural_order(logs: Sequence[TrainingLog]) -> list[TrainingLog]:
    """The runs with lr2 before lr10, where they came in the order of the alphabet, as a shell lists files.

    Any other order is somebody's choice and stays.
    """
    paths = [log.log_path.parts for log in logs]
    if paths != sorted(paths):
        return list(logs)
    return sorted(logs, key=lambda log: _key(str(log.log_path)))


def _key(text: str) -> list[tuple[int, int, str]]:
    """Numbers by their value, before letters."""
    parts = re.split(r"(\d+)", text)
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in parts if part]
