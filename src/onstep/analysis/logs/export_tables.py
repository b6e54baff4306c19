"""Exports the records of a log to CSV or Parquet, one row per record."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from onstep.analysis.logs.columns import number
from onstep.analysis.logs.training_log import TrainingLog
from onstep.errors import ConfigError, extra
from onstep.files.durability import replacing

_ROWS_A_GROUP = 100_000
"""Rows per group of a Parquet file; one group is in memory at a time."""


def export(log: TrainingLog, path: str | Path) -> Path:
    """Write CSV or Parquet, depending on the suffix of `path`; see `export_csv` and `export_parquet`."""
    writers = {".csv": export_csv, ".parquet": export_parquet}
    suffix = Path(path).suffix.lower()
    if suffix not in writers:
        raise ConfigError(f"the name of an export must end in {' or '.join(writers)}, got {str(path)!r}.")
    return writers[suffix](log, path)


def export_csv(log: TrainingLog, path: str | Path) -> Path:
    """Write the records as CSV: a header with all keys, one line per record, empty cells for missing keys.

    Numbers are written so that reading them returns the same float (`nan` and `inf` if not finite); lists and objects
    are JSON. Memory use is small even for a million records.

    Args:
        log: the log of one run.

    Returns:
        `path`.

    Raises:
        DataError: if almost all of many cells would be empty; see `Columns.check_table`.
    """
    log.columns.check_table(str(path))
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    keys = log.keys()
    with (
        replacing(Path(path)) as temporary,
        temporary.open("w", encoding="utf-8", errors="replace", newline="") as file,
    ):
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(keys)
        for block in log.blocks(keys):
            writer.writerows(zip(*(_cells(block[key]) for key in keys), strict=True))
    return Path(path)


def export_parquet(log: TrainingLog, path: str | Path) -> Path:
    """Write the records as Parquet: one column per key, null where a record lacks it.

    Integers, floats, booleans, strings and lists of numbers keep their type; a key with values of several types, or
    with objects, becomes a column of JSON strings. The log is read twice; memory use is small.

    Args:
        log: the log of one run.

    Returns:
        `path`.

    Raises:
        MissingExtraError: if pyarrow is not installed.
        DataError: as for `export_csv`.
    """
    with extra("reports", "writing Parquet requires pyarrow", ", or export CSV."):
        import pyarrow as pa
        import pyarrow.parquet as pq
    log.columns.check_table(str(path))
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    keys = log.keys()
    kinds = _kinds(log, keys)
    schema = pa.schema([(_encodable(key), _arrow_type(pa, kinds[key])) for key in keys])
    with replacing(Path(path)) as temporary, pq.ParquetWriter(temporary, schema) as writer:
        for group in _groups(log, keys):
            arrays = [_array(pa, group[key], kinds[key], field.type) for key, field in zip(keys, schema, strict=True)]
            writer.write_table(pa.table(arrays, schema=schema))
    return Path(path)


def _cells(values: list[Any]) -> list[Any]:
    """Convert the values that the csv writer would not write as JSON."""
    return [json.dumps(value) if isinstance(value, bool | list | dict) else value for value in values]


_Kind = frozenset[str]
"""Names of the types of a key's values; lists by the types of their elements."""


def _kinds(log: TrainingLog, keys: list[str]) -> dict[str, _Kind]:
    kinds: dict[str, set[str]] = {key: set() for key in keys}
    for block in log.blocks(keys):
        for key in keys:
            found = set(map(type, block[key]))
            kinds[key] |= {kind.__name__ for kind in found if kind not in (list, int)}
            if list in found:
                lists = [value for value in block[key] if isinstance(value, list)]
                are_numbers = all(type(one) in (int, float) for value in lists for one in value)
                kinds[key] |= {"list" if are_numbers else "list of others"}
            if int in found:
                is_64_bit = all(-(1 << 63) <= value < 1 << 63 for value in block[key] if type(value) is int)
                kinds[key] |= {"int" if is_64_bit else "float"}
    return {key: frozenset(found - {"NoneType"}) for key, found in kinds.items()}


def _arrow_type(pa: Any, kind: _Kind) -> Any:
    if kind == {"int"}:
        return pa.int64()
    if not kind or kind <= {"int", "float"}:
        return pa.float64()
    if kind == {"bool"}:
        return pa.bool_()
    return pa.list_(pa.float64()) if kind == {"list"} else pa.string()


def _array(pa: Any, values: list[Any], kind: _Kind, arrow_type: Any) -> Any:
    if arrow_type == pa.float64():
        values = [None if value is None else number(value) for value in values]
    elif kind == {"list"}:
        values = [None if value is None else [number(one) for one in value] for value in values]
    elif arrow_type == pa.string():
        as_text = _encodable if kind == {"str"} else json.dumps
        values = [None if value is None else as_text(value) for value in values]
    return pa.array(values, arrow_type, from_pandas=False)


def _encodable(text: str) -> str:
    """Replace unpaired surrogates, which UTF-8 cannot encode."""
    return text.encode("utf-8", errors="replace").decode("utf-8")


def _groups(log: TrainingLog, keys: list[str]) -> Iterator[dict[str, list[Any]]]:
    group: dict[str, list[Any]] = {key: [] for key in keys}
    num_rows = 0
    for block in log.blocks(keys):
        for key in keys:
            group[key] += block[key]
        num_rows += len(next(iter(block.values()), []))
        if num_rows >= _ROWS_A_GROUP:
            yield group
            group, num_rows = {key: [] for key in keys}, 0
    if num_rows:
        yield group
