"""Columns filled while a file is read equal what `json.loads` gives, whatever the records hold."""

from __future__ import annotations

import json
import math
import random
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onstep.analysis import TrainingLog
from onstep.analysis.logs import lines, record_file

KEYS = [
    "loss",
    "eval_loss",
    "a",
    "a1",
    "a2",
    "loss ",
    "über",
    'k"q',
    "x\\y",
    "global_step",
    "{",
    "}",
    ', "loss"',
    "\u2028",
]
TEXTS = ["", '"loss": 3', 'x, "loss": 1', '{"loss": 2}', "\\", 'é"', "[1]", "1.5", "\n", "a}", "{b", "NaN"]


def some_number(source: random.Random) -> float:
    whole = source.randrange(-(10**6), 10**6)
    tiny_or_huge = source.random() * 10.0 ** source.randrange(-300, 300)
    return source.choice([source.random(), whole, tiny_or_huge, -0.0, 10**30, math.nan, math.inf, -math.inf])


def some_value(source: random.Random, depth: int = 0) -> Any:
    kind = source.randrange(12)
    if kind == 0:
        return source.choice(TEXTS)
    if kind == 1 and depth < 2:
        return [some_value(source, depth + 1) for _ in range(source.randrange(3))]
    if kind == 2 and depth < 2:
        return {source.choice(KEYS): some_value(source, depth + 1) for _ in range(source.randrange(3))}
    return source.choice([True, False, None]) if kind == 3 else some_number(source)


def some_line(source: random.Random, keys: list[str], *, is_simple: bool) -> str:
    """A record as JSON; now and then with a key that stands twice."""
    values = {key: source.random() if is_simple and source.random() < 0.95 else some_value(source) for key in keys}
    separators = source.choice([None, (",", ":"), (", ", ": "), (" , ", " : ")])
    line = json.dumps(values, ensure_ascii=source.random() < 0.5, separators=separators)
    if source.random() < 0.05:
        again = f"{json.dumps(source.choice(KEYS))}: {json.dumps(some_value(source))}}}"
        line = line[:-1].rstrip() + (", " if values else "") + again
    return line


def some_file(source: random.Random) -> str:
    layouts = [source.sample(KEYS, source.randrange(6)) for _ in range(source.randrange(1, 6))]
    is_simple = source.random() < 0.5
    lines = [some_line(source, source.choice(layouts), is_simple=is_simple) for _ in range(source.randrange(1, 60))]
    begin, between, end = source.choice(
        [("[\n", ",\n", "\n]"), ("[", ",\n", "]"), ("[\n", ", \r\n", "\n]\n\n"), ("[", ", ", "]")]
    )
    return begin + between.join(lines) + end


def column_of(records: list[dict[str, Any]], key: str) -> list[float]:
    values = (record.get(key) for record in records)
    return [float(one) if isinstance(one, int | float) and not isinstance(one, bool) else math.nan for one in values]


@pytest.mark.parametrize("seed", range(8))
def test_columns_equal_those_of_decoded_records(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = random.Random(seed)
    path = tmp_path / "log.json"
    for _ in range(25):
        num_bytes = source.choice([50, 300, 2000, 1 << 22])
        monkeypatch.setattr(record_file, "PIECE_BYTES", num_bytes)
        monkeypatch.setattr(lines, "PIECE_BYTES", num_bytes)
        text = some_file(source)
        path.write_text(text, encoding="utf-8", newline="")
        decoded = json.loads(text)
        log = TrainingLog.from_file(path)
        assert log.notes == []
        assert repr(list(log.records)) == repr(decoded)
        assert repr([log.records[row] for row in range(len(decoded))]) == repr(decoded)
        assert log.keys() == list({key: None for record in decoded for key in record})
        for key in KEYS:
            assert log.has(key).tolist() == [key in record for record in decoded], (text, key)
            assert np.array_equal(log.column(key), column_of(decoded, key), equal_nan=True), (text, key)
            rows, numbers = log.columns.points(key)
            assert np.array_equal(rows, np.flatnonzero(log.has(key))), (text, key)
            assert np.array_equal(numbers, log.column(key)[rows], equal_nan=True), (text, key)
            values = [value for block in log.blocks([key]) for value in block[key]]
            assert repr(values) == repr([record.get(key) for record in decoded]), (text, key)


def plain_log(path: Path, num_records: int = 500) -> TrainingLog:
    """A metrics log of plain records, with an evaluation after every hundredth."""
    records: list[dict[str, Any]] = []
    for step in range(num_records):
        records.append({"global_step": step, "loss": 1 / (1 + step), "peak": [1, 2], "host": "a"})
        if step % 100 == 99:
            records.append({"global_step": step, "eval_loss": 2 / step})
    path.write_text("[\n" + ",\n".join(map(json.dumps, records)) + "\n]")
    return TrainingLog.from_file(path)


def test_columns_are_at_hand_once_the_file_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = plain_log(tmp_path / "log.json")

    def never(*_: object, **__: object) -> None:
        raise AssertionError("a record was decoded")

    monkeypatch.setattr(record_file.RecordFile, "_decoded", never)
    log.load_columns(["loss", "eval_loss", "global_step"])
    assert np.count_nonzero(~np.isnan(log.column("loss"))) == 500
    assert log.column("eval_loss")[100] == 2 / 99
    assert not log.is_training[100]
    with pytest.raises(AssertionError, match="was decoded"):
        log.records[0]


def nested_log(path: Path, num_records: int = 300) -> tuple[TrainingLog, list[dict[str, Any]]]:
    records: list[dict[str, Any]] = [
        {"global_step": step, "norms": {"a": step / 7, "b": {"c": []}}, "who": ["x", "{"], "loss": 1 / (1 + step)}
        for step in range(num_records)
    ]
    path.write_text("[\n" + ",\n".join(map(json.dumps, records)) + "\n]")
    return TrainingLog.from_file(path), records


def test_columns_and_blocks_of_objects_and_lists_of_texts(tmp_path: Path) -> None:
    log, records = nested_log(tmp_path / "log.json")
    assert log.column("loss").tolist() == [record["loss"] for record in records]
    assert np.isnan(log.column("norms")).all()
    assert [value for block in log.blocks(["norms"]) for value in block["norms"]] == [one["norms"] for one in records]


def test_columns_of_a_long_log_take_less_memory_than_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "PIECE_BYTES", 1 << 16)
    path = tmp_path / "log.json"
    plain_log(path, 20_000)
    tracemalloc.start()
    try:
        log = TrainingLog.from_file(path)
        log.load_columns(log.keys())
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert log.num_records == 20_200
    assert peak < path.stat().st_size + 1_000_000


@pytest.mark.parametrize(
    "other",
    [
        '{"x": 5, "a": 1, "loss": 2}',
        '{"x": {}, "a": {}, "loss": 2}',
        '{"x": {"a": 1, "loss": 2}}',
        '{"x": {"a": {}, "loss": 2}}',
        '{"x": {"}": 1}, "loss": 2}',
        '{"x": {"\\"": 1}, "loss": 2}',
        '{"x": [{"a": 1}], "loss": 2}',
        '{"x": {"a": "x"}, "loss": 2}',
    ],
)
@pytest.mark.parametrize("example", ['{"x": {"a": 1}, "loss": 7}', '{"x": {"a": {}}, "loss": 7}'])
def test_line_that_only_looks_like_its_neighbours_is_told_apart(tmp_path: Path, example: str, other: str) -> None:
    path = tmp_path / "log.json"
    path.write_text(f"[\n{example},\n{other},\n{example}\n]")
    log, decoded = TrainingLog.from_file(path), json.loads(path.read_text())
    assert log.notes == []
    assert np.array_equal(log.column("loss"), column_of(decoded, "loss"), equal_nan=True)
    assert [value for block in log.blocks(["x"]) for value in block["x"]] == [record.get("x") for record in decoded]


def test_damaged_value_in_an_object_is_named(tmp_path: Path) -> None:
    path = tmp_path / "log.json"
    _, records = nested_log(path, 3)
    path.write_text(path.read_text().replace(json.dumps(records[1]["norms"]), '{"a": 1x, "b": {"c": []}}'))
    log = TrainingLog.from_file(path)
    assert log.column("loss").tolist() == [record["loss"] for record in records]
    assert math.isnan(log.records[1]["norms"])
    assert "'norms' in record 1" in log.notes[0]


def test_log_of_another_layout_takes_no_more_memory_than_its_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "PIECE_BYTES", 1 << 16)
    records = [{"step": step, "loss": 1 / (1 + step), "epoch": step / 100} for step in range(20_000)]
    path = tmp_path / "trainer_state.json"
    path.write_text(json.dumps({"log_history": records}, indent=2))
    del records
    tracemalloc.start()
    try:
        content = json.loads(path.read_text())
        as_objects = tracemalloc.get_traced_memory()[1]
        del content
        tracemalloc.reset_peak()
        log = TrainingLog.from_file(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert log.num_records == 20_000
    assert peak < 1.1 * as_objects


def test_lists_and_texts_are_no_numbers(tmp_path: Path) -> None:
    log = plain_log(tmp_path / "log.json", 10)
    assert np.isnan(log.column("peak")).all()
    assert np.isnan(log.column("host")).all()
    assert log.has("peak").all()
    assert log.notes == []


def test_columns_are_read_once_and_cannot_be_changed(tmp_path: Path) -> None:
    log = plain_log(tmp_path / "log.json")
    first = log.column("loss")
    assert log.column("loss") is first
    with pytest.raises(ValueError, match="read-only"):
        first[0] = 3.0


def test_key_that_no_record_has_is_a_column_of_nan(tmp_path: Path) -> None:
    log = plain_log(tmp_path / "log.json", 3)
    assert np.isnan(log.column("never")).all()
    assert not log.has("never").any()


def test_records_are_a_sequence(tmp_path: Path) -> None:
    records = plain_log(tmp_path / "log.json", 5).records
    assert [record["global_step"] for record in records[1:4]] == [1, 2, 3]
    assert records[-1] == records[4]
    for row in (5, -6):
        with pytest.raises(IndexError, match="has 5"):
            records[row]


def test_log_stays_as_it_was_opened_when_a_resume_takes_its_place(tmp_path: Path) -> None:
    path = tmp_path / "log.json"
    log = plain_log(path, 50)
    (tmp_path / "other.json").write_text('[\n{"global_step": 0, "loss": 7.5}\n]')
    (tmp_path / "other.json").rename(path)
    assert log.column("loss")[49] == 1 / 50
    assert log.records[49]["global_step"] == 49
