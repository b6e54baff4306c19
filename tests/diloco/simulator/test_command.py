"""`onstep diloco simulate`, by its command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from onstep.cli.main import main

SCENARIO = """
sites:
  berlin: {workers: 2, upload_mbit: 40, download_mbit: 100, round_trip_ms: 30, step_seconds: 0.5, step_jitter: 0.1}
  lima: {workers: 2, upload_mbit: 10, round_trip_ms: 220, packet_loss: 1e-4, hours_between_failures: 2}
parameters: 1e6
rounds: 30
sync_every: 50
max_staleness: 2
"""


@pytest.fixture
def scenario(tmp_path: Path) -> str:
    file = tmp_path / "scenario.yaml"
    file.write_text(SCENARIO)
    return str(file)


def test_a_report_has_round_times_bytes_late_and_lost_work_and_a_row_for_each_site(
    scenario: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["diloco", "simulate", scenario, "-o", str(tmp_path / "rounds.png")]) == 0
    text = capsys.readouterr().out
    for expected in (
        "30 rounds in",
        "a round: median",
        "late:",
        "lost with killed workers",
        "bytes:",
        "berlin",
        "lima",
    ):
        assert expected in text
    assert (tmp_path / "rounds.png").read_bytes().startswith(b"\x89PNG")


def test_json_has_every_round_and_says_what_was_varied(scenario: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diloco", "simulate", scenario, "--json", "--vary", "codec=fp32,int4"]) == 0
    exact, small = json.loads(capsys.readouterr().out)
    assert (exact["choices"], small["choices"]) == ({"codec": "fp32"}, {"codec": "int4"})
    assert len(small["rounds"]) == 30
    assert small["bytes_up"] < exact["bytes_up"] / 6


def test_variations_are_a_table_and_a_figure(scenario: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--vary", "sync_every=20,50", "--vary", "min_workers=2,3", "-o", str(tmp_path / "varied.svg")]
    assert main(["diloco", "simulate", scenario, *options]) == 0
    heading, *rows = capsys.readouterr().out.splitlines()
    assert heading.split()[:3] == ["sync_every", "min_workers", "round"]
    assert [row.split()[:2] for row in rows] == [["20", "2"], ["20", "3"], ["50", "2"], ["50", "3"]]
    assert "<svg" in (tmp_path / "varied.svg").read_text()


def test_a_mistyped_key_is_an_error_with_the_right_one(scenario: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diloco", "simulate", scenario, "--vary", "sync_evry=1,2"]) == 1
    assert "Did you mean 'sync_every'" in capsys.readouterr().err
