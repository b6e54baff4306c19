"""A run's directory and identity: what an earlier run left is continued, refused or left alone, never overwritten."""

from __future__ import annotations

import errno
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from onstep import CallbackManager, JsonLogger, pretrain
from onstep.config import ConfigContainer, from_dict, validate
from onstep.errors import ConfigError, DataError, RunExistsError
from onstep.training import GlobalState
from onstep.training.runs.claims import acquire_run_dir

Change = Callable[[ConfigContainer], Any]


@pytest.fixture
def config(tiny_config: ConfigContainer, tmp_path: Path) -> ConfigContainer:
    tiny_config.run.name, tiny_config.run.output_dir = "mine", str(tmp_path / "runs")
    tiny_config.train.train_iters, tiny_config.scheduler.lr_warmup_iters = 2, 0
    tiny_config.validation.eval_iters, tiny_config.optimizer.lr = 0, 1e-3
    tiny_config.optimizer.min_lr = 1e-4
    return tiny_config


def dir_of(config: ConfigContainer, name: str = "mine") -> Path:
    return Path(config.run.output_dir) / name


def record(config: ConfigContainer, name: str = "mine") -> dict[str, Any]:
    content: dict[str, Any] = json.loads((dir_of(config, name) / "run.json").read_text())
    return content


def content_of(directory: Path) -> dict[str, tuple[bytes, int]]:
    """Every file with its bytes and its time of change."""
    files = [path for path in directory.rglob("*") if path.is_file()]
    return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


def stopping(config: ConfigContainer, *, error: BaseException | None = None) -> GlobalState | None:
    """A run that a callback ends after its first step."""
    manager = CallbackManager()

    def end(context: Any) -> None:
        if error is not None:
            raise error
        context.control.stop()

    manager.register("on_step_end", end)
    if error is None:
        return pretrain(config, callbacks=manager)
    with pytest.raises(type(error)):
        pretrain(config, callbacks=manager)
    return None


def test_a_run_keeps_its_configuration_status_and_weights(config: ConfigContainer) -> None:
    pretrain(config)
    left = record(config)
    assert (left["status"], left["step"], left["name"]) == ("completed", 2, "mine")
    assert len(left["run_id"]) == 32
    assert left["ended_at"] >= left["started_at"]
    assert (dir_of(config) / "model" / "model.safetensors").exists()


@pytest.mark.parametrize("unit", ["train_iters", "train_samples", "num_epochs"])
def test_the_configuration_of_a_run_is_one_that_can_be_run(config: ConfigContainer, unit: str) -> None:
    config.train.train_iters = None
    config.dataset.seq_length = config.model.seq_length = 512
    setattr(config.train, unit, {"train_iters": 2, "train_samples": 8, "num_epochs": 0.1}[unit])
    state = pretrain(config)
    assert state.train_state.step >= 2
    validate(from_dict(record(config)["config"]))
    validate(state.cfg)
    assert state.trainer_state.max_steps == state.train_state.step


def test_a_finished_run_says_so_and_trains_nothing(config: ConfigContainer, capsys: pytest.CaptureFixture[str]) -> None:
    pretrain(config)
    before = content_of(dir_of(config))
    manager = CallbackManager()
    manager.register("on_run_end", lambda context: pytest.fail("nothing runs"))
    state = pretrain(config, callbacks=manager)
    assert state.train_state.step == 0
    assert content_of(dir_of(config)) == before
    output = capsys.readouterr().out
    assert "is finished: 2 steps" in output
    assert "run.fresh=true" in output
    assert "run.name=" in output


def set_log_interval(config: ConfigContainer) -> None:
    config.logger.log_interval = 1


def set_micro_batch(config: ConfigContainer) -> None:
    config.train.micro_batch_size = 2


def set_timeout(config: ConfigContainer) -> None:
    config.dist.distributed_timeout_minutes = 1.0


@pytest.mark.parametrize("change", [set_log_interval, set_micro_batch, set_timeout])
def test_what_does_not_change_the_learning_is_the_same_run(
    config: ConfigContainer, change: Change, capsys: pytest.CaptureFixture[str]
) -> None:
    pretrain(config)
    change(config)
    pretrain(config)
    assert "is finished" in capsys.readouterr().out


def test_another_configuration_is_refused_with_the_first_key_that_differs(config: ConfigContainer) -> None:
    pretrain(config)
    before = content_of(dir_of(config))
    config.optimizer.lr = 0.5
    config.rng.seed = 7
    with pytest.raises(RunExistsError, match=r"optimizer\.lr is 0\.001 there and 0\.5 here.*run\.fresh=true"):
        pretrain(config)
    assert content_of(dir_of(config)) == before


def test_a_stopped_run_stays_stopped(config: ConfigContainer, capsys: pytest.CaptureFixture[str]) -> None:
    stopping(config)
    assert (record(config)["status"], record(config)["step"]) == ("stopped", 1)
    assert pretrain(config).train_state.step == 0
    assert "was stopped: 1 steps" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("error", "status"),
    [(RuntimeError("broken"), "failed"), (SystemExit(3), "paused"), (KeyboardInterrupt(), "failed")],
)
def test_a_run_that_ended_half_way_is_continued(config: ConfigContainer, error: BaseException, status: str) -> None:
    config.checkpoint.save_interval = 1
    stopping(config, error=error)
    assert record(config)["status"] == status
    assert pretrain(config).train_state.step == 2
    assert record(config)["status"] == "completed"


def test_an_unfinished_run_is_refused_where_it_may_not_be_continued(config: ConfigContainer) -> None:
    stopping(config, error=RuntimeError("broken"))
    config.checkpoint.resume = False
    with pytest.raises(RunExistsError, match=r"unfinished run \(status 'failed', step 1\).*run\.name=mine-new"):
        pretrain(config)


def test_a_run_that_failed_in_set_up_may_be_mended_and_started_again(config: ConfigContainer) -> None:
    paths = config.dataset.paths
    config.dataset.paths = ["/nowhere/at/all"]
    with pytest.raises(DataError):
        pretrain(config)
    config.dataset.paths = paths
    pretrain(config)
    assert record(config)["status"] == "completed"


def test_a_fresh_run_stands_beside_the_old_ones(config: ConfigContainer) -> None:
    config.run.fresh = True
    for _ in range(3):
        pretrain(config, callbacks=[JsonLogger()])
    for name in ("mine", "mine-2", "mine-3"):
        assert record(config, name)["status"] == "completed"
        assert (dir_of(config, name) / "trainer_logs.json").exists()
    config.run.fresh, config.run.name = False, "mine-2"
    assert pretrain(config).train_state.step == 0, "it is known under its new name"


def test_a_directory_with_other_files_is_left_alone(config: ConfigContainer) -> None:
    directory = dir_of(config)
    directory.mkdir(parents=True)
    (directory / "thesis.tex").write_text("years of work")
    before, changed = content_of(directory), directory.stat().st_mtime_ns
    with pytest.raises(RunExistsError, match=r"contains files but no run\.json.*Nothing was touched"):
        pretrain(config)
    assert content_of(directory) == before
    assert directory.stat().st_mtime_ns == changed


@pytest.mark.parametrize(
    "name",
    [
        "gradient_norms.json",
        "parameter_norms.1.json",
        "tb/events.out.tfevents.1.host",
        "a/b/loss_x/events.out.tfevents.1.host",
        "events.out.tfevents.1.host",
    ],
)
def test_what_is_measured_before_training_does_not_keep_the_run_out(config: ConfigContainer, name: str) -> None:
    path = dir_of(config) / name
    path.parent.mkdir(parents=True)
    path.write_text("[]")
    pretrain(config)
    assert record(config)["status"] == "completed"
    assert path.read_text() == "[]"


@pytest.mark.parametrize("name", ["tb/thesis.tex", "tb/a/thesis.tex", "tb"])
def test_a_directory_with_more_than_events_is_left_alone(config: ConfigContainer, name: str) -> None:
    path = dir_of(config) / name
    path.parent.mkdir(parents=True)
    (path.parent / "events.out.tfevents.1.host").write_text("") if name != "tb" else path.mkdir()
    if name != "tb":
        path.write_text("years of work")
    with pytest.raises(RunExistsError, match=r"contains files but no run\.json"):
        pretrain(config)


@pytest.mark.parametrize("interrupted", ["replace", "unlink"])
def test_a_run_killed_before_it_wrote_its_record_starts_again(
    config: ConfigContainer, monkeypatch: pytest.MonkeyPatch, interrupted: str
) -> None:
    child = os.fork()
    if child == 0:
        monkeypatch.setattr(Path, interrupted, lambda *_args, **_kwargs: os.kill(os.getpid(), signal.SIGKILL))
        try:
            acquire_run_dir(config)
        finally:
            os._exit(0)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    left = {path.name for path in dir_of(config).iterdir()} - {".run.lock"}
    assert left == {"run.json.tmp" if interrupted == "replace" else f".write-test-{child}"}
    pretrain(config)
    assert record(config)["status"] == "completed"
    assert not left & {path.name for path in dir_of(config).iterdir()}


@pytest.mark.parametrize("name", ["run.json.tmp", ".write-test-1", ".trainer_logs.json.1.tmp", ".metrics.csv.1.tmp"])
def test_a_directory_named_like_a_leftover_is_left_alone(config: ConfigContainer, name: str) -> None:
    (dir_of(config) / name).mkdir(parents=True)
    with pytest.raises(RunExistsError, match=r"contains files but no run\.json"):
        pretrain(config)
    assert (dir_of(config) / name).is_dir()


def test_an_empty_directory_is_taken(config: ConfigContainer) -> None:
    dir_of(config).mkdir(parents=True)
    pretrain(config)
    assert record(config)["status"] == "completed"


def test_a_directory_that_cannot_be_written_is_refused_before_training(config: ConfigContainer, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    config.run.output_dir = str(tmp_path / "file" / "runs")
    with pytest.raises(ConfigError, match=r"cannot be written \(Not a directory\); choose another run\.output_dir"):
        pretrain(config)


def test_a_full_disk_is_refused_before_an_existing_run_continues(
    config: ConfigContainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopping(config, error=KeyboardInterrupt())
    before = content_of(dir_of(config))

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(
            ConfigError, match=r"mine cannot be written \(No space left .*\); free space on its disk\.$"
        ):
            pretrain(config)
    after = content_of(dir_of(config))
    lock = str(dir_of(config) / ".run.lock")
    assert {**after, lock: None} == {**before, lock: None}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "cannot read"),
        ("[]", "not the record of a run"),
        ('{"config": 3}', "not the record of a run"),
        ('{"config": {"train": {"train_iters": "many"}}}', "stored configuration cannot be read"),
        ('{"config": {"model": {"num_layers": 3}}}', "does not fit"),
    ],
)
def test_a_broken_record_is_refused_with_help(config: ConfigContainer, text: str, says: str) -> None:
    dir_of(config).mkdir(parents=True)
    (dir_of(config) / "run.json").write_text(text)
    with pytest.raises(RunExistsError, match=says):
        pretrain(config)
    assert (dir_of(config) / "run.json").read_text() == text


def test_an_aborted_run_saves_no_weights(config: ConfigContainer) -> None:
    manager = CallbackManager()
    manager.register("on_step_end", lambda context: context.control.abort("diverged"))
    pretrain(config, callbacks=manager)
    assert record(config)["status"] == "stopped"
    assert not (dir_of(config) / "model").exists()
    row = json.loads((dir_of(config) / "decisions.jsonl").read_text())
    assert (row["flag"], row["reason"]) == ("should_abort_without_save", "diverged")


def test_a_stop_asked_in_the_final_evaluation_does_not_make_the_run_unfinished(config: ConfigContainer) -> None:
    config.validation.eval_iters = 2
    manager = CallbackManager()
    manager.register("on_test_end", lambda context: context.control.stop())
    manager.register("on_eval_end", lambda context: context.control.stop())
    config.validation.eval_interval = None
    pretrain(config, callbacks=manager)
    assert record(config)["status"] == "completed"
