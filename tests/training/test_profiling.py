"""Profiles of a few steps: what is in their traces, and that they end whatever happens."""

from __future__ import annotations

import gzip
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from onstep import CallbackManager
from onstep.callbacks import ProfilerCallback
from onstep.config import ProfilingConfig
from onstep.errors import ConfigError
from onstep.training import GlobalState
from onstep.training.profiling.instruments import (
    NvtxRanges,
    handle_profiling_step,
    handle_profiling_stop,
    should_profile_rank,
)
from tests.support.small_runs import TinyModel, run, small_state


def profiled(directory: Path, steps: int = 6, **fields: Any) -> GlobalState:
    """A run of some steps whose steps 3 and 4 are profiled."""
    state = small_state(train_iters=steps)
    state.cfg.run.output_dir = str(directory)
    state.cfg.profiling = ProfilingConfig(
        use_pytorch_profiler=True, profile_step_start=2, profile_step_end=4, profile_ranks=[0]
    )
    for name, value in fields.items():
        setattr(state.cfg.profiling, name, value)
    return state


class Marked(TinyModel):
    """Names each forward pass in the trace by its number."""

    def __init__(self) -> None:
        super().__init__()
        self.passes = 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.passes += 1
        with torch.profiler.record_function(f"pass {self.passes}"):
            return super().forward(*args, **kwargs)


def trace(directory: Path, name: str = "torch_profile") -> dict[str, Any]:
    with gzip.open(directory / name / "rank-0.json.gz", "rt") as file:
        content: dict[str, Any] = json.load(file)
    return content


def passes(directory: Path) -> list[int]:
    """The numbers of the forward passes in a trace; a step has two."""
    names = {event.get("name", "") for event in trace(directory)["traceEvents"]}
    return sorted(int(name.removeprefix("pass ")) for name in names if name.startswith("pass "))


def test_the_steps_after_the_start_up_to_the_end_are_in_the_trace(tmp_path: Path) -> None:
    run(profiled(tmp_path), model=Marked())
    assert passes(tmp_path) == [5, 6, 7, 8]
    assert not torch.autograd._profiler_enabled()


def test_a_profile_may_begin_with_the_first_step(tmp_path: Path) -> None:
    run(profiled(tmp_path, profile_step_start=0, profile_step_end=1), model=Marked())
    assert passes(tmp_path) == [1, 2]


def test_a_training_that_ends_within_the_window_writes_what_there_is(tmp_path: Path) -> None:
    run(profiled(tmp_path, steps=3), model=Marked())
    assert passes(tmp_path) == [5, 6]
    assert not torch.autograd._profiler_enabled()


def test_a_training_that_fails_within_the_window_writes_what_there_is(tmp_path: Path) -> None:
    class Failing(Marked):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            if self.passes == 7:
                raise RuntimeError("no more")
            return super().forward(*args, **kwargs)

    with pytest.raises(RuntimeError, match="no more"):
        run(profiled(tmp_path), model=Failing())
    assert passes(tmp_path) == [5, 6, 7]
    assert not torch.autograd._profiler_enabled()


def test_one_that_fails_while_it_warms_up_leaves_nothing_behind(tmp_path: Path) -> None:
    class Failing(Marked):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            if self.passes == 3:
                raise RuntimeError("no more")
            return super().forward(*args, **kwargs)

    with pytest.raises(RuntimeError, match="no more"):
        run(profiled(tmp_path), model=Failing())
    assert not torch.autograd._profiler_enabled()
    run(profiled(tmp_path / "again"), model=Marked())
    assert passes(tmp_path / "again") == [5, 6, 7, 8]


def test_a_process_that_begins_within_the_window_records_the_rest(tmp_path: Path) -> None:
    state = profiled(tmp_path, steps=5)
    state.train_state.step = 3
    run(state, model=Marked())
    assert passes(tmp_path) == [1, 2]


def test_one_that_begins_after_it_records_nothing(tmp_path: Path) -> None:
    state = profiled(tmp_path)
    state.train_state.step = 4
    run(state, model=Marked())
    assert not (tmp_path / "torch_profile").exists()


def test_a_window_whose_last_step_is_skipped_ends_before_it(tmp_path: Path) -> None:
    state = profiled(tmp_path)
    state.cfg.train.iterations_to_skip = [4]
    run(state, model=Marked())
    assert passes(tmp_path) == [5, 6]
    assert not torch.autograd._profiler_enabled()


def test_traces_are_beside_the_directory_of_tensorboard(tmp_path: Path) -> None:
    state = profiled(tmp_path / "elsewhere")
    state.cfg.logger.tensorboard_dir = str(tmp_path / "logs" / "tensorboard")
    run(state, model=Marked())
    assert passes(tmp_path / "logs") == [5, 6, 7, 8]


def test_shapes_and_the_execution_trace_are_kept_where_asked_for(tmp_path: Path) -> None:
    run(profiled(tmp_path, pytorch_profiler_collect_shapes=True, pytorch_profiler_collect_chakra=True))
    assert any("Input Dims" in event.get("args", {}) for event in trace(tmp_path)["traceEvents"])
    assert trace(tmp_path, "chakra")["nodes"]


def test_a_second_profiler_among_the_callbacks_is_refused_before_training(tmp_path: Path) -> None:
    manager = CallbackManager()
    manager.add(ProfilerCallback(output_dir=str(tmp_path)))
    state = profiled(tmp_path)
    with pytest.raises(ConfigError, match="ProfilerCallback both need torch's profiler"):
        run(state, manager)
    assert state.train_state.step == 0


def test_a_profiler_of_the_users_own_is_left_in_peace(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with torch.profiler.profile() as own:
        run(profiled(tmp_path), model=Marked())
    assert "another profiler is already recording" in caplog.text
    assert "pass 8" in {event.name for event in own.events()}
    assert not (tmp_path / "torch_profile" / "rank-0.json.gz").exists()


def test_one_that_begins_while_ours_warms_up_is_left_in_peace(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    own = torch.profiler.profile()
    manager = CallbackManager()
    manager.register("on_step_end", lambda context: own.start() if context.state.train_state.step == 2 else None)
    run(profiled(tmp_path), manager, model=Marked())
    own.stop()
    assert "another profiler is already recording" in caplog.text
    assert "pass 8" in {event.name for event in own.events()}


def test_a_directory_that_cannot_be_made_costs_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "torch_profile").write_text("a file is in the way")
    state = profiled(tmp_path)
    run(state)
    assert state.train_state.step == 6
    assert "nothing is profiled" in caplog.text


@pytest.mark.parametrize(("ranks", "expected"), [([0], [True, False]), ([], [True, True]), ([1], [False, True])])
def test_ranks_are_profiled_as_listed_and_all_of_them_without_a_list(ranks: list[int], expected: list[bool]) -> None:
    config = ProfilingConfig(profile_ranks=ranks)
    assert [should_profile_rank(config, rank) for rank in (0, 1)] == expected
    assert not should_profile_rank(None, 0)


def test_the_functions_drive_a_profiler_of_torch() -> None:
    """Its schedule as Megatron Bridge makes it."""
    config = ProfilingConfig(use_pytorch_profiler=True, profile_step_start=2, profile_step_end=4, profile_ranks=[])
    ready: list[int] = []
    made = torch.profiler.profile(
        schedule=torch.profiler.schedule(wait=1, warmup=1, active=2, repeat=1),
        on_trace_ready=lambda one: ready.append(one.step_num),
    )
    made.start()
    for step in range(6):
        handle_profiling_step(config, step, 0, made)
        handle_profiling_stop(config, step + 1, 0, made)
    assert ready == [4]


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_nsys_without_a_gpu_is_said_once_and_does_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        state = profiled(tmp_path, use_pytorch_profiler=False, use_nsys_profiler=True)
        run(state)
        assert state.train_state.step == 6
    assert sum("use_nsys_profiler does nothing" in record.message for record in caplog.records) == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
@pytest.mark.parametrize("name", ["nvtx_ranges", "record_memory_history"])
def test_what_needs_a_gpu_is_said_once_without_one(tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str) -> None:
    for _ in range(2):
        run(profiled(tmp_path, use_pytorch_profiler=False, **{name: True}))
    assert sum(f"{name} does nothing" in record.message for record in caplog.records) == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="takes a CUDA GPU")
def test_ranges_and_the_window_of_nsys_leave_a_gpu_run_as_it_is(tmp_path: Path) -> None:
    weights = []
    for marked in (False, True):
        state = profiled(tmp_path, use_pytorch_profiler=False, use_nsys_profiler=marked, nvtx_ranges=marked)
        state.world.device = torch.device("cuda")
        model = TinyModel().cuda()
        run(state, model=model)
        assert (state.features.find(NvtxRanges) is not None) is marked
        weights.append(torch.cat([parameter.flatten() for parameter in model.parameters()]))
    assert weights[0].equal(weights[1])


def test_ranges_without_a_gpu_are_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        state = profiled(tmp_path, use_pytorch_profiler=False, nvtx_ranges=True)
        run(state)
    assert state.features.find(NvtxRanges) is None
    assert caplog.text == ""
