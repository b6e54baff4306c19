"""The metrics log stays valid JSON between records, survives SIGKILL and loses nothing when a run continues it."""

from __future__ import annotations

import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from blake3 import blake3

from onstep.errors import OnstepError
from onstep.record import MetricsLog, MetricsLogError, MetricsLogHeldError, align, read_records, set_aside
from tests.support.waiting import until

RECORDS = [
    {"global_step": 0, "note": 'a "quoted" {brace} \\ and ☃ é\n', "list": [1, 2.5e-7, -3]},
    {"global_step": 10, "loss": math.inf, "nested": {"a": {"b": [True, None, -math.inf]}}},
    {"global_step": 20, "loss": 1.25e10, "text": "x, {y}]"},
]


def written(path: Path, steps: list[int]) -> Path:
    with MetricsLog.open(path) as metrics_log:
        for step in steps:
            metrics_log.append({"global_step": step, "loss": 1.0 / step})
    return path


def steps_of(path: Path) -> list[int]:
    return [record["global_step"] for record in json.loads(path.read_text())]


def check_digest(metrics_log: MetricsLog) -> None:
    """That of all bytes of the file before the closing bracket."""
    assert metrics_log.num_bytes == metrics_log.path.stat().st_size - len("\n]")
    content = metrics_log.path.read_bytes()[: metrics_log.num_bytes]
    assert metrics_log.digest == blake3(content).hexdigest()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trainer_logs.json"


def test_file_is_valid_json_before_and_after_every_record(path: Path) -> None:
    metrics_log = MetricsLog.open(path)
    assert json.loads(path.read_text()) == []
    for count, record in enumerate(RECORDS, start=1):
        metrics_log.append(record)
        assert json.loads(path.read_text()) == RECORDS[:count]
        check_digest(metrics_log)
    metrics_log.close()
    assert json.loads(path.read_text()) == RECORDS
    assert path.read_text().startswith("[\n{")
    assert path.read_text().endswith("}\n]")


def test_one_record_stands_on_one_line(path: Path) -> None:
    with MetricsLog.open(path) as metrics_log:
        for record in RECORDS:
            metrics_log.append(record)
    assert len(path.read_text().splitlines()) == len(RECORDS) + 2


def test_opening_again_continues(path: Path) -> None:
    written(path, [1, 2])
    written(path, [3])
    assert steps_of(path) == [1, 2, 3]


def test_opening_without_appending_leaves_an_empty_array(path: Path) -> None:
    MetricsLog.open(path).close()
    written(path, [1])
    assert steps_of(path) == [1]


def test_nan_is_bare_and_lists_stay_arrays(path: Path) -> None:
    with MetricsLog.open(path) as metrics_log:
        metrics_log.append({"loss": math.nan, "peak_mem_allocated": [1, 2]})
    assert '{"loss": NaN, "peak_mem_allocated": [1, 2]}' in path.read_text()
    assert math.isnan(read_records(path)[0]["loss"])


def test_values_json_has_no_form_for_become_plain(path: Path) -> None:
    with MetricsLog.open(path) as metrics_log:
        metrics_log.append({"array": np.arange(2), "scalar": np.float32(0.5), "path": Path("a/b")})
    assert read_records(path) == [{"array": [0, 1], "scalar": 0.5, "path": "a/b"}]


class Hostile:
    def __repr__(self) -> str:
        raise RuntimeError("no text of this")


def hostile_values() -> dict[str, Any]:
    circular: list[Any] = [1]
    circular.append(circular)
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    return {
        "tuple keys": {("a", "b"): 1, None: 2, 3: 4},
        "circular": circular,
        "deep": deep,
        "hostile": Hostile(),
        "hostile key": {Hostile(): 1},
        "long": 10**5000,
        "meta": torch.ones(2, device="meta"),
        "set": {1},
    }


@pytest.mark.parametrize("name", hostile_values())
def test_whatever_is_recorded_the_rest_of_the_record_is_there(path: Path, name: str) -> None:
    with MetricsLog.open(path) as metrics_log:
        metrics_log.append({"global_step": 1, "loss": math.inf, "bad": hostile_values()[name], "list": (1, {"a": 2.5})})
        metrics_log.append({"global_step": 2})
    first, second = read_records(path)
    assert {key: value for key, value in first.items() if key != "bad"} == {
        "global_step": 1,
        "loss": math.inf,
        "list": [1, {"a": 2.5}],
    }
    assert first["bad"]
    assert second == {"global_step": 2}


def test_values_json_cannot_hold_become_text_where_they_are(path: Path) -> None:
    values = hostile_values()
    with MetricsLog.open(path) as metrics_log:
        metrics_log.append({name: values[name] for name in ("tuple keys", "circular", "hostile")})
    (record,) = read_records(path)
    assert record["tuple keys"] == {"('a', 'b')": 1, "null": 2, "3": 4}
    assert record["circular"] == [1, "[1, [...]]"]
    assert "Hostile" in record["hostile"]


@pytest.mark.parametrize("take_it", [MetricsLog.open, align, set_aside])
def test_a_directory_of_that_name_is_renamed(path: Path, take_it: Any) -> None:
    path.mkdir()
    (path / "thesis.tex").write_text("years of work")
    taken = take_it(path)
    if isinstance(taken, MetricsLog):
        taken.close()
        assert read_records(path) == []
    else:
        assert not path.exists()
    aside = path.with_name(f"{path.stem}.unreadable-1{path.suffix}")
    assert (aside / "thesis.tex").read_text() == "years of work"


def test_directory_is_made(tmp_path: Path) -> None:
    assert steps_of(written(tmp_path / "a" / "b" / "log.json", [1])) == [1]


def test_append_to_a_closed_metrics_log_is_refused(path: Path) -> None:
    metrics_log = MetricsLog.open(path)
    metrics_log.close()
    metrics_log.close()
    with pytest.raises(MetricsLogError, match="closed"):
        metrics_log.append({})


def test_mode_x_refuses_an_existing_file(path: Path) -> None:
    written(path, [1])
    with pytest.raises(MetricsLogError, match="mode 'a'"):
        MetricsLog.open(path, "x")
    with pytest.raises(MetricsLogError, match="mode must be"):
        MetricsLog.open(path, "w")
    assert steps_of(path) == [1]


def test_failed_write_leaves_the_file_as_it_was(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    metrics_log = MetricsLog.open(path)
    metrics_log.append({"global_step": 1})
    real = os.pwrite

    def full_disk(descriptor: int, data: bytes, offset: int) -> int:
        if len(data) > 12:
            return real(descriptor, data[:12], offset)
        if data != b"\n]":
            raise OSError(28, "No space left on device")
        return real(descriptor, data, offset)

    before = path.read_bytes()
    monkeypatch.setattr(os, "pwrite", full_disk)
    with pytest.raises(OSError, match="No space"):
        metrics_log.append({"global_step": 2})
    assert path.read_bytes() == before
    monkeypatch.undo()
    metrics_log.append({"global_step": 3})
    check_digest(metrics_log)
    metrics_log.close()
    assert steps_of(path) == [1, 3]


def test_a_directory_that_is_renamed_while_its_log_is_made_durable_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    directory, real = tmp_path / "run", os.fsync

    def renames(descriptor: int) -> None:
        real(descriptor)
        if directory.exists():
            directory.rename(tmp_path / "moved")

    with MetricsLog.open(directory / "trainer_logs.json") as metrics_log:
        metrics_log.append({"global_step": 1})
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", renames)
            assert metrics_log.sync()
            assert metrics_log.sync()
    assert caplog.text == ""
    assert steps_of(tmp_path / "moved" / "trainer_logs.json") == [1]


@pytest.mark.parametrize("written_bytes", [1, 2, 15, 10_000])
def test_append_interrupted_by_ctrl_c_is_taken_in_by_the_next(
    path: Path, monkeypatch: pytest.MonkeyPatch, written_bytes: int
) -> None:
    metrics_log = MetricsLog.open(path)
    metrics_log.append({"global_step": 1})
    real = os.pwrite

    def interrupted(descriptor: int, data: bytes, offset: int) -> int:
        real(descriptor, data[:written_bytes], offset)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "pwrite", interrupted)
    with pytest.raises(KeyboardInterrupt):
        metrics_log.append({"global_step": 2, "long": "x" * 100})
    monkeypatch.undo()
    metrics_log.append({"global_step": 3})
    check_digest(metrics_log)
    metrics_log.close()
    assert steps_of(path) == ([1, 2, 3] if written_bytes > 100 else [1, 3])


def test_every_prefix_of_a_metrics_log_gives_its_whole_records(path: Path) -> None:
    with MetricsLog.open(path) as metrics_log:
        for record in [*RECORDS, {"loss": math.nan}]:
            metrics_log.append(record)
    whole = path.read_bytes()
    ends = [match.end(1) for match in re.finditer(rb"(\})(?:,\n|\n\])", whole)]
    assert len(ends) == 4
    for length in range(len(whole) + 1):
        path.write_bytes(whole[:length])
        assert len(read_records(path)) == sum(end <= length for end in ends), whole[:length]


def test_every_prefix_of_an_indented_utf8_metrics_log_is_read(path: Path) -> None:
    whole = json.dumps(RECORDS, indent=2, ensure_ascii=False).encode()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        records = read_records(path)
        assert records == RECORDS[: len(records)]
    assert len(records) == len(RECORDS)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("", 0),
        (" \n", 0),
        ("[", 0),
        ("[\n]", 0),
        ('[{"a": 1}]', 1),
        ('[{"a": 1}', 1),
        ('[{"a": 1},', 1),
        ('[{"a": 1},\n]', 1),
        ('[{"a": 1}, {"a": NaN}', 2),
        ('[{"a": 1}, {"a": Infinity}, {"a": -Infini', 2),
        ('[\n{"a": 1},\n{"a": {"b": 2}, "c', 1),
        ('[\n{"a": 1},\n{"b": "{', 1),
        ('[\n{"a": 1}\n]\x00\x00\x00', 1),
        ('[\n{"a": 1},\n{"b": 2\x00\x00', 1),
        ('\n [\n{"a": 1}\n]\n\n', 1),
    ],
)
def test_tolerant_decoding(path: Path, text: str, count: int) -> None:
    path.write_text(text)
    assert len(read_records(path)) == count
    written(path, [7])
    assert len(json.loads(path.read_text())) == count + 1


UNREADABLE = {
    "object": b'{"a": 1}',
    "lines": b'{"a": 1}\n{"a": 2}\n',
    "prose": b"not a metrics log",
    "numbers": b"[1, 2]",
    "binary": b"\xff\xfe\x00\x01",
    "damage in the middle": b'[\n{"a": 1},\n{"a": @@},\n{"a": 3}\n]',
    "unbalanced quote": b'[{"a": "x}, {"b": 1}, {"c": "y"}]',
    "missing comma": b'[{"a": 1} {"a": 2}]',
    "more after the end": b'[{"a": 1}]\n[{"a": 2}]',
}


@pytest.mark.parametrize("content", UNREADABLE.values(), ids=UNREADABLE)
def test_unreadable_file_is_an_error_and_is_kept(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(MetricsLogError, match=r"trainer_logs\.json is"):
        read_records(path)
    assert issubclass(MetricsLogError, OnstepError)
    written(path, [1])
    assert steps_of(path) == [1]
    assert (path.parent / "trainer_logs.unreadable-1.json").read_bytes() == content
    path.write_bytes(content + b" ")
    assert align(path, 5) == path.parent / "trainer_logs.unreadable-2.json"
    assert not path.exists()
    assert (path.parent / "trainer_logs.unreadable-1.json").read_bytes() == content


def test_missing_file_is_reported_as_such(path: Path) -> None:
    for function in (read_records, align, set_aside):
        with pytest.raises(FileNotFoundError):
            function(path)
    assert not path.exists()


def test_align_keeps_the_branch_that_was_cut_off(path: Path) -> None:
    written(path, [10, 20, 30, 40])
    assert align(path, 20) == path.with_name("trainer_logs.branch-1.json")
    assert steps_of(path) == [10, 20]
    assert steps_of(path.with_name("trainer_logs.branch-1.json")) == [30, 40]
    written(path, [25])
    assert align(path, 20) == path.with_name("trainer_logs.branch-2.json")
    assert steps_of(path.with_name("trainer_logs.branch-1.json")) == [30, 40]
    assert steps_of(path.with_name("trainer_logs.branch-2.json")) == [25]


def test_align_leaves_a_fitting_metrics_log_untouched(path: Path) -> None:
    written(path, [10, 20])
    before = path.stat()
    assert align(path, 20) is None
    assert align(path) is None
    after = path.stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)
    assert list(path.parent.iterdir()) == [path]


def test_align_repairs_what_a_crash_left(path: Path) -> None:
    path.write_text('[\n{"global_step": 1},\n{"global_step": 2, "lo')
    assert align(path) is None
    assert json.loads(path.read_text()) == [{"global_step": 1}]


def test_record_without_a_step_counts_as_step_zero(path: Path) -> None:
    path.write_text('[{"experiment": 1}, {"global_step": 1}]')
    align(path, 0)
    assert json.loads(path.read_text()) == [{"experiment": 1}]


def test_set_aside_takes_the_first_free_number(path: Path) -> None:
    for number in (1, 2):
        written(path, [number])
        assert set_aside(path) == path.with_name(f"trainer_logs.{number}.json")
        assert not path.exists()
        assert steps_of(path.with_name(f"trainer_logs.{number}.json")) == [number]


def test_second_writer_is_refused_until_the_first_is_done(path: Path) -> None:
    with MetricsLog.open(path) as metrics_log:
        metrics_log.append({"global_step": 1})
        for function in (MetricsLog.open, align, set_aside):
            with pytest.raises(MetricsLogHeldError, match="another live run"):
                function(path)
        metrics_log.append({"global_step": 2})
    assert steps_of(path) == [1, 2]
    assert list(path.parent.iterdir()) == [path]
    written(path, [3])


def test_forked_child_cannot_append_and_does_not_keep_the_lock(path: Path) -> None:
    metrics_log = MetricsLog.open(path)
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            metrics_log.append({"global_step": 99})
        except MetricsLogError:
            os.write(write_end, b"refused")
            signal.pause()
        finally:
            os._exit(1)
    try:
        os.close(write_end)
        assert os.read(read_end, 100) == b"refused"
        metrics_log.append({"global_step": 1})
        metrics_log.close()
        written(path, [2])
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(read_end)
    assert steps_of(path) == [1, 2]


WRITER = """
import sys
from onstep.record import MetricsLog
metrics_log = MetricsLog.open(sys.argv[1])
start = int(sys.argv[2])
print("ready", flush=True)
for step in range(start, start + 10_000_000):
    metrics_log.append({"global_step": step, "text": "x" * (step * 7919 % 9000)})
"""


def test_sigkill_at_any_moment_costs_at_most_the_record_being_written(path: Path) -> None:
    random.seed(0)
    start = 0
    for _ in range(5):
        command = [sys.executable, "-c", WRITER, str(path), str(start)]
        before = path.stat().st_size if path.exists() else 0
        process = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        until(lambda before=before: path.exists() and path.stat().st_size > before)
        time.sleep(random.uniform(0.0, 0.1))
        process.kill()
        process.wait()
        process.stdout.close()
        steps = [record["global_step"] for record in read_records(path)]
        assert steps == list(range(len(steps)))
        assert len(steps) >= start
        start = len(steps)
    written(path, [start or 1])
    assert len(json.loads(path.read_text())) == start + 1
    assert start > 0


def test_it_can_be_imported_where_there_is_no_fcntl() -> None:
    code = "import sys; sys.modules['fcntl'] = None; import onstep.record.metrics_log"
    subprocess.run([sys.executable, "-c", code], check=True)
