"""How much is shown: quiet, default, verbose, and Megatron Bridge's lines."""

from __future__ import annotations

import io
import itertools
import logging
import os
import re
import signal
from typing import Any

import pytest

from onstep import Callback, CallbackManager, DefaultMetrics, ProgressCallback, Trainer, TrainingArguments, pretrain
from onstep.config import ConfigContainer
from onstep.console import shown_by_default
from onstep.console.progress import RowPace
from onstep.errors import ConfigError
from onstep.training import Preempted
from tests.support.small_runs import RaggedRows, TinyModel


def test_pretrain_prints_rows_and_bridges_lines_only_where_asked_for(
    tiny_config: ConfigContainer, capsys: pytest.CaptureFixture[str]
) -> None:
    pretrain(tiny_config)
    text = capsys.readouterr().out
    assert "split" in text
    assert "Training complete: loss " in text
    for words in ("MODEL_TFLOP/s/GPU", "consumed samples", "validation loss at", "time across ranks"):
        assert words not in text
    tiny_config.logger.console = "bridge"
    pretrain(tiny_config)
    text = capsys.readouterr().out
    for words in ("MODEL_TFLOP/s/GPU", "consumed samples", "validation loss at iteration 5"):
        assert words in text
    assert "split" not in text


def test_a_run_shorter_than_its_log_interval_shows_its_first_and_last_loss(
    tiny_config: ConfigContainer, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_config.logger.log_interval = 1000
    losses: list[float] = []
    manager = CallbackManager()
    manager.register("on_train_step_end", lambda context: losses.append(float(context.loss_dict["lm loss"])))
    pretrain(tiny_config, callbacks=manager)
    title = f"Training complete: loss {losses[0]:.4g} at the start, {losses[-1]:.4g} at the end\n"
    assert title in capsys.readouterr().out


def test_the_end_is_the_loss_of_the_last_row(tiny_config: ConfigContainer, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_config.logger.log_interval = 2
    pretrain(tiny_config)
    text = capsys.readouterr().out
    rows = [line.split() for line in text.splitlines() if " train " in line]
    loss = float(rows[-1][rows[-1].index("train") + 2])
    assert f"at the start, {loss:.4g} at the end" in text


def test_quiet_is_one_line(tiny_config: ConfigContainer, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_config.logger.console = "quiet"
    pretrain(tiny_config)
    captured = capsys.readouterr()
    (line,) = captured.out.splitlines()
    assert "Training complete: loss " in line


def test_no_callback_is_added_beside_one_that_shows_progress(
    tiny_config: ConfigContainer, capsys: pytest.CaptureFixture[str]
) -> None:
    class Mine(Callback):
        shows_progress = True

    pretrain(tiny_config, callbacks=[Mine()])
    assert capsys.readouterr().out == ""
    tiny_config.run.default_callbacks = False
    pretrain(tiny_config)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("level", "words"),
    [
        ("default", {"split", "model: ", "Training complete"}),
        ("verbose", {"split", "[INFO|info_logger] max_steps: 2", "Training complete"}),
        ("quiet", {"Training complete"}),
        ("bridge", {"consumed samples"}),
    ],
)
def test_the_trainer_has_the_same_levels(
    level: str, words: set[str], tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    args = TrainingArguments(
        str(tmp_path), max_steps=2, logging_steps=1, save_strategy="no", config_overrides={"logger.console": level}
    )
    Trainer(TinyModel(), args, train_dataset=RaggedRows(16)).train()
    text = capsys.readouterr().out
    every = {"split", "model: ", "[INFO|info_logger] max_steps: 2", "Training complete", "consumed samples"}
    assert {one for one in every if one in text} == words


def rows(level: str, num_rows: int, make_state: Any, seconds: float = 0.0) -> list[int]:
    stream = io.StringIO()
    callback = ProgressCallback(use_tqdm=False, output_stream=stream, level=level, header_interval=0)
    clock = itertools.count(0.0, seconds) if seconds else itertools.repeat(0.0)
    callback._pace.clock = lambda: next(clock)
    callback.on_train_begin(None, make_state(max_steps=num_rows * 5, logging_steps=5), None)
    for step in range(5, num_rows * 5 + 1, 5):
        callback.on_log(None, make_state(step=step, max_steps=num_rows * 5), None, logs={"loss": 1.0})
    return [int(line.split()[1].replace(",", "")) for line in stream.getvalue().splitlines()[1:]]


def test_a_file_shows_some_rows_of_many_and_always_the_first_and_the_last(make_state: Any) -> None:
    assert rows("default", 40, make_state) == list(range(5, 201, 5))
    shown = rows("default", 300, make_state)
    assert len(shown) <= 22
    assert (shown[0], shown[-1]) == (5, 1500)
    assert rows("verbose", 300, make_state) == list(range(5, 1501, 5))


def test_the_demo_is_a_short_file(make_state: Any) -> None:
    """1,500 steps, logged every 5 and evaluated every 250: with what is printed around it, under 60 lines."""
    stream = io.StringIO()
    callback = ProgressCallback(use_tqdm=False, output_stream=stream)
    callback._pace.clock = lambda: 0.0
    callback.on_train_begin(None, make_state(max_steps=1500, logging_steps=5), None)
    for step in range(5, 1501, 5):
        callback.on_log(None, make_state(step=step, max_steps=1500), None, logs={"loss": 1.0})
        if step % 250 == 0:
            callback.on_evaluate(None, make_state(step=step), None, metrics={"eval_loss": 1.0 + step})
    callback.on_log(None, make_state(step=1500), None, logs={"train_runtime": 1.0, **dict.fromkeys("abcdefghijk", 1)})
    callback.on_run_end(None, make_state(step=1500), None)
    lines = stream.getvalue().splitlines()
    assert len(lines) <= 40
    assert len([line for line in lines if "split" in line]) == 1


def test_a_file_shows_a_row_a_minute(make_state: Any) -> None:
    assert rows("default", 300, make_state, seconds=60.0) == list(range(5, 1501, 5))
    shown = rows("default", 300, make_state, seconds=30.0)
    assert max(after - before for before, after in itertools.pairwise(shown)) == 10


def test_the_pace_of_a_run_without_an_end_is_every_row() -> None:
    pace = RowPace()
    pace.begin(5, -1)
    assert all(pace.shows(step) for step in range(100))


def test_columns_of_the_speed_are_there_before_it_is_known(
    tiny_config: ConfigContainer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "160")  # wide enough for the tokens of a step too
    monkeypatch.setattr("onstep.console.progress.place_of_output", lambda: "terminal")
    tiny_config.logger.log_interval, tiny_config.validation.eval_on_start = 2, True
    pretrain(tiny_config, callbacks=[DefaultMetrics(), *shown_by_default("default", use_tqdm=False)])
    headers = [line for line in capsys.readouterr().out.splitlines() if "split" in line]
    assert len(headers) == 1
    assert headers[0].endswith("tok/s")


def test_a_final_validation_that_repeats_the_last_one_has_no_second_row(
    tiny_config: ConfigContainer, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_config.train.train_iters, tiny_config.validation.eval_interval = 4, 2
    pretrain(tiny_config)
    rows = [line.split()[1:3] for line in capsys.readouterr().out.splitlines() if " eval " in line]
    assert rows == [["2", "eval"], ["4", "eval"]]


@pytest.mark.parametrize("wrong", ["loud", "bridge"])
def test_an_unknown_level_is_refused(wrong: str) -> None:
    with pytest.raises(ValueError, match="level must be quiet, default or verbose, got"):
        ProgressCallback(level=wrong)


def test_an_unknown_level_is_refused_by_its_key(tiny_config: ConfigContainer, tmp_path: Any) -> None:
    tiny_config.logger.console = "foo"
    rule = r"logger\.console('\])?='foo' must be quiet \| default \| verbose \| bridge\."
    with pytest.raises(ConfigError, match=rule):
        pretrain(tiny_config)
    with pytest.raises(ConfigError, match=rule):
        Trainer(TinyModel(), TrainingArguments(str(tmp_path), config_overrides={"logger.console": "foo"}))


@pytest.mark.parametrize(("level", "log_interval"), [("default", 2), ("quiet", 100)])
def test_a_preempted_run_ends_with_its_losses(
    level: str, log_interval: int, tiny_config: ConfigContainer, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_config.logger.console, tiny_config.logger.log_interval = level, log_interval
    with pytest.raises(Preempted, match="preempted at step 3; the same command continues the run"):
        pretrain(tiny_config, callbacks=signal_at("on_step_end", 3))
    text = capsys.readouterr().out
    assert re.search(
        r"^(\d\d:\d\d:\d\d )?Training stopped at step 3: loss [\d.]+ at the start, [\d.]+ at the end", text, re.M
    )
    assert "exiting program" not in text


def test_a_preempted_evaluation_says_how_to_go_on(tiny_config: ConfigContainer) -> None:
    tiny_config.validation.eval_on_start = True
    with pytest.raises(Preempted, match="evaluation at step 0; the same command continues the run"):
        pretrain(tiny_config, callbacks=signal_at("on_eval_step_end", 1))


def test_bridges_line_of_an_exit_is_printed_where_its_lines_are(
    tiny_config: ConfigContainer, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    tiny_config.train.exit_interval = 2
    with caplog.at_level(logging.INFO, "onstep"):
        pretrain(tiny_config)
    text = capsys.readouterr().out
    assert "Training stopped at step 2: loss " in text
    assert "exiting program" not in text
    assert "exiting program at iteration 2" in caplog.messages
    tiny_config.logger.console = "bridge"
    pretrain(tiny_config)
    assert re.search(r"^\[exiting program at iteration 2\] datetime: ", capsys.readouterr().out, re.M)


def signal_at(event: str, number: int) -> CallbackManager:
    """Sends SIGTERM at an event."""
    manager, count = CallbackManager(), itertools.count(1)
    manager.register(event, lambda context: next(count) == number and os.kill(os.getpid(), signal.SIGTERM))
    return manager
