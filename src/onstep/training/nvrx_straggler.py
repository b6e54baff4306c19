"""The straggler detection of `nvidia-resiliency-ext`, which scores GPUs by the kernels that they run."""

from __future__ import annotations

import importlib
import logging
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from onstep.config.safety_config import NVRxStragglerDetectionConfig
from onstep.distributed import World
from onstep.errors import MissingExtraError
from onstep.training.feature import Feature
from onstep.training.job import Job
from onstep.training.tags import report_points, write_points

logger = logging.getLogger(__name__)


class NVRxStragglerDetectionManager:
    """Owns the package's `Detector`, of which there is one in a process.

    Args:
        config: what is scored, how often, and what happens.
        world: the ranks.
        write: takes scores by tag, on every rank.
    """

    def __init__(
        self,
        config: NVRxStragglerDetectionConfig,
        world: World | None = None,
        write: Callable[[Mapping[str, float]], None] | None = None,
    ) -> None:
        self._config, self._world, self._write = config, world or World(), write
        self._detector: Any = None
        self.found = ""
        """What the last report found, in words, on all ranks."""

    @property
    def rank(self) -> int:
        """This process's rank."""
        return self._world.rank

    @property
    def is_initialized(self) -> bool:
        """Between `initialize` and `shutdown`."""
        return self._detector is not None

    def initialize(self) -> None:
        """Start the detector. All ranks do.

        Raises:
            MissingExtraError: where the package is not installed.
            ValueError: where neither kind of score is asked for.
        """
        config = self._config
        wanted = {
            "relative_perf_scores": config.calc_relative_gpu_perf,
            "individual_perf_scores": config.calc_individual_gpu_perf,
        }
        scores = [name for name, is_wanted in wanted.items() if is_wanted]
        if not scores:
            raise ValueError(
                "nvrx_straggler has no scores to compute; set calc_relative_gpu_perf or calc_individual_gpu_perf."
            )
        detector = _straggler_module().Detector
        detector.initialize(
            scores_to_compute=scores,
            gather_on_rank0=True,
            profiling_interval=config.profiling_interval,
            report_time_interval=config.report_time_interval,
        )
        self._detector = detector

    def wrap_train_step_function(self, train_step: Callable[..., Any]) -> Callable[..., Any]:
        """A `train_step` whose kernels are scored; as it was, where the detector does not run."""
        return train_step if self._detector is None else partial(self._measured, train_step)

    def check_stragglers(self, global_rank: int) -> bool:
        """Whether the run is to end because a GPU is slow: the same on all ranks. Collective, once a step.

        A report is made, and said on rank 0, when `report_time_interval` is over.
        """
        if self._detector is None:
            return False
        report = self._detector.generate_report_if_interval_elapsed()
        said = self._take_up(report) if global_rank == 0 and report is not None else ("", {})
        if not self._detector.is_interval_elapsed():
            return False
        self.found, scores = self._world.share(said)
        if self._write is not None and scores:
            self._write(scores)
        return bool(self.found) and self._config.stop_if_detected

    def shutdown(self) -> None:
        """End the detector; nothing where it does not run."""
        if self._detector is not None:
            detector, self._detector = self._detector, None
            detector.shutdown()

    def _measured(self, train_step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._detector is None:
            return train_step(*args, **kwargs)
        with self._detector.detection_section("train_step"):
            return train_step(*args, **kwargs)

    def _take_up(self, report: Any) -> tuple[str, dict[str, float]]:
        """What was found in words, and the scores by tag."""
        config = self._config
        stragglers = report.identify_stragglers(
            gpu_rel_threshold=config.gpu_relative_perf_threshold,
            gpu_indiv_threshold=config.gpu_individual_perf_threshold,
        )
        kinds = (
            ("some GPUs are slower than the others", stragglers["straggler_gpus_relative"]),
            ("some GPUs are slower than they were", stragglers["straggler_gpus_individual"]),
        )
        texts = [f"{what}: {_named(ids)}" for what, ids in kinds if ids]
        for text in texts:
            logger.warning("STRAGGLER DETECTION WARNING: %s", text)
        return "; ".join(texts), self._say_scores(report) if config.enable_logging else {}

    def _say_scores(self, report: Any) -> dict[str, float]:
        tags: dict[str, float] = {}
        for kind, is_wanted, scores in (
            ("relative", self._config.calc_relative_gpu_perf, report.gpu_relative_perf_scores),
            ("individual", self._config.calc_individual_gpu_perf, report.gpu_individual_perf_scores),
        ):
            if not is_wanted:
                continue
            count = self._config.num_gpu_perf_scores_to_print
            if count > 0:
                print(scores_block(kind, scores, report.rank_to_node, count), flush=True)  # noqa: T201 - asked for
            tags |= score_summary(f"gpu_{kind}_perf", list(scores.values()))
        return tags


def check_nvrx_straggler_detection(nvrx_straggler_manager: NVRxStragglerDetectionManager | None) -> bool:
    """Whether the run is to end because a GPU is slow; False without a manager. Collective where there is one."""
    if nvrx_straggler_manager is None:
        return False
    return nvrx_straggler_manager.check_stragglers(nvrx_straggler_manager.rank)


def safe_shutdown_nvrx_straggler_manager(nvrx_straggler_manager: NVRxStragglerDetectionManager | None) -> None:
    """End the detection; what goes wrong is logged and not raised."""
    if nvrx_straggler_manager is None:
        return
    try:
        nvrx_straggler_manager.shutdown()
    except Exception as error:  # noqa: BLE001 - a watcher must not fail the run that it watched
        logger.error("the straggler detection of nvidia-resiliency-ext did not end well: %s", error)


def start_nvrx_straggler_manager(
    manager: NVRxStragglerDetectionManager | None, world: World
) -> NVRxStragglerDetectionManager | None:
    """The manager, started; None, with a message of rank 0, where that fails on any rank. Collective with a manager."""
    if manager is None:
        return None
    error: Exception | None = None
    try:
        manager.initialize()
    except Exception as failure:  # noqa: BLE001 - the run goes on without it
        error = failure
    failed = world.agree([int(error is not None)]) == [1]
    if not failed:
        return manager
    if world.is_main:
        why = error or "another rank failed"
        print(f"Failed to initialize NVRx straggler detection: {why}", flush=True)  # noqa: T201 - Bridge's line
    safe_shutdown_nvrx_straggler_manager(manager)
    return None


def scores_block(kind: str, scores: Mapping[int, float], nodes: Mapping[int, str], count: int) -> str:
    """Lines of the `count` worst and best GPUs, or of all where there are few."""
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
    """`<prefix>/min`, `/median`, `/max`; NaN where there are no scores."""
    if not scores:
        return {f"{prefix}/{name}": math.nan for name in ("min", "median", "max")}
    return {
        f"{prefix}/min": min(scores),
        f"{prefix}/median": statistics.median_low(scores),
        f"{prefix}/max": max(scores),
    }


def _named(ids: Any) -> str:
    return ", ".join(f"rank {one.rank} on {one.node}" for one in sorted(ids, key=lambda one: one.rank))


def _straggler_module() -> Any:
    try:
        return importlib.import_module("nvidia_resiliency_ext.straggler")
    except ImportError as error:
        raise MissingExtraError(
            "nvrx_straggler.enabled=True needs nvidia-resiliency-ext: pip install 'onstep[resiliency]', or use "
            "straggler.log_straggler, which needs nothing."
        ) from error


class NvrxStragglers(Feature[Job]):
    """The straggler detection of `nvidia-resiliency-ext` around every step; its scores go to the trackers."""

    name = "nvrx_stragglers"
    when = "nvrx_straggler.enabled"
    collective = True

    @classmethod
    def wanted(cls, host: Job) -> bool:
        return host.run.cfg.nvrx_straggler.enabled

    def __init__(self, host: Job) -> None:
        super().__init__(host)
        self._checked_at: int | None = None
        self.manager: NVRxStragglerDetectionManager | None = NVRxStragglerDetectionManager(
            host.run.cfg.nvrx_straggler, host.run.world, self._write
        )

    @contextmanager
    def session(self) -> Iterator[None]:
        """Start the detection; without it the run goes on. Collective."""
        self.manager = start_nvrx_straggler_manager(self.manager, self.host.run.world)
        try:
            yield
        finally:
            safe_shutdown_nvrx_straggler_manager(self.manager)

    def wrap_step(self, train_step: Callable[..., Any]) -> Callable[..., Any]:
        """Let the detection measure the step."""
        if self.manager is None:
            return train_step
        wrapped: Callable[..., Any] = self.manager.wrap_train_step_function(train_step)
        return wrapped

    def before_exit_decision(self) -> None:
        """Ask, once a step, whether a GPU is so slow that the run is to end. Collective."""
        run, manager = self.host.run, self.manager
        if manager is None or self._checked_at == run.train_state.step:
            return
        self._checked_at = run.train_state.step
        if check_nvrx_straggler_detection(manager):
            run.exits.decided, run.exits.straggler = "straggler", manager.found

    def _write(self, scores: Mapping[str, float]) -> None:
        run, progress = self.host.run, self.host.run.train_state
        write_points(run.trackers.loggers, report_points(scores), progress.step, progress.consumed_train_samples)
