"""Logs for tests: of records that are given, and of a short run whose numbers are known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from onstep.analysis import TrainingLog

RECORDS = 100


def log_of(records: list[dict[str, Any]], label: str | None = None, path: str = "log.json") -> TrainingLog:
    return TrainingLog(Path(path), records, label=label)


def points(metric: str, values: list[float], **more: Any) -> list[dict[str, Any]]:
    """One record a step, from step 1 on."""
    return [{"global_step": step, metric: value, **more} for step, value in enumerate(values, 1)]


def run(label: str = "run", *, offset: float = 0.0, num: int = RECORDS) -> TrainingLog:
    """A record each 10 steps, 30 s and 1,000 tokens; an evaluation each 50 steps, 1 s later."""
    records: list[dict[str, Any]] = []
    for index in range(1, num + 1):
        place = {"timestamp": 1000.0 + 30 * index, "global_step": 10 * index, "epoch": index / num}
        loss = offset + 2 + 3 / index + 0.1 * (index % 2)
        training = {"loss": loss, "grad_norm": 1 + 1 / index, "learning_rate": 1e-3 * (1 - index / num)}
        records.append({**place, **training, "total_tokens": 1000 * index, "total_flos": 5e9 * index})
        if index % 5 == 0:
            records.append({**place, "timestamp": place["timestamp"] + 1, "eval_loss": offset + 2.2 + 3 / index})
    return log_of(records, label)
