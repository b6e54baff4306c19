"""What is logged for each parameter, as a table of parameters and steps."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from onstep.analysis.record_columns import number
from onstep.analysis.training_log import TrainingLog
from onstep.errors import ConfigError, DataError
from onstep.journal import Record

KEYS = {"norm": "norms", "spectral_norm": "spectral_norms", "grad_norm": "grad_norms"}
"""Metrics, and under which key a record holds the values of all parameters."""
NAMES = {"norm": "parameter norm", "spectral_norm": "spectral norm", "grad_norm": "gradient norm"}


@dataclass(frozen=True)
class ParameterTable:
    """One number for each parameter and step."""

    log_path: Path
    metric: str
    parameters: list[str]
    steps: NDArray[np.float64]
    """Shape (num_steps,)."""
    values: NDArray[np.float64]
    """Shape (num_parameters, num_steps); NaN where a record has no finite value for the parameter."""


def read_table(
    log_path: str | Path, metric: str | None = None, filter_pattern: str | None = None, step_stride: int = 1
) -> ParameterTable:
    """The table of a `parameter_norms.json` or `gradient_norms.json`; the parameters as they first appear.

    Args:
        log_path: The file, also of a run that is going on or was killed.
        metric: A key of `KEYS`; None takes the first of them that the file has.
        filter_pattern: Only parameters in whose names this regular expression is found.
        step_stride: Take every so many records.

    Raises:
        FileNotFoundError: when there is no such file.
        ConfigError: for an unknown metric, a stride below 1, a pattern that is no regular expression.
        DataError: when there are no records, none has the metric, or no parameter fits the pattern.
    """
    if step_stride < 1:
        raise ConfigError(f"step_stride must be at least 1, got {step_stride}.")
    pattern = _compiled(filter_pattern)
    log = TrainingLog.from_file(log_path)
    chosen = _chosen(log, metric)
    records = [record for record in log.records if isinstance(record.get(KEYS[chosen]), dict)][::step_stride]
    parameters = _parameters(records, KEYS[chosen])
    kept = [name for name in parameters if pattern.search(name)]
    if not kept:
        there = ", ".join(parameters[:5])
        raise DataError(
            f"{log.log_path} has no parameter that {filter_pattern!r} is found in; there are {len(parameters)}: {there}"
            f"{', ...' if len(parameters) > 5 else ''}."
        )
    steps = np.array([number(record.get("global_step")) for record in records])
    return ParameterTable(log.log_path, chosen, kept, steps, _values(records, KEYS[chosen], kept))


def _compiled(pattern: str | None) -> re.Pattern[str]:
    try:
        return re.compile(pattern or "")
    except re.error as error:
        raise ConfigError(f"filter must be a regular expression, got {pattern!r}: {error}.") from None


def _chosen(log: TrainingLog, metric: str | None) -> str:
    """The metric that was asked for, or the first that the file has."""
    if metric is not None and metric not in KEYS:
        raise ConfigError(f"metric must be one of {', '.join(KEYS)}, got {metric!r}.")
    if log.num_records == 0:
        raise DataError(f"{log.log_path} has no records yet; such a file gets one at each evaluation.")
    known = [name for name, key in KEYS.items() if log.has(key).any()]
    if not known:
        keys = ", ".join(log.keys())
        raise DataError(f"{log.log_path} has none of {', '.join(KEYS.values())}; its records have {keys}.")
    if metric is not None and metric not in known:
        raise DataError(f"{log.log_path} has no {KEYS[metric]!r}; choose {' or '.join(map(repr, known))}.")
    return metric or known[0]


def _parameters(records: Sequence[Record], key: str) -> list[str]:
    return list({name: None for record in records for name in record[key]})


def _values(records: Sequence[Record], key: str, parameters: list[str]) -> NDArray[np.float64]:
    table = np.array([[number(record[key].get(name)) for record in records] for name in parameters], dtype=np.float64)
    return np.where(np.isfinite(table), table, np.nan)
