"""What TensorBoard's reader shows of a directory that was written to before: fresh, continued, rolled back."""

from __future__ import annotations

import copy
import inspect
import logging
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.tensorboard import SummaryWriter

from onstep import CallbackManager, TrainerCallback, pretrain
from onstep.callbacks.resumable_summary_writer import ResumableSummaryWriter
from onstep.callbacks.tb_logger import TBLogger
from onstep.config import ConfigContainer
from onstep.errors import ConfigError
from tests.support.tracker_files import age, num_files, steps_by_tag
from tests.support.waiting import PATIENCE


class Run:
    """Tells one writer what a loop would, and writes to it."""

    def __init__(self, make_state: Any, directory: Path, **info: Any) -> None:
        self.writer = ResumableSummaryWriter(str(directory))
        self.make_state, self.info = make_state, info

    def notify(self, event: str, step: int) -> None:
        getattr(self.writer, event)(args=None, state=self.make_state(step=step, **self.info), control=None)

    def write(self, *steps: int, tag: str = "loss") -> None:
        for step in steps:
            self.writer.add_scalar(tag, 1.0, step)

    def end(self, step: int) -> None:
        self.notify("on_train_end", step)
        self.notify("on_run_end", step)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "tb"


@pytest.fixture
def start(make_state: Any, directory: Path) -> Any:
    return lambda **info: Run(make_state, directory, **info)


@pytest.fixture
def killed(start: Any, directory: Path) -> dict[str, Any]:
    """A run that wrote steps 1 to 6 and was killed; its state at the checkpoint of step 4."""
    run = start()
    run.notify("on_train_begin", 0)
    run.write(1, 2, 3, 4)
    state = copy.deepcopy(run.writer.state_dict())
    run.write(5, 6)
    run.writer.close()
    age(directory)
    return state


EVENTS = ("on_checkpoint_load", "on_data_init_start", "on_train_begin")


@pytest.mark.parametrize("event", EVENTS)
def test_what_is_after_the_checkpoint_is_hidden_and_its_own_step_is_shown(
    start: Any, directory: Path, killed: Any, event: str
) -> None:
    run = start()
    run.writer.load_state_dict(killed)
    run.notify(event, 4)
    run.write(5)
    run.end(5)
    assert steps_by_tag(directory) == {"loss": [1, 2, 3, 4, 5]}


def test_all_tellings_of_one_start_count_once(start: Any, directory: Path, killed: Any) -> None:
    run = start()
    run.writer.load_state_dict(killed)
    for event in EVENTS:
        run.notify(event, 4)
        run.write(5 + EVENTS.index(event))
    run.end(7)
    assert steps_by_tag(directory) == {"loss": [1, 2, 3, 4, 5, 6, 7]}


def test_a_writer_that_was_made_too_early_is_made_again(start: Any, directory: Path, killed: Any) -> None:
    run = start()
    run.write(5, tag="text")  # by a callback that stands before it in the list
    run.write(4, tag="early")
    run.writer.load_state_dict(killed)
    run.notify("on_train_begin", 4)
    run.write(5)
    run.end(5)
    assert steps_by_tag(directory) == {"loss": [1, 2, 3, 4, 5], "early": [4]}


def test_a_run_that_begins_anew_hides_an_earlier_one(
    start: Any, directory: Path, killed: Any, caplog: pytest.LogCaptureFixture
) -> None:
    run = start()
    with caplog.at_level(logging.WARNING):
        run.notify("on_data_init_start", 0)
        run.notify("on_train_begin", 0)
    assert [record.getMessage() for record in caplog.records] == [
        f"{directory} has events of an earlier run; TensorBoard will hide them"
    ]
    run.write(0, 1)
    run.end(1)
    assert steps_by_tag(directory) == {"loss": [0, 1]}


def test_so_does_the_second_run_of_one_trainer_but_not_what_was_evaluated_before_the_first(
    start: Any, directory: Path
) -> None:
    run = start()
    run.write(0, tag="before")
    run.notify("on_run_end", 0)
    run.notify("on_train_begin", 0)
    run.write(1, 2)
    run.end(2)
    run.write(2, tag="after")
    run.notify("on_run_end", 2)
    age(directory)
    assert steps_by_tag(directory) == {"before": [0], "loss": [1, 2], "after": [2]}
    run.notify("on_train_begin", 0)
    run.write(1)
    run.end(1)
    assert steps_by_tag(directory) == {"loss": [1]}


def test_what_is_written_at_step_0_before_a_late_beginning_stays(start: Any, directory: Path, killed: Any) -> None:
    run = start()
    run.write(0, tag="info")
    run.notify("on_train_begin", 0)
    run.write(1)
    run.end(1)
    assert steps_by_tag(directory) == {"info": [0], "loss": [1]}


def test_an_evaluation_without_training_adds_to_what_is_there(start: Any, directory: Path, killed: Any) -> None:
    run = start()
    run.write(6, tag="eval")
    run.notify("on_run_end", 6)
    assert steps_by_tag(directory) == {"loss": [1, 2, 3, 4, 5, 6], "eval": [6]}


def test_a_rollback_hides_what_is_undone_and_closing_hides_nothing(start: Any, directory: Path) -> None:
    run = start()
    run.notify("on_train_begin", 0)
    run.write(1, 2, 3)
    run.notify("on_checkpoint_load", 1)
    run.write(2, 3)
    run.writer.close()
    run.write(4)
    run.end(4)
    run.end(4)
    assert steps_by_tag(directory) == {"loss": [1, 2, 3, 4]}


def test_rollbacks_within_a_second_are_still_read_in_order(start: Any, directory: Path) -> None:
    run = start()
    run.notify("on_train_begin", 0)
    run.write(1, 2)
    for _ in range(2):
        run.notify("on_checkpoint_load", 1)
        run.write(2)
    run.end(2)
    assert steps_by_tag(directory) == {"loss": [1, 2]}
    seconds = sorted(int(path.name.split(".")[3]) for path in directory.glob("events.*"))
    assert len(set(seconds)) == 3, "names that sort by the second in them"


def test_the_directories_of_add_scalars_are_hidden_too(start: Any, directory: Path) -> None:
    first = start()
    first.notify("on_train_begin", 0)
    for step in (1, 2, 3):
        first.writer.add_scalars("a/b", {"x": 1.0}, step)
    first.writer.close()
    age(directory)
    run = start()
    run.notify("on_train_begin", 1)
    run.writer.add_scalars("a/b", {"x": 1.0, "y": 2.0}, 2)
    run.end(2)
    assert steps_by_tag(directory / "a_b_x") == {"a/b": [1, 2]}
    assert steps_by_tag(directory / "a_b_y") == {"a/b": [2]}


def test_nothing_is_made_until_something_is_written(start: Any, directory: Path) -> None:
    run = start(rank=1)
    for event in EVENTS:
        run.notify(event, 0)
    run.writer.flush()
    assert run.writer.state_dict() == {"log_dir": str(directory)}
    assert run.writer.log_dir == run.writer.get_logdir() == str(directory)
    run.notify("on_checkpoint_load", 3)
    run.end(3)
    run.writer.close()
    assert not directory.exists()


def test_the_directory_of_the_checkpoint_is_continued(make_state: Any, directory: Path, killed: Any) -> None:
    run = Run(make_state, directory.parent / "tb-of-today")
    run.writer.load_state_dict(killed)
    run.notify("on_train_begin", 4)
    run.write(5)
    run.end(5)
    assert run.writer.log_dir == str(directory)
    assert steps_by_tag(directory) == {"loss": [1, 2, 3, 4, 5]}
    assert not (directory.parent / "tb-of-today").exists()


def test_a_directory_that_is_gone_is_reported_and_the_new_one_used(
    start: Any, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = start()
    run.writer.load_state_dict({"log_dir": str(directory.parent / "gone")})
    assert re.search("the TensorBoard directory to resume, .*gone, is missing; writing to", caplog.text)
    assert run.writer.log_dir == str(directory)


def test_the_directory_of_another_run_is_left_alone(make_state: Any, tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text("{}")
    (tmp_path / "a" / "tb-1").mkdir()
    other = Run(make_state, tmp_path / "b" / "tb")
    other.writer.load_state_dict({"log_dir": str(tmp_path / "a" / "tb-1")})
    assert other.writer.log_dir == str(tmp_path / "b" / "tb")
    same = Run(make_state, tmp_path / "a" / "tb-2")
    same.writer.load_state_dict({"log_dir": str(tmp_path / "a" / "tb-1")})
    assert same.writer.log_dir == str(tmp_path / "a" / "tb-1")


def test_it_has_every_public_name_of_the_real_writer(directory: Path) -> None:
    real, writer = SummaryWriter(str(directory)), ResumableSummaryWriter(str(directory))
    names = {name for name in [*dir(SummaryWriter), *vars(real)] if not name.startswith("_")}
    missing = [name for name in sorted(names) if not hasattr(writer, name)]
    assert missing == []
    assert len(names) > 25
    with pytest.raises(AttributeError, match="has no attribute 'add_magic'"):
        writer.add_magic  # noqa: B018 - the access is what fails
    with pytest.raises(AttributeError):
        writer.get_last_lr  # noqa: B018 - the access is what fails
    assert not any(hasattr(SummaryWriter, name) for name in ("add_magic", "get_last_lr"))
    real.close()
    writer.close()


def test_what_a_checkpoint_covers_is_flushed_before_it_is_saved(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run, flushed = start(), []
    run.write(1)
    monkeypatch.setattr(run.writer.file_writer, "flush", lambda: flushed.append(True))
    run.writer.state_dict()
    assert flushed == [True]
    monkeypatch.undo()
    run.end(1)


def test_looking_at_a_method_makes_nothing_and_calling_it_writes(directory: Path) -> None:
    with ResumableSummaryWriter(directory) as writer:
        method = writer.add_tensor
        assert not directory.exists()
        method("t", torch.ones(2), 3)
        writer.add_text("words", "**x**", 1)
        writer.add_histogram("h", torch.ones(2), 1)
        writer.add_image("i", torch.zeros(3, 4, 4), 1)
        writer.add_images("is", torch.zeros(2, 3, 4, 4), 1)
        writer.add_custom_scalars({"all": {"loss": ["Multiline", ["loss"]]}})
    assert steps_by_tag(directory).keys() >= {"t", "words/text_summary", "h", "i", "is"}
    assert num_files(directory) == 1


def test_signature_is_the_documented_one() -> None:
    assert list(inspect.signature(ResumableSummaryWriter).parameters) == ["log_dir"]


def test_importing_it_does_not_import_tensorboard() -> None:
    code = (
        "import sys; from onstep.callbacks import ResumableSummaryWriter, TBLogger; "
        "TBLogger(ResumableSummaryWriter('x')); assert 'tensorboard' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE)


class GoesBack(TrainerCallback):
    """Asks for one rollback."""

    def __init__(self, step: int) -> None:
        self.step: int | None = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            self.step = None
            control.rollback("a test")


@pytest.mark.parametrize("writer_first", [True, False])
def test_a_run_that_goes_back_shows_each_step_once(
    tiny_config: ConfigContainer, tmp_path: Path, directory: Path, writer_first: bool
) -> None:
    config = tiny_config
    config.run.name, config.run.output_dir = "run", str(tmp_path)
    config.logger.log_interval, config.checkpoint.save_interval, config.validation.eval_interval = 1, 3, 2
    writer = ResumableSummaryWriter(str(directory))
    manager = CallbackManager()
    callbacks = [writer, TBLogger(writer)]
    manager.add([GoesBack(5), *(callbacks if writer_first else reversed(callbacks))])
    pretrain(config, callbacks=manager)
    found = steps_by_tag(directory)
    assert found["train-loss"] == list(range(1, 9))
    assert found["eval-loss"] == [2, 4, 6, 8]
    for tag, steps in found.items():
        assert steps == sorted(set(steps)), tag


def test_it_works_where_only_the_start_of_training_is_fired(directory: Path, killed: Any) -> None:
    writer = ResumableSummaryWriter(directory)
    for step in (4, 0):  # a resumed training in Hugging Face's Trainer, then a second one
        state = SimpleNamespace(global_step=step, is_world_process_zero=True)
        writer.on_train_begin(None, state, None)
        writer.add_scalar("loss", 1.0, step + 1)
        writer.on_train_end(None, state, None)
        writer.flush()
    assert steps_by_tag(directory) == {"loss": [1]}
    writer.close()


@pytest.mark.parametrize("event", ["on_data_init_start", "on_train_begin"])
def test_a_directory_that_cannot_be_written_is_reported_before_training(
    make_state: Any, tmp_path: Path, event: str
) -> None:
    (tmp_path / "file").write_text("")
    run = Run(make_state, tmp_path / "file" / "tb")
    with pytest.raises(ConfigError, match=r"cannot write to log_dir .*/file/tb.*choose another"):
        run.notify(event, 0)
    Run(make_state, tmp_path / "file" / "tb", rank=1).notify(event, 0)


def test_a_directory_that_cannot_be_written_is_reported_when_something_is(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot write to log_dir .*/file/tb"):
        ResumableSummaryWriter(tmp_path / "file" / "tb").add_scalar("loss", 1.0, 1)


def test_what_is_shown_at_a_step_is_known_of_earlier_files_too(start: Any, directory: Path) -> None:
    first = start()
    first.notify("on_train_begin", 0)
    first.write(1, 4, 6)
    first.write(4, tag="other")
    first.writer.add_text("words", "once", 4)
    first.end(6)
    age(directory)
    again = start()
    again.notify("on_train_begin", 4)
    assert again.writer.tags_at(4) == {"loss", "other", "words"}
    again.write(5, 6)
    assert [again.writer.tags_at(step) for step in (1, 4, 5, 6, 7)] == [
        {"loss"},
        {"loss", "other", "words"},
        {"loss"},
        {"loss"},
        set(),
    ]
    again.notify("on_checkpoint_load", 3)
    again.write(5)
    assert [again.writer.tags_at(step) for step in (1, 4, 6)] == [{"loss"}, set(), set()]
