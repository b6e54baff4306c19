"""`onstep why` tells what a run decided, whatever a crash left of its files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from onstep import CallbackManager, pretrain
from onstep.cli.main import main
from onstep.config import ConfigContainer
from onstep.errors import NonFiniteError
from onstep.training import forward_step

ANOMALY = {"bad_step": 7, "anomaly": "non-finite loss", "loss": float("nan"), "grad_norm": 2.5}


def decision(step: int, flag: str, reason: str = "", **more: Any) -> dict[str, Any]:
    head = {"timestamp": 1.7e9, "step": step, "flag": flag, "author": "anomaly gate", "event": "", "reason": reason}
    return {**head, "rank": 0, "details": {}, **more}


def made_run(directory: Path, decisions: list[dict[str, Any]], **record: Any) -> Path:
    directory.mkdir(parents=True)
    (directory / "run.json").write_text(json.dumps({"status": "stopped", "step": 9, "config": {}, **record}))
    (directory / "decisions.jsonl").write_text("".join(json.dumps(one) + "\n" for one in decisions))
    return directory


def captured(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    assert main(["why", *arguments]) == 0
    return capsys.readouterr().out.splitlines()


def test_every_kind_of_decision_is_reported_in_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = made_run(
        tmp_path / "run",
        [
            decision(3, "should_save", "milestone", author="Saver", event="on_step_end", rank=1),
            decision(4, "should_log", author="Chatty"),
            decision(4, "should_save", author="Saver", rank=3, place="rank 3, dp_shard 1, dp_replicate 1"),
            decision(5, "set", author="Tuner", details={"key": "lr_factor", "value": 0.5}),
            decision(5, "set", author="Tuner", details={"key": "log_interval", "value": None}),
            decision(7, "skip", "non-finite loss at step 7", details={**ANOMALY, "sample_ids": [4, 9]}),
            decision(8, "rollback", "spike", details={**ANOMALY, "sample_ids": list(range(20))}),
            decision(5, "rolled_back", "spike", details={**ANOMALY, "bad_step": 8, "to_step": 5, "lr_factor": 0.25}),
            decision(9, "should_training_stop", "enough", author="Guard", event="on_step_end"),
        ],
    )
    head, *lines = captured(capsys, str(directory))
    assert head == f"{directory} was stopped at step 9. The last decision to stop: by Guard during on_step_end: enough."
    entries = [line.partition(" (20")[0] for line in lines if line.startswith("step")]
    assert entries == [
        "step 3: save, by Saver during on_step_end on rank 1: milestone",
        "step 4: save, by Saver on rank 3, dp_shard 1, dp_replicate 1",
        "step 5: lr_factor set to 0.5, by Tuner",
        "step 5: log_interval set to the configured value, by Tuner",
        "step 7: update skipped, by anomaly gate: non-finite loss at step 7",
        "step 8: rollback decided, by anomaly gate: spike",
        "step 5: rolled back to step 5, by anomaly gate: spike",
        "step 9: stop, by Guard during on_step_end: enough",
    ]
    assert "    loss nan, gradient norm 2.5" in lines
    assert "    skipped from the next epoch on: samples [4, 9]" in lines
    assert any("[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11] and 8 more" in line for line in lines)
    assert "    the data continues after step 8; the factor on the learning rate is now 0.25" in lines


def test_one_step_is_reported_with_its_logs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = made_run(tmp_path / "run", [decision(4, "should_log", author="Chatty"), decision(5, "should_save")])
    assert [line.partition(" (20")[0] for line in captured(capsys, str(directory), "--step", "4")[1:-1]] == [
        "step 4: log, by Chatty"
    ]
    assert captured(capsys, str(directory), "--step", "6")[1:-1] == ["Nothing was decided at step 6."]


def test_torn_and_foreign_lines_and_a_broken_record_cost_only_themselves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = made_run(tmp_path / "run", [decision(3, "should_save", "first")])
    with (directory / "decisions.jsonl").open("ab") as file:
        file.write(b'{"step": 4, "fl\n[1, 2]\n\xff\xfe\n{"step": 5, "flag": "skip"}\n{"step": 6, "flag": "sh')
    (directory / "run.json").write_text("{")
    head, *lines = captured(capsys, str(directory))
    assert "has the status unknown" in head
    assert [line.partition(",")[0] for line in lines] == ["step 3: save", "step 5: update skipped"]


def test_a_run_is_found_by_its_name_and_a_mistyped_one_is_answered_with_near_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made_run(tmp_path / "runs" / "tiny_gpt", [])
    monkeypatch.chdir(tmp_path)
    assert captured(capsys, "tiny_gpt")[1:] == ["No decisions are recorded."]
    for mistyped in ("tiny_gtp", "runs/tiny_gtp"):
        assert main(["why", mistyped]) == 1
        assert "Did you mean 'tiny_gpt'?" in capsys.readouterr().err
    assert main(["why", str(tmp_path / "nowhere" / "x")]) == 1
    assert "has no runs" in capsys.readouterr().err


def test_the_headline_names_what_ended_this_start_of_the_run_and_not_an_earlier_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ending = [decision(7, "raised", "NaN at step 7"), decision(7, "should_training_stop", "enough", author="Guard")]
    failed = made_run(tmp_path / "failed", ending[:1], status="failed", error="OSError: no space.", continued_at=1.6e9)
    head, _ = captured(capsys, str(failed))
    assert head.endswith(
        "failed at step 9. The last decision to stop: by anomaly gate: NaN at step 7. OSError: no space."
    )
    later = made_run(tmp_path / "later", ending, status="failed", error="OSError: no space.", continued_at=1.8e9)
    head, *_ = captured(capsys, str(later))
    assert head == f"{later} failed at step 9. OSError: no space."


def test_failures_after_which_a_run_was_started_again_are_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    last = "rank 0 hangs at step 7"
    run = made_run(tmp_path / "run", [], status="failed", error=last)
    gone = "rank 1, dp_shard 1 is gone (its process was killed or crashed) at step 5, while it is computing a step"
    for number, line in enumerate((gone, last), 1):
        (run / f"first-culprit-2026-11-28T23-18-4{number}.txt").write_text(f"====\nfirst failure: {line}\n\nlast ...\n")
    (run / "first-culprit-3.txt").symlink_to("/dev/zero")
    line = f"step 5: the run failed: {gone} (2026-11-28 23:18:41)"
    assert captured(capsys, str(run))[1:] == ["No decisions are recorded.", line]
    assert line in captured(capsys, str(run), "--step", "5")
    assert line not in captured(capsys, str(run), "--step", "7")


def test_a_decision_that_came_late_is_reported_with_the_step_that_it_is_about(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = made_run(tmp_path / "run", [decision(12, "should_training_stop", "NaN", details=ANOMALY)])
    assert captured(capsys, str(directory), "--step", "7")[1].startswith("step 12: stop, by anomaly gate: NaN")
    assert captured(capsys, str(directory), "--step", "8")[1:-1] == ["Nothing was decided at step 8."]


def poisoned_at(step: int) -> Any:
    calls: list[int] = []

    def forward(data_iterator: Any, model: Any) -> Any:
        loss, function = forward_step(data_iterator, model)
        calls.append(1)
        return (loss * float("nan") if len(calls) == step else loss), function

    return forward


def named_run(config: ConfigContainer, directory: Path) -> Path:
    config.run.name, config.run.output_dir, config.validation.eval_iters = "real", str(directory), 0
    return directory / "real"


def test_a_step_that_is_not_finite_and_raises_is_on_record(
    tiny_config: ConfigContainer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = named_run(tiny_config, tmp_path)
    tiny_config.train.micro_batch_size = tiny_config.train.global_batch_size
    ids: list[Any] = []
    manager = CallbackManager()
    manager.register("on_train_step_start", lambda context: ids.append(context.sample_ids))
    with pytest.raises(NonFiniteError):
        pretrain(tiny_config, poisoned_at(3), callbacks=manager)
    capsys.readouterr()
    [row] = [json.loads(line) for line in (directory / "decisions.jsonl").read_text().splitlines()]
    assert (row["step"], row["flag"], row["author"]) == (3, "raised", "anomaly gate")
    assert row["details"]["anomaly"] == "non-finite loss"
    assert row["details"]["sample_ids"] == sorted(ids[2][0])
    head, *lines = captured(capsys, str(directory), "--step", "3")
    assert "failed at step 2. The last decision to stop: by anomaly gate: non-finite loss at step 3" in head
    assert lines[0].startswith("step 3: ended with an error, by anomaly gate: non-finite loss at step 3")
    assert lines[1].startswith("    loss nan, gradient norm")
    assert lines[2] == f"    the update was not applied; samples {shown(sorted(ids[2][0]))}"


def shown(ids: list[int]) -> str:
    return str(ids) if len(ids) <= 12 else f"{ids[:12]} and {len(ids) - 12} more"


@pytest.mark.parametrize(
    ("kind", "code", "words", "consequence"),
    [
        ("transient_error", 17, "a transient error (or", "exit code 17 (the fault is known); without a checkpoint"),
        (
            "persistent_error",
            16,
            "restart on another device to find the cause",
            "exit code 16 (restart, on another device if possible); with a checkpoint from before the step",
        ),
    ],
)
def test_leaving_for_a_result_that_may_be_wrong_is_on_record_with_its_diagnosis(
    tiny_config: ConfigContainer,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    kind: str,
    code: int,
    words: str,
    consequence: str,
) -> None:
    directory = named_run(tiny_config, tmp_path)
    rerun = tiny_config.rerun_state_machine
    rerun.rerun_mode, rerun.error_injection_rate, rerun.error_injection_type = "validate_results", 1, kind
    with pytest.raises(SystemExit) as left:
        pretrain(tiny_config)
    assert left.value.code == code
    capsys.readouterr()
    rows = [json.loads(line) for line in (directory / "decisions.jsonl").read_text().splitlines()]
    assert [row["flag"] for row in rows] == ["saved", "rerun_exit"] if code == 16 else ["rerun_exit"]
    assert (rows[-1]["step"], rows[-1]["author"]) == (1, "rerun state machine")
    assert rows[-1]["details"] == {"exit_code": code, "checkpoint": code == 16}
    head, *lines, _ = captured(capsys, str(directory), "--step", "1")
    assert "The last decision to stop: by rerun state machine: Rank 0" in head
    assert words in head
    assert lines[0].startswith("step 1: exited because a result may be wrong, by rerun state machine: Rank 0")
    assert lines[1:] == [f"    {consequence}"]


def test_what_a_real_run_decided_is_explained(
    tiny_config: ConfigContainer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def ask(context: Any) -> None:
        if context.state.train_state.step == 2:
            context.control.set("log_interval", 1, "look closer")
        if context.state.train_state.step == 3:
            context.control.stop("seen enough")

    manager = CallbackManager()
    manager.register("on_step_end", ask)
    tiny_config.run.name, tiny_config.run.output_dir = "real", str(tmp_path)
    tiny_config.validation.eval_iters = 0
    pretrain(tiny_config, callbacks=manager)
    capsys.readouterr()
    head, *lines = captured(capsys, str(tmp_path / "real"))
    assert "was stopped at step 3. The last decision to stop: by" in head
    assert head.endswith("during on_step_end: seen enough.")
    assert "log_interval set to 1" in lines[0]
    assert "step 3: stop" in lines[1]


def test_commands_from_outside_are_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows: list[tuple[str, dict[str, Any]]] = [
        ("pause", {}),
        ("resume", {}),
        ("skip_batch", {"count": 2}),
        ("command", {"command": "generate", "data": {"prompts": ["a"]}}),
        ("refused", {"refused": "rollback", "why": "there is no checkpoint"}),
    ]
    written = [{"step": 3, "flag": flag, "author": "onstep at 127.0.0.1", "details": details} for flag, details in rows]
    (tmp_path / "decisions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in written))
    _, *lines = captured(capsys, str(tmp_path))
    assert [line.removeprefix("step 3: ").split(", by")[0] for line in lines] == [
        "paused",
        "resumed",
        "the batches of 2 steps skipped",
        "generate",
        "rollback refused (there is no checkpoint)",
    ]


def test_a_step_ends_with_the_command_that_shows_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = made_run(tmp_path / "a run", [decision(7, "skip", "spike", details=ANOMALY)])
    assert captured(capsys, str(directory), "--step", "7")[-1].endswith(f": onstep rewind '{directory}' 7")
    assert "onstep rewind" not in "\n".join(captured(capsys, str(directory)))
    trainer = made_run(tmp_path / "trainer", [], layout="hugging_face")
    assert captured(capsys, str(trainer), "--step", "7")[-1].endswith(" 7 --script YOUR_SCRIPT.py")
