"""What is measured of the steps themselves: their time, energy and stragglers, without evaluations and saves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from onstep.training.nvrx_straggler import safe_shutdown_nvrx_straggler_manager, start_nvrx_straggler_manager

if TYPE_CHECKING:
    from onstep.training.state import GlobalState

INTERVAL_TIME = "interval-time"


@contextmanager
def measured_steps(state: GlobalState) -> Iterator[None]:
    """Measure energy and stragglers while the block runs, where that is asked for. Collective.

    When it ends well, rank 0 prints the energy of the training; after an exception nothing is waited for.
    """
    monitor = state.energy_monitor
    if monitor is not None and monitor.setup():
        monitor.resume()
    manager = start_nvrx_straggler_manager(state.nvrx_straggler_manager, state.world)
    state.nvrx_straggler_manager = manager
    try:
        yield
        if monitor is not None and monitor.is_available:
            monitor.lap()
            if state.world.is_main:
                print(f"Total training energy (GPU): {monitor.get_total() / 1e6} MJ", flush=True)  # noqa: T201
    finally:
        safe_shutdown_nvrx_straggler_manager(manager)
        state.straggler_timer.close()
        state.timers(INTERVAL_TIME).reset()


def start_interval(state: GlobalState) -> None:
    """Start the time of the steps anew."""
    timer = state.timers(INTERVAL_TIME)
    timer.reset()
    timer.start()
    state.straggler_timer.restart()
    if state.energy_monitor is not None:
        state.energy_monitor.restart()


@contextmanager
def outside_interval(state: GlobalState) -> Iterator[None]:
    """An evaluation or a save: its time and energy belong to no logging interval."""
    timer, monitor = state.timers(INTERVAL_TIME), state.energy_monitor
    was_running = timer.is_running
    if was_running:
        timer.stop()
    if monitor is not None:
        monitor.pause()
    started = state.clock.elapsed()
    try:
        yield
    finally:
        seconds = state.clock.elapsed() - started
        state.interval_start += seconds
        state.straggler_timer.leave_out(seconds)
        if monitor is not None:
            monitor.resume()
        if was_running:
            timer.start()


def print_timers(state: GlobalState, names: Sequence[str], normalizer: float = 1.0) -> None:
    """Print times as Megatron Bridge does, on the last rank. Collective.

    Where a callback shows progress, only if timers were asked for (`logger.timing_log_level` above 0).
    """
    is_shown = state.prints_console_line or state.cfg.logger.timing_log_level > 0
    state.timers.log(names, rank=None if is_shown else _NOBODY, normalizer=normalizer)


_NOBODY = -1
