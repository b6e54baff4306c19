"""A resumed run notices each change of the bytes of its log that its checkpoint covers, and sees none elsewhere."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from onstep.record import read_records
from onstep.record.writer import JsonLogWriter

NAME = "log.json"
NUM_COVERED = 8
NOTICED = ("is not what the run had written up to step 8", "although the checkpoint covers them")

Lines = list[bytes]


def resumed(directory: Path, state: dict[str, Any] | None, step: int) -> JsonLogWriter:
    """A writer that continues from a checkpoint in another process, or starts."""
    writer = JsonLogWriter(NAME)
    if state is not None:
        writer.load_state_dict({**json.loads(json.dumps(state)), "log_path": str(directory / NAME)})
    writer.open(directory, step)
    return writer


def write(writer: JsonLogWriter, first: int, last: int) -> None:
    for step in range(first, last + 1):
        writer.write_record(step, step / 10, {"loss": 1.0 + step / 8})


def kill(writer: JsonLogWriter) -> None:
    assert writer.metrics_log is not None
    writer.metrics_log._release()


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], bytes]:
    """The state of a checkpoint after eight records, and a log with two more."""
    directory = tmp_path_factory.mktemp("log")
    writer = resumed(directory, None, 0)
    write(writer, 1, NUM_COVERED)
    state = writer.state_dict()
    write(writer, 9, 10)
    kill(writer)
    return state, (directory / NAME).read_bytes()


def lost(lines: Lines, at: int) -> Lines:
    return [*lines[:at], *lines[at + 1 :]]


def doubled(lines: Lines, at: int) -> Lines:
    return [*lines[: at + 1], *lines[at:]]


def swapped_with_the_first(lines: Lines, at: int) -> Lines:
    return [lines[at], *lines[1:at], lines[0], *lines[at + 1 :]] if at else [lines[1], lines[0], *lines[2:]]


def another_number(lines: Lines, at: int) -> Lines:
    return [*lines[:at], lines[at].replace(b'"loss": ', b'"loss": 7'), *lines[at + 1 :]]


def another_time(lines: Lines, at: int) -> Lines:
    return [*lines[:at], lines[at].replace(b'"timestamp": 1', b'"timestamp": 2'), *lines[at + 1 :]]


def a_space_more(lines: Lines, at: int) -> Lines:
    return [*lines[:at], lines[at].replace(b": ", b":  ", 1), *lines[at + 1 :]]


@pytest.mark.parametrize("at", range(NUM_COVERED))
@pytest.mark.parametrize("damage", [lost, doubled, swapped_with_the_first, another_number, another_time, a_space_more])
def test_a_change_that_leaves_the_log_valid_is_named_and_nothing_is_lost(
    log: tuple[dict[str, Any], bytes],
    tmp_path: Path,
    damage: Callable[[Lines, int], Lines],
    at: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    state, content = log
    lines = damage(content[2:-2].split(b",\n"), at)
    (tmp_path / NAME).write_bytes(b"[\n" + b",\n".join(lines) + b"\n]")
    assert json.loads((tmp_path / NAME).read_bytes())
    writer = resumed(tmp_path, state, NUM_COVERED)
    is_after = damage is doubled and at == NUM_COVERED - 1  # the second one, which is moved to the branch
    assert any(text in caplog.text for text in NOTICED) is not is_after
    if damage in (lost, doubled) and at < NUM_COVERED - 1:
        assert f"it has {NUM_COVERED - 1 if damage is lost else NUM_COVERED + 1} records, not 8" in caplog.text
    write(writer, 9, 9)
    after, noticed = writer.state_dict(), len(caplog.messages)
    writer.close()
    everything = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert all(line in everything for line in lines)
    assert json.loads((tmp_path / NAME).read_text())[-1]["global_step"] == 9
    if damage is lost:
        records = read_records(tmp_path / NAME)
        assert sum(record.get("missing_records", {}).get("number", 1) for record in records) == NUM_COVERED + 1
    kill(resumed(tmp_path, after, 9))
    assert caplog.messages[noticed:] == [], "the next checkpoint covers the log as it is"


def test_flipped_bits_are_named(
    log: tuple[dict[str, Any], bytes], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state, content = log
    num_covered, _ = state["log_digest"]
    for at in range(0, num_covered, 5):
        directory = tmp_path / str(at)
        directory.mkdir()
        flipped = content[at] ^ (1 << at % 8)
        (directory / NAME).write_bytes(content[:at] + bytes([flipped]) + content[at + 1 :])
        caplog.clear()
        kill(resumed(directory, state, NUM_COVERED))
        assert any(text in caplog.text for text in NOTICED), (at, content[at : at + 1], bytes([flipped]))


def test_a_change_is_named_in_a_rollback_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    writer = resumed(tmp_path, None, 0)
    write(writer, 1, NUM_COVERED)
    state = writer.state_dict()
    write(writer, 9, 9)
    with (tmp_path / NAME).open("r+b") as file:
        file.seek(file.read().index(b'"loss": 1.125') + len('"loss": 1.'))
        file.write(b"6")
    writer.load_state_dict(state)
    assert NOTICED[0] in caplog.text
    writer.close()


def test_a_checkpoint_without_the_digest_resumes_as_before(
    log: tuple[dict[str, Any], bytes], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state, content = log
    (tmp_path / NAME).write_bytes(content.replace(b"1.25}", b"1.75}"))
    kill(resumed(tmp_path, {key: value for key, value in state.items() if key != "log_digest"}, NUM_COVERED))
    assert "is not what" not in caplog.text


@pytest.mark.parametrize("seed", range(20))
def test_kills_rollbacks_and_torn_ends_are_not_taken_for_a_change(
    tmp_path: Path, seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    chance, step = random.Random(seed), 0
    writer, saved = resumed(tmp_path, None, 0), [(0, None)]
    for _ in range(40):
        event = chance.choice(["write", "write", "save", "kill", "torn", "rollback", "evaluate"])
        if event == "write":
            write(writer, step + 1, step + 3)
            step += 3
        elif event == "save":
            saved.append((step, writer.state_dict()))
        elif event == "evaluate":
            writer.close()
            writer.reopen(tmp_path)
        elif event == "rollback" and len(saved) > 1:
            saved = saved[: chance.randrange(2, len(saved) + 1)]
            step, state = saved[-1]
            writer.load_state_dict(json.loads(json.dumps(state)))
        elif event in ("kill", "torn"):
            kill(writer)
            step, state = saved[-1]
            covered, _ = (state and state["log_digest"]) or (0, "")
            size = (tmp_path / NAME).stat().st_size
            if event == "torn" and covered:
                with (tmp_path / NAME).open("r+b") as file:
                    file.truncate(chance.randint(covered, size))
            writer = resumed(tmp_path, state, step)
    writer.close()
    assert not [text for text in caplog.messages if "were moved to" not in text]
