"""The curves of a job: added by one thread, read by others."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from onstep.control.history import MOST_POINTS, MOST_SERIES, History
from onstep.record import MetricsLog, align


def test_a_curve_has_every_point_that_was_added() -> None:
    history = History()
    for step in range(1, 301):
        history.add(step, 100.0 + step, {"loss": 1.0 / step, "text": "no curve", "flag": True})
    series = history.series()
    assert list(series) == ["loss"] == history.names()
    assert series["loss"]["step"] == list(range(1, 301))
    assert series["loss"]["value"] == [1.0 / step for step in range(1, 301)]
    assert series["loss"]["time"][-1] == 400.0
    assert history.num_points() == 300


def test_values_per_rank_become_curves_of_their_own() -> None:
    history = History()
    history.add(1, 0.0, {"memory": [3, 4.5], "names": ["a", "b"]})
    assert {name: one["value"] for name, one in history.series().items()} == {"memory[0]": [3.0], "memory[1]": [4.5]}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, np.float32("nan"), 10**400])
def test_what_is_not_finite_is_a_gap(value: float) -> None:
    history = History()
    history.add(1, 0.0, {"loss": value})
    assert history.series()["loss"]["value"] == [None]


def test_numbers_of_numpy_are_numbers() -> None:
    history = History()
    history.add(1, 0.0, {"a": np.float32(0.5), "b": np.int64(7), "c": np.float64(2)})
    assert [one["value"] for one in history.series().values()] == [[0.5], [7.0], [2.0]]


@pytest.mark.parametrize("points", [10, 1000, 1003])
def test_a_long_curve_is_downsampled_without_losing_a_spike_or_the_last_point(points: int) -> None:
    history = History()
    for step in range(20_000):
        history.add(step, float(step), {"loss": 100.0 if step == 7_777 else -9.0 if step == 12_345 else math.sin(step)})
    one = history.series(points=points)["loss"]
    assert len(one["step"]) <= points
    assert dict(zip(one["step"], one["value"], strict=True))[7_777] == 100.0
    assert min(one["value"]) == -9.0
    assert one["step"][-1] == 19_999
    assert one["step"] == sorted(set(one["step"]))


def test_a_curve_keeps_its_spikes_and_its_newest_points_within_a_bound() -> None:
    history = History()
    for step in range(5 * MOST_POINTS):
        history.add(step, 0.0, {"loss": 100.0 if step == 12_345 else 1.0})
    assert history.num_points() <= MOST_POINTS
    one = history.series(points=MOST_POINTS)["loss"]
    assert max(one["value"]) == 100.0
    assert one["step"][0] == 0
    assert one["step"] == sorted(set(one["step"]))
    assert one["step"][-1000:] == list(range(5 * MOST_POINTS - 1000, 5 * MOST_POINTS))
    assert history._own_curves["loss"].rows().base.nbytes == 3 * 8 * MOST_POINTS


def test_only_points_after_a_step_and_only_known_names_are_returned() -> None:
    history = History()
    for step in range(10):
        history.add(step, 0.0, {"loss": step, "lr": step})
    series = history.series(["lr", "unknown"], since_step=6)
    assert series == {"lr": {"step": [7, 8, 9], "value": [7.0, 8.0, 9.0], "time": [0.0, 0.0, 0.0]}}


def test_points_of_repeated_steps_replace_those_of_before() -> None:
    history = History()
    for step in range(10):
        history.add(step, 0.0, {"loss": step})
    before = history.series()
    history.add(3, 0.0, {"loss": 30})
    assert history.series()["loss"]["value"] == [0.0, 1.0, 2.0, 30.0]
    assert len(before["loss"]["step"]) == 10


@pytest.fixture
def record(tmp_path: Path) -> Iterator[MetricsLog]:
    """The record of a run, with the losses of steps 1 to 10, and an evaluation after the last."""
    with MetricsLog.open(tmp_path / "record.jsonl") as log:
        log.append({"kind": "start", "global_step": 0, "num_ranks": 1})
        for step in range(1, 11):
            log.append({"kind": "log", "timestamp": 100.0 + step, "global_step": step, "loss": float(step)})
        log.append({"kind": "evaluation", "timestamp": 111.0, "global_step": 10, "eval_loss": 5.0})
        yield log


def test_curves_are_read_from_a_log_as_it_grows(record: MetricsLog) -> None:
    history = History(record.path)
    history.refresh()
    assert history.series(["loss"])["loss"]["step"] == list(range(1, 11))
    record.append({"kind": "log", "timestamp": 112.0, "global_step": 11, "loss": 0.5})
    history.refresh()
    history.refresh()
    assert history.series(["loss"])["loss"]["value"] == [*map(float, range(1, 11)), 0.5]
    assert history.names() == ["loss", "eval_loss"]


def test_a_log_that_a_rollback_cuts_back_has_one_curve_and_keeps_what_is_not_in_it(record: MetricsLog) -> None:
    history = History(record.path)
    history.add(10, 110.0, {"rss_bytes": 7})
    history.refresh()
    record.close()
    align(record.path, 4)
    history.refresh()
    assert history.series(["loss"])["loss"]["step"] == [1, 2, 3, 4]
    assert history.names() == ["loss", "rss_bytes"]
    with MetricsLog.open(record.path) as log:
        for step in range(5, 30):
            log.append({"kind": "log", "timestamp": 200.0 + step, "global_step": step, "loss": -1.0})
    history.refresh()
    assert history.series(["loss"])["loss"]["value"] == [1.0, 2.0, 3.0, 4.0, *25 * [-1.0]]


def test_records_of_before_the_log_precede_it(record: MetricsLog) -> None:
    record.close()
    align(record.path, num_records=1)
    history = History(record.path, before=[{"step": step, "loss": float(step)} for step in (1, 2, 3)])
    history.refresh()
    assert history.series()["loss"]["step"] == [1, 2, 3]
    with MetricsLog.open(record.path) as log:
        log.append({"kind": "log", "global_step": 3, "loss": 30.0})
    history.refresh()
    assert history.series()["loss"]["value"] == [1.0, 2.0, 3.0, 30.0]
    again = History(record.path, before=[{"step": step, "loss": float(step)} for step in (1, 2, 3)])
    again.refresh()
    assert again.series()["loss"]["value"] == [1.0, 2.0, 30.0]


def test_a_log_that_is_not_there_yet_is_read_once_it_is(tmp_path: Path) -> None:
    history = History(tmp_path / "record.jsonl")
    history.refresh()
    assert history.names() == []
    (tmp_path / "record.jsonl").write_text('{"global_step": 1, "loss": 2.0}\n')
    history.refresh()
    assert history.series()["loss"]["step"] == [1]


def test_names_without_end_do_not_fill_the_memory() -> None:
    history = History()
    for number in range(MOST_SERIES + 10):
        history.add(1, 0.0, {f"loss_of_{number}": 1.0})
    assert len(history.names()) == MOST_SERIES


def test_a_reader_sees_whole_points_while_the_training_thread_adds_and_rolls_back() -> None:
    history, errors, is_done = History(), [], threading.Event()

    def read() -> None:
        while not is_done.is_set():
            for one in history.series(points=10_000).values():
                if one["value"] != [2.0 * step for step in one["step"]] or one["time"] != one["value"]:
                    errors.append(one)

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(10):
        for step in range(500):
            history.add(step, 2.0 * step, {"a": 2.0 * step, "b": 2.0 * step})
    is_done.set()
    reader.join()
    assert not errors
