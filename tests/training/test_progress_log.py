"""The lines of `progress.txt`, and what is read from them."""

from __future__ import annotations

from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from onstep import pretrain
from onstep.config import ConfigContainer
from onstep.distributed import World
from onstep.errors import CheckpointError
from onstep.training.stages.progress_log import (
    append_to_progress_log,
    compute_throughputs_and_append_to_progress_log,
    get_start_time_from_progress_log,
    log_async_checkpoint_saved,
    log_job_start,
)
from tests.support.small_runs import small_state

START = datetime(2026, 3, 1, 12, 0, 0)


class Ranks(World):
    """Some rank of a world whose barriers are only counted."""

    barriers = 0

    def barrier(self) -> None:
        self.barriers += 1


def config(directory: Path | None) -> ConfigContainer:
    wanted = ConfigContainer()
    wanted.checkpoint.save = None if directory is None else str(directory)
    return wanted


def line(minute: int, ranks: int, *what: str) -> str:
    time = START + timedelta(minutes=minute)
    return "\t".join([f"{time:%Y-%m-%d %H:%M:%S}", "Job ID: 7", f"# GPUs: {ranks}", *what]) + "\n"


def saved(minute: int, ranks: int, step: int, flops: str, kind: str = "Saved checkpoint") -> str:
    rates = [f"{name} throughput: 1.0 MODEL_TFLOP/s/GPU" for name in ("Job", "Cumulative")]
    tail = [f"Floating-point operations: {flops}", "Tokens (in billions): 0.10"]
    return line(minute, ranks, kind, f"Iteration: {step}", *rates, *tail)


def write(directory: Path, *lines: str) -> ConfigContainer:
    (directory / "progress.txt").write_text("".join(lines))
    return config(directory)


def start_of(wanted: ConfigContainer, ranks: int) -> tuple[int, float]:
    """(minutes after START, floating-point operations)."""
    time, flops = get_start_time_from_progress_log(wanted, world_size=ranks)
    return int((time - START).total_seconds() / 60), flops


def read(directory: Path) -> list[list[str]]:
    return [one.split("\t") for one in (directory / "progress.txt").read_text().splitlines()]


def test_a_line_names_time_job_ranks_and_what_happened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    world = Ranks(size=4)
    append_to_progress_log(tmp_path / "new" / "folder", "Starting job", world)
    monkeypatch.delenv("SLURM_JOB_ID")
    append_to_progress_log(
        str(tmp_path / "new" / "folder"), "Saved async checkpoint\tIteration: 3", world, barrier=False
    )
    first, second = read(tmp_path / "new" / "folder")
    assert abs(datetime.strptime(first[0], "%Y-%m-%d %H:%M:%S") - datetime.now()) < timedelta(minutes=5)
    assert first[1:] == ["Job ID: 4711", "# GPUs: 4", "Starting job"]
    assert second[1:] == ["Job ID: ", "# GPUs: 4", "Saved async checkpoint", "Iteration: 3"]
    assert world.barriers == 1


def test_rank_0_writes_and_all_wait(tmp_path: Path) -> None:
    world = Ranks(rank=1, size=2)
    append_to_progress_log(tmp_path, "Starting job", world)
    assert world.barriers == 1
    assert list(tmp_path.iterdir()) == []


def test_the_first_job_of_this_many_ranks_counts(tmp_path: Path) -> None:
    wanted = write(
        tmp_path,
        line(0, 8, "Starting job"),
        saved(1, 8, 10, "1.00e+10"),
        line(2, 4, "Starting job"),
        saved(3, 4, 20, "2.00e+10"),
        line(4, 8, "Starting job"),
        saved(5, 8, 30, "3.00e+10"),
        line(6, 8, "Starting job"),
        saved(7, 8, 40, "4.00e+10"),
    )
    assert start_of(wanted, 8) == (4, 2e10)
    with pytest.raises(CheckpointError, match=r"'Starting job' line with 4 ranks"):
        start_of(wanted, 4)


def test_three_starts_of_one_job(tmp_path: Path) -> None:
    wanted = write(
        tmp_path,
        line(0, 2, "Starting job"),
        saved(1, 2, 10, "1.00e+10"),
        line(2, 2, "Starting job"),
        line(3, 2, "Starting job"),
    )
    assert start_of(wanted, 2) == (0, 0.0)


def test_an_asynchronous_save_counts_when_it_is_durable(tmp_path: Path) -> None:
    lines = [
        line(0, 8, "Starting job"),
        saved(1, 8, 10, "1.00e+10", "Saving async checkpoint"),
        line(2, 8, "Saved async checkpoint", "Iteration: 10"),
        saved(3, 8, 20, "2.00e+10", "Saving async checkpoint"),
        line(4, 4, "Starting job"),
    ]
    assert start_of(write(tmp_path, *lines), 4) == (4, 1e10)
    lines.insert(4, line(3, 8, "Saved async checkpoint", "Iteration: 20"))
    assert start_of(write(tmp_path, *lines), 4) == (4, 2e10)


@pytest.mark.parametrize(
    "broken",
    [
        "\n",
        "half a li",
        line(9, 2, "Starting jo")[:30] + "\n",
        "2026-13-45 00:00:00\tJob ID: \t# GPUs: 2\tStarting job\n",
        line(9, 2, "Starting job").replace("# GPUs: 2", "# GPUs: two"),
        line(9, 8, "Saved checkpoint", "Iteration: 12", "Floating-point operations: 1.0"),
        line(9, 8, "Saved checkpoint", "Iteration: 12"),
        saved(9, 8, 12, "many"),
        "\ufffd\x00\t\t\t\n",
    ],
)
def test_a_line_that_cannot_be_read_is_skipped(broken: str, tmp_path: Path) -> None:
    before, after = [line(0, 8, "Starting job"), saved(1, 8, 10, "1.00e+10")], line(2, 2, "Starting job")
    assert start_of(write(tmp_path, *before, broken.rstrip("\n") + "\n", after), 2) == (2, 1e10)


def test_half_a_last_line_is_skipped_and_ended_by_the_next(tmp_path: Path) -> None:
    half = line(1, 8, "Starting job").rstrip("\n")
    wanted = write(tmp_path, line(0, 2, "Starting job"), half)
    assert start_of(wanted, 2) == (0, 0.0)
    append_to_progress_log(tmp_path, "Starting job", World())
    assert [one[3] for one in read(tmp_path)] == ["Starting job"] * 3


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"checkpoint.save is not set"):
        get_start_time_from_progress_log(config(None))
    with pytest.raises(CheckpointError, match=r"no progress log .*progress.txt; logger.log_progress=true"):
        get_start_time_from_progress_log(config(tmp_path))
    with pytest.raises(CheckpointError, match=r"has none"):
        get_start_time_from_progress_log(write(tmp_path, saved(1, 1, 10, "1.00e+10")))


def run_state(directory: Path | None, **fields: Any) -> Any:
    state = small_state()
    state.cfg.checkpoint.save = None if directory is None else str(directory)
    state.checkpoints, state.flops_at_start = None, 0.0
    for name, value in fields.items():
        setattr(state, name, value)
    return state


def ago(**units: int) -> datetime:
    return datetime.now() - timedelta(**units)


def test_throughputs_of_the_job_and_since_the_first_one(tmp_path: Path) -> None:
    """57.6e15 operations in two hours of two jobs, 18e15 in the last half hour: 4 and 5 TFLOP/s on each of 2 ranks."""
    first = f"{ago(hours=2):%Y-%m-%d %H:%M:%S}\tJob ID: \t# GPUs: 2\tStarting job\n"
    (tmp_path / "progress.txt").write_text(first)
    state = run_state(tmp_path, world=Ranks(size=2), start_time=ago(minutes=30).timestamp(), flops_at_start=39.6e15)
    state.train_state.step, state.train_state.consumed_train_samples = 50, 10_000_000
    state.train_state.floating_point_operations_so_far = 57.6e15
    compute_throughputs_and_append_to_progress_log(state, 57.6e15)
    assert read(tmp_path)[1][2:] == [
        "# GPUs: 2",
        "Saved checkpoint",
        "Iteration: 50",
        "Job throughput: 5.0 MODEL_TFLOP/s/GPU",
        "Cumulative throughput: 4.0 MODEL_TFLOP/s/GPU",
        "Floating-point operations: 5.76e+16",
        "Tokens (in billions): 0.12",
    ]
    assert start_of(config(tmp_path), 2)[1] == 0.0


@pytest.mark.parametrize("log_interval", [1, 5])
def test_operations_since_the_last_logged_step_count(
    tiny_config: ConfigContainer, tmp_path: Path, log_interval: int
) -> None:
    tiny_config.checkpoint.save, tiny_config.checkpoint.save_interval = str(tmp_path / "checkpoints"), 2
    tiny_config.logger.log_interval, tiny_config.logger.log_progress = log_interval, True
    tiny_config.train.train_iters, tiny_config.validation.eval_interval = 6, None
    tiny_config.train.exit_interval = 4
    state = pretrain(tiny_config)
    assert state.train_state.step == 4
    state = pretrain(tiny_config)
    per_step = 4 * 32 * state.flops_per_token
    assert state.train_state.floating_point_operations_so_far == 6 * per_step
    assert state.flops_at_start == 4 * per_step, "a job does not count what the one before it has done"
    saves = [one for one in read(tmp_path / "checkpoints") if one[3] == "Saved checkpoint"]
    wanted = [f"Floating-point operations: {step * per_step:.2e}" for step in (2, 4, 6)]
    assert [one[7] for one in saves] == wanted


def test_a_log_that_was_removed_does_not_end_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    compute_throughputs_and_append_to_progress_log(run_state(tmp_path), 1e9)
    assert read(tmp_path)[0][3] == "Saved checkpoint"
    assert "no progress log" in caplog.text


def test_an_asynchronous_save_has_two_lines(tmp_path: Path) -> None:
    state = run_state(tmp_path)
    state.cfg.checkpoint.async_save, state.train_state.step = True, 12
    log_job_start(state)
    compute_throughputs_and_append_to_progress_log(state, 7e9)
    log_async_checkpoint_saved(state, 12)
    log_job_start(state)
    kinds = [one[3:5] for one in read(tmp_path)]
    assert kinds == [
        ["Starting job"],
        ["Saving async checkpoint", "Iteration: 12"],
        ["Saved async checkpoint", "Iteration: 12"],
        ["Starting job"],
    ]


def test_without_a_directory_nothing_is_written() -> None:
    state = run_state(None)
    log_job_start(state)
    log_async_checkpoint_saved(state, 1)
    compute_throughputs_and_append_to_progress_log(state, 1e9)
