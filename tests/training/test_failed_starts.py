"""A start that fails leaves nothing behind: no directory of a new run, and an existing one as it was."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from filelock import lock_descriptor

from onstep import Callback, Trainer, TrainingArguments, pretrain
from onstep.callbacks import JsonLogger
from onstep.config import ConfigContainer
from onstep.errors import DataError, OnstepError, RunExistsError
from onstep.training.runs import run_dir
from onstep.training.runs.run_dir import RunLock
from onstep.training.runs.start_traces import StartTraces
from tests.support.small_runs import RaggedRows, TinyModel


class Fails(Callback):
    """Raises while the run is set up."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def on_init_end(self, context: Any) -> None:
        raise self.error


class FailsAtTrainStart(Callback):
    """Raises when everything is set up, and others have opened their files."""

    def on_train_start(self, context: Any) -> None:
        raise RuntimeError("broken")


def content(directory: Path) -> dict[str, bytes]:
    return {str(one.relative_to(directory)): one.read_bytes() for one in directory.rglob("*") if one.is_file()}


def no_data(config: ConfigContainer) -> None:
    config.dataset.paths = ["nowhere.txt"]
    pretrain(config)


def wrong_model(config: ConfigContainer) -> None:
    config.model.vocab_size = 10  # fewer than the bytes
    pretrain(config)


def failing_callback(config: ConfigContainer) -> None:
    pretrain(config, callbacks=[Fails(RuntimeError("broken"))])


def failing_train_start(config: ConfigContainer) -> None:
    pretrain(config, callbacks=[JsonLogger(lr=1), FailsAtTrainStart()])


def interrupted(config: ConfigContainer) -> None:
    pretrain(config, callbacks=[Fails(KeyboardInterrupt())])


STARTS = pytest.mark.parametrize(
    ("start", "error"),
    [
        (no_data, DataError),
        (wrong_model, OnstepError),
        (failing_callback, RuntimeError),
        (interrupted, KeyboardInterrupt),
    ],
)
Start = Callable[[ConfigContainer], None]


@STARTS
def test_a_start_that_failed_leaves_no_directory(
    tiny_config: ConfigContainer, tmp_path: Path, start: Start, error: type[BaseException]
) -> None:
    tiny_config.run.name, tiny_config.run.output_dir = "mine", str(tmp_path / "deep" / "runs")
    with pytest.raises(error):
        start(tiny_config)
    assert list(tmp_path.glob("deep*")) == []


@STARTS
def test_an_unfinished_run_is_untouched_by_a_start_that_failed(
    tiny_config: ConfigContainer, tmp_path: Path, start: Start, error: type[BaseException]
) -> None:
    tiny_config.run.name, tiny_config.run.output_dir = "mine", str(tmp_path)
    tiny_config.train.exit_interval = 2
    pretrain(tiny_config)
    before = content(tmp_path / "mine")
    tiny_config.checkpoint.on_config_change = "apply"
    with pytest.raises(error):
        start(tiny_config)
    assert content(tmp_path / "mine") == before


def test_a_train_start_that_failed_leaves_no_directory_either(tiny_config: ConfigContainer, tmp_path: Path) -> None:
    tiny_config.run.name, tiny_config.run.output_dir = "mine", str(tmp_path / "deep" / "runs")
    with pytest.raises(RuntimeError, match="broken"):
        failing_train_start(tiny_config)
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_has_trained_keeps_its_records_where_a_later_train_start_fails(
    tiny_config: ConfigContainer, tmp_path: Path
) -> None:
    tiny_config.run.name, tiny_config.run.output_dir = "mine", str(tmp_path)
    tiny_config.train.exit_interval, tiny_config.logger.log_interval = 2, 1
    pretrain(tiny_config, callbacks=[JsonLogger()])
    before = content(tmp_path / "mine")
    with pytest.raises(RuntimeError, match="broken"):
        failing_train_start(tiny_config)
    after = content(tmp_path / "mine")
    assert before.keys() <= after.keys()
    assert json.loads(after["trainer_logs.json"])[:2] == json.loads(before["trainer_logs.json"])[:2]
    assert b'"status": "failed"' in after["run.json"]


def test_a_finished_run_stays_so_where_its_extension_cannot_start(tiny_config: ConfigContainer, tmp_path: Path) -> None:
    tiny_config.run.name, tiny_config.run.output_dir = "mine", str(tmp_path)
    pretrain(tiny_config)
    before = content(tmp_path / "mine")["run.json"]
    longer = copy.deepcopy(tiny_config)
    longer.train.train_iters, longer.checkpoint.on_config_change = 99, "apply"
    with pytest.raises(RuntimeError, match="broken"):
        failing_train_start(longer)
    assert content(tmp_path / "mine")["run.json"] == before


def test_a_changed_configuration_is_not_kept_where_the_run_cannot_start(
    tiny_config: ConfigContainer, tmp_path: Path
) -> None:
    tiny_config.run.name, tiny_config.run.output_dir, tiny_config.train.exit_interval = "mine", str(tmp_path), 1
    pretrain(tiny_config)
    changed = copy.deepcopy(tiny_config)
    changed.optimizer.lr, changed.checkpoint.on_config_change = 0.5, "apply"
    with pytest.raises(RuntimeError, match="broken"):
        failing_train_start(changed)
    assert json.loads(content(tmp_path / "mine")["run.json"])["status"] == "failed"
    pretrain(tiny_config)


def test_a_start_that_failed_leaves_other_runs_in_the_new_directory_alone(
    tiny_config: ConfigContainer, tmp_path: Path
) -> None:
    class BeginsAnother(Callback):
        def on_init_end(self, context: Any) -> None:
            (tmp_path / "runs" / "other").mkdir()
            raise RuntimeError("broken")

    tiny_config.run.name, tiny_config.run.output_dir = "mine", str(tmp_path / "runs")
    with pytest.raises(RuntimeError, match="broken"):
        pretrain(tiny_config, callbacks=[BeginsAnother()])
    assert [one.name for one in (tmp_path / "runs").iterdir()] == ["other"]


def test_what_a_callback_has_written_is_kept_with_the_record_of_the_failure(
    tiny_config: ConfigContainer, tmp_path: Path
) -> None:
    class Writes(Callback):
        def on_init_end(self, context: Any) -> None:
            (context.state.run_dir.path / "mine.txt").write_text("kept")

    tiny_config.run.name, tiny_config.run.output_dir = "mine", str(tmp_path)
    with pytest.raises(RuntimeError, match="broken"):
        pretrain(tiny_config, callbacks=[Writes(), Fails(RuntimeError("broken"))])
    assert {"mine.txt", "run.json"} <= content(tmp_path / "mine").keys()
    assert b'"status": "failed"' in content(tmp_path / "mine")["run.json"]


def test_files_of_others_in_a_trainers_directory_stay(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("theirs")
    args = TrainingArguments(str(tmp_path / "out"), max_steps=2)
    with pytest.raises(RuntimeError, match="broken"):
        Trainer(TinyModel(), args, train_dataset=RaggedRows(16), callbacks=[Fails(RuntimeError("broken"))]).train()
    assert content(tmp_path / "out") == {"notes.txt": b"theirs"}


def test_a_run_that_has_trained_keeps_its_directory(tiny_config: ConfigContainer, tmp_path: Path) -> None:
    class Breaks(Callback):
        def on_step_end(self, context: Any) -> None:
            raise RuntimeError("broken")

    tiny_config.run.name, tiny_config.run.output_dir = "mine", str(tmp_path)
    with pytest.raises(RuntimeError, match="broken"):
        pretrain(tiny_config, callbacks=[Breaks()])
    assert b'"status": "failed"' in content(tmp_path / "mine")["run.json"]


def test_a_start_that_failed_leaves_what_another_process_began_meanwhile(
    tiny_config: ConfigContainer, tmp_path: Path
) -> None:
    tiny_config.run.name, tiny_config.run.output_dir = "mine", str(tmp_path)
    traces = StartTraces.before(tmp_path / "mine")
    (tmp_path / "mine").mkdir()
    other = RunLock(tmp_path / "mine" / ".run.lock")
    (tmp_path / "mine" / "run.json").write_text("{}")
    traces.undo_unclaimed()
    assert (tmp_path / "mine" / "run.json").read_text() == "{}"
    other.release()
    traces.undo_unclaimed()
    assert not (tmp_path / "mine").exists()


def test_a_lock_taken_on_a_file_that_was_just_removed_is_taken_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, calls = tmp_path / ".run.lock", []

    def lock_late(descriptor: int, *, blocking: bool) -> bool:
        calls.append(descriptor)
        if len(calls) == 1:
            path.unlink()
        return lock_descriptor(descriptor, blocking=blocking)

    monkeypatch.setattr(run_dir, "lock_descriptor", lock_late)
    lock = RunLock(path)
    with pytest.raises(RunExistsError, match="live process"):
        RunLock(path)
    lock.release()
