"""Changed files of every format end in a result or a message: no raw error, no hang over 10 s, no growth over 1 GB."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.support.faults.fuzz.formats import FORMATS
from tests.support.faults.fuzz.honest_files import MAKERS

pytestmark = [
    pytest.mark.faults,
    pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="measures memory by Linux' proc"),
]

SEED = 1
INPUTS = 5000
FEW = 50
LIGHT = ("chats", "texts", "configuration", "indexed")
"""Honest files that take no time to write."""


def fuzz(tmp_path: Path, *words: str) -> dict[str, Any]:
    """Run the fuzzer as a program, and print what it prints."""
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "tests.support.faults.fuzz", *words, "--json", str(report)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ})
    print(done.stdout[-20_000:], done.stderr[-4000:])
    assert report.exists(), done.stderr
    return dict(json.loads(report.read_text()))


def kinds(report: dict[str, Any]) -> list[tuple[str, str, str]]:
    return [(found["verdict"], found["error"], found["command"]) for found in report["findings"]]


@pytest.mark.process
def test_honest_files_are_read_through_every_door(tmp_path: Path) -> None:
    report = fuzz(tmp_path, "--index", "-1")
    assert kinds(report) == []
    assert set(report["counts"]) == set(FORMATS)
    assert all(count["read"] == count["inputs"] == 1 for count in report["counts"].values())


@pytest.mark.process
def test_a_few_changed_files_of_every_format_end_in_a_result_or_a_message(tmp_path: Path) -> None:
    report = fuzz(tmp_path, "--seed", str(SEED), "--inputs", str(FEW))
    assert kinds(report) == []
    assert set(report["counts"]) == set(FORMATS)


@pytest.mark.process
def test_planted_errors_hangs_and_growths_are_found() -> None:
    command = [sys.executable, "-m", "tests.support.faults.fuzz.planted"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ})
    report = json.loads(done.stdout)
    found = {one["format"]: one["verdict"] for one in report["findings"]}
    assert found == {
        "raw error": "raw error",
        "error of a library": "raw error",
        "panic": "raw error",
        "printed traceback": "raw error",
        "no message": "raw error",
        "crash": "raw error",
        "hang": "hang",
        "busy hang": "hang",
        "growth": "growth",
        "too much memory": "growth",
    }
    assert {name for name, count in report["counts"].items() if count["refused"]} == {
        "refused",
        "refused by a command",
        "error of the disk",
    }
    assert report["counts"]["read"]["read"] == 1
    by_name = {one["format"]: one for one in report["findings"]}
    assert by_name["raw error"]["error"] == "KeyError: 'x'"
    assert by_name["raw error"]["command"] == "python -m tests.support.faults.fuzz 'raw error' --seed 1 --index 0"
    assert "SIGSEGV" in by_name["crash"]["error"]


def test_an_input_is_a_function_of_its_format_seed_and_index(tmp_path: Path) -> None:
    for name in LIGHT:
        (tmp_path / "honest" / name).mkdir(parents=True)
        MAKERS[name](tmp_path / "honest" / name)
    seen: Counter[str] = Counter()
    for form in (form for form in FORMATS.values() if form.honest in LIGHT):
        for index in range(12):
            contents = []
            for attempt in ("one", "two"):
                place = tmp_path / f"{form.name}-{index}-{attempt}"
                place.mkdir()
                form.make_input(Random(f"{form.name}/1/{index}"), tmp_path / "honest", place)
                contents.append({path.relative_to(place): path.read_bytes() for path in place.rglob("*.*")})
            assert contents[0] == contents[1]
            seen[str(contents[0])] += 1
    assert max(seen.values()) < 3, "other indices give other inputs"


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_thousands_of_changed_files_end_in_a_result_or_a_message(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    report = fuzz(tmp_path, "--seed", str(SEED), "--inputs", str(INPUTS))
    total: Counter[str] = sum(map(Counter, report["counts"].values()), Counter())
    record_property("inputs", total["inputs"])
    record_property("refused with a message", total["refused"])
    record_property("read all the same", total["read"])
    for verdict, shown in {"raw error": "raw errors", "hang": "hangs over 10 s", "growth": "growths over 1 GB"}.items():
        record_property(shown, total[verdict])
    for name, count in report["counts"].items():
        record_property(name, f"{count['inputs']} inputs: {count['refused']} refused, {count['read']} read")
    assert kinds(report) == []
    assert set(report["counts"]) == set(FORMATS)
    assert total["inputs"] >= INPUTS
