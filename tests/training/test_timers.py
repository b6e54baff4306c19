"""Named timers: levels, laps, what ranks print and hand to trackers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from onstep.distributed import World
from onstep.training import Clock, Timers
from onstep.training.reporting.timer import TimerError
from onstep.training.reporting.timers import TIMER_LEVELS, times_block
from tests.support.forked_processes import Processes, output_of
from tests.support.recording_loggers import record_all
from tests.support.small_runs import small_state

JOBS = "tests.support.jobs.watch_jobs"


class Hands:
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def spend(self, timer: Any, seconds: float) -> None:
        with timer:
            self.now += seconds


class Rank(World):
    """One rank of several; the others measured what they are said to have measured."""

    def __init__(self, rank: int, *others: float) -> None:
        super().__init__(rank=rank, size=len(others) + 1)
        self.others = others
        self.collectives = self.barriers = 0

    def gather_numbers(self, numbers: list[float]) -> list[list[float]]:
        self.collectives += 1
        rows = [[one] * len(numbers) for one in self.others]
        return [*rows[: self.rank], numbers, *rows[self.rank :]]

    def barrier(self) -> None:
        self.barriers += 1


@pytest.fixture
def clock() -> Hands:
    return Hands()


def timers_of(clock: Hands, level: int = 2, option: str = "minmax", world: World | None = None) -> Timers:
    return Timers(level, option, world=world, clock=clock)


@pytest.mark.parametrize(
    ("level", "on"), [(-1, []), (0, ["evaluate"]), (1, ["evaluate", "optimizer"]), (2, ["evaluate", "optimizer", "x"])]
)
def test_what_is_above_the_level_measures_nothing(clock: Hands, level: int, on: list[str]) -> None:
    timers = timers_of(clock, level)
    for name in ("evaluate", "optimizer", "x"):
        timer = timers(name)
        clock.spend(timer, 1.0)
        assert timer.is_on is (name in on)
        if name in on:
            assert timer.elapsed() == 1.0
        else:
            with pytest.raises(TimerError, match=r"raise logger\.timing_log_level"):
                timer.elapsed()


def test_the_first_user_says_the_level_of_a_timer(clock: Hands) -> None:
    timers = timers_of(clock, 1)
    assert timers("mine", 1).is_on
    assert not timers("other").is_on
    assert timers("mine") is timers("mine", 1)
    with pytest.raises(TimerError, match=r"'mine' has had level 1 since its first use, got 2"):
        timers("mine", 2)
    with pytest.raises(TimerError, match=r"'third' must be 0, 1 or 2, got 3"):
        timers("third", 3)


def test_the_levels_are_bridges() -> None:
    documented = {
        0: {
            *("interval-time", "eval-time", "evaluate", "save-checkpoint", "save-checkpoint-non-persistent"),
            *("load-checkpoint", "load-pretrained-checkpoint", "tokenizer-setup", "model-and-optimizer-setup"),
            "train/valid/test-data-iterators-setup",
        },
        1: {"forward-backward", "all-grads-sync", "params-all-gather", "optimizer"},
        2: {"batch-generator", "forward-compute", "backward-compute"},
    }
    for level, names in documented.items():
        assert {name for name, found in TIMER_LEVELS.items() if found == level} == names
    assert set(Timers(1).names()) == documented[1]
    assert set(Timers(2).names()) == documented[1] | documented[2]
    assert Timers(0).names() == Timers(-1).names() == []


def test_a_timer_started_twice_or_stopped_unstarted_is_an_error(clock: Hands) -> None:
    timer = timers_of(clock)("forward-compute")
    with pytest.raises(TimerError, match="'forward-compute' is not running"):
        timer.stop()
    timer.start()
    with pytest.raises(TimerError, match="'forward-compute' is already running"):
        timer.start()


def test_times_add_up_and_can_be_read_while_the_timer_runs(clock: Hands) -> None:
    timer = timers_of(clock)("optimizer")
    clock.spend(timer, 1.0)
    timer.start()
    clock.now += 2.0
    assert timer.elapsed(reset=False) == 3.0
    assert timer.is_running
    clock.now += 4.0
    assert timer.elapsed() == 7.0
    clock.now += 8.0
    timer.stop()
    clock.now += 16.0
    assert timer.elapsed() == 8.0
    assert timer.elapsed() == 0.0


def test_the_trackers_share_does_not_depend_on_what_was_printed(clock: Hands) -> None:
    timer = timers_of(clock)("optimizer")
    clock.spend(timer, 1.0)
    assert timer.since_written() == 1.0
    clock.spend(timer, 2.0)
    assert timer.elapsed() == 3.0
    assert timer.since_written() == 2.0


def test_a_block_that_fails_is_not_counted_and_can_be_timed_again(clock: Hands) -> None:
    world = Rank(0, 0.0)
    timer = timers_of(clock, world=world)("save-checkpoint")

    def save() -> None:
        with timer.measure(barrier=True):
            clock.now += 5.0
            raise OSError("full")

    with pytest.raises(OSError, match="full"):
        save()
    assert world.barriers == 1, "after an error no rank waits for another"
    with timer.measure(barrier=True):
        clock.now += 1.0
    assert timer.elapsed() == 1.0
    assert world.barriers == 3


def test_of_a_block_within_itself_only_the_outer_one_counts(clock: Hands) -> None:
    timer = timers_of(clock)("evaluate")
    with timer.measure():
        clock.now += 1.0
        with timer.measure():
            clock.now += 2.0
        clock.now += 4.0
    assert timer.elapsed() == 7.0


@pytest.mark.parametrize(
    ("option", "block"),
    [
        (
            "minmax",
            "(min, max) time across ranks (ms):\n"
            "    forward-backward ...............................: (100.00, 300.00)\n"
            "    optimizer ......................................: (100.00, 300.00)",
        ),
        (
            "max",
            "max time across ranks (ms):\n"
            "    forward-backward ...............................: 300.00\n"
            "    optimizer ......................................: 300.00",
        ),
        (
            "all",
            "times across ranks (ms):\n"
            "  forward-backward:\n     rank  0: 100.00\n     rank  1: 300.00\n     rank  2: 200.00\n"
            "  optimizer:\n     rank  0: 100.00\n     rank  1: 300.00\n     rank  2: 200.00",
        ),
    ],
)
def test_the_last_rank_prints_the_times_of_all(
    clock: Hands, capsys: pytest.CaptureFixture[str], option: str, block: str
) -> None:
    """Each has measured over 10 steps."""
    for rank, others in enumerate(((3.0, 2.0), (1.0, 2.0), (1.0, 3.0))):
        world = Rank(rank, *others)
        timers = timers_of(clock, option=option, world=world)
        for name in ("forward-backward", "optimizer"):
            clock.spend(timers(name), (1.0, 3.0, 2.0)[rank])
        timers.log(["forward-backward", "optimizer"], normalizer=10)
        assert capsys.readouterr().out == (block + "\n" if rank == 2 else "")
        assert world.collectives == 1


def test_a_name_is_padded_to_48_characters() -> None:
    line = times_block({"optimizer": [0.001]}, "max").splitlines()[1]
    assert line == "    " + "optimizer " + "." * 38 + ": 1.00"


def test_what_nobody_measured_is_left_out_and_a_rank_without_it_does_not_count(
    clock: Hands, capsys: pytest.CaptureFixture[str]
) -> None:
    timers = timers_of(clock, world=Rank(1, 0.0))
    clock.spend(timers("optimizer"), 0.25)
    timers.log(["optimizer", "forward-backward"], reset=False)
    out = capsys.readouterr().out
    assert "(250.00, 250.00)" in out
    assert "forward-backward" not in out
    timers.log(["optimizer"], rank=0)
    assert capsys.readouterr().out == ""
    timers.log(["optimizer"])
    assert capsys.readouterr().out == "", "reset"


def test_a_wrong_option_is_refused() -> None:
    with pytest.raises(TimerError, match="must be max, minmax or all, got 'mean'"):
        Timers(0, "mean")


def test_trackers_get_the_slowest_ranks_seconds_all_the_same(clock: Hands) -> None:
    state = small_state()
    loggers = record_all(state)
    timers = timers_of(clock, world=Rank(1, 6.0))
    clock.spend(timers("optimizer"), 4.0)
    clock.spend(timers("train/valid/test-data-iterators-setup"), 8.0)
    names = ["optimizer", "train/valid/test-data-iterators-setup", "evaluate"]
    timers.write(names, loggers, iteration=7, normalizer=2.0)
    for backend, logger in loggers.items():
        setup = "train/valid/test-data-iterators-setup-time"
        setup = setup.replace("/", "_") if backend == "mlflow" else setup
        assert {tag: logger.curve(tag) for tag in logger.tags} == {
            "optimizer-time": {7: 3.0},
            setup: {7: 4.0},
            "evaluate-time": {7: 3.0},
        }
    timers.write(["optimizer"], loggers["tensorboard"], iteration=8)
    assert loggers["tensorboard"].curve("optimizer-time") == {7: 3.0, 8: 6.0}, "its own 4 s were handed over once"
    timers.write(["optimizer"], None, iteration=9)


def test_a_run_has_timers_on_its_own_clock() -> None:
    state = small_state()
    state.cfg.logger.timing_log_level = 1
    now = 3.0
    state.clock = Clock(elapsed=lambda: now)
    timer = state.timers("optimizer")
    timer.start()
    now = 5.0
    timer.stop()
    assert timer.elapsed() == 2.0
    assert not state.timers("forward-compute").is_on


@pytest.mark.distributed
def test_real_ranks_see_each_others_times(processes: Processes, tmp_path: Path) -> None:
    assert processes.run(JOBS, "timers", tmp_path, {}, ranks=2) == [0, 0], output_of(tmp_path)
    results = [json.loads((tmp_path / f"result-{rank}.json").read_text()) for rank in range(2)]
    assert results[0] == results[1] == {"gathered": {"optimizer": [1.0, 2.0]}, "maxima": {"optimizer-time": 2.0}}
    assert "(1000.00, 2000.00)" in (tmp_path / "rank-1.out").read_text()
    assert "time across ranks" not in (tmp_path / "rank-0.out").read_text()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_device_is_waited_for() -> None:
    device = torch.device("cuda", 0)
    timers = Timers(2, world=World(device=device))
    ended = torch.cuda.Event()
    with timers("forward-compute"):
        torch.cuda._sleep(20_000_000)
        ended.record()
    assert ended.query()
    with timers("mine", 2):
        torch.cuda._sleep(20_000_000)
    assert timers("mine").elapsed() > 0.002


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_timer_that_is_off_does_not_wait_for_the_device() -> None:
    timers = Timers(0, world=World(device=torch.device("cuda", 0)))
    ended = torch.cuda.Event()
    with timers("forward-compute"):
        torch.cuda._sleep(200_000_000)
        ended.record()
    assert not ended.query()
    torch.cuda.synchronize()
