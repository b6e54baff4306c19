"""A log is followed while it is written, cut back and begun anew: nothing is lost, nothing comes twice."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from onstep.analysis import LogTail
from onstep.analysis.logs import log_tail
from onstep.record import MetricsLog, align, set_aside


def steps(records: list[dict[str, int]]) -> list[int]:
    return [record["global_step"] for record in records]


def write(metrics_log: MetricsLog, numbers: range) -> None:
    for number in numbers:
        metrics_log.append({"global_step": number, "text": "x" * 40})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "trainer_logs.json"
    with MetricsLog.open(path) as metrics_log:
        write(metrics_log, range(30))
    return path


def test_last_records_are_found_from_the_end(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_tail, "_TAIL_BYTES", 100)
    for number in (0, 1, 5, 30, 99):
        assert steps(LogTail(path).last(number)) == list(range(30))[max(0, 30 - number) :]


def test_news_are_what_was_appended_since(path: Path) -> None:
    tail = LogTail(path)
    assert steps(tail.last(1)) == [29]
    assert tail.news() == []
    with MetricsLog.open(path) as metrics_log:
        write(metrics_log, range(30, 32))
        assert steps(tail.news()) == [30, 31]
        write(metrics_log, range(32, 33))
        assert steps(tail.news()) == [32]
    assert tail.news() == []
    assert not tail.was_rewritten


def test_half_written_record_is_read_when_it_is_whole(path: Path) -> None:
    tail = LogTail(path)
    tail.last(1)
    whole, addition = path.read_bytes()[:-2], b',\n{"global_step": 30, "loss": 1.5}'
    for cut in range(1, len(addition)):
        path.write_bytes(whole + addition[:cut])
        assert tail.news() == [], addition[:cut]
    path.write_bytes(whole + addition + b"\n]")
    assert tail.news() == [{"global_step": 30, "loss": 1.5}]


def test_resume_from_an_earlier_step_shows_the_new_records_only(path: Path) -> None:
    tail = LogTail(path)
    tail.last(30)
    align(path, 19)
    assert tail.news() == []
    assert tail.was_rewritten
    with MetricsLog.open(path) as metrics_log:
        write(metrics_log, range(20, 22))
    assert steps(tail.news()) == [20, 21]
    assert not tail.was_rewritten


def test_resume_that_wrote_before_it_was_noticed_loses_nothing(path: Path) -> None:
    tail = LogTail(path)
    tail.last(30)
    align(path, 19)
    with MetricsLog.open(path) as metrics_log:
        for number in range(20, 45):
            metrics_log.append({"global_step": number, "text": "y"})
    assert steps(tail.news()) == list(range(20, 45))
    assert tail.was_rewritten


def test_repair_without_a_cut_is_no_rewriting(path: Path) -> None:
    tail = LogTail(path)
    tail.last(1)
    path.write_bytes(path.read_bytes()[:-2])
    align(path)
    assert tail.news() == []
    assert not tail.was_rewritten


def test_run_begun_anew_is_shown_from_its_start(path: Path) -> None:
    tail = LogTail(path)
    tail.last(3)
    set_aside(path)
    assert tail.news() == []
    with MetricsLog.open(path) as metrics_log:
        write(metrics_log, range(100, 103))
    assert steps(tail.news()) == [100, 101, 102]
    assert tail.was_rewritten


def test_log_that_was_emptied_in_place_is_shown_anew(path: Path) -> None:
    tail = LogTail(path)
    tail.last(1)
    path.write_text("[\n" + json.dumps({"global_step": 7}) + "\n]")
    assert steps(tail.news()) == [7]
    assert tail.was_rewritten


def test_log_that_was_cut_in_place_and_has_outgrown_its_old_end_shows_the_new_records_only(path: Path) -> None:
    tail = LogTail(path)
    tail.last(30)
    content = path.read_bytes()
    with path.open("r+b") as file:
        file.truncate(content.index(b'{"global_step": 20'))
        file.seek(0, 2)
        file.write(
            b",\n".join(json.dumps({"global_step": number, "text": "y" * 60}).encode() for number in range(20, 45))
        )
    assert steps(tail.news()) == list(range(20, 45))
    assert tail.was_rewritten


def test_all_records_are_read_and_then_those_that_follow(path: Path) -> None:
    tail = LogTail(path)
    with MetricsLog.open(path) as metrics_log:
        write(metrics_log, range(30, 32))
        assert steps(list(tail.read())) == list(range(32))
        assert tail.news() == []
        write(metrics_log, range(32, 33))
    assert steps(tail.news()) == [32]


def test_unchanged_log_is_not_read_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tail = LogTail(path)
    tail.read()
    monkeypatch.setattr(log_tail.FileSource, "read", None)
    assert tail.news() == []


def test_log_in_another_layout_is_read_as_a_whole_whenever_it_has_changed(tmp_path: Path) -> None:
    path = tmp_path / "trainer_state.json"
    path.write_text(json.dumps({"log_history": [{"step": 1, "loss": 2.0}]}, indent=2))
    tail = LogTail(path)
    assert steps(list(tail.read())) == [1]
    assert tail.news() == []
    assert not tail.was_rewritten
    path.write_text(json.dumps({"log_history": [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0}]}, indent=2))
    assert tail.news() == []
    assert tail.was_rewritten
    assert steps(list(tail.read())) == [1, 2]
