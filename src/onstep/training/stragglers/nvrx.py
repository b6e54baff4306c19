"""Detects stragglers with `nvidia-resiliency-ext`, which scores GPUs by the kernels that they run."""

from __future__ import annotations

import importlib
import logging
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any, ParamSpec, TypeVar

from onstep.config import NVRxStragglerDetectionConfig
from onstep.distributed import World, attempt
from onstep.errors import MissingExtraError
from onstep.training.compute.step import Step
from onstep.training.feature import Feature
from onstep.training.reporting.bridge_tags import write_tags
from onstep.training.stages.job import Job

logger = logging.getLogger(__name__)

Given = ParamSpec("Given")
Found = TypeVar("Found")

_SLOWER_THAN = {"relative": "the others", "individual": "they were"}
"""The baseline of each kind of score."""


class NVRxStragglerDetectionManager:
    """Owns the package's `Detector`, of which a process has only one.

    Args:
        config: what to score, how often, and how to react.
        world: the ranks.
        write: receives scores by tag, on every rank.
    """

    def __init__(
        self,
        config: NVRxStragglerDetectionConfig,
        world: World | None = None,
        write: Callable[[Mapping[str, float]], None] | None = None,
    ) -> None:
        self._config, self._world, self._write = config, world or World(), write
        wanted = {"relative": config.calc_relative_gpu_perf, "individual": config.calc_individual_gpu_perf}
        self._kinds = [kind for kind, is_wanted in wanted.items() if is_wanted]
        self._package: ModuleType | None = None
        self.found = ""
        """The findings of the last report, as text, on all ranks."""

    @property
    def rank(self) -> int:
        """This process's rank."""
        return self._world.rank

    @property
    def is_initialized(self) -> bool:
        """True between `initialize` and `shutdown`."""
        return self._package is not None

    def initialize(self) -> None:
        """Start the detector. Must be called on all ranks.

        Raises:
            MissingExtraError: if the package is not installed.
            ValueError: if neither kind of score is enabled.
        """
        if not self._kinds:
            raise ValueError(
                "nvrx_straggler has no scores to compute; set calc_relative_gpu_perf or calc_individual_gpu_perf."
            )
        package = _straggler_module()
        package.Detector.initialize(
            scores_to_compute=[f"{kind}_perf_scores" for kind in self._kinds],
            gather_on_rank0=True,
            profiling_interval=self._config.profiling_interval,
            report_time_interval=self._config.report_time_interval,
        )
        self._package = package

    def wrap_train_step_function(self, train_step: Callable[Given, Found]) -> Callable[Given, Found]:
        """A `train_step` whose kernels are scored; unchanged if the detector is not running."""
        if self._package is None:
            return train_step

        def measured(*given: Given.args, **named: Given.kwargs) -> Found:
            if self._package is None:
                return train_step(*given, **named)
            with self._package.Detector.detection_section("train_step"):
                return train_step(*given, **named)

        return measured

    def check_stragglers(self, global_rank: int) -> bool:
        """Whether to end the run because a GPU is slow; the same on all ranks. Collective, once per step.

        When `report_time_interval` has passed, a report is made, and printed on rank 0.
        """
        if self._package is None:
            return False
        detector = self._package.Detector
        report = detector.generate_report_if_interval_elapsed()
        reported = self._say(report) if global_rank == 0 and report is not None else ("", {})
        if not detector.is_interval_elapsed():
            return False
        self.found, scores = self._world.share(reported)
        if self._write is not None and scores:
            self._write(scores)
        return bool(self.found) and self._config.stop_if_detected

    def shutdown(self) -> None:
        """Stop the detector; do nothing if it is not running."""
        if self._package is not None:
            package, self._package = self._package, None
            package.Detector.shutdown()

    def _say(self, report: Any) -> tuple[str, dict[str, float]]:
        """Warn of the findings in the package's report and print the scores; returns findings, and scores by tag."""
        config = self._config
        stragglers = report.identify_stragglers(
            gpu_rel_threshold=config.gpu_relative_perf_threshold,
            gpu_indiv_threshold=config.gpu_individual_perf_threshold,
        )
        texts: list[str] = []
        tags: dict[str, float] = {}
        for kind, compared in _SLOWER_THAN.items():
            slow = sorted(stragglers[f"straggler_gpus_{kind}"], key=lambda one: one.rank)
            if slow:
                ranks = ", ".join(f"{self._world.place(one.rank)} on {one.node}" for one in slow)
                texts.append(f"some GPUs are slower than {compared}: {ranks}")
                logger.warning("STRAGGLER DETECTION WARNING: %s", texts[-1])
        for kind in self._kinds if config.enable_logging else []:
            scores = getattr(report, f"gpu_{kind}_perf_scores")
            if config.num_gpu_perf_scores_to_print > 0:
                block = scores_block(kind, scores, report.rank_to_node, config.num_gpu_perf_scores_to_print)
                print(block, flush=True)  # noqa: T201 - asked for
            tags |= score_summary(f"gpu_{kind}_perf", list(scores.values()))
        return "; ".join(texts), tags


def check_nvrx_straggler_detection(nvrx_straggler_manager: NVRxStragglerDetectionManager | None) -> bool:
    """Whether to end the run because a GPU is slow; False without a manager. Collective with one."""
    manager = nvrx_straggler_manager
    return manager is not None and manager.check_stragglers(manager.rank)


def safe_shutdown_nvrx_straggler_manager(nvrx_straggler_manager: NVRxStragglerDetectionManager | None) -> None:
    """Stop the detection; errors are logged, not raised."""
    error = None if nvrx_straggler_manager is None else attempt(nvrx_straggler_manager.shutdown)[1]
    if error is not None:
        logger.error("cannot stop the straggler detection of nvidia-resiliency-ext: %s", error)


def scores_block(kind: str, scores: Mapping[int, float], nodes: Mapping[int, str], count: int) -> str:
    """Lines of the `count` worst and best GPUs, or of all if there are few."""
    order = sorted(scores, key=lambda rank: scores[rank])
    if len(order) <= 2 * count:
        groups: dict[str, Sequence[int]] = {"all ranks, worst first": order}
    else:
        groups = {f"worst {count} of {len(order)} ranks": order[:count], f"best {count}": order[::-1][:count]}
    lines = [f"GPU {kind} performance"]
    for title, ranks in groups.items():
        lines.append(f" {title}:")
        lines += [f"  Rank={rank} Node={nodes[rank]} Score={scores[rank]:.2f}" for rank in ranks]
    return "\n".join(lines)


def score_summary(prefix: str, scores: Sequence[float]) -> dict[str, float]:
    """`<prefix>/min`, `/median`, `/max`; NaN without scores."""
    values = (min(scores), statistics.median_low(scores), max(scores)) if scores else (math.nan,) * 3
    return {f"{prefix}/{name}": value for name, value in zip(("min", "median", "max"), values, strict=True)}


def _straggler_module() -> ModuleType:
    try:
        return importlib.import_module("nvidia_resiliency_ext.straggler")
    except ImportError as error:
        raise MissingExtraError(
            "nvrx_straggler.enabled=True requires nvidia-resiliency-ext: pip install 'onstep[resiliency]', or use "
            "straggler.log_straggler, which requires no package."
        ) from error


class NvrxStragglers(Feature[Job]):
    """Runs the straggler detection of `nvidia-resiliency-ext` around every step; its scores go to the trackers."""

    name = "nvrx_stragglers"
    when = "nvrx_straggler.enabled"
    collective = True

    def __init__(self, host: Job) -> None:
        super().__init__(host)
        self.manager: NVRxStragglerDetectionManager | None = NVRxStragglerDetectionManager(
            host.run.cfg.nvrx_straggler, host.run.world, self._write
        )

    @contextmanager
    def session(self) -> Iterator[None]:
        """Start the detection; if it fails on a rank, the run continues without it. Collective."""
        world, manager = self.host.run.world, self.manager
        error = None if manager is None else attempt(manager.initialize)[1]
        if world.agree([int(error is not None)]) == [1]:
            if world.is_main:
                why = error or "another rank failed"
                print(f"Failed to initialize NVRx straggler detection: {why}", flush=True)  # noqa: T201 - Bridge's line
            safe_shutdown_nvrx_straggler_manager(manager)
            self.manager = None
        try:
            yield
        finally:
            safe_shutdown_nvrx_straggler_manager(self.manager)

    def wrap_step(self, train_step: Callable[[Step], None]) -> Callable[[Step], None]:
        return train_step if self.manager is None else self.manager.wrap_train_step_function(train_step)

    def after_count(self, step: Step) -> None:
        """Request the end of the run if a GPU is too slow. Collective."""
        if self.manager is not None and check_nvrx_straggler_detection(self.manager):
            self.host.run.exits.straggler = self.manager.found

    def _write(self, scores: Mapping[str, float]) -> None:
        run, progress = self.host.run, self.host.run.train_state
        write_tags(run.bridge_trackers.loggers, scores, progress.step, progress.consumed_train_samples)
