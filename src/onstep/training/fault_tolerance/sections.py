"""Times the sections of a run (set-up, steps, checkpoints) for heartbeats and learned time limits.

All functions do nothing where neither `ft.calc_ft_timeouts` nor `ft.enable_ft_package` is set.
"""

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


def setup(state: Run) -> None:
    """Connect to the monitor, load what earlier starts have learned, and open the section `setup`. Collective.

    Raises:
        ConfigError: a ValueError, if the run has no checkpoint directory to keep the learned limits in.
        MissingExtraError: if `nvidia-resiliency-ext` is configured but not installed.
    """
    config = state.cfg.ft
    if not (config.calc_ft_timeouts or config.enable_ft_package):
        return
    if state.checkpoints is None:
        raise ConfigError(
            f"ft.calc_ft_timeouts and ft.enable_ft_package store {FT_STATE_FILE} next to the checkpoints; set run.name "
            "or checkpoint.save."
        )
    sections_of(state).state = FaultToleranceState(
        ft_state_path=state.checkpoints.root / FT_STATE_FILE,
        is_async_chkpt_enabled=state.cfg.checkpoint.async_save,
        is_calculating_timeouts=config.calc_ft_timeouts,
        is_setup_section_open=True,
    )
    client = (
        _their_client()
        if config.enable_ft_package
        else LearnedTimeouts(state.world, state.features.room(SectionLimits))
    )
    _load(state, client)
    client.init_workload_monitoring()
    sections_of(state).client = client
    client.start_section("setup")


def on_training_step_start(state: Run) -> None:
    """Begin a training step; the first one ends the set-up, and the second one is the first to be timed."""
    sections = sections_of(state)
    if sections.client is not None:
        sections.state.curr_eval_iter_idx = 0
        _start_step(state, sections.client, sections.state.seen_tr_iters_cnt)


def on_training_step_end(state: Run) -> None:
    """End a training step."""
    sections = sections_of(state)
    if sections.client is not None:
        _end_step(sections.client, sections.state)
        sections.state.seen_tr_iters_cnt += 1


def on_eval_step_start(state: Run) -> None:
    """Begin an evaluation batch; the first one of an evaluation is not timed."""
    sections = sections_of(state)
    if sections.client is not None:
        _start_step(state, sections.client, sections.state.curr_eval_iter_idx)


def on_eval_step_end(state: Run) -> None:
    """End an evaluation batch."""
    sections = sections_of(state)
    if sections.client is not None:
        if sections.state.curr_eval_iter_idx >= NUM_WARMUP_ITERS:
            _end_step(sections.client, sections.state)
        sections.state.curr_eval_iter_idx += 1


def on_checkpointing_start(state: Run) -> None:
    """Begin a save, or the completion of one that continues in the background."""
    client = sections_of(state).client
    if client is not None:
        client.start_section("checkpointing")


def on_checkpointing_end(state: Run, is_async_finalization: bool = False) -> None:
    """End a save; if limits are learned, they are learned again after each save, which is collective.

    Args:
        is_async_finalization: this was the completion of a save in the background, which does not count as a save.
    """
    client = sections_of(state).client
    if client is None:
        return
    client.end_section("checkpointing")
    if not is_async_finalization:
        sections_of(state).state.seen_checkpoints_cnt += 1
        _maybe_update_timeouts(state, client)


def shutdown(state: Run) -> None:
    """Learn a last time, now including the time allowed between sections, and disconnect. Collective."""
    client = sections_of(state).client
    if client is None:
        return
    if state.world.is_main:
        print("FT: closing...", flush=True)  # noqa: T201 - Megatron Bridge's line
    _maybe_update_timeouts(state, client, is_closing=True)
    abort(state)
    if state.world.is_main:
        print("FT: closed.", flush=True)  # noqa: T201 - Megatron Bridge's line


def abort(state: Run) -> None:
    """Disconnect without a collective, for example after an error."""
    sections = sections_of(state)
    client, sections.client = sections.client, None
    if client is not None:
        client.shutdown_workload_monitoring()


class FaultToleranceSections(Feature[Run]):
    """Times the sections of a run and learns their limits."""

    name = "fault_tolerance"
    when = "ft.calc_ft_timeouts, ft.enable_ft_package, ft.simulate_fault"
    collective = True

    @classmethod
    def wanted(cls, host: Run) -> bool:
        ft = host.cfg.ft
        given = sections_of(host).client is not None
        return bool(ft.calc_ft_timeouts or ft.enable_ft_package or ft.simulate_fault or given)

    @contextmanager
    def session(self) -> Iterator[None]:
        """Open the section `setup`, and start the simulated fault if configured. Collective."""
        run = self.host
        if sections_of(run).client is not None:  # the caller's own, already set up
            yield
            return
        setup(run)
        if run.cfg.ft.simulate_fault:
            simulate_fault(run.cfg.ft, run.world)
        try:
            yield
        except BaseException:
            abort(run)
            raise
        shutdown(run)

    def wrap_step(self, train_step: Callable[[Step], None]) -> Callable[[Step], None]:
        def timed(step: Step) -> None:
            on_training_step_start(self.host)
            try:
                train_step(step)
            except SystemExit:
                on_training_step_end(self.host)
                raise
            on_training_step_end(self.host)

        return timed

    def wrap_score(self, score: Callable[Given, Found]) -> Callable[Given, Found]:
        def timed(*given: Given.args, **named: Given.kwargs) -> Found:
            on_eval_step_start(self.host)
            result = score(*given, **named)
            on_eval_step_end(self.host)
            return result

        return timed

    @contextmanager
    def pause(self, work: Interruption) -> Iterator[None]:
        is_timed = work in ("write", "finalize")
        if is_timed:
            on_checkpointing_start(self.host)
        yield
        if is_timed:
            on_checkpointing_end(self.host, is_async_finalization=work == "finalize")


def _start_step(state: Run, client: LearnedTimeouts, num_seen: int) -> None:
    """Close the set-up, and after the warm-up open the section `step`.

    An evaluation that a callback runs inside a step is part of that step.
    """
    ft = sections_of(state).state
    if ft.is_setup_section_open:
        client.end_section("setup")
        ft.is_setup_section_open = False
        ft.is_persistent_chkpt_loaded = state.is_resumed
    if num_seen < NUM_WARMUP_ITERS:
        return
    if ft.open_steps == 0:
        client.start_section("step")
    ft.open_steps += 1


def _end_step(client: LearnedTimeouts, ft: FaultToleranceState) -> None:
    if ft.open_steps == 1:
        client.end_section("step")
    ft.open_steps = max(0, ft.open_steps - 1)


def _maybe_update_timeouts(state: Run, client: LearnedTimeouts, *, is_closing: bool = False) -> None:
    """Learn and store the limits of sections that were seen often enough. Collective."""
    ft = sections_of(state).state
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
        _store(state, client)


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
