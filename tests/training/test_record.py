"""`record.jsonl` says what happened in a run, each thing once, however often the run is killed or rolled back."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from onstep import Callback, JsonLogger, Trainer, TrainingArguments, pretrain
from onstep.analysis.logs.files import find_log_files
from onstep.analysis.logs.log_tail import LogTail
from onstep.analysis.logs.training_log import TrainingLog
from onstep.config import ConfigContainer
from onstep.record import Record, read_records, without_wall_clock
from onstep.training.checkpointing.run_progress import RunProgress
from onstep.training.reporting.run_record import RunRecord
from tests.support.resuming import Interrupted

OF_A_PROCESS = ("start", "end")
"""Kinds of lines of which a run has one for each of its processes."""


@pytest.fixture
def config(tiny_config: ConfigContainer, tmp_path: Path) -> ConfigContainer:
    """8 steps, each logged, with evaluations and checkpoints at 4 and 8."""
    tiny_config.run.name, tiny_config.run.output_dir, tiny_config.run.save_weights = "run", str(tmp_path), False
    tiny_config.logger.log_interval = 1
    tiny_config.checkpoint.save_interval = tiny_config.validation.eval_interval = 4
    tiny_config.checkpoint.most_recent_k = -1
    return tiny_config


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "record.jsonl"


class At(Callback):
    """Does something after a step, once."""

    def __init__(self, step: int, act: Any) -> None:
        self.step, self.act = step, act

    def on_step_end(self, context: Any) -> None:
        if context.step == self.step:
            self.step = -1
            self.act(context)


def dies(context: Any) -> None:
    raise Interrupted


def interrupted(config: ConfigContainer, step: int, *callbacks: Callback) -> None:
    with pytest.raises(Interrupted):
        pretrain(config, callbacks=[*callbacks, At(step, dies)])


def course(path: Path) -> list[Record]:
    return [without_wall_clock(line) for line in read_records(path) if line["kind"] not in OF_A_PROCESS]


def kinds(path: Path) -> list[tuple[str, int]]:
    return [(line["kind"], line["global_step"]) for line in read_records(path)]


def test_everything_that_happens_has_a_line(config: ConfigContainer, path: Path) -> None:
    stop = At(6, lambda context: context.control.stop("enough"))
    pretrain(config, callbacks=[stop])
    logs = [("log", step) for step in range(1, 7)]
    assert kinds(path) == [
        ("start", 0),
        *logs[:4],
        ("evaluation", 4),
        ("checkpoint", 4),
        logs[4],
        ("decision", 6),
        logs[5],
        ("log", 6),  # the totals
        ("checkpoint", 6),
        ("evaluation", 6),
        ("test", 6),
        ("end", 6),
    ]
    by_kind = {line["kind"]: line for line in read_records(path)}
    assert by_kind["decision"]["reason"] == "enough"
    assert by_kind["evaluation"]["eval_loss"] > 0
    assert by_kind["end"]["reason"] == "stopped"
    assert all(json.loads(line) for line in path.read_text().splitlines())
    assert path.read_bytes().endswith(b"}\n")


class Hears(Callback):
    """Listens to the record, and appends a sample after step 2."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, int, Any]] = []
        self.path: Path | None = None

    def on_train_start(self, context: Any) -> None:
        self.path = context.state.record.path
        context.state.record.listeners.add(lambda *line: self.lines.append(line))

    def on_step_end(self, context: Any) -> None:
        if context.step == 2:
            context.trainer_state.append_to_record("sample", {"prompt": "def ", "text": "main()"})


@pytest.mark.parametrize("name", ["run", None])
def test_a_callback_hears_the_lines_and_appends_its_own(config: ConfigContainer, path: Path, name: str | None) -> None:
    config.run.name, config.train.train_iters, hears = name, 3, Hears()
    pretrain(config, callbacks=[hears])
    assert ("sample", 2, {"prompt": "def ", "text": "main()"}) in hears.lines
    assert [step for kind, step, _ in hears.lines if kind == "log"][:3] == [1, 2, 3]
    assert hears.path == (path if name else None)
    if name is not None:
        [line] = [line for line in read_records(path) if line["kind"] == "sample"]
        assert (line["global_step"], line["prompt"], line["text"]) == (2, "def ", "main()")


def test_a_trainer_has_the_same_record(tmp_path: Path) -> None:
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(2, 1)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": (self.layer(x) - labels).square().mean(), "logits": self.layer(x)}

    data = [{"x": torch.ones(2) * n, "labels": torch.ones(1)} for n in range(8)]
    args = TrainingArguments(
        output_dir=str(tmp_path), max_steps=2, logging_steps=1, report_to="none", per_device_train_batch_size=2
    )
    trainer = Trainer(model=Net(), args=args, train_dataset=data, eval_dataset=data, default_callbacks=False)
    trainer.train()
    trainer.evaluate()
    trainer.predict(data)
    lines = read_records(tmp_path / "record.jsonl")
    assert [line["kind"] for line in lines] == ["start", "log", "log", "log", "checkpoint", "end", "evaluation", "test"]
    logged = [line["loss"] for line in lines if "loss" in line]
    assert logged == [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("dies_at", [[3], [5, 6, 8], [4, 4]])
def test_a_resumed_run_has_the_lines_of_one_that_was_not_interrupted(
    config: ConfigContainer, path: Path, dies_at: list[int]
) -> None:
    pretrain(config)
    whole = course(path)
    config.run.name = "interrupted"
    for step in dies_at:
        interrupted(config, step)
    pretrain(config)
    path = path.parents[1] / "interrupted" / path.name
    assert course(path) == whole
    ends = [line["reason"] for line in read_records(path) if line["kind"] == "end"]
    assert ends[-1] == "completed"


def test_log_history_of_a_resumed_run_is_read_from_its_record(config: ConfigContainer, path: Path) -> None:
    whole = pretrain(config).trainer_state.log_history
    config.run.name = "interrupted"
    interrupted(config, 6)
    resumed = pretrain(config).trainer_state.log_history
    assert [without_wall_clock(one) for one in resumed] == [without_wall_clock(one) for one in whole]


def test_a_rollback_moves_the_lines_of_the_abandoned_steps_aside(config: ConfigContainer, path: Path) -> None:
    pretrain(config, callbacks=[At(6, lambda context: context.control.rollback(to_step=4))])
    assert [line["global_step"] for line in read_records(path) if "loss" in line] == [1, 2, 3, 4, 5, 6, 7, 8]
    branch = read_records(path.with_name("record.branch-1.jsonl"))
    assert [line["global_step"] for line in branch if "loss" in line] == [5]
    decisions = [line["flag"] for line in [*branch, *read_records(path)] if line["kind"] == "decision"]
    assert decisions == ["rollback", "rolled_back"]


def test_the_decisions_of_all_branches_are_in_the_record_and_in_decisions_jsonl(
    config: ConfigContainer, path: Path
) -> None:
    """What a resume or a rollback moves aside with its steps stays in `decisions.jsonl`, which is never cut."""
    rolls_back = At(6, lambda context: context.control.rollback(to_step=4, reason="as a test"))
    interrupted(config, 7, At(3, lambda context: context.control.save("early")), rolls_back)
    pretrain(config, callbacks=[At(7, lambda context: context.control.stop("enough"))])
    branches = sorted(path.parent.glob("record.branch-*.jsonl"))
    lines = [line for one in (path, *branches) for line in read_records(one) if line["kind"] == "decision"]
    rows = [json.loads(line) for line in path.with_name("decisions.jsonl").read_text().splitlines()]
    in_file = [row for row in rows if row["flag"] != "saved"]  # its checkpoint has a line of its own
    keys = ("flag", "author", "event", "reason", "details")
    in_record = sorted(([one["global_step"], *map(one.get, keys)] for one in lines), key=str)
    assert in_record == sorted(([one["step"], *map(one.get, keys)] for one in in_file), key=str)
    assert [one["flag"] for one in in_file] == ["should_save", "rollback", "rolled_back", "should_training_stop"]
    here = [line["flag"] for line in read_records(path) if line["kind"] == "decision"]
    assert "rollback" not in here, "it was made in a step that was abandoned"


def test_a_rollback_to_a_checkpoint_without_a_position_goes_by_steps(
    config: ConfigContainer, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Versions before 0.5 have saved it."""
    of_this_version = RunProgress.state_dict

    def before(progress: RunProgress) -> dict[str, Any]:
        state = of_this_version(progress)
        del state["record_position"]
        return state

    monkeypatch.setattr(RunProgress, "state_dict", before)
    pretrain(config, callbacks=[At(6, lambda context: context.control.rollback(to_step=4))])
    assert [line["global_step"] for line in read_records(path) if "loss" in line] == [1, 2, 3, 4, 5, 6, 7, 8]
    branch = read_records(path.with_name("record.branch-1.jsonl"))
    assert [line["global_step"] for line in branch if "loss" in line] == [5]


def test_lines_that_a_power_failure_took_are_named(
    config: ConfigContainer, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    interrupted(config, 6)
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:3]))
    with caplog.at_level(logging.WARNING):
        history = pretrain(config).trainer_state.log_history
    assert [entry["step"] for entry in history if len(entry) == 1 or "loss" in entry] == [1, 2, 5, 6, 7, 8]
    (gap,) = [line["missing_records"] for line in read_records(path) if "missing_records" in line]
    assert (gap["number"], gap["after_step"], gap["up_to_step"]) == (4, 2, 4)
    assert "4 records after step 2, up to step 4 are missing" in caplog.text
    assert [line["global_step"] for line in read_records(path) if "loss" in line] == [1, 2, 5, 6, 7, 8]


def test_a_changed_line_is_named_and_kept(
    config: ConfigContainer, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    interrupted(config, 6)
    changed = path.read_bytes().replace(b'"loss": ', b'"loss": 7', 1)
    path.write_bytes(changed)
    with caplog.at_level(logging.WARNING):
        pretrain(config)
    assert f"{path} is not what the run had written up to step 4" in caplog.text
    assert path.read_bytes().startswith(b"".join(changed.splitlines(keepends=True)[:7]))


def test_lines_that_a_full_disk_refused_come_from_the_checkpoint(
    config: ConfigContainer, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import os

    pretrain(config)
    whole = course(path)
    config.run.name, path = "full", path.parents[1] / "full" / path.name
    real = os.pwrite

    def full(descriptor: int, data: bytes, offset: int) -> int:
        if len(data) > 1 and os.readlink(f"/proc/self/fd/{descriptor}").endswith(path.name):
            raise OSError(28, "No space left on device")
        return real(descriptor, data, offset)

    with monkeypatch.context() as patch:
        interrupted(config, 7, At(2, lambda context: patch.setattr(os, "pwrite", full)))
    assert [line["global_step"] for line in read_records(path)] == [0, 1]
    pretrain(config)
    assert course(path) == whole


def test_a_new_run_in_the_same_directory_moves_the_record_aside(config: ConfigContainer, path: Path) -> None:
    config.checkpoint.save_interval = None
    interrupted(config, 3)
    pretrain(config)
    assert [step for kind, step in kinds(path) if kind == "log"] == [*range(1, 9), 8]
    assert kinds(path.with_name("record.1.jsonl"))[0] == ("start", 0)


def test_a_run_without_a_metrics_log_is_read_from_its_record(config: ConfigContainer, path: Path) -> None:
    pretrain(config)
    log = TrainingLog.from_run_dir(path.parent)
    assert log.log_path == path
    assert [record["global_step"] for record in log.get_training_records()] == list(range(1, 9))
    assert [record["global_step"] for record in log.get_eval_records()] == [4, 8, 8]
    assert log.notes == []
    assert "num_ranks" not in [*log.keys()]
    assert [record["kind"] for record in LogTail(path).last(2)] == ["evaluation", "test"]
    assert find_log_files(path.parents[1]) == [path]


def test_a_metrics_log_goes_before_the_record(config: ConfigContainer, path: Path) -> None:
    pretrain(config, callbacks=[JsonLogger()])
    assert find_log_files(path.parents[1]) == [path.with_name("trainer_logs.json")]
    logged, recorded = (TrainingLog.from_file(one) for one in (path.with_name("trainer_logs.json"), path))
    assert [{**one, "timestamp": 0} for one in logged.records] == [
        {key: value for key, value in one.items() if key != "kind"} | {"timestamp": 0} for one in recorded.records
    ]


@pytest.mark.parametrize("is_copied", [False, True])
def test_a_decision_of_a_start_stays_in_the_record_of_its_run(
    is_copied: bool, config: ConfigContainer, path: Path, tmp_path: Path
) -> None:
    interrupted(config, 6)
    before = path.read_bytes()
    if is_copied:
        shutil.copytree(path.parent, tmp_path / "copy")
        config.run.name, path = "copy", tmp_path / "copy" / path.name
    config.optimizer.weight_decay = 0.5
    config.checkpoint.on_config_change = "apply"
    pretrain(config)
    assert "changed" in [line["flag"] for line in read_records(path) if line["kind"] == "decision"]
    if is_copied:
        assert (tmp_path / "run" / path.name).read_bytes() == before


def test_an_evaluation_of_a_checkpoint_is_in_the_record_of_its_directory_at_once(tmp_path: Path) -> None:
    for name in ("trained", "evaluated"):
        (tmp_path / name).mkdir()
    trained, evaluated = RunRecord(), RunRecord()
    trained.begin(tmp_path / "trained", 0, 0.0, {})
    position = trained.state_dict()
    trained.close()
    before = (tmp_path / "trained" / "record.jsonl").read_bytes()
    evaluated.go_back(position, 4)
    evaluated.append(tmp_path / "evaluated", "evaluation", 4, 1.0, {"eval_loss": 2.0})
    assert [line["eval_loss"] for line in read_records(tmp_path / "evaluated" / "record.jsonl")] == [2.0]
    evaluated.close()
    assert (tmp_path / "trained" / "record.jsonl").read_bytes() == before
