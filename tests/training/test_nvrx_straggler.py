"""The detection of `nvidia-resiliency-ext`, driven through a stand-in with the package's own names."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import pytest

from onstep.config import NVRxStragglerDetectionConfig
from onstep.distributed import World
from onstep.errors import MissingExtraError
from onstep.training import (
    NVRxStragglerDetectionManager,
    check_nvrx_straggler_detection,
    safe_shutdown_nvrx_straggler_manager,
)
from onstep.training.stragglers.nvrx import scores_block
from tests.support.recording_loggers import record_all
from tests.support.small_runs import run, small_state


@dataclass(frozen=True)
class StragglerId:
    rank: int
    node: str


@dataclass
class Report:
    """Scores by rank."""

    gpu_relative_perf_scores: dict[int, float]
    gpu_individual_perf_scores: dict[int, float]
    rank_to_node: dict[int, str] = field(default_factory=lambda: dict.fromkeys(range(99), "node"))

    def identify_stragglers(
        self,
        gpu_rel_threshold: float = 0.75,
        section_rel_threshold: float = 0.75,
        gpu_indiv_threshold: float = 0.75,
        section_indiv_threshold: float = 0.75,
    ) -> dict[str, Any]:
        def below(scores: dict[int, float], threshold: float) -> set[StragglerId]:
            return {StragglerId(rank, "node") for rank, score in scores.items() if score < threshold}

        return {
            "straggler_gpus_relative": below(self.gpu_relative_perf_scores, gpu_rel_threshold),
            "straggler_gpus_individual": below(self.gpu_individual_perf_scores, gpu_indiv_threshold),
            "straggler_sections_relative": {},
            "straggler_sections_individual": {},
        }


class Detector:
    """What the package's `Detector` does with its class, without a GPU: reports that are given, by step."""

    initialized = False
    options: dict[str, Any]
    sections: list[str]
    reports: dict[int, Report] = {}  # noqa: RUF012 - set by each test
    steps = 0
    fails = ""

    @classmethod
    def initialize(
        cls,
        scores_to_compute: Any = "all",
        gather_on_rank0: bool = True,
        profiling_interval: int = 1,
        report_time_interval: float = 60,
        node_name: str | None = None,
    ) -> None:
        assert not cls.initialized
        if cls.fails == "initialize":
            raise RuntimeError("no CUPTI")
        cls.options = {
            "scores": list(scores_to_compute),
            "gathers": gather_on_rank0,
            "every": profiling_interval,
            "seconds": report_time_interval,
        }
        cls.initialized, cls.steps, cls.sections = True, 0, []

    @classmethod
    def shutdown(cls) -> None:
        cls.initialized = False
        if cls.fails == "shutdown":
            raise RuntimeError("CUPTI is gone")

    @classmethod
    @contextmanager
    def detection_section(cls, name: str | None = None, profile_cuda: bool = True) -> Iterator[None]:
        assert cls.initialized
        cls.sections.append(str(name))
        yield

    @classmethod
    def generate_report_if_interval_elapsed(cls) -> Report | None:
        cls.steps += 1
        return cls.reports.get(cls.steps)

    @classmethod
    def is_interval_elapsed(cls) -> bool:
        return cls.steps in cls.reports


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> type[Detector]:
    module = ModuleType("nvidia_resiliency_ext.straggler")
    module.Detector = Detector  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "nvidia_resiliency_ext", ModuleType("nvidia_resiliency_ext"))
    monkeypatch.setitem(sys.modules, "nvidia_resiliency_ext.straggler", module)
    monkeypatch.setattr(Detector, "initialized", False)
    monkeypatch.setattr(Detector, "reports", {})
    monkeypatch.setattr(Detector, "fails", "")
    return Detector


SLOW = Report({0: 1.0, 1: 0.5, 2: 0.9}, {0: 1.0, 1: 0.6, 2: 0.65})
WELL = Report({0: 1.0, 1: 0.9}, {0: 1.0, 1: 1.0})


def manager(written: dict[str, float] | None = None, world: World | None = None, **options: Any) -> Any:
    config = NVRxStragglerDetectionConfig(enabled=True, **options)
    one = NVRxStragglerDetectionManager(config, world, None if written is None else written.update)
    one.initialize()
    return one


def test_the_detector_gets_what_is_configured(package: type[Detector]) -> None:
    manager(calc_individual_gpu_perf=False, report_time_interval=7.0, profiling_interval=3)
    assert package.options == {"scores": ["relative_perf_scores"], "gathers": True, "every": 3, "seconds": 7.0}


def test_without_any_score_nothing_starts(package: type[Detector]) -> None:
    with pytest.raises(ValueError, match="has no scores to compute"):
        manager(calc_relative_gpu_perf=False, calc_individual_gpu_perf=False)
    assert not package.initialized


def test_a_report_is_said_in_words_scores_and_tags(
    package: type[Detector], capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    package.reports = {2: SLOW}
    written: dict[str, float] = {}
    one = manager(written, stop_if_detected=True)
    assert not check_nvrx_straggler_detection(one)
    assert capsys.readouterr().out == ""
    assert check_nvrx_straggler_detection(one)
    assert "STRAGGLER DETECTION WARNING: some GPUs are slower than the others: rank 1 on node" in caplog.text
    assert "slower than they were: rank 1 on node, rank 2 on node" in caplog.text
    out = capsys.readouterr().out
    assert "GPU relative performance\n all ranks, worst first:\n  Rank=1 Node=node Score=0.50\n  Rank=2" in out
    assert written == {
        "gpu_relative_perf/min": 0.5,
        "gpu_relative_perf/median": 0.9,
        "gpu_relative_perf/max": 1.0,
        "gpu_individual_perf/min": 0.6,
        "gpu_individual_perf/median": 0.65,
        "gpu_individual_perf/max": 1.0,
    }


@pytest.mark.parametrize(("report", "stops", "ends"), [(SLOW, True, True), (SLOW, False, False), (WELL, True, False)])
def test_the_run_ends_only_for_stragglers_and_only_where_that_is_configured(
    package: type[Detector], report: Report, stops: bool, ends: bool
) -> None:
    package.reports = {1: report}
    one = manager(stop_if_detected=stops)
    assert check_nvrx_straggler_detection(one) is ends
    assert check_nvrx_straggler_detection(one) is False


def test_another_rank_learns_it_from_rank_0(package: type[Detector]) -> None:
    class Second(World):
        def share(self, item: Any, source: int = 0) -> Any:
            return "rank 3 is slow", {"gpu_relative_perf/min": 0.25}

    package.reports = {1: SLOW}
    written: dict[str, float] = {}
    one = manager(written, Second(rank=1, size=2), stop_if_detected=True)
    assert check_nvrx_straggler_detection(one)
    assert (one.found, written) == ("rank 3 is slow", {"gpu_relative_perf/min": 0.25})


def test_many_ranks_are_shown_by_their_best_and_worst() -> None:
    scores = {rank: 1 - rank / 10 for rank in range(5)}
    assert scores_block("relative", scores, dict.fromkeys(range(5), "n"), 2).splitlines() == [
        "GPU relative performance",
        " worst 2 of 5 ranks:",
        "  Rank=4 Node=n Score=0.60",
        "  Rank=3 Node=n Score=0.70",
        " best 2:",
        "  Rank=0 Node=n Score=1.00",
        "  Rank=1 Node=n Score=0.90",
    ]


def test_no_scores_are_nan(package: type[Detector]) -> None:
    package.reports = {1: Report({}, {})}
    written: dict[str, float] = {}
    check_nvrx_straggler_detection(manager(written))
    assert len(written) == 6
    assert all(math.isnan(one) for one in written.values())


def test_without_a_manager_there_is_nothing_to_find_and_nothing_to_end() -> None:
    assert check_nvrx_straggler_detection(None) is False
    safe_shutdown_nvrx_straggler_manager(None)


def test_an_error_at_the_end_is_logged_and_not_raised(
    package: type[Detector], caplog: pytest.LogCaptureFixture
) -> None:
    one = manager()
    package.fails = "shutdown"
    safe_shutdown_nvrx_straggler_manager(one)
    assert "resiliency-ext: CUPTI is gone" in caplog.text
    assert check_nvrx_straggler_detection(one) is False


def train_with_it(**options: Any) -> Any:
    state = small_state(train_iters=4)
    state.cfg.logger.console = "bridge"
    for name, value in {"enabled": True, **options}.items():
        setattr(state.cfg.nvrx_straggler, name, value)
    run(state)
    return state


def test_the_loop_measures_each_step_and_ends_the_detector(package: type[Detector]) -> None:
    train_with_it()
    assert package.sections == ["train_step"] * 4
    assert package.steps >= 3, "asked once a step"
    assert not package.initialized


def test_scores_reach_the_trackers(package: type[Detector]) -> None:
    package.reports = {2: SLOW}
    state = small_state(train_iters=4)
    state.cfg.nvrx_straggler.enabled = True
    loggers = record_all(state)
    run(state)
    for logger in loggers.values():
        assert logger.curve("gpu_relative_perf/min") == {2: 0.5}


def test_the_loop_leaves_for_a_slow_gpu(package: type[Detector], capsys: pytest.CaptureFixture[str]) -> None:
    package.reports = {2: SLOW}
    state = train_with_it(stop_if_detected=True)
    assert (state.train_state.step, state.exits.decided) == (2, "straggler")
    assert "[Exiting program due to straggler detection.] datetime: " in capsys.readouterr().out
    assert "rank 1 on node" in state.ending.stopped_by.reason


def test_a_detector_that_does_not_start_is_left_out_of_the_run(
    package: type[Detector], capsys: pytest.CaptureFixture[str]
) -> None:
    package.fails = "initialize"
    state = train_with_it()
    assert state.train_state.step == 4
    assert state.nvrx_straggler_manager is None
    assert "Failed to initialize NVRx straggler detection: no CUPTI" in capsys.readouterr().out


def test_without_the_package_the_run_says_so_with_the_install_line_and_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "nvidia_resiliency_ext", None)
    with pytest.raises(MissingExtraError, match=r"onstep\[resiliency\]"):
        manager()
    assert train_with_it().train_state.step == 4
    assert "Failed to initialize NVRx straggler detection: nvrx_straggler.enabled=True" in capsys.readouterr().out
