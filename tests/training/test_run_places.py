"""Two live runs never save in one place, and a run whose directory is moved or removed saves all the same."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from onstep import CallbackManager, JsonLogger, pretrain
from onstep.checkpoint import checkpoints, resolve
from onstep.config import ConfigContainer
from onstep.config.keys import typed_copy
from onstep.errors import RunExistsError
from onstep.record import read_records
from onstep.training import GlobalState
from onstep.training.runs import lock as run_lock
from onstep.training.runs.lock import LEASE, LOCK, RunLock
from tests.support.small_models import Regression, arguments, quiet, regression_rows


@pytest.fixture
def config(tiny_config: ConfigContainer, tmp_path: Path) -> ConfigContainer:
    tiny_config.run.name, tiny_config.run.output_dir = "mine", str(tmp_path / "runs")
    tiny_config.train.train_iters, tiny_config.scheduler.lr_warmup_iters = 6, 0
    tiny_config.validation.eval_iters, tiny_config.logger.log_interval = 0, 1
    tiny_config.checkpoint.save_interval = 2
    return tiny_config


def at_step(step: int, event: str, action: Callable[[], Any]) -> CallbackManager:
    """Does `action` at the first `event` from this step on."""
    manager, done = CallbackManager(), []
    manager.add(JsonLogger())

    def act(context: Any) -> None:
        if context.state.train_state.step >= step and not done:
            done.append(step)
            action()

    manager.register(event, act)
    return manager


def steps_in(directory: Path) -> list[int]:
    return sorted(info.step for info in checkpoints(directory))


def is_complete(directory: Path) -> None:
    """All that a run leaves is there, and each checkpoint is whole."""
    record = json.loads((directory / "run.json").read_text())
    assert (record["status"], record["step"]) == ("completed", 6)
    for step in steps_in(directory / "checkpoints"):
        resolve(directory / "checkpoints", step=step)
    assert (directory / "model" / "model.safetensors").exists()
    assert "saved" in (directory / "decisions.jsonl").read_text()


MOVES = [("on_step_end", False), ("on_checkpoint_save_start", False), ("on_step_end", True)]


@pytest.mark.parametrize(("event", "is_async"), MOVES)
@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_run_goes_on_in_its_directory_when_that_is_renamed(
    config: ConfigContainer, caplog: pytest.LogCaptureFixture, event: str, is_async: bool, is_replaced: bool
) -> None:
    runs = Path(config.run.output_dir)
    config.checkpoint.async_save = is_async

    def rename() -> None:
        (runs / "mine").rename(runs / "kept")
        if is_replaced:
            (runs / "mine" / "checkpoints").mkdir(parents=True)

    with caplog.at_level(logging.WARNING):
        state = pretrain(config, callbacks=at_step(3, event, rename))
    assert "was moved to" in caplog.text
    assert "could not be made durable" not in caplog.text
    assert state.run_dir is not None
    assert state.run_dir.path == runs / "kept"
    is_complete(runs / "kept")
    assert steps_in(runs / "kept" / "checkpoints")[-2:] == [4, 6]  # that of step 2 may have been half written
    assert [one["global_step"] for one in read_records(runs / "kept" / "trainer_logs.json") if "loss" in one] == [
        *range(1, 7)
    ]
    assert [path for path in (runs / "mine").rglob("*") if path.is_file()] == []
    assert (runs / "mine").exists() == is_replaced

    config.run.name = "kept"
    assert pretrain(config, callbacks=[JsonLogger()]).stage.has_stepped is False


def test_a_rollback_finds_the_checkpoints_of_a_run_that_was_renamed(config: ConfigContainer) -> None:
    runs = Path(config.run.output_dir)
    manager = at_step(3, "on_step_end", lambda: (runs / "mine").rename(runs / "kept"))
    asks = iter([True])
    manager.register(
        "on_step_end", lambda context: context.step == 3 and next(asks, False) and context.control.rollback("bad")
    )
    state = pretrain(config, callbacks=manager)
    assert state.train_state.num_rollbacks == 1
    assert steps_in(runs / "kept" / "checkpoints") == [2, 4, 6]


@pytest.mark.parametrize("is_taken", [False, True])
def test_a_run_whose_directory_is_removed_makes_another_with_its_record(
    config: ConfigContainer, caplog: pytest.LogCaptureFixture, is_taken: bool
) -> None:
    runs, others = Path(config.run.output_dir), list[GlobalState]()

    def remove() -> None:
        shutil.rmtree(runs / "mine")
        if is_taken:
            others.append(pretrain(config))

    with caplog.at_level(logging.ERROR):
        pretrain(config, callbacks=at_step(3, "on_step_end", remove))
    place = runs / ("mine-2" if is_taken else "mine")
    assert f"{runs / 'mine'} was removed" in caplog.text
    assert f"in {place}" in caplog.text
    is_complete(place)
    assert steps_in(place / "checkpoints") == [4, 6]
    if is_taken:
        is_complete(runs / "mine")
        assert steps_in(runs / "mine" / "checkpoints") == [2, 4, 6]
        assert json.loads((runs / "mine" / "run.json").read_text())["run_id"] == others[0].run_dir.run_id  # type: ignore[union-attr]


@pytest.mark.parametrize("place", ["saves", "runs/mine", "runs/mine/checkpoints", "runs/mine/checkpoints/checkpoint-2"])
def test_a_second_live_run_in_one_place_is_refused_with_the_name_of_the_first(
    config: ConfigContainer, tmp_path: Path, place: str
) -> None:
    other = typed_copy(config)
    other.run.name, other.checkpoint.save = "other", str(tmp_path / place)
    if place == "saves":
        config.checkpoint.save = str(tmp_path / place)
    refused: list[str] = []

    def start_other() -> None:
        with pytest.raises(RunExistsError) as error:
            pretrain(other)
        refused.append(str(error.value))

    pretrain(config, callbacks=at_step(3, "on_step_end", start_other))
    assert "is in use by a live process" in refused[0]
    assert "mine" in refused[0]
    assert not (tmp_path / "runs" / "other").exists()
    assert steps_in(tmp_path / ("saves" if place == "saves" else "runs/mine/checkpoints")) == [2, 4, 6]


def test_a_save_directory_is_free_again_after_the_run(config: ConfigContainer, tmp_path: Path) -> None:
    config.checkpoint.save, config.checkpoint.save_interval, config.checkpoint.save_at_end = (
        str(tmp_path / "s"),
        6,
        False,
    )
    with pytest.raises(RuntimeError, match="broken"):
        pretrain(config, callbacks=at_step(1, "on_step_end", fail))
    assert not (tmp_path / "s").exists()
    pretrain(config)
    assert steps_in(tmp_path / "s") == [6]


def fail() -> None:
    raise RuntimeError("broken")


def test_a_disk_without_locks_holds_a_directory_for_one_process_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int, *, blocking: bool) -> bool:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(run_lock, "lock_descriptor", refuse)
    monkeypatch.setattr(run_lock, "_TAKEOVER_SECONDS", 0.3)
    ready, is_ready = os.pipe()
    other = os.fork()
    if other == 0:
        held = RunLock(tmp_path / LOCK, "the run in runs/a, ")
        os.write(is_ready, b"x")
        signal.pause()
        held.release()
    try:
        os.read(ready, 1)
        with pytest.raises(RunExistsError, match=rf"the run in runs/a, process {other} on "):
            RunLock(tmp_path / LOCK)
    finally:
        os.kill(other, signal.SIGKILL)
        os.waitpid(other, 0)
    lock = RunLock(tmp_path / LOCK)
    with pytest.raises(RunExistsError, match=f"process {os.getpid()} on "):
        RunLock(tmp_path / LOCK)
    child = os.fork()
    if child == 0:  # such as a data loader's worker
        os._exit(0)
    os.waitpid(child, 0)
    assert (tmp_path / LEASE).exists()
    lock.release()
    assert not (tmp_path / LEASE).exists()
    RunLock(tmp_path / LOCK).release()


@pytest.mark.parametrize("door", ["pretrain", "Trainer"])
def test_a_change_of_the_working_directory_moves_nothing(
    door: str,
    config: ConfigContainer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    manager = at_step(2, "on_step_end", lambda: os.chdir(tmp_path / "there"))
    if door == "pretrain":
        config.run.output_dir, config.logger.report_to = "runs", ["tensorboard"]
        pretrain(config, callbacks=manager)
    else:
        args = arguments(Path("runs"), output_dir="runs/mine", max_steps=6, save_steps=2, report_to="tensorboard")
        quiet(Regression(), args, regression_rows(24), callbacks=manager).train()
    mine = tmp_path / "here" / "runs" / "mine"
    assert json.loads((mine / "run.json").read_text())["step"] == 6
    assert steps_in(mine if door == "Trainer" else mine / "checkpoints") == [2, 4, 6]
    assert list(mine.rglob("events.out.tfevents.*"))
    assert len(read_records(mine / "trainer_logs.json")) > 0
    assert not list((tmp_path / "there").iterdir())
    assert "moved" not in caplog.text
