"""Text samples are read from the record of a run, or from the file that others append to at any time."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from onstep.analysis.logs.samples_log import (
    FILE_NAME,
    TextSample,
    append_samples,
    newest_by_step,
    read_samples,
    samples_of_run,
    set_samples_aside,
)

SAMPLES = [TextSample(1.5, 0, "def ", "\x00é\n"), TextSample(2.5, 10, "def ", "main():\n    pass")]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / FILE_NAME


def test_samples_are_lines_of_json_that_are_read_back(path: Path) -> None:
    append_samples(path, SAMPLES[:1])
    append_samples(path, SAMPLES[1:])
    first, second = path.read_text(encoding="utf-8").splitlines()
    assert json.loads(first) == {"timestamp": 1.5, "step": 0, "prompt": "def ", "text": "\x00é\n"}
    assert json.loads(second)["text"] == "main():\n    pass"
    assert read_samples(path) == SAMPLES


def test_a_missing_file_has_no_samples(path: Path) -> None:
    assert read_samples(path) == []


def test_a_line_that_a_crash_has_torn_is_skipped_and_the_next_one_is_whole(path: Path) -> None:
    append_samples(path, SAMPLES[:1])
    with path.open("ab") as file:
        file.write(b'{"timestamp": 2.0, "step": 5, "prompt": "de')
    assert read_samples(path) == SAMPLES[:1]
    append_samples(path, SAMPLES[1:])
    assert read_samples(path) == SAMPLES


@pytest.mark.parametrize(
    "line",
    [
        b"\x00\x00\x00",
        b"[" * 100_000,
        b"[]",
        b"{}",
        b'{"timestamp": 1, "step": true, "prompt": "a", "text": "b"}',
        b'{"timestamp": 1, "step": -1, "prompt": "a", "text": "b"}',
        b'{"timestamp": NaN, "step": 1, "prompt": "a", "text": "b"}',
        b'{"timestamp": 1, "step": 1, "prompt": ["a"], "text": "b"}',
        b'{"timestamp": 1, "step": 1, "prompt": "a"}',
        b"\xff\xfe",
        b'"' + b"a" * (17 << 20) + b'"',
    ],
    ids=lambda line: repr(line[:30]),
)
def test_foreign_lines_are_skipped(path: Path, line: bytes) -> None:
    append_samples(path, SAMPLES[:1])
    with path.open("ab") as file:
        file.write(line + b"\n")
    append_samples(path, SAMPLES[1:])
    assert read_samples(path) == SAMPLES


def test_a_pipe_is_refused_and_nobody_waits_for_it(path: Path) -> None:
    os.mkfifo(path)
    with pytest.raises(OSError, match="is not a regular file"):
        append_samples(path, SAMPLES)
    assert read_samples(path) == []


def test_the_last_text_of_a_prompt_at_a_step_counts(path: Path) -> None:
    again = TextSample(9.0, 0, "def ", "again")
    other = TextSample(9.0, 0, "import ", "os")
    assert newest_by_step([SAMPLES[1], SAMPLES[0], other, again]) == {
        0: {"def ": "again", "import ": "os"},
        10: {"def ": "main():\n    pass"},
    }


def test_samples_of_an_earlier_run_are_set_aside(path: Path) -> None:
    set_samples_aside(path)
    for _ in range(2):
        append_samples(path, SAMPLES)
        set_samples_aside(path)
    assert sorted(one.name for one in path.parent.iterdir()) == ["text_samples.1.jsonl", "text_samples.2.jsonl"]


def record_from(step: int, directory: Path) -> None:
    """A record that begins after `step`, with a sample of step 10."""
    lines = [
        {"timestamp": 1.0, "global_step": step, "epoch": 0.0, "kind": "start"},
        {"timestamp": 2.0, "global_step": 10, "epoch": 0.0, "kind": "decision", "prompt": "a", "text": "b"},
        {"timestamp": 3.0, "global_step": 10, "epoch": 0.0, "kind": "sample", "prompt": "def ", "text": "kept"},
    ]
    (directory / "record.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"timestamp": 4')


def test_the_samples_of_a_run_are_those_in_its_record(path: Path) -> None:
    append_samples(path, SAMPLES)
    assert samples_of_run(path.parent) == SAMPLES, "a run of an earlier version"
    record_from(0, path.parent)
    assert samples_of_run(path.parent) == [TextSample(3.0, 10, "def ", "kept")]


def test_a_run_that_an_earlier_version_began_has_the_samples_of_both(path: Path) -> None:
    append_samples(path, [*SAMPLES, TextSample(2.7, 12, "def ", "abandoned")])
    record_from(10, path.parent)
    assert samples_of_run(path.parent) == [*SAMPLES, TextSample(3.0, 10, "def ", "kept")]
