"""Defines the record that replaces lost ones in a metrics log."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

MISSING = "missing_records"
"""Its field: `number` of lost records, `after_step`, `up_to_step`, and `last_record`, the digest of the last one."""


def gap_record(number: int, after_step: int | None, up_to_step: int, last_record: str | None = None) -> dict[str, Any]:
    """The record in place of `number` lost ones; `after_step` is None if they were the first."""
    missing = {"number": number, "after_step": after_step, "up_to_step": up_to_step, "last_record": last_record}
    return {"timestamp": time.time(), "global_step": up_to_step, MISSING: missing}


def describe_gap(record: Mapping[str, Any]) -> str | None:
    """What a gap lacks, for messages; None for any other record."""
    missing = record.get(MISSING)
    if not isinstance(missing, Mapping):
        return None
    number, after, up_to = (missing.get(key) for key in ("number", "after_step", "up_to_step"))
    start = f"after step {after}, up to step {up_to}" if isinstance(after, int) else f"up to step {up_to}"
    what = "1 record" if number == 1 else f"{number} records"
    return f"{what} {start:.80} {'is' if number == 1 else 'are'} missing"
