"""Who is slow, and in what: the comparison, its report, and what follows from it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from onstep import CallbackManager
from onstep.config import StragglerDetectionConfig
from onstep.config.parallel_sizes import ParallelSizes
from onstep.distributed import World
from onstep.training import StragglerDetector
from onstep.training.stragglers.detector import act_on_stragglers
from onstep.training.stragglers.rank_times import RankTimes, find_stragglers, ranking_lines, straggler_line
from tests.support.forked_processes import Processes, output_of
from tests.support.small_runs import run, small_state

JOBS = "tests.support.jobs.watch_jobs"
MS = 1e-3


def rank(data: float, forward: float, step: float = 200.0) -> RankTimes:
    """In milliseconds."""
    return RankTimes(step * MS, data * MS, forward * MS)


def found(*times: RankTimes, threshold: float = 0.7) -> list[tuple[int, str]]:
    return [(one.rank, one.cause) for one in find_stragglers(times, threshold)]


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ([rank(1, 10), rank(1, 10), rank(1, 10)], []),
        ([rank(1, 10), rank(60, 10)], [(1, "data")]),
        ([rank(60, 10), rank(1, 10)], [(0, "data")]),
        ([rank(1, 30), rank(1, 10), rank(1, 10)], [(0, "compute")]),
        ([rank(1, 10), rank(40, 20), rank(1, 10)], [(1, "data")]),
        ([rank(1, 10), rank(20, 20), rank(1, 10)], [(1, "compute")]),
        ([rank(1, 10), rank(50, 10), rank(1, 40), rank(1, 10)], [(2, "compute"), (1, "data")]),
        ([rank(0.1, 10), rank(0.3, 10)], []),  # three times as slow in what hardly takes any time
        ([rank(0, 0), rank(0, 0)], []),
        ([rank(1, 10)], []),
    ],
)
def test_the_rank_that_works_longest_is_named_with_what_it_works_at(
    times: list[RankTimes], expected: list[tuple[int, str]]
) -> None:
    assert found(*times) == expected


@pytest.mark.parametrize(("forward", "is_slow"), [(14.2, False), (14.4, True)])
def test_the_threshold_is_a_share_of_the_median_ranks_speed(forward: float, is_slow: bool) -> None:
    """10 of 14.28 ms are 0.7."""
    assert bool(found(rank(0, 10), rank(0, 10), rank(0, forward))) is is_slow


def test_a_rank_that_waits_for_others_is_not_the_slow_one() -> None:
    """Rank 1 reads for 100 ms; the others spend that time in collectives, so they communicate most."""
    times = [rank(1, 20, step=180), rank(101, 20, step=180), rank(1, 20, step=180)]
    assert [round(one.communication / MS) for one in times] == [119, 19, 119]
    assert found(*times) == [(1, "data")]


def test_the_warning_says_rank_cause_and_how_slow() -> None:
    [slow] = find_stragglers([rank(1, 10), rank(1, 10), rank(31, 10)], 0.7)
    assert str(slow) == (
        "rank 2 is slow in data: 31.0 ms per step, the median rank 1.0 ms; it runs at 51% of that rank's speed"
    )


def test_the_warning_names_the_coordinates_of_a_rank(caplog: pytest.LogCaptureFixture) -> None:
    state = small_state(train_iters=2)
    state.world.sizes = ParallelSizes(dp_replicate=2, dp_shard=2)
    act_on_stragglers(state, find_stragglers([rank(1, 10), rank(1, 10), rank(31, 10)], 0.7))
    assert "rank 2, dp_shard 0, dp_replicate 1 is slow in data: 31.0 ms per step" in caplog.text


def test_the_line_has_least_and_largest_with_their_ranks() -> None:
    """6e9 FLOPs a step are 3e9 a rank, in 30 and 60 ms: 0.1 and 0.05 TFLOP/s."""
    hot = RankTimes(0.2, 0.004, 0.02, watts=410.0, celsius=60.0)
    line = straggler_line([RankTimes(0.2, 0.002, 0.01, watts=400.0, celsius=61.0), hot], 6e9)
    assert line == (
        "straggler report | step (ms) min 200.00 (rank 0) max 200.00 (rank 0) | data (ms) min 2.00 (rank 0) max 4.00 "
        "(rank 1) | compute (ms) min 30.00 (rank 0) max 60.00 (rank 1) | communication (ms) min 136.00 (rank 1) max "
        "168.00 (rank 0) | TFLOP/s min 0.05 (rank 1) max 0.10 (rank 0) | power (W) min 400.00 (rank 0) max 410.00 "
        "(rank 1) | temperature (C) min 60.00 (rank 1) max 61.00 (rank 0)"
    )
    assert "TFLOP/s" not in straggler_line([rank(1, 1)], 0.0)


def test_more_than_one_rank_of_each_end_is_listed() -> None:
    times = [rank(1, 1), rank(3, 1), rank(2, 1), rank(0, 1)]
    assert ranking_lines(times, 1) == []
    assert ranking_lines(times, 2) == [
        "slowest ranks (ms of own work): 1: 6.00, 2: 5.00",
        "fastest ranks (ms of own work): 3: 3.00, 0: 4.00",
    ]


class Now:
    """A clock that is moved by hand."""

    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


class Peers(World):
    """Rank 0; what the others measured is a factor of its own times."""

    def __init__(self, *factors: float) -> None:
        super().__init__(size=len(factors) + 1)
        self.factors = factors

    def gather_numbers(self, numbers: list[float]) -> list[list[float]]:
        step, *parts = numbers
        others = [[step, *(part * factor for part in parts)] for factor in self.factors]
        return [numbers, *others]


@pytest.fixture
def now() -> Now:
    return Now()


def detector(now: Now, world: World, **options: Any) -> tuple[StragglerDetector, list[Any]]:
    captured: list[Any] = []
    config = StragglerDetectionConfig(log_straggler=True, **options)
    return StragglerDetector(config, world, now, captured.append), captured


def take_steps(timer: Any, now: Now, count: int = 4) -> None:
    """4 ms of data, two forward passes of 8 ms, 80 ms of the rest."""
    for _ in range(count):
        with timer(bdata=True):
            now.seconds += 4 * MS
        for _ in range(2):
            with timer:
                now.seconds += 8 * MS
        now.seconds += 80 * MS


def test_a_report_is_about_the_steps_since_the_last_one(now: Now, capsys: pytest.CaptureFixture[str]) -> None:
    timer, captured = detector(now, Peers(1.0, 3.0))
    for total in (4, 8):
        take_steps(timer, now, total)
        timer.leave_out(1.0)
        now.seconds += 1.0  # an evaluation
        assert timer.report(total_flops=total * 9e9, log_interval=4) is True
        line = capsys.readouterr().out
        assert "step (ms) min 100.00 (rank 0)" in line
        assert "data (ms) min 4.00 (rank 0) max 12.00 (rank 2)" in line
        assert "compute (ms) min 48.00 (rank 0) max 88.00 (rank 2)" in line
        assert "communication (ms) min 0.00 (rank 2) max 48.00 (rank 0)" in line
        assert "TFLOP/s min 0.03 (rank 2) max 0.06 (rank 0)" in line
    assert [[one.rank for one in found] for found in captured] == [[2], [2]]
    assert [one.rank for one in timer.stragglers] == [2]


def test_equal_ranks_are_not_named(now: Now) -> None:
    timer, captured = detector(now, Peers(1.0, 1.1))
    take_steps(timer, now)
    assert timer.report(0.0, 4) is False
    assert captured == []
    assert timer.stragglers == ()


def test_a_pass_that_raised_is_ended(now: Now) -> None:
    timer, _ = detector(now, Peers(1.0))

    def fail() -> None:
        with timer:
            now.seconds += 8 * MS
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        fail()
    now.seconds += 1.0
    take_steps(timer, now, 1)
    timer.report(0.0, 1)
    assert timer.stragglers == ()
    timer.start()
    timer.stop()
    timer.stop()


def test_what_is_off_measures_nothing_and_says_nothing(now: Now, capsys: pytest.CaptureFixture[str]) -> None:
    timer, _ = detector(now, Peers(9.0), disable_straggler_on_startup=True)
    take_steps(timer, now)
    assert not timer.enabled
    assert timer.report(1.0, 4) is False
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("starts_off", [False, True])
def test_a_command_turns_it_off_and_on_from_the_next_report_on(
    starts_off: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    state = small_state(train_iters=12)
    state.cfg.straggler.log_straggler, state.cfg.logger.log_interval = True, 2
    state.cfg.straggler.disable_straggler_on_startup = starts_off
    manager = CallbackManager()
    reported = []

    def send(context: Any) -> None:
        step = state.train_state.step
        if "straggler report" in capsys.readouterr().out:
            reported.append(step - 1)
        if step in (3, 7):
            context.control.set("log_straggler", int((step == 7) is not starts_off))

    manager.register("on_step_end", send)
    run(state, manager)
    assert reported == ([6, 8] if starts_off else [2, 4, 10])


def test_without_the_detection_a_command_says_that_it_has_no_effect(caplog: pytest.LogCaptureFixture) -> None:
    state = small_state(train_iters=2)
    manager = CallbackManager()
    manager.register("on_step_end", lambda context: context.control.set("log_straggler", 1))
    run(state, manager)
    assert "log_straggler has no effect: start the run with straggler.log_straggler=true" in caplog.text


def test_a_run_without_it_has_a_timer_that_does_nothing() -> None:
    timer = small_state().straggler_timer
    assert not timer.enabled
    with timer(bdata=True), timer:
        pass
    assert timer.report(1.0, 1) is False


def test_the_loop_measures_batches_and_forward_passes(capsys: pytest.CaptureFixture[str]) -> None:
    state = small_state(train_iters=4)
    state.cfg.straggler.log_straggler, state.cfg.logger.log_interval = True, 2
    run(state)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("straggler report")]
    assert len(lines) == 2
    for line in lines:
        assert "data (ms) min " in line
        assert "compute (ms) min 0.00" not in line


@pytest.mark.parametrize("at", [2, 4])
def test_a_slow_rank_ends_the_run_where_that_is_configured(
    at: int, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Found at the end of step `at`, decided on after the next; a run that is at its end is not ended."""
    state = small_state(train_iters=4)
    state.cfg.straggler.log_straggler = state.cfg.straggler.stop_if_detected = True
    state.cfg.logger.log_interval, state.cfg.logger.console = 100, "bridge"
    manager = CallbackManager()

    def see(context: Any) -> None:
        if state.train_state.step == at:
            state.straggler_timer._on_found(find_stragglers([rank(1, 10), rank(61, 10)], 0.7))

    manager.register("on_step_end", see)
    run(state, manager)
    assert "STRAGGLER DETECTION WARNING: rank 1 is slow in data" in caplog.text
    out = capsys.readouterr().out
    if at == 4:
        assert (state.train_state.step, state.exits.decided) == (4, None)
        assert "Exiting program" not in out
    else:
        assert (state.train_state.step, state.exits.decided) == (2, "straggler")
        assert "[Exiting program due to straggler detection.] datetime: " in out
        assert state.ending.stopped_by is not None
        assert "rank 1 is slow in data" in state.ending.stopped_by.reason


@pytest.fixture(scope="module")
def start(processes: Processes, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[list[Any], str]]:
    def of(**settings: Any) -> tuple[list[Any], str]:
        directory = tmp_path_factory.mktemp("ranks")
        settings["straggler"] = {"log_straggler": True, **settings.get("straggler", {})}
        assert processes.run(JOBS, "straggler", directory, settings, ranks=2) == [0, 0], output_of(directory)
        return [json.loads((directory / f"result-{one}.json").read_text()) for one in range(2)], output_of(directory)

    return of


@pytest.mark.distributed
@pytest.mark.parametrize("cause", ["data", "compute"])
def test_of_real_ranks_the_slow_one_is_named_with_its_cause(start: Any, cause: str) -> None:
    results, text = start(**{cause: 0.15})
    assert [one["found"] for one in results] == [[[1, cause]]] * 2
    assert f"STRAGGLER DETECTION WARNING: rank 1 is slow in {cause}" in text
    assert text.count("straggler report | ") == 3


@pytest.mark.distributed
def test_of_equal_real_ranks_nobody_is_named(start: Any) -> None:
    results, text = start(base=0.1)
    assert [one["found"] for one in results] == [[], []]
    assert "WARNING" not in text


@pytest.mark.distributed
def test_all_ranks_leave_together_for_a_slow_one(start: Any) -> None:
    results, text = start(compute=0.15, straggler={"stop_if_detected": True})
    first, second = [(one["step"], one["decided"]) for one in results]
    assert first == second == (3, "straggler")
    assert text.count("Exiting program due to straggler detection.") == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_the_forward_pass_is_timed_on_the_device_without_waiting(capsys: pytest.CaptureFixture[str]) -> None:
    world = World(device=torch.device("cuda", 0))
    timer = StragglerDetector(StragglerDetectionConfig(log_straggler=True), world)
    ended = torch.cuda.Event()
    with timer(bdata=True):
        pass
    with timer:
        torch.cuda._sleep(200_000_000)
        ended.record()
    assert not ended.query()
    timer.report(1e12, 1)
    line = capsys.readouterr().out
    assert float(line.split("compute (ms) min ")[1].split()[0]) > 50
