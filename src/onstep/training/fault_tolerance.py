"""Sections of a run (set-up, steps, checkpoints) for heartbeats and learned time limits.

All functions do nothing where neither `ft.calc_ft_timeouts` nor `ft.enable_ft_package` is set.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from onstep.errors import ConfigError, MissingExtraError
from onstep.training.fault_tolerance_state import FaultToleranceState
from onstep.training.section_clock import SectionClock
from onstep.training.simulated_fault import simulate_fault

if TYPE_CHECKING:
    from onstep.training.state import GlobalState

logger = logging.getLogger(__name__)

NUM_WARMUP_ITERS = 1
"""Steps that are not timed: the first one compiles, allocates and fills caches."""
MIN_ITERS_FOR_STEP_TIMEOUT_UPDATE = 16
"""Steps after which the limit of a step may be learned."""
FT_STATE_FILE = "ft_state.json"

_SOCKET = "FT_RANK_MONITOR_IPC_SOCKET"


def setup(state: GlobalState) -> None:
    """Connect to the monitor, take up what earlier starts have learned, and open the section `setup`. Collective.

    Raises:
        ConfigError: a ValueError, where the run has no folder of checkpoints to keep the learned limits in.
        MissingExtraError: where `nvidia-resiliency-ext` is asked for and not installed.
    """
    config = state.cfg.ft
    if not (config.calc_ft_timeouts or config.enable_ft_package):
        return
    if state.checkpoints is None:
        raise ConfigError(
            f"ft.calc_ft_timeouts and ft.enable_ft_package keep {FT_STATE_FILE} beside the checkpoints; set run.name "
            "or checkpoint.save."
        )
    state.fault_tolerance_state = FaultToleranceState(
        ft_state_path=state.checkpoints.root / FT_STATE_FILE,
        is_async_chkpt_enabled=state.cfg.checkpoint.async_save,
        is_calculating_timeouts=config.calc_ft_timeouts,
        is_setup_section_open=True,
    )
    client = _their_client() if config.enable_ft_package else SectionClock(state.world, state.section_limits)
    _load(state, client)
    client.init_workload_monitoring()
    state.rank_monitor_client = client
    client.start_section("setup")


def on_training_step_start(state: GlobalState) -> None:
    """A training step begins; the first one ends the set-up, and the one after it is the first to be timed."""
    client = state.rank_monitor_client
    if client is None:
        return
    ft = state.fault_tolerance_state
    _end_setup(state)
    ft.curr_eval_iter_idx = 0
    if ft.seen_tr_iters_cnt >= NUM_WARMUP_ITERS:
        _start_step(state)


def on_training_step_end(state: GlobalState) -> None:
    """It ends."""
    if state.rank_monitor_client is None:
        return
    _end_step(state)
    state.fault_tolerance_state.seen_tr_iters_cnt += 1


def on_eval_step_start(state: GlobalState) -> None:
    """An evaluation batch begins; the first one of an evaluation is not timed."""
    if state.rank_monitor_client is None:
        return
    _end_setup(state)
    if state.fault_tolerance_state.curr_eval_iter_idx >= NUM_WARMUP_ITERS:
        _start_step(state)


def on_eval_step_end(state: GlobalState) -> None:
    """It ends."""
    if state.rank_monitor_client is None:
        return
    ft = state.fault_tolerance_state
    if ft.curr_eval_iter_idx >= NUM_WARMUP_ITERS:
        _end_step(state)
    ft.curr_eval_iter_idx += 1


def on_checkpointing_start(state: GlobalState) -> None:
    """A save begins, or the end of one that goes on in the background."""
    if state.rank_monitor_client is not None:
        state.rank_monitor_client.start_section("checkpointing")


def on_checkpointing_end(state: GlobalState, is_async_finalization: bool = False) -> None:
    """It ends. Collective where limits are learned: they are learned anew after each save.

    Args:
        is_async_finalization: it was the end of a save in the background, which does not count as one.
    """
    if state.rank_monitor_client is None:
        return
    state.rank_monitor_client.end_section("checkpointing")
    if not is_async_finalization:
        state.fault_tolerance_state.seen_checkpoints_cnt += 1
        _maybe_update_timeouts(state)


@contextmanager
def checkpointing_section(state: GlobalState, *, is_async_finalization: bool = False) -> Iterator[None]:
    """The section `checkpointing` around a block."""
    on_checkpointing_start(state)
    yield
    on_checkpointing_end(state, is_async_finalization)


def shutdown(state: GlobalState) -> None:
    """Learn a last time, now also how long the run may be between sections, and disconnect. Collective."""
    client = state.rank_monitor_client
    if client is None:
        return
    if state.world.is_main:
        print("FT: closing...", flush=True)  # noqa: T201 - Megatron Bridge's line
    _maybe_update_timeouts(state, is_closing=True)
    abort(state)
    if state.world.is_main:
        print("FT: closed.", flush=True)  # noqa: T201 - Megatron Bridge's line


def abort(state: GlobalState) -> None:
    """Disconnect without a collective, as after an error."""
    client, state.rank_monitor_client = state.rank_monitor_client, None
    if client is not None:
        client.shutdown_workload_monitoring()


@contextmanager
def monitored(state: GlobalState) -> Iterator[None]:
    """The sections of a run around a block, and the simulated fault where one is wanted. Collective."""
    setup(state)
    if state.cfg.ft.simulate_fault:
        simulate_fault(state.cfg.ft, state.world)
    try:
        yield
    except BaseException:
        abort(state)
        raise
    shutdown(state)


def _end_setup(state: GlobalState) -> None:
    ft = state.fault_tolerance_state
    if ft.is_setup_section_open:
        state.rank_monitor_client.end_section("setup")
        ft.is_setup_section_open = False
        ft.is_persistent_chkpt_loaded = state.is_resumed


def _start_step(state: GlobalState) -> None:
    """Open the section `step`; an evaluation that a callback makes inside a step is part of that step."""
    ft = state.fault_tolerance_state
    if ft.open_steps == 0:
        state.rank_monitor_client.start_section("step")
    ft.open_steps += 1


def _end_step(state: GlobalState) -> None:
    ft = state.fault_tolerance_state
    if ft.open_steps == 0:
        return
    ft.open_steps -= 1
    if ft.open_steps == 0:
        state.rank_monitor_client.end_section("step")


def _maybe_update_timeouts(state: GlobalState, *, is_closing: bool = False) -> None:
    """Learn the limits of the sections of which enough was seen, and keep them. Collective."""
    ft = state.fault_tolerance_state
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
    if not sections:
        return
    client = state.rank_monitor_client
    if client.calculate_and_set_section_timeouts(
        selected_sections=sections, calc_out_of_section=with_rest, skip_if_not_ready=True
    ):
        _store(state, client)


def _store(state: GlobalState, client: Any) -> None:
    """Replace the file in one step, on rank 0; what cannot be written fails no training."""
    path = state.fault_tolerance_state.ft_state_path
    if not state.world.is_main or path is None:
        return
    temporary = path.with_suffix(".json.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("w", encoding="utf-8") as file:
            json.dump(client.state_dict(), file, indent=2)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        logger.warning("the learned time limits could not be written to %s: %s", path, error)


def _load(state: GlobalState, client: Any) -> None:
    """Take up the file of an earlier start, read on rank 0; a broken one is left out. Collective."""
    path, content = state.fault_tolerance_state.ft_state_path, None
    if state.world.is_main and path is not None and path.exists():
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            logger.warning("%s cannot be read (%s); the time limits are learned anew", path, error)
    content = state.world.share(content)
    if content is None:
        return
    try:
        client.load_state_dict(content)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        if state.world.is_main:
            logger.warning("%s does not hold time limits (%s); they are learned anew", path, error)


def _their_client() -> Any:
    """The client of `nvidia-resiliency-ext`, in a process that its launcher has started."""
    try:
        from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient  # type: ignore[import-not-found,unused-ignore]
    except ImportError as error:
        raise MissingExtraError(
            "ft.enable_ft_package=True needs nvidia-resiliency-ext: pip install 'onstep[resiliency]', or leave it out: "
            "Onstep's own watchdog needs nothing."
        ) from error
    if not os.environ.get(_SOCKET):
        raise ConfigError(
            f"ft.enable_ft_package=True needs a monitor for each rank, and ${_SOCKET} is not set; start the ranks with "
            "ft_launcher, or leave it out: Onstep's own watchdog needs no launcher."
        )
    return RankMonitorClient()
