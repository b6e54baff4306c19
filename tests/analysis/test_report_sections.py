"""What the report shows beside the charts: text samples, decisions, times, machines and code."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from onstep.analysis import TrainingLog, write_report
from onstep.analysis.logs.samples_log import TextSample, append_samples
from onstep.analysis.reports.ledger import time_ledger
from tests.analysis.test_report import EVIL, Page
from tests.support.made_logs import log_of, points, run


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "base").mkdir()
    return tmp_path / "base"


def page_of(directory: Path, records: list[dict[str, Any]] | None = None) -> Page:
    log = TrainingLog(directory / "trainer_logs.json", records or points("loss", [2.0, 1.0]), label=directory.name)
    return Page(write_report(log, directory.parent / "report.html"))


def write_run(directory: Path, **record: Any) -> None:
    (directory / "run.json").write_text(json.dumps({"config": {"seed": 1}, "status": "completed", **record}))


def test_samples_stand_side_by_side_from_before_during_and_after_training(directory: Path) -> None:
    made = [TextSample(1.0, step, "def ", f"text {step}") for step in (0, 100, 200, 300, 400)]
    append_samples(directory / "text_samples.jsonl", made)
    page = page_of(directory)
    assert page.texts["pre"] == ["text 0", "text 200", "text 400"]
    assert [dict(attributes).get("class") for tag, attributes in page.tags if tag == "span"].count("prompt") == 3
    assert "Text samples" in page.texts["h2"]


def test_a_single_sample_and_none_are_fine(directory: Path) -> None:
    assert "Text samples" not in page_of(directory).texts["h2"]
    append_samples(directory / "text_samples.jsonl", [TextSample(1.0, 5, "a", "b")])
    assert page_of(directory).texts["pre"] == ["b"]


def test_decisions_have_their_author_and_reason_and_everyday_ones_are_left_out(directory: Path) -> None:
    made = [
        {"timestamp": 1e9, "step": 5, "flag": "should_log", "author": "the loop", "reason": "every 5 steps"},
        {"timestamp": 1e9, "step": 7, "flag": "should_training_stop", "author": "EarlyStopping", "reason": "no gain"},
    ]
    (directory / "decisions.jsonl").write_text("".join(json.dumps(one) + "\n" for one in made) + '{"torn')
    page = page_of(directory)
    assert "Decisions (1)" in page.texts["h2"]
    cells = page.texts["td"]
    at = cells.index("step 7")
    assert cells[at : at + 3] == ["step 7", "2001-09-09 01:46:40", "stop, by EarlyStopping: no gain"]


def test_of_many_decisions_the_last_are_shown(directory: Path) -> None:
    made = [{"step": step, "flag": "saved", "author": "the loop", "details": {}} for step in range(150)]
    (directory / "decisions.jsonl").write_text("".join(json.dumps(one) + "\n" for one in made))
    cells = page_of(directory).texts["td"]
    assert "step 49" not in cells
    assert {"step 50", "step 149"} <= set(cells)


def test_machine_versions_and_code_are_shown(directory: Path) -> None:
    code = {"revision": "0123456789abcdef" + 24 * "0", "branch": "trunk", "dirty": True}
    machine = {"host": "node1", "processor": "EPYC", "cpus": 8, "gpus": ["H200", "H200"]}
    later = {"machine": {**machine, "host": "node2"}}
    write_run(directory, versions={"torch": "2.13.0"}, machine=machine, code=code, continued_with=later, started_at=1e9)
    cells = page_of(directory).texts["td"]
    facts = dict(pairwise(cells))
    assert facts["code"] == "0123456789ab (trunk), with uncommitted changes"
    assert facts["GPUs"] == "2 x H200"
    assert (facts["host"], facts["torch"], facts["cpus"]) == ("node1", "2.13.0", "8")
    assert facts["continued with"] == "host node2"
    assert facts["started"] == "2001-09-09 01:46:40"


@pytest.mark.parametrize(
    "record", [{"versions": 3, "machine": [], "code": "x", "started_at": "y"}, {"machine": {"gpus": 1}}]
)
def test_a_foreign_record_of_a_run_is_no_obstacle(directory: Path, record: dict[str, Any]) -> None:
    write_run(directory, **record)
    assert "Summary" in page_of(directory).texts["h2"]


def test_files_that_cannot_be_read_are_no_obstacle(directory: Path) -> None:
    (directory / "decisions.jsonl").mkdir()
    (directory / "text_samples.jsonl").write_bytes(b"\x00\xff{]\n[1]\n")
    assert "Summary" in page_of(directory).texts["h2"]


def test_texts_of_a_run_stay_texts(directory: Path) -> None:
    append_samples(directory / "text_samples.jsonl", [TextSample(1.0, 0, EVIL, EVIL)])
    decision = {"step": EVIL, "flag": EVIL, "author": EVIL, "reason": EVIL}
    (directory / "decisions.jsonl").write_text(json.dumps(decision) + "\n")
    write_run(directory, versions={EVIL: EVIL}, machine={"host": EVIL, "gpus": [EVIL]}, code={"revision": EVIL})
    page = page_of(directory)
    assert len([tag for tag, _ in page.tags if tag == "script"]) == 2
    assert not [tag for tag, _ in page.tags if tag == "img"]
    assert page.texts["pre"] == [EVIL]


def test_the_times_that_a_monitor_measured_are_added_up() -> None:
    measured = {"seconds_data": 1.0, "seconds_forward_backward": 6.0, "seconds_eval": 3.0}
    records = [*points("loss", [2.0, 1.0], **measured), {"global_step": 2, "train_runtime": 20.0, **measured}]
    ledger = time_ledger(log_of(records))
    assert ledger is not None
    assert ledger.seconds == {"reading data": 2.0, "forward and backward": 12.0, "evaluation": 6.0}
    assert (ledger.total, ledger.is_measured) == (20.0, True)


def test_without_a_monitor_evaluations_are_told_apart_from_the_rest() -> None:
    records = [{"timestamp": 100.0 + step, "global_step": step, "loss": 1.0} for step in range(61)]
    records[30] = {"timestamp": 130.0, "global_step": 30, "eval_loss": 1.0, "eval_runtime": 12.0}
    ledger = time_ledger(log_of(records))
    assert ledger is not None
    assert ledger.seconds == {"steps, saving and everything else": 48.0, "evaluation": 12.0}
    assert not ledger.is_measured


def test_a_log_without_times_has_no_ledger(directory: Path) -> None:
    assert time_ledger(log_of(points("loss", [2.0, 1.0]))) is None
    assert "Where the time went" not in page_of(directory).texts["h2"]
    assert "Where the time went" in page_of(directory, list(run().records)).texts["h2"]


def test_the_time_between_two_processes_of_a_run_is_told_apart(directory: Path) -> None:
    records = [{"timestamp": 100.0 + step, "global_step": step, "loss": 1.0} for step in range(10)]
    records += [{"timestamp": 1000.0 + step, "global_step": step, "loss": 1.0} for step in range(10, 20)]
    ledger = time_ledger(log_of(records), 1001.0)
    assert ledger is not None
    assert ledger.seconds["stopped, before it was continued"] == 892.0
    assert ledger.total == 919.0
    write_run(directory, continued_at=1001.0)
    assert "stopped, before it was continued" in page_of(directory, records).texts["td"]


def test_a_run_was_stopped_from_its_last_decision_where_that_is_after_its_last_record(directory: Path) -> None:
    records = [{"timestamp": at, "global_step": step, "loss": 1.0} for step, at in enumerate((100.0, 200.0, 400.0))]
    made = [(320.0, "should_training_stop"), (323.0, "saved"), (390.0, "saved"), (None, "set")]
    lines = [json.dumps({"timestamp": at, "step": 1, "flag": flag, "author": "the loop"}) for at, flag in made]
    (directory / "decisions.jsonl").write_text("\n".join(lines) + "\n")
    write_run(directory, continued_at=353.0)
    cells = page_of(directory, records).texts["td"]
    assert cells[cells.index("stopped, before it was continued") + 1].startswith("30.0 s")


def test_a_file_that_may_not_be_read_is_named_in_the_notes(directory: Path) -> None:
    (directory / "decisions.jsonl").symlink_to("/proc/self/mem")  # reading its first bytes fails, even for root
    page = page_of(directory)
    assert any("decisions.jsonl cannot be read: Input/output error" in note for note in page.texts["li"])
