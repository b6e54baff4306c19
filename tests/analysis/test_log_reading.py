"""What can be read of a damaged or foreign log is read, and the notes say what was not."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onstep.analysis import TrainingLog
from onstep.errors import DataError
from onstep.record import MetricsLog

RECORDS: list[dict[str, Any]] = [
    {"global_step": 0, "experiment_info": {"note": "nested", "loss": 9}},
    {"global_step": 1, "loss": 2.5, "who": "über"},
    {"global_step": 2, "loss": math.nan, "who": "b"},
    {"global_step": 2, "eval_loss": math.inf},
]


def in_lines(records: list[dict[str, Any]]) -> str:
    return "[\n" + ",\n".join(json.dumps(record, ensure_ascii=False) for record in records) + "\n]"


def read(tmp_path: Path, content: str | bytes) -> TrainingLog:
    path = tmp_path / "trainer_logs.json"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return TrainingLog.from_file(path)


def same(log: TrainingLog, records: list[dict[str, Any]]) -> bool:
    return repr(list(log.records)) == repr(records)


@pytest.mark.parametrize(
    "content",
    [
        in_lines(RECORDS),
        json.dumps(RECORDS),
        json.dumps(RECORDS, indent=2),
        "\n".join(map(json.dumps, RECORDS)),
        "\ufeff" + in_lines(RECORDS),
        in_lines(RECORDS).replace("\n", "\r\n"),
    ],
    ids=["journal", "one line", "indented", "JSON lines", "byte order mark", "Windows"],
)
def test_whole_file_of_any_layout_is_read_without_notes(tmp_path: Path, content: str) -> None:
    log = read(tmp_path, content)
    assert same(log, RECORDS)
    assert log.notes == []
    assert np.array_equal(log.column("loss"), [np.nan, 2.5, np.nan, np.nan], equal_nan=True)


def test_file_cut_at_any_byte_gives_its_whole_records(tmp_path: Path) -> None:
    content = in_lines(RECORDS).encode()
    ends = [content.index(json.dumps(one, ensure_ascii=False).encode()) for one in RECORDS]
    ends = [end + len(json.dumps(one, ensure_ascii=False).encode()) for end, one in zip(ends, RECORDS, strict=True)]
    for cut in range(1, len(content)):
        log = read(tmp_path, content[:cut])
        num_whole = sum(end <= cut for end in ends)
        assert same(log, RECORDS[:num_whole]), content[:cut]
        assert log.notes, content[:cut]


def test_cut_record_is_named(tmp_path: Path) -> None:
    log = read(tmp_path, in_lines(RECORDS)[:-20])
    (note,) = log.notes
    assert "Recovered 3 records" in note
    assert "truncated at byte" in note


def test_missing_bracket_is_reported_as_a_writer_at_work(tmp_path: Path) -> None:
    log = read(tmp_path, in_lines(RECORDS)[:-2] + ",")
    assert same(log, RECORDS)
    assert log.notes == ["Recovered 4 records; the closing ']' is missing: the writer is still running, or was killed"]


def test_live_metrics_log_is_whole_at_any_moment(tmp_path: Path) -> None:
    path = tmp_path / "trainer_logs.json"
    with MetricsLog.open(path) as metrics_log:
        for number, record in enumerate(RECORDS, 1):
            metrics_log.append(record)
            log = TrainingLog.from_file(path)
            assert (log.num_records, log.notes) == (number, [])


def test_damaged_lines_are_left_out_and_named(tmp_path: Path) -> None:
    lines = in_lines(RECORDS).splitlines()
    lines[2] = lines[2][:15] + "\0\0\0\0" + lines[2][19:]
    lines.insert(4, "ETA: 3 h")
    log = read(tmp_path, "\n".join(lines))
    assert same(log, [RECORDS[0], *RECORDS[2:]])
    (note,) = log.notes
    assert note.startswith("Recovered 3 records; skipped damaged lines: 3 (")
    assert "5 ('ETA: 3 h' at byte" in note


def test_many_damaged_lines_are_counted(tmp_path: Path) -> None:
    log = read(tmp_path, in_lines(RECORDS)[:-2] + "\n" + "junk\n" * 2000 + json.dumps(RECORDS[1]) + "\n]")
    assert log.num_records == 5
    assert "and 1997 more" in log.notes[0]


def test_damaged_value_counts_as_nan_and_is_named(tmp_path: Path) -> None:
    records = [{"global_step": step, "loss": 0.5, "host": "a"} for step in range(5)]
    log = read(tmp_path, in_lines(records).replace('"global_step": 3, "loss": 0.5', '"global_step": 3, "loss": 0x5'))
    assert np.array_equal(log.column("loss"), [0.5, 0.5, 0.5, np.nan, 0.5], equal_nan=True)
    assert log.records[3]["global_step"] == 3
    assert math.isnan(log.records[3]["loss"])
    (note,) = log.notes
    assert "'loss' in record 3" in note


@pytest.mark.parametrize(
    "bad", ['{"a": "x"5, "b": 1}', '{"a": "x", "b": }', '{"a": "x", "b": 1} {"a": 2', '{"a": "x"}, "b": 1}']
)
def test_line_like_its_neighbours_but_malformed_is_left_out(tmp_path: Path, bad: str) -> None:
    good = '{"a": "x", "b": 1}'
    log = read(tmp_path, f"[\n{good},\n{bad},\n{good}\n]")
    assert same(log, [json.loads(good)] * 2)
    assert "skipped damaged lines: 3 (" in log.notes[0]


def test_history_of_hugging_face_trainer_is_read_with_its_steps(tmp_path: Path) -> None:
    history = [
        {"step": 10, "loss": 2.0, "epoch": 0.1},
        {"step": 10, "eval_loss": 3.0},
        {"step": 10, "train_runtime": 1.0},
    ]
    log = read(tmp_path, json.dumps({"global_step": 10, "best_metric": None, "log_history": history}, indent=2))
    assert log.get_steps(log.get_training_records()) == [10]
    assert log.get_metric_values("eval_loss") == [3.0]
    assert log.find_best_step("loss") == (10, 2.0)
    assert "'step' is read as 'global_step'" in log.notes[0]
    whole = json.dumps({"best_metric": None, "log_history": history}, indent=2)
    for rest in ("}", "},", "},\n    {", '},\n    {\n      "step": 10'):
        cut = read(tmp_path, whole[: whole.index(rest) + len(rest)])
        assert cut.get_metric_values("loss") == [2.0]
        assert "Recovered 1 records" in cut.notes[0], rest


def test_indented_file_that_was_cut_gives_what_stands_before(tmp_path: Path) -> None:
    log = read(tmp_path, json.dumps(RECORDS, indent=2)[:-40])
    assert same(log, RECORDS[:3])
    assert "Recovered 3 records; nothing could be read from character" in log.notes[0]


@pytest.mark.parametrize("content", ["", "\n", "[", "[\n]", '[\n{"timest'])
def test_log_of_a_run_that_just_began_has_no_records(tmp_path: Path, content: str) -> None:
    log = read(tmp_path, content)
    assert log.num_records == 0
    assert log.keys() == []
    assert len(log.column("loss")) == 0
    assert log.get_training_records() == []
    assert log.find_best_step("loss") is None
    assert log.get_final_record() is None


@pytest.mark.parametrize(
    "content", ["not json", "[nonsense]", '{"cut": ', b"\x18\x00\x00\x00\x00\x00\x00\x00\xa3\x7fK\x22"]
)
def test_file_without_a_record_is_refused_with_a_remedy(tmp_path: Path, content: str | bytes) -> None:
    with pytest.raises(DataError, match=r"Invalid JSON in log file: .*trainer_logs\.json.*pass the trainer_logs\.json"):
        read(tmp_path, content)


@pytest.mark.parametrize("content", ['{"config": {}, "status": "running"}', "[1, 2, 3]"])
def test_json_that_holds_no_records_is_refused(tmp_path: Path, content: str) -> None:
    with pytest.raises(ValueError, match="must contain a JSON array"):
        read(tmp_path, content)


def test_event_file_of_tensorboard_is_reported_as_such(tmp_path: Path) -> None:
    path = tmp_path / "events.out.tfevents.1700000000.host"
    path.write_bytes(b"\x18\x00\x00\x00\x00\x00\x00\x00\xa3\x7fK\x22\t\x00\x00\xc0brain.Event:2")
    with pytest.raises(DataError, match="tensorboard --logdir"):
        TrainingLog.from_file(path)


def test_missing_file_and_directory_are_reported(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"Log file not found: .*absent\.json"):
        TrainingLog.from_file(tmp_path / "absent.json")
    with pytest.raises(FileNotFoundError, match="Log file not found"):
        TrainingLog.from_run_dir(tmp_path)
    with pytest.raises(DataError, match="is a directory"):
        TrainingLog.from_file(tmp_path)
