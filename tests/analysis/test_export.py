"""Tables hold what the log holds: read back they are equal."""

from __future__ import annotations

import csv
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest

from onstep.analysis import TrainingLog, export_csv, export_parquet
from onstep.analysis.logs import export_tables as export
from onstep.analysis.logs import record_file
from onstep.errors import ConfigError, MissingExtraError

RECORDS: list[dict[str, Any]] = [
    {"global_step": 1, "loss": 0.1 + 0.2, "who": 'a "quoted", text', "ok": True, "peak": [1, 2], "info": {"lr": 1e-3}},
    {"global_step": 2, "loss": math.nan, "mixed": 3},
    {"global_step": 3, "eval_loss": 2, "mixed": "three", "peak": [2.5]},
    {"global_step": 4, "eval_loss": 2.5, "loss": math.inf, "big": 2**70, "whole": 2**60, "nothing": None},
]


@pytest.fixture(params=["file", "list"])
def log(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrainingLog:
    if request.param == "list":
        return TrainingLog(tmp_path / "x.json", RECORDS)
    monkeypatch.setattr(record_file, "PIECE_BYTES", 100)
    path = tmp_path / "log.json"
    path.write_text("[\n" + ",\n".join(map(json.dumps, RECORDS)) + "\n]")
    return TrainingLog.from_file(path)


def test_csv_has_a_line_a_record_and_exact_numbers(log: TrainingLog, tmp_path: Path) -> None:
    path = export_csv(log, tmp_path / "new" / "log.csv")
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == log.keys()
    assert [int(row["global_step"]) for row in rows] == [1, 2, 3, 4]
    assert float(rows[0]["loss"]) == 0.1 + 0.2
    assert (rows[1]["loss"], rows[2]["loss"], rows[3]["loss"]) == ("nan", "", "inf")
    assert rows[0]["who"] == 'a "quoted", text'
    assert json.loads(rows[0]["peak"]) == [1, 2]
    assert json.loads(rows[0]["info"]) == {"lr": 1e-3}
    assert (rows[0]["ok"], int(rows[3]["big"])) == ("true", 2**70)


def test_parquet_keeps_types_and_nulls(log: TrainingLog, tmp_path: Path) -> None:
    pq = pytest.importorskip("pyarrow.parquet")
    table = pq.read_table(export_parquet(log, tmp_path / "log.parquet"))
    types = {field.name: str(field.type) for field in table.schema}
    assert types["global_step"] == types["whole"] == "int64"
    assert types["loss"] == types["eval_loss"] == types["big"] == "double"
    assert (types["who"], types["ok"], types["mixed"], types["info"]) == ("string", "bool", "string", "string")
    assert types["peak"].startswith("list<")
    columns = table.to_pydict()
    assert columns["global_step"] == [1, 2, 3, 4]
    assert columns["eval_loss"] == [None, None, 2.0, 2.5]
    assert math.isnan(columns["loss"][1])
    assert columns["loss"][2] is None
    assert columns["peak"] == [[1.0, 2.0], None, [2.5], None]
    assert columns["mixed"] == [None, "3", '"three"', None]
    assert columns["whole"][3] == 2**60


def test_long_log_is_written_in_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pq = pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr(export, "_ROWS_A_GROUP", 100)
    monkeypatch.setattr(record_file, "PIECE_BYTES", 1000)
    path = tmp_path / "log.json"
    path.write_text("\n".join(json.dumps({"global_step": step, "loss": 1 / step}) for step in range(1, 1001)))
    log = TrainingLog.from_file(path)
    assert pq.ParquetFile(export_parquet(log, tmp_path / "log.parquet")).num_row_groups > 5
    table = pq.read_table(tmp_path / "log.parquet").to_pydict()
    assert table == {"global_step": list(range(1, 1001)), "loss": [1 / step for step in range(1, 1001)]}
    assert len(export_csv(log, tmp_path / "log.csv").read_text().splitlines()) == 1001


def test_log_without_records_is_a_table_without_rows(tmp_path: Path) -> None:
    log = TrainingLog(tmp_path / "x.json", [])
    assert export_csv(log, tmp_path / "log.csv").read_text().strip() == ""
    pq = pytest.importorskip("pyarrow.parquet")
    assert pq.read_table(export_parquet(log, tmp_path / "log.parquet")).num_rows == 0


def test_missing_pyarrow_is_reported_with_the_install_line(
    log: TrainingLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'onstep\[reports\]'"):
        export_parquet(log, tmp_path / "log.parquet")


def test_failed_export_leaves_the_earlier_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "log.csv"
    path.write_text("earlier")
    log = TrainingLog(tmp_path / "x.json", RECORDS)

    def full(_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(export, "_cells", full)
    with pytest.raises(OSError, match="no space"):
        export_csv(log, path)
    assert path.read_text() == "earlier"
    assert [one.name for one in tmp_path.iterdir()] == ["log.csv"]


def test_suffix_chooses_the_format(tmp_path: Path) -> None:
    log = TrainingLog(tmp_path / "x.json", RECORDS)
    assert export.export(log, tmp_path / "a.CSV").exists()
    with pytest.raises(ConfigError, match=r"must end in \.csv or \.parquet, got '.*a\.xlsx'"):
        export.export(log, tmp_path / "a.xlsx")
