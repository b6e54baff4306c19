"""Gives records the form of Hugging Face's `log_history`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from onstep.record.gaps import MISSING
from onstep.record.kinds import KINDS, has_metrics
from onstep.record.reading import Record

INFO_KEY = "experiment_info"
"""The field of a metrics log's record with the arguments that its `JsonLogger` was given."""
BRIDGE_KEY = "bridge"
"""The field of a record that contains Megatron Bridge's tags since the previous record."""

_NOT_SHOWN = ("timestamp", "global_step", INFO_KEY, BRIDGE_KEY, MISSING)
_HEAD = frozenset({*_NOT_SHOWN, "epoch", "step", "kind"})
"""Keys that are not metrics."""


def is_reported(record: Mapping[str, Any]) -> bool:
    """Whether a record belongs to `log_history`: it has metrics."""
    return has_metrics(record) and not record.keys() <= _HEAD


def history_of(records: Iterable[Record]) -> list[Record]:
    """Those of the records that belong to `log_history`, in its form."""
    return [_shown(record) for record in records if is_reported(record)]


def _shown(record: Record) -> Record:
    left_out = (*_NOT_SHOWN, "kind") if record.get("kind") in KINDS else _NOT_SHOWN
    return {
        **{key: value for key, value in record.items() if key not in left_out},
        "step": record.get("global_step", 0),
    }
