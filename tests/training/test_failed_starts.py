"""A start that fails leaves nothing behind: no directory of a new run, and an existing one as it was."""

from __future__ import annotations

import copy
import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from filelock import lock_descriptor

from onstep import Callback, CallbackManager, Trainer, TrainingArguments, pretrain
from onstep.callbacks import JsonLogger
from onstep.config import ConfigContainer
from onstep.errors import CheckpointError, ConfigError, DataError, OnstepError, RunExistsError
from onstep.training import opening
from onstep.training.runs import lock as run_lock
from onstep.training.runs.lock import RunLock
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


class Broken(Callback):
    """Fails while it loads, or in another call of the set-up."""

    def __init__(self, event: str) -> None:
        self.event = event

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._come("load_state_dict")

    def on_init_end(self, context: Any) -> None:
        self._come("on_init_end")

    def on_checkpoint_load(self, context: Any) -> None:
        self._come("on_checkpoint_load")

    def _come(self, event: str) -> None:
        if event == self.event:
            raise ValueError("broken")


def failing_train_start(config: ConfigContainer) -> None:
    pretrain(config, callbacks=[JsonLogger(lr=1), FailsAtTrainStart()])


def interrupted(config: ConfigContainer) -> None:
    pretrain(config, callbacks=[Fails(KeyboardInterrupt())])


STARTS = pytest.mark.parametrize(
    ("start", "error"),
    [
        (no_data, DataError),
        (wrong_model, OnstepError),
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


@pytest.mark.parametrize("event", ["on_init_end", "load_state_dict", "on_checkpoint_load"])
@pytest.mark.parametrize("status", ["paused", "completed"])
def test_an_unfinished_run_whose_callback_fails_at_its_next_start_has_failed(
    tiny_config: ConfigContainer, tmp_path: Path, event: str, status: str
) -> None:
    tiny_config.run.name, tiny_config.run.output_dir = "mine", str(tmp_path)
    tiny_config.train.exit_interval = 2 if status == "paused" else None
    pretrain(tiny_config, callbacks=[Broken("never")])
    tiny_config.train.train_iters, tiny_config.checkpoint.on_config_change = 9, "apply"
    with pytest.raises((ValueError, CheckpointError)):
        pretrain(tiny_config, callbacks=[Broken(event)])
    record = json.loads(content(tmp_path / "mine")["run.json"])
    assert record["status"] == ("failed" if status == "paused" else status)
    assert ("broken" in (record.get("error") or "")) == (status == "paused")


@pytest.mark.parametrize("start", [failing_callback, failing_train_start])
def test_a_callback_that_failed_at_the_first_start_leaves_no_directory(
    tiny_config: ConfigContainer, tmp_path: Path, start: Start
) -> None:
    tiny_config.run.name, tiny_config.run.output_dir = "mine", str(tmp_path / "deep" / "runs")
    with pytest.raises(RuntimeError, match="broken"):
        start(tiny_config)
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


def test_a_restart_that_fails_replaces_the_error_of_the_failure_before(
    tiny_config: ConfigContainer, tmp_path: Path
) -> None:
    tiny_config.run.name, tiny_config.run.output_dir = "mine", str(tmp_path)
    tiny_config.checkpoint.save_interval, tiny_config.validation.eval_iters = 1, 0
    stops = CallbackManager()
    stops.register("on_step_end", _at_step_two)
    with pytest.raises(ValueError, match="the first failure"):
        pretrain(tiny_config, callbacks=stops)
    with pytest.raises(RuntimeError, match="broken"):
        failing_callback(tiny_config)
    record = json.loads(content(tmp_path / "mine")["run.json"])
    assert (record["status"], record["error"]) == (
        "failed",
        "RuntimeError: broken (raised by callback 'Fails' during 'on_init_end')",
    )


def test_an_error_without_a_text_is_recorded_with_its_callback(tiny_config: ConfigContainer, tmp_path: Path) -> None:
    class Unprintable(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    class AtStepEnd(Callback):
        def on_step_end(self, context: Any) -> None:
            raise Unprintable

    tiny_config.run.name, tiny_config.run.output_dir = "mine", str(tmp_path)
    with pytest.raises(Unprintable):
        pretrain(tiny_config, callbacks=[AtStepEnd()])
    record = json.loads(content(tmp_path / "mine")["run.json"])
    assert record["error"] == "Unprintable: Unprintable (raised by callback 'AtStepEnd' during 'on_step_end')"


def _at_step_two(context: Any) -> None:
    if context.state.train_state.step == 2:
        raise ValueError("the first failure")


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


def test_another_process_that_gets_in_while_a_failed_start_is_undone_keeps_its_record(
    tiny_config: ConfigContainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever finds no lock any more may begin at once."""
    tiny_config.run.name, tiny_config.run.output_dir = "mine", str(tmp_path)
    unlink = Path.unlink

    def unlink_and_begin(path: Path, missing_ok: bool = False) -> None:
        unlink(path, missing_ok)
        if path.name == ".run.lock":
            (tmp_path / "mine" / "run.json").write_text("theirs")

    monkeypatch.setattr(Path, "unlink", unlink_and_begin)
    with pytest.raises(RuntimeError, match="broken"):
        failing_callback(tiny_config)
    assert content(tmp_path / "mine") == {"run.json": b"theirs"}


@pytest.mark.parametrize("is_refused", [True, False])
@pytest.mark.parametrize("before", [None, 2, 4], ids=["new", "paused", "finished"])
def test_what_another_process_did_before_the_directory_was_locked_stays(
    before: int | None,
    is_refused: bool,
    tiny_config: ConfigContainer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It trains while this start reads its data."""
    tiny_config.run.name, tiny_config.run.output_dir = "mine", str(tmp_path)
    tiny_config.train.train_iters = 4
    if before is not None:
        first = copy.deepcopy(tiny_config)
        first.train.exit_interval = before
        pretrain(first)
    theirs, ours = copy.deepcopy(tiny_config), copy.deepcopy(tiny_config)
    theirs.train.train_iters, theirs.checkpoint.on_config_change = 6, "apply"
    ours.train.train_iters, ours.checkpoint.on_config_change = 8, "apply"
    if is_refused:
        ours.optimizer.lr, ours.checkpoint.on_config_change = 0.123, "error"
    check, states = opening._check_same_data, []

    def check_slowly(*arguments: Any) -> None:
        monkeypatch.setattr(opening, "_check_same_data", check)
        pretrain(theirs)
        states.append(content(tmp_path / "mine"))

    monkeypatch.setattr(opening, "_check_same_data", check_slowly)
    with pytest.raises(RunExistsError if is_refused else RuntimeError):
        failing_callback(ours)
    assert [content(tmp_path / "mine")] == states
    assert b'"status": "completed"' in states[0]["run.json"]


def test_a_directory_that_another_failed_start_removes_is_made_again(
    tiny_config: ConfigContainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_config.run.name, tiny_config.run.output_dir = "mine", str(tmp_path / "new")
    calls = []

    def lock_late(descriptor: int, *, blocking: bool) -> bool:
        calls.append(descriptor)
        if len(calls) == 1:
            shutil.rmtree(tmp_path / "new")
        return lock_descriptor(descriptor, blocking=blocking)

    monkeypatch.setattr(run_lock, "lock_descriptor", lock_late)
    pretrain(tiny_config)
    assert b'"status": "completed"' in content(tmp_path / "new" / "mine")["run.json"]


def test_a_lock_that_cannot_be_written_is_not_kept(
    tiny_config: ConfigContainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    tiny_config.run.name, tiny_config.run.output_dir = "mine", str(tmp_path / "new")
    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", full)
        with pytest.raises(ConfigError, match="free space on its disk"):
            pretrain(tiny_config)
    assert not (tmp_path / "new").exists()
    pretrain(tiny_config)


def test_a_claimed_directory_is_given_back_where_its_run_cannot_be_opened(
    tiny_config: ConfigContainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the stored values that are to be kept do not fit so many ranks."""

    def refuse(*arguments: object) -> None:
        raise ConfigError("4 ranks")

    tiny_config.run.name, tiny_config.run.output_dir, tiny_config.train.exit_interval = "mine", str(tmp_path), 1
    pretrain(tiny_config)
    before = content(tmp_path / "mine")
    with monkeypatch.context() as patched:
        patched.setattr(opening, "resolve", refuse)
        with pytest.raises(ConfigError, match="4 ranks"):
            pretrain(tiny_config)
    assert content(tmp_path / "mine") == before
    pretrain(tiny_config)


def test_what_makes_a_directory_a_runs_is_removed_after_the_rest(
    tiny_config: ConfigContainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever comes meanwhile is told of the run, and leaves the probe of its own directory to it."""
    tiny_config.run.name, tiny_config.run.output_dir = "mine", str(tmp_path)
    unlink, removed = Path.unlink, []

    def note(path: Path, missing_ok: bool = False) -> None:
        removed.append(path.name)
        unlink(path, missing_ok)

    class Comes(Fails):
        def on_init_end(self, context: Any) -> None:
            (tmp_path / "mine" / ".write-test-1").touch()
            monkeypatch.setattr(Path, "unlink", note)
            super().on_init_end(context)

    with pytest.raises(RuntimeError, match="broken"):
        pretrain(tiny_config, callbacks=[Comes(RuntimeError("broken"))])
    assert removed[-2:] == ["run.json", ".run.lock"]
    assert content(tmp_path / "mine") == {".write-test-1": b""}


def test_a_lock_taken_on_a_file_that_was_just_removed_is_taken_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, calls = tmp_path / ".run.lock", []

    def lock_late(descriptor: int, *, blocking: bool) -> bool:
        calls.append(descriptor)
        if len(calls) == 1:
            path.unlink()
        return lock_descriptor(descriptor, blocking=blocking)

    monkeypatch.setattr(run_lock, "lock_descriptor", lock_late)
    lock = RunLock(path)
    with pytest.raises(RunExistsError, match="live process"):
        RunLock(path)
    lock.release()
