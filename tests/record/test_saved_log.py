"""The records of a metrics log and those that its gaps stand for are as many as were written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from onstep.record import MetricsLog, read_records
from onstep.record.writer import JsonLogWriter

NAME = "trainer_logs.json"


def saved_after(directory: Path, state: dict[str, Any] | None, first: int, last: int) -> dict[str, Any]:
    """Continue from a state, record these steps, and return the state of a checkpoint."""
    writer = JsonLogWriter(NAME)
    if state is not None:
        writer.load_state_dict(json.loads(json.dumps(state)))
    writer.open(directory, step=first - 1)
    for step in range(first, last + 1):
        writer.write_record(step, 0.0, {"loss": 1 / step})
    writer.make_durable()
    found = writer.state_dict()
    writer.close()
    return found


def lose_all_but(path: Path, number: int) -> None:
    kept = read_records(path)[:number]
    path.unlink()
    with MetricsLog.open(path) as log:
        for record in kept:
            log.append(record)


def number_of_records(path: Path) -> int:
    return sum(record.get("missing_records", {}).get("number", 1) for record in read_records(path))


def test_a_second_loss_counts_what_the_first_gap_replaced(tmp_path: Path) -> None:
    path = tmp_path / NAME
    state = saved_after(tmp_path, None, 1, 50)
    lose_all_but(path, 40)
    state = saved_after(tmp_path, state, 51, 60)
    assert number_of_records(path) == 60
    lose_all_but(path, 5)  # also the gap of ten
    state = saved_after(tmp_path, state, 61, 70)
    assert number_of_records(path) == 70
    lose_all_but(path, 8)  # the gap of 55 stays
    saved_after(tmp_path, state, 71, 72)
    assert number_of_records(path) == 72
    assert [record["missing_records"]["number"] for record in read_records(path) if "missing_records" in record] == [
        55,
        8,
    ]


def test_a_state_without_the_count_is_read(tmp_path: Path) -> None:
    state = saved_after(tmp_path, None, 1, 5)
    assert state.pop("num_replaced") == 0
    lose_all_but(tmp_path / NAME, 2)
    saved_after(tmp_path, state, 6, 6)
    assert number_of_records(tmp_path / NAME) == 6
