"""Times the sections of a run (set-up, steps, checkpoints) for heartbeats and learned time limits."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import ParamSpec, TypeVar

from onstep.errors import ConfigError, DataError, MissingExtraError
from onstep.files.bounded_reading import read_json
from onstep.files.durability import replace_durably
from onstep.training.compute.step import Step
from onstep.training.fault_tolerance.learned_timeouts import LearnedTimeouts
from onstep.training.fault_tolerance.simulated_fault import simulate_fault
from onstep.training.feature import Feature, Interruption
from onstep.training.run import Run
from onstep.training.runs.stage import SectionLimits

logger = logging.getLogger(__name__)

Given = ParamSpec("Given")
Found = TypeVar("Found")

NUM_WARMUP_ITERS = 1
"""Number of steps that are not timed: the first one compiles, allocates and fills caches."""
MIN_ITERS_FOR_STEP_TIMEOUT_UPDATE = 16
"""Number of steps after which the limit of a step may be learned."""
FT_STATE_FILE = "ft_state.json"

_SOCKET = "FT_RANK_MONITOR_IPC_SOCKET"


@dataclass
class FaultToleranceState:
    """The open sections and what has been seen so far; determines which time limits may be learned."""

    ft_state_path: Path | None = None
    """`ft_state.json`, in the directory of the checkpoints; None if nothing is learned."""
    is_persistent_chkpt_loaded: bool = False
    """The set-up loaded a checkpoint, so its duration is representative of later starts."""
    is_async_chkpt_enabled: bool = False
    """Saves continue in the background: their section does not show how long they last."""
    is_calculating_timeouts: bool = False
    """`ft.calc_ft_timeouts`."""
    is_setup_section_open: bool = False
    seen_checkpoints_cnt: int = 0
    seen_tr_iters_cnt: int = 0
    curr_eval_iter_idx: int = 0
    open_steps: int = 0
    """Steps and evaluation batches in progress, nested."""


@dataclass
class Sections:
    """The client that times the sections of a run, and its memory."""

    client: LearnedTimeouts | None = None
    """Onstep's own, that of `nvidia-resiliency-ext` with the same methods, or None."""
    state: FaultToleranceState = field(default_factory=FaultToleranceState)


def sections_of(run: Run) -> Sections:
    """The sections of a run, open or not."""
    return run.features.room(Sections)


class FaultToleranceSections(Feature[Run]):
    """Times the sections of a run (set-up, steps, checkpoints) and learns their limits."""

    name = "fault_tolerance"
    when = "ft.calc_ft_timeouts, ft.enable_ft_package, ft.simulate_fault"
    collective = True

    @classmethod
    def wanted(cls, host: Run) -> bool:
        """If a key asks for it, or if the caller has given a client."""
        return super().wanted(host) or sections_of(host).client is not None

    def __init__(self, host: Run) -> None:
        super().__init__(host)
        self._sections = sections_of(host)

    @contextmanager
    def session(self) -> Iterator[None]:
        """Open the section `setup`, and start the simulated fault if configured. Collective.

        At the end, learn a last time, now including the time allowed between sections, and disconnect; after an error,
        disconnect without a collective.

        Raises:
            ConfigError: a ValueError, if the run has no checkpoint directory to keep the learned limits in.
            MissingExtraError: if `nvidia-resiliency-ext` is configured but not installed.
        """
        config, world = self.host.cfg.ft, self.host.world
        if self._sections.client is not None:  # the caller's own, already set up
            yield
            return
        if config.calc_ft_timeouts or config.enable_ft_package:
            self._connect()
        if config.simulate_fault:
            simulate_fault(config, world)
        try:
            yield
        except BaseException:
            self._disconnect()
            raise
        if self._sections.client is not None:
            if world.is_main:
                print("FT: closing...", flush=True)  # noqa: T201 - Megatron Bridge's line
            self._learn(self._sections.client, is_closing=True)
            self._disconnect()
            if world.is_main:
                print("FT: closed.", flush=True)  # noqa: T201 - Megatron Bridge's line

    def wrap_step(self, train_step: Callable[[Step], None]) -> Callable[[Step], None]:
        """Time the training steps; the first one ends the set-up, and the second one is the first to be timed."""

        def timed(step: Step) -> None:
            state = self._sections.state
            state.curr_eval_iter_idx = 0
            self._start_step(state.seen_tr_iters_cnt)
            try:
                train_step(step)
            except SystemExit:
                self._end_training_step()
                raise
            self._end_training_step()

        return timed

    def wrap_score(self, score: Callable[Given, Found]) -> Callable[Given, Found]:
        """Time the batches of an evaluation, except the first one."""

        def timed(*given: Given.args, **named: Given.kwargs) -> Found:
            state = self._sections.state
            self._start_step(state.curr_eval_iter_idx)
            result = score(*given, **named)
            if state.curr_eval_iter_idx >= NUM_WARMUP_ITERS:
                self._end_step()
            state.curr_eval_iter_idx += 1
            return result

        return timed

    @contextmanager
    def pause(self, work: Interruption) -> Iterator[None]:
        """Time a save, or the completion of one in the background, which does not count as a save.

        If limits are learned, they are learned again after each save, which is collective.
        """
        client = self._sections.client if work in ("write", "finalize") else None
        if client is not None:
            client.start_section("checkpointing")
        yield
        if client is not None:
            client.end_section("checkpointing")
            if work == "write":
                self._sections.state.seen_checkpoints_cnt += 1
                self._learn(client)

    def _connect(self) -> None:
        """Connect to the monitor, load what earlier starts have learned, and open the section `setup`. Collective."""
        run, config = self.host, self.host.cfg.ft
        if run.checkpoints is None:
            raise ConfigError(
                f"ft.calc_ft_timeouts and ft.enable_ft_package store {FT_STATE_FILE} next to the checkpoints; set "
                "run.name or checkpoint.save."
            )
        self._sections.state = FaultToleranceState(
            ft_state_path=run.checkpoints.root / FT_STATE_FILE,
            is_async_chkpt_enabled=run.cfg.checkpoint.async_save,
            is_calculating_timeouts=config.calc_ft_timeouts,
            is_setup_section_open=True,
        )
        own = LearnedTimeouts(run.world, run.features.room(SectionLimits))
        client = _their_client() if config.enable_ft_package else own
        _load(run, client)
        client.init_workload_monitoring()
        self._sections.client = client
        client.start_section("setup")

    def _disconnect(self) -> None:
        client, self._sections.client = self._sections.client, None
        if client is not None:
            client.shutdown_workload_monitoring()

    def _start_step(self, num_seen: int) -> None:
        """Close the set-up, and after the warm-up open the section `step`.

        An evaluation that a callback runs inside a step is part of that step.
        """
        client, ft = self._sections.client, self._sections.state
        if client is None:
            return
        if ft.is_setup_section_open:
            client.end_section("setup")
            ft.is_setup_section_open = False
            ft.is_persistent_chkpt_loaded = self.host.is_resumed
        if num_seen < NUM_WARMUP_ITERS:
            return
        if ft.open_steps == 0:
            client.start_section("step")
        ft.open_steps += 1

    def _end_step(self) -> None:
        client, ft = self._sections.client, self._sections.state
        if client is not None and ft.open_steps == 1:
            client.end_section("step")
        ft.open_steps = max(0, ft.open_steps - 1)

    def _end_training_step(self) -> None:
        self._end_step()
        self._sections.state.seen_tr_iters_cnt += 1

    def _learn(self, client: LearnedTimeouts, *, is_closing: bool = False) -> None:
        """Learn and store the limits of sections that were seen often enough. Collective."""
        ft = self._sections.state
        if not ft.is_calculating_timeouts:
            return
        sections = []
        if ft.is_persistent_chkpt_loaded:
            sections.append("setup")
        if ft.seen_tr_iters_cnt >= MIN_ITERS_FOR_STEP_TIMEOUT_UPDATE:
            sections.append("step")
        if ft.seen_checkpoints_cnt > 0 and not ft.is_async_chkpt_enabled:
            sections.append("checkpointing")
        with_rest = is_closing and {"setup", "step"} <= set(sections)
        if sections and client.calculate_and_set_section_timeouts(
            selected_sections=sections, calc_out_of_section=with_rest, skip_if_not_ready=True
        ):
            _store(self.host, client)


def _store(state: Run, client: LearnedTimeouts) -> None:
    """Replace the file atomically, on rank 0; a failed write does not fail the training."""
    path = sections_of(state).state.ft_state_path
    if not state.world.is_main or path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_durably(path, json.dumps(client.state_dict(), indent=2))
    except OSError as error:
        logger.warning("the learned time limits could not be written to %s: %s", path, error)


def _load(state: Run, client: LearnedTimeouts) -> None:
    """Load the file of an earlier start, read on rank 0; a broken one is ignored. Collective."""
    path, content = sections_of(state).state.ft_state_path, None
    if state.world.is_main and path is not None and path.exists():
        try:
            content = read_json(path)
        except (OSError, DataError) as error:
            logger.warning("%s cannot be read (%s); learning the time limits from scratch", path, error)
    content = state.world.share(content)
    if content is None:
        return
    try:
        client.load_state_dict(content)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        if state.world.is_main:
            logger.warning("%s does not contain time limits (%s); learning them from scratch", path, error)


def _their_client() -> LearnedTimeouts:
    """The client of `nvidia-resiliency-ext`, in a process that its launcher started."""
    try:
        from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient  # type: ignore[import-not-found,unused-ignore]
    except ImportError as error:
        raise MissingExtraError(
            "ft.enable_ft_package=True requires nvidia-resiliency-ext: pip install 'onstep[resiliency]', or drop the "
            "option: Onstep's own watchdog requires no package."
        ) from error
    if not os.environ.get(_SOCKET):
        raise ConfigError(
            f"ft.enable_ft_package=True requires a monitor for each rank, but ${_SOCKET} is not set; start the ranks "
            "with ft_launcher, or drop the option: Onstep's own watchdog requires no launcher."
        )
    client: LearnedTimeouts = RankMonitorClient()  # it has the same methods
    return client
