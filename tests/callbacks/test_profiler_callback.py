"""A trace that the Chrome trace viewer opens, from every kind of run."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from onstep import Callback, pretrain
from onstep.callbacks.profiler_callback import ProfilerCallback
from onstep.config import ConfigContainer
from onstep.errors import ConfigError
from tests.support.small_configs import small_pretrain_config


@pytest.fixture
def config(corpus: Path, token_cache: Path) -> ConfigContainer:
    """8 steps of a model of one layer: a trace has each of its operations."""
    config = small_pretrain_config(corpus, token_cache)
    config.train.train_iters, config.train.global_batch_size, config.train.micro_batch_size = 8, 1, 1
    config.logger.log_interval = 4
    config.validation.eval_interval, config.validation.eval_after_training = None, False
    return config


def profiler(directory: Path, **options: Any) -> ProfilerCallback:
    return ProfilerCallback(**{"output_dir": str(directory / "profiles"), "with_stack": False, **options})


def trace(callback: ProfilerCallback) -> list[dict[str, Any]]:
    """The events of a callback's trace, each checked against the Trace Event Format."""
    assert callback.trace_path is not None
    content = json.loads(callback.trace_path.read_text(encoding="utf-8"))
    events = content["traceEvents"]
    assert {event["ph"] for event in events} <= set("BEXiIMsftCbneNODPRacv(")
    for event in events:
        assert isinstance(event["name"], str)
        assert "pid" in event
        if event["ph"] != "M":
            assert isinstance(event["ts"], (int, float))
            assert "tid" in event
        if event["ph"] == "X":
            assert event["dur"] >= 0
    return list(events)


def steps_in(events: list[dict[str, Any]]) -> list[int]:
    return sorted({int(e["name"].split()[1]) for e in events if e["name"].startswith("step ") and e["ph"] == "X"})


def test_the_trace_has_the_steps_of_the_window_with_the_models_operations(
    config: ConfigContainer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    callback = profiler(tmp_path, start_step=2, num_steps=3)
    pretrain(config, callbacks=[callback])
    assert callback.trace_path == tmp_path / "profiles" / "real_training_rank0.json"
    events = trace(callback)
    assert steps_in(events) == [3, 4, 5]
    names = [event["name"] for event in events]
    assert sum("scaled_dot_product" in name for name in names) >= 3
    assert {"aten::embedding", "aten::mm"} <= set(names)
    inside = [event for event in events if event["name"] == "aten::mm"]
    marks = [event for event in events if event["name"].startswith("step ")]
    assert all(any(m["ts"] <= e["ts"] <= m["ts"] + m["dur"] for m in marks) for e in inside)
    assert "Self CPU time total" in capsys.readouterr().out


def test_shapes_and_flops_are_recorded_unless_turned_off(config: ConfigContainer, tmp_path: Path) -> None:
    with_all, without = profiler(tmp_path / "a", num_steps=1), profiler(tmp_path / "b", num_steps=1)
    without.record_shapes = without.with_flops = False
    for callback in (with_all, without):
        pretrain(config, callbacks=[callback])
    products = [e for e in trace(with_all) if e["name"] == "aten::mm"]
    assert all(product["args"]["Input Dims"] for product in products)
    assert not [e for e in trace(without) if "Input Dims" in e.get("args", {})]


def test_with_stack_the_python_functions_are_in_the_trace(config: ConfigContainer, tmp_path: Path) -> None:
    callback = profiler(tmp_path, with_stack=True, num_steps=1)
    pretrain(config, callbacks=[callback])
    assert any("transformer.py" in event["name"] for event in trace(callback))


@pytest.mark.parametrize(
    ("steps", "start", "length", "recorded"),
    [(8, 3, 5, [4, 5, 6, 7, 8]), (6, 3, 5, [2, 3, 4, 5, 6]), (4, 3, 5, [1, 2, 3, 4]), (2, 5, 1, [2]), (1, 3, 5, [1])],
)
def test_a_run_shorter_than_the_window_gives_a_trace(
    steps: int, start: int, length: int, recorded: list[int], config: ConfigContainer, tmp_path: Path
) -> None:
    config.train.train_iters, config.scheduler.lr_warmup_iters = steps, 0
    callback = profiler(tmp_path, start_step=start, num_steps=length)
    pretrain(config, callbacks=[callback])
    assert steps_in(trace(callback)) == recorded


def test_a_run_resumed_past_the_start_gives_a_trace_of_its_own_steps(config: ConfigContainer, tmp_path: Path) -> None:
    config.checkpoint.save, config.train.exit_interval = str(tmp_path / "saved"), 5
    pretrain(config)
    config.train.exit_interval = None
    callback = profiler(tmp_path, start_step=1, num_steps=2)
    pretrain(config, callbacks=[callback])
    assert steps_in(trace(callback)) == [7, 8]


class Failing(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_forward_backward_end(self, context: Any) -> None:
        if context.state.train_state.step == self.step:
            raise KeyError("no")


def test_an_exception_inside_the_window_leaves_a_trace_and_no_open_profiler(
    config: ConfigContainer, tmp_path: Path
) -> None:
    callback = profiler(tmp_path, start_step=2, num_steps=4)
    with pytest.raises(KeyError):
        pretrain(config, callbacks=[callback, Failing(4)])
    assert steps_in(trace(callback)) == [3, 4, 5]
    assert not torch.autograd.profiler._is_profiler_enabled
    with torch.profiler.profile():  # raises where another one is open
        pass


@pytest.mark.parametrize("step", [0, 2])
def test_a_run_that_fails_before_the_window_leaves_no_trace_and_says_so(
    step: int, config: ConfigContainer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    callback = profiler(tmp_path, start_step=3, num_steps=2)
    with caplog.at_level(logging.WARNING), pytest.raises(KeyError):
        pretrain(config, callbacks=[callback, Failing(step)])
    assert callback.trace_path is None
    assert "before step 4 of this process, so nothing was profiled" in caplog.text
    with torch.profiler.profile():
        pass


def test_two_runs_in_a_row_are_both_profiled(config: ConfigContainer, tmp_path: Path) -> None:
    callback = profiler(tmp_path, start_step=1, num_steps=1)
    config.scheduler.lr_warmup_iters = 0
    for steps in (2, 3):
        config.train.train_iters = steps
        pretrain(config, callbacks=[callback])
        assert steps_in(trace(callback)) == [2]
        callback.trace_path.unlink()  # type: ignore[union-attr]


def test_every_rank_writes_a_file_of_its_own_and_rank_0_the_tables(
    make_state: Any, args: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in (0, 1):
        callback = profiler(tmp_path, start_step=0, num_steps=1)
        state = make_state(step=7, max_steps=9, rank=rank, num_processes=2)
        callback.on_train_begin(args, state, None)
        callback.on_step_begin(args, state, None)
        torch.ones(3).sum()
        callback.on_step_end(args, state, None)
        callback.on_train_end(args, state, None)
        assert steps_in(trace(callback)) == [8]
        assert ("aten::sum" in capsys.readouterr().out) == (rank == 0)
    assert {path.name for path in (tmp_path / "profiles").iterdir()} == {
        "real_training_rank0.json",
        "real_training_rank1.json",
    }


def test_profiling_changes_no_loss(config: ConfigContainer, tmp_path: Path) -> None:
    plain = pretrain(config)
    profiled = pretrain(config, callbacks=[profiler(tmp_path)])
    assert [r["loss"] for r in plain.info.log_history if "loss" in r] == [
        r["loss"] for r in profiled.info.log_history if "loss" in r
    ]


@pytest.mark.parametrize(
    "options", [{"start_step": -1}, {"num_steps": 0}, {"warmup_steps": -1}, {"num_steps": "5"}, {"start_step": None}]
)
def test_a_window_that_is_none_is_refused(options: dict[str, Any]) -> None:
    ((name, value),) = options.items()
    with pytest.raises(ConfigError, match=f"{name} must be an integer >= [01], got {value!r}"):
        ProfilerCallback(**options)


def test_a_second_one_in_a_run_is_refused_and_the_next_run_can_have_one(
    config: ConfigContainer, tmp_path: Path
) -> None:
    first, second = profiler(tmp_path / "a", start_step=1), profiler(tmp_path / "b", start_step=2)
    with pytest.raises(ConfigError, match=r"one is already active \(output_dir='.*a/profiles'\)"):
        pretrain(config, callbacks=[first, second])
    pretrain(config, callbacks=[second])
    assert trace(second)


def test_inside_a_profiler_of_the_user_it_is_refused_and_theirs_goes_on(
    config: ConfigContainer, tmp_path: Path
) -> None:
    with torch.profiler.profile() as theirs:
        with pytest.raises(ConfigError, match="inside another profiler"):
            pretrain(config, callbacks=[profiler(tmp_path)])
        torch.ones(3).cumsum(0)
    assert "aten::cumsum" in {event.name for event in theirs.events()}


class Theirs(Callback):
    """A profiler that is not ours, from the beginning of a step to the end of training."""

    def __init__(self, step: int) -> None:
        self.step, self.profiler = step, torch.profiler.profile()

    def on_forward_backward_end(self, context: Any) -> None:
        if context.state.train_state.step == self.step:
            self.profiler.start()

    def on_train_end(self, context: Any) -> None:
        torch.ones(3).cumsum(0)
        self.profiler.stop()


@pytest.mark.parametrize("step", [1, 2])
def test_where_one_of_the_user_records_at_the_window_nothing_is_profiled_and_theirs_goes_on(
    step: int, config: ConfigContainer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    theirs, callback = Theirs(step), profiler(tmp_path, start_step=3, num_steps=2)
    pretrain(config, callbacks=[callback, theirs])
    assert caplog.text.count("profiles nothing: another profiler is already recording") == 1
    assert "nothing was profiled" not in caplog.text
    assert callback.trace_path is None
    assert "aten::cumsum" in {event.name for event in theirs.profiler.events()}
    pretrain(config, callbacks=[callback])
    assert steps_in(trace(callback)) == [4, 5]


class Spoiling(Callback):
    """Does something to the directory of the traces after the second step."""

    def __init__(self, spoil: Callable[[], None]) -> None:
        self.spoil = spoil

    def on_step_end(self, context: Any) -> None:
        if context.state.train_state.step == 2:
            self.spoil()


def test_a_directory_that_was_removed_during_the_run_is_made_again(config: ConfigContainer, tmp_path: Path) -> None:
    callback = profiler(tmp_path, start_step=2, num_steps=2)
    pretrain(config, callbacks=[callback, Spoiling(lambda: shutil.rmtree(tmp_path / "profiles"))])
    assert steps_in(trace(callback)) == [3, 4]


def test_a_trace_that_cannot_be_written_is_not_claimed(
    config: ConfigContainer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def spoil() -> None:
        (tmp_path / "profiles").rmdir()
        (tmp_path / "profiles").write_text("a file")

    callback = profiler(tmp_path, start_step=2, num_steps=2)
    pretrain(config, callbacks=[callback, Spoiling(spoil)])
    assert callback.trace_path is None
    assert "could not write the trace" in caplog.text
    assert "lower start_step" not in caplog.text


@pytest.mark.parametrize("content", ['{"traceEvents": [{"ph": "X"', "", None])
def test_a_trace_that_is_not_whole_is_not_claimed(
    content: str | None, make_state: Any, args: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def write(path: str) -> None:
        if content is not None:
            Path(path).write_text(content)

    callback = profiler(tmp_path, start_step=0, num_steps=1)
    (tmp_path / "profiles").mkdir()
    (tmp_path / "profiles/real_training_rank0.json").write_text("{}")  # of an earlier run
    callback.on_train_begin(args, make_state(max_steps=9), None)
    callback.on_step_begin(args, make_state(max_steps=9), None)
    callback._profiler.profile.export_chrome_trace = write
    callback.on_step_end(args, make_state(step=1, max_steps=9), None)
    callback.on_train_end(args, make_state(step=1, max_steps=9), None)
    assert callback.trace_path is None
    assert "could not write the trace" in caplog.text


def test_an_output_dir_that_cannot_be_made_is_refused_before_training(
    config: ConfigContainer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "profiles").write_text("a file")
    with pytest.raises(ConfigError, match=r"cannot create output_dir='.*profiles'"):
        pretrain(config, callbacks=[profiler(tmp_path)])
    assert "lower start_step" not in caplog.text


def test_an_export_that_takes_long_is_announced(
    config: ConfigContainer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config.train.train_iters, config.scheduler.lr_warmup_iters = 1, 0
    for with_stack in (False, True):
        pretrain(config, callbacks=[profiler(tmp_path, with_stack=with_stack, num_steps=1)])
        assert (
            "this blocks training and can take long (to speed it up, use with_stack=False" in caplog.text
        ) == with_stack
    assert "tracemalloc is tracing" not in caplog.text


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_on_a_gpu_the_kernels_are_in_the_trace_and_in_a_second_table(
    config: ConfigContainer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config.dist.device = "cuda"
    callback = profiler(tmp_path)
    pretrain(config, callbacks=[callback])
    assert any(event.get("cat") == "kernel" for event in trace(callback))
    assert capsys.readouterr().out.count("Self CPU time total") == 2
