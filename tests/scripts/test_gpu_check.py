"""The check of a new GPU and its benchmark: they stop at nothing, and say what was not as expected."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from types import ModuleType

import pytest
import torch

import gpu
from onstep.config import ConfigContainer

ROOT = Path(__file__).parents[2]


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import gpu_check

    return gpu_check


@pytest.mark.parametrize("is_cpu", [True, False])
def test_all_twenty_items_are_there_in_order(check: ModuleType, is_cpu: bool) -> None:
    numbers = [item.number for item in check.items(is_cpu=is_cpu)]
    assert sorted(set(numbers)) == list(range(1, 21))
    assert numbers == sorted(numbers)


def test_a_failure_and_a_limit_stop_nothing_and_are_listed_at_the_end(
    check: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def item(number: int, code: str, limit: int = 60, answer: str = "") -> object:
        return check.Item(number, f"item {number}", (sys.executable, "-c", code), "that", limit, answer=answer)

    chosen = [
        item(1, "print('RESULT one')"),
        item(2, "raise SystemExit(3)"),
        item(3, "import time; time.sleep(600)", limit=1),
        item(4, "print('NOT equal. First'); raise SystemExit(1)", answer="NOT equal"),
        item(5, "print('RESULT five')"),
    ]
    monkeypatch.setattr(check, "items", lambda is_cpu: chosen)
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--output", str(tmp_path)])
    assert check.main() == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:6]] == ["ok", "FAILED", "FAILED", "ok", "ok"]
    assert "one" in lines[1]
    assert "exit code 3" in lines[2]
    assert "longer than 1 s" in lines[3]
    assert [line.split()[:2] for line in lines if line.startswith("FAILED ") and ": expected" in line] == [
        ["FAILED", "2"],
        ["FAILED", "3"],
    ]
    assert "3 of 5 as expected" in "\n".join(lines)


def test_a_quiet_row_must_be_fast_and_must_not_wait() -> None:
    waits = {"stream": 0, "event": 1, "from device": 1, "reads": 0}
    good = gpu.Figures(seconds=[0.1], ratios=[1.0], waits=waits)
    slow = gpu.Figures(seconds=[0.1], ratios=[0.9], waits=waits)
    waiting = gpu.Figures(seconds=[0.1], ratios=[1.0], waits={**waits, "stream": 10})
    first, second = gpu.QUIET
    cuda = torch.device("cuda")
    assert gpu.verdicts({first: good, second: good}, cuda) == []
    [said] = gpu.verdicts({first: slow, second: good}, cuda)
    assert said.startswith(f"{first}: 0.900 of the bare loop")
    [said] = gpu.verdicts({first: good, second: waiting}, cuda)
    assert "expected no wait" in said


@pytest.mark.slow
def test_the_benchmark_runs_on_a_cpu(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), "--device", "cpu", "--tiny"]
    subprocess.run([*command, "--output", str(tmp_path)], check=True)
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert all(row["seconds"] or row["problem"].startswith("not installed") for row in found["rows"].values())
    assert "| bare compiled loop |" in (tmp_path / "gpu.md").read_text()


def test_the_guide_names_keys_that_have_an_effect() -> None:
    guide, config = (ROOT / "docs" / "guide" / "on-a-gpu.md").read_text(), ConfigContainer()
    named = re.findall(r"`(\w+)\.(\w+)(?:=[^`]*)?`", guide)
    sections = {field.name: getattr(config, field.name) for field in fields(config)}
    own = [(section, key) for section, key in named if section in sections]
    assert len(own) > 5
    assert [one for one in own if one[1] not in {field.name for field in fields(sections[one[0]])}] == []
