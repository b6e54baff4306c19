"""Runs side by side: whose numbers are best, and what their configurations differ in."""

from __future__ import annotations

import json
import math
import socket
from pathlib import Path
from typing import Any

import pytest

from onstep.analysis import TrainingLog, compare_runs, format_comparison, plot_training_metrics
from onstep.analysis.logs.run_status import is_locked
from onstep.analysis.reports.charts_data import report_data
from onstep.analysis.reports.comparison import ABSENT, differences, flat, number_text, value_text
from onstep.errors import ConfigError
from onstep.record import MetricsLog
from tests.support.made_logs import log_of, points

CONFIG = {"optimizer": {"lr": 0.1, "betas": [0.9, 0.95]}, "logger": {"log_interval": 1}, "run": {"name": "x"}}


def made(directory: Path, losses: list[float], config: dict[str, Any] | None = None, **more: Any) -> TrainingLog:
    """A run with an evaluation 0.5 above the loss after each step."""
    with MetricsLog.open(directory / "trainer_logs.json") as metrics_log:
        for step, loss in enumerate(losses, 1):
            metrics_log.append({"global_step": step, "epoch": step / 10, "loss": loss, "grad_norm": loss, **more})
            metrics_log.append(
                {"global_step": step, "epoch": step / 10, "eval_loss": loss + 0.5, "eval_accuracy": loss / 9}
            )
    if config is not None:
        record = {"status": "completed", "config": config}
        (directory / "run.json").write_text(json.dumps(record))
    return TrainingLog.from_run_dir(directory)


def changed(**values: Any) -> dict[str, Any]:
    return {**CONFIG, "optimizer": {**CONFIG["optimizer"], **values}, "run": {"name": "another"}}


@pytest.fixture
def logs(tmp_path: Path) -> list[TrainingLog]:
    return [
        made(tmp_path / "runs" / "good", [3.0, 1.0, 2.0], CONFIG, total_tokens=4096),
        made(tmp_path / "runs" / "bad", [3.0, 2.5], changed(lr=0.5)),
    ]


def row(logs: list[TrainingLog], name: str) -> tuple[list[float | None], list[int | None], list[int]]:
    found = next(one for one in compare_runs(logs).metrics if one.name == name)
    return found.values, found.steps, found.best


def of_tokenizer(directory: Path, loss: float, fingerprint: str | None, ratio: float | None, kind: str) -> TrainingLog:
    """A run as `pretrain` records it; one of an earlier version has neither fingerprint nor ratio."""
    log = made(directory, [loss + 1, loss], {**CONFIG, "tokenizer": {"tokenizer_type": kind}})
    record = json.loads((directory / "run.json").read_text())
    if fingerprint is not None:
        record["tokenizer"] = {"fingerprint": fingerprint} | ({} if ratio is None else {"bytes_per_token": ratio})
    (directory / "run.json").write_text(json.dumps(record))
    return log


def test_losses_of_different_tokenizers_are_compared_per_byte(tmp_path: Path) -> None:
    logs = [
        of_tokenizer(tmp_path / "a", 2.0, "bytes", 1.0, "bytes"),
        of_tokenizer(tmp_path / "b", 3.5, "x", 3.5, "bpe"),
    ]
    assert row(logs, "final loss") == ([2.0, 3.5], [None, None], []), "no run is the best"
    assert row(logs, "final loss per byte") == ([2.0, 1.0], [None, None], [1])
    assert row(logs, "best validation loss per byte") == ([2.5, pytest.approx(4.0 / 3.5)], [2, 2], [1])
    assert row(logs, "best validation perplexity")[2] == []
    assert "note: the runs have different tokenizers" in format_comparison(compare_runs(logs))
    drawn = plot_training_metrics(logs, ["loss", "grad_norm"], smooth_window=1).axes
    assert [axes.get_title(loc="left") for axes in drawn] == ["training loss per byte", "gradient norm"]
    assert [list(line.get_ydata()) for line in drawn[0].lines] == [[3.0, 2.0], [4.5 / 3.5, 1.0]]
    assert [list(line.get_ydata()) for line in drawn[1].lines] == [[3.0, 2.0], [4.5, 3.5]]
    loss = report_data(logs, ["a", "b"])["groups"][0]["metrics"][0]
    assert (loss["name"], [one["y"] for one in loss["series"]]) == ("training loss per byte", [[3, 2], [1.28571, 1]])


@pytest.mark.parametrize("fingerprints", [("bytes", "x"), (None, "x"), (None, None)])
def test_losses_of_different_tokenizers_without_a_common_unit_have_no_best(
    tmp_path: Path, fingerprints: tuple[str | None, str | None]
) -> None:
    logs = [
        of_tokenizer(tmp_path / kind, 2.0 + at, fingerprints[at], None, kind)
        for at, kind in enumerate(("bytes", "bpe"))
    ]
    found = compare_runs(logs)
    assert not any(one.best for one in found.metrics)
    assert "no run is marked as the best" in format_comparison(found)
    [title] = [axes.get_title(loc="left") for axes in plot_training_metrics(logs, ["loss"]).axes]
    assert title == "training loss per token of different tokenizers"


def test_losses_of_one_tokenizer_are_compared_as_they_are(tmp_path: Path) -> None:
    logs = [of_tokenizer(tmp_path / name, 2.0 + at, "x", 3.5 + at, "bpe") for at, name in enumerate("ab")]
    assert row(logs, "final loss")[2] == [0]
    assert not any("per byte" in one.name for one in compare_runs(logs).metrics)


def test_numbers_stand_side_by_side_with_their_steps_and_the_best(logs: list[TrainingLog]) -> None:
    assert row(logs, "final loss") == ([2.0, 2.5], [None, None], [0])
    assert row(logs, "best loss") == ([1.0, 2.5], [2, 2], [0])
    assert row(logs, "final validation loss") == ([2.5, 3.0], [3, 2], [0])
    assert row(logs, "best validation perplexity")[0] == pytest.approx([math.exp(1.5), math.exp(3.0)])
    assert row(logs, "steps") == ([3, 2], [None, None], [])
    assert row(logs, "tokens") == ([4096, None], [None, None], [])
    assert row(logs, "final eval_accuracy")[0] == pytest.approx([2 / 9, 2.5 / 9])


def test_equal_runs_have_no_best(tmp_path: Path) -> None:
    logs = [made(tmp_path / name, [1.0]) for name in "ab"]
    assert row(logs, "final loss")[2] == []


def test_a_diverged_run_is_never_the_best(tmp_path: Path) -> None:
    logs = [made(tmp_path / "a", [5.0, math.nan]), made(tmp_path / "b", [5.0, 4.0]), made(tmp_path / "c", [6.0, 3.0])]
    values, _, best = row(logs, "final loss")
    assert (math.isnan(values[0] or 0.0), best) == (True, [2])


def test_only_keys_with_different_values_are_listed_what_changes_learning_first() -> None:
    one = {"logger.log_interval": 1, "optimizer.lr": 0.1, "optimizer.eps": None, "run.name": "a", "model.a": 1}
    other = {"logger.log_interval": 5, "optimizer.lr": 0.2, "optimizer.eps": None, "run.name": "b", "model.a": 1}
    found = differences([one, other, None])
    assert [(diff.key, diff.values) for diff in found] == [
        ("optimizer.lr", [0.1, 0.2, None]),
        ("logger.log_interval", [1, 5, None]),
    ]
    assert [diff.changes_learning for diff in found] == [True, False]


def test_a_key_that_a_configuration_lacks_and_a_value_of_another_type_are_differences() -> None:
    found = differences([{"optimizer.lr": 1, "a.b": True}, {"a.b": 1}])
    assert {diff.key: diff.values for diff in found} == {"optimizer.lr": [1, ABSENT], "a.b": [True, 1]}


def test_configurations_are_read_from_the_run_json_beside_the_log(logs: list[TrainingLog]) -> None:
    found = compare_runs(logs)
    assert [(diff.key, diff.values) for diff in found.differences] == [("optimizer.lr", [0.1, 0.5])]
    assert (found.statuses, found.notes) == (["completed", "completed"], [])


@pytest.mark.parametrize("content", [None, "{", "[]", '{"config": 3}', '{"status": "running"}'])
def test_a_run_without_a_readable_configuration_is_compared_by_its_log(
    logs: list[TrainingLog], content: str | None
) -> None:
    path = logs[1].log_path.parent / "run.json"
    path.unlink()
    if content is not None:
        path.write_text(content)
    found = compare_runs(logs)
    assert found.differences == []
    assert [note for note in found.notes if "bad" in note and "no run.json with a configuration" in note]
    assert "There are no two configurations to compare." in format_comparison(found)


def test_a_run_that_never_said_that_it_ended_is_running_or_killed(logs: list[TrainingLog]) -> None:
    (logs[0].log_path.parent / "run.json").write_text('{"status": "running"}')
    assert compare_runs(logs).statuses == ["running or killed", "completed"]


def test_a_run_whose_process_is_gone_was_killed(logs: list[TrainingLog]) -> None:
    directory = logs[0].log_path.parent
    (directory / "run.json").write_text('{"status": "running"}')
    (directory / ".run.lock").write_text(f"process 1 on {socket.gethostname()}\n")
    if is_locked(directory / ".run.lock") is None:
        pytest.skip("this system does not list the locks of its processes")
    assert compare_runs(logs).statuses == ["killed", "completed"]


def test_branch_that_a_run_left_is_noted(tmp_path: Path) -> None:
    with MetricsLog.open(tmp_path / "back" / "trainer_logs.json") as metrics_log:
        for step, loss in [(1, 3.0), (2, 1.0), (3, 0.5), (2, 2.0)]:
            metrics_log.append({"global_step": step, "loss": loss})
    logs = [TrainingLog.from_run_dir(tmp_path / "back"), made(tmp_path / "other", [4.0])]
    assert row(logs, "best loss") == ([2.0, 4.0], [2, 1], [0])
    assert [note for note in compare_runs(logs).notes if note.startswith("back: the run was rolled back")]


def test_text_lines_up(logs: list[TrainingLog]) -> None:
    lines = format_comparison(compare_runs(logs)).splitlines()
    assert lines[0].split() == ["good", "bad"]
    assert lines[1].split() == ["status", "completed", "completed"]
    assert "best loss 1 @ 2 * 2.5 @ 2" in [" ".join(line.split()) for line in lines]
    assert "optimizer.lr   0.1  0.5" in lines
    assert len({len(line) for line in lines[:8]}) == 1


def test_markdown_has_a_table_for_numbers_and_one_for_keys(logs: list[TrainingLog]) -> None:
    logs[0].label = "a|b"
    text = format_comparison(compare_runs(logs), "md")
    assert "|  | a\\|b | bad |\n| --- | ---: | ---: |" in text
    assert "| optimizer.lr | 0.1 | 0.5 |" in text


def test_json_holds_everything_and_no_nan(logs: list[TrainingLog], tmp_path: Path) -> None:
    text = format_comparison(compare_runs([*logs, made(tmp_path / "lost", [math.nan])]), "json")
    content = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert [run["label"] for run in content["runs"]][:2] == ["good", "bad"]
    assert content["metrics"]["best loss"]["values"][:2] == [1.0, 2.5]
    assert content["differences"] == {"optimizer.lr": [0.1, 0.5, None]}


def test_text_of_a_log_moves_no_cursor(logs: list[TrainingLog]) -> None:
    logs[0].label = "\x1b[2Jgone\nnew line"
    for form in ("text", "md"):
        text = format_comparison(compare_runs(logs), form)
        assert "\x1b" not in text
        assert "?[2Jgone?new line" in text


def test_what_cannot_be_compared_is_refused(logs: list[TrainingLog]) -> None:
    with pytest.raises(ConfigError, match="no log to compare"):
        compare_runs([])
    with pytest.raises(ConfigError, match="format must be one of text, md, json"):
        format_comparison(compare_runs(logs), "xml")


def test_nested_values_become_dotted_keys() -> None:
    assert dict(flat({"a": {"b": {"c": 1}, "d": [2]}, "e": {}})) == {"a.b.c": 1, "a.d": [2], "e": {}}


def test_values_are_short() -> None:
    numbers = {None: "-", 600: "600", 614400.0: "614,400", 1.23456: "1.235", 6e-05: "6e-05", 1234.5: "1,234.5"}
    assert [number_text(value) for value in numbers] == list(numbers.values())
    assert number_text(math.nan) == "nan"
    assert [value_text(value) for value in (None, "", "adam", [1, 2], True)] == ["null", '""', "adam", "[1, 2]", "true"]
    assert len(value_text("x" * 100)) == 40


def test_numbers_are_short_whatever_their_size() -> None:
    found = [number_text(value) for value in (600.0, 1234.56, 1e20, 1.5e7 + 0.25, 0.000123456, None)]
    assert found == ["600", "1,234.6", "1e+20", "1.5e+07", "0.0001235", "-"]


def test_runs_without_a_configuration_share_one_note() -> None:
    [note] = compare_runs([log_of(points("loss", [2.0, 1.0]), name) for name in ("one", "two", "three")]).notes
    assert note == "no run.json with a configuration next to the logs of one, two, three"
