"""Computes throughput and runtime estimates, and accounts for where a run's time went."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from onstep.config import TrainingConfig
from onstep.distributed import shards
from onstep.errors import ConfigError
from onstep.train_state import TrainState


def report_throughput(
    train_config: TrainingConfig,
    iteration: int,
    seq_length: int,
    history_wct: Sequence[float],
    window_size: int,
    *,
    batch_size: int | None = None,
    world_size: int | None = None,
) -> dict[str, float]:
    """Batches, samples and tokens per second, in total and per device, over a window of steps.

    The window spans `window_size - 1` steps: with W = `window_size` and T the time from the first to the last entry,
    the rate is (W-1)/T. This is exact if `history_wct` has W entries.

    Args:
        train_config: provides the batch and micro-batch sizes.
        iteration: the step just completed, for messages.
        seq_length: tokens per sequence; 0 omits token rates.
        history_wct: times in seconds at the end of each of the latest steps, on any clock, in order.
        window_size: number of entries required for a report; with fewer, it is empty.
        batch_size: samples per step, if not `train_config.global_batch_size`.
        world_size: number of ranks, each counted as a device; None queries `torch.distributed`.

    Returns:
        `throughput/{batches,samples,tokens}_per_sec`, the same under `throughput/device/`,
        `throughput/micro_batch_size` and `throughput/global_batch_size`; `{}` until the window is full, or if no time
        has passed.

    Raises:
        ConfigError: if the batch size is unknown.
    """
    if not history_wct or len(history_wct) < window_size:
        return {}
    elapsed = history_wct[-1] - history_wct[0]
    if elapsed <= 0:
        if shards.rank() == 0:
            text = f"Warning: elapsed_wct is {elapsed}, skipping throughput calculation at iteration {iteration}"
            print(text, flush=True)  # noqa: T201 - Bridge's line
        return {}
    samples = batch_size or train_config.global_batch_size
    if samples is None:
        raise ConfigError(
            "train.global_batch_size is None, but throughput requires the samples per step; set it, or pass batch_size."
        )
    batches_per_second = (window_size - 1) / elapsed
    rates = {"batches_per_sec": batches_per_second, "samples_per_sec": batches_per_second * samples}
    if tokens_per_second := batches_per_second * samples * seq_length:
        rates["tokens_per_sec"] = tokens_per_second
    devices = world_size or shards.world_size()
    report = {f"throughput/{name}": rate for name, rate in rates.items()}
    report |= {f"throughput/device/{name}": rate / devices for name, rate in rates.items()}
    if train_config.micro_batch_size is not None:
        report["throughput/micro_batch_size"] = train_config.micro_batch_size
    return report | {"throughput/global_batch_size": samples}


SECONDS_OF_UNIT = {"seconds": 1, "minutes": 60, "hours": 3600, "days": 86400}
"""The units supported by `report_runtime`."""


def report_runtime(
    train_state: TrainState,
    start_time: float,
    seq_length: int,
    train_iters: int,
    time_unit: str = "seconds",
    *,
    start_step: int = 0,
    now: float | None = None,
) -> dict[str, float]:
    """Progress and elapsed time of a run, with an estimate of the remaining time at this process's pace so far.

    Args:
        train_state: progress of the whole run, across all restarts.
        start_time: unix seconds at which this process started training.
        seq_length: tokens per sequence.
        train_iters: number of steps of the whole run.
        time_unit: seconds, minutes, hours or days.
        start_step: step from which this process resumed. `train_state.step` also counts the steps of earlier processes,
            whose time is not part of `now - start_time`.
        now: unix seconds; None reads the clock.

    Returns:
        `time/remaining_estimate` (absent before this process has completed a step), `time/tokens`, `time/samples`,
        `time/batches` and `time/total`, which is the time of this process.

    Raises:
        ConfigError: for an unknown unit.
    """
    if time_unit not in SECONDS_OF_UNIT:
        units = ", ".join(SECONDS_OF_UNIT)
        raise ConfigError(f"the time unit must be one of {units}, got {time_unit!r}; set logger.runtime_time_unit.")
    unit = SECONDS_OF_UNIT[time_unit]
    elapsed = (time.time() if now is None else now) - start_time
    steps_here = train_state.step - start_step
    report: dict[str, float] = {}
    if steps_here > 0:
        report["time/remaining_estimate"] = elapsed / steps_here * max(0, train_iters - train_state.step) / unit
    return report | {
        "time/tokens": train_state.consumed_train_samples * seq_length,
        "time/samples": train_state.consumed_train_samples,
        "time/batches": train_state.step,
        "time/total": elapsed / unit,
    }


class TimeBreakdown:
    """Charges elapsed time, minus the time spent in callbacks, to the currently open account.

    The accounts sum exactly to the time between `start` and the last `enter`, `recharge` or `balance`: no time is
    counted twice or lost.

    Args:
        accounts: names of the accounts; time is charged to the first unless another is entered.
        reading: returns the current time and the total time spent in callbacks, in seconds, from one clock reading.
    """

    CALLBACKS = "callbacks"

    def __init__(self, accounts: tuple[str, ...], reading: Callable[[], tuple[float, float]]) -> None:
        self._reading = reading
        self._default = self.account = accounts[0]
        self._seconds: dict[str, float] = dict.fromkeys((*accounts, self.CALLBACKS), 0.0)
        self._last, self._last_callbacks = reading()

    def enter(self, account: str | None = None) -> None:
        """Charge the elapsed time to the open account, and open another one (None: the first)."""
        self._charge()
        self.account = account or self._default
        assert self.account in self._seconds

    def recharge(self, account: str) -> None:
        """Charge the time since the last entry to `account` instead of the open one, and leave `account` open."""
        self.account = account
        self._charge()

    def of(self, *accounts: str) -> float:
        """Seconds charged to the given accounts so far, excluding the time since the last entry."""
        return sum(self._seconds[account] for account in accounts)

    def balance(self) -> dict[str, float]:
        """Seconds of every account from the start until now."""
        self._charge()
        return dict(self._seconds)

    def _charge(self) -> None:
        now, callbacks = self._reading()
        in_callbacks = callbacks - self._last_callbacks
        self._seconds[self.CALLBACKS] += in_callbacks
        self._seconds[self.account] += now - self._last - in_callbacks
        self._last, self._last_callbacks = now, callbacks


class CountedSeconds:
    """Sums the seconds of steps, and subtracts those of steps undone by a rollback.

    Args:
        start_step: number of completed steps when the process began; rolling back to it undoes everything.
    """

    def __init__(self, start_step: int) -> None:
        self.total = 0.0
        """Seconds of all steps that currently count."""
        self.in_interval = 0.0
        """Seconds since the last `next_interval`."""
        self._steps = self._counted_steps = 0
        self._at_step = {start_step: 0.0}

    def add_step(self, seconds: float, is_applied: bool) -> None:
        """Add a step of `seconds`; a step whose update was skipped does not count."""
        self._steps += 1
        if is_applied:
            self._counted_steps += 1
            self._add(seconds)

    def add_wait(self, seconds: float) -> None:
        """Add `seconds` of device time for the steps of this interval, in proportion to those that count."""
        if self._steps:
            self._add(seconds * self._counted_steps / self._steps)

    def mark(self, step: int) -> None:
        """Mark a step, of which a checkpoint was saved, as a possible rollback target."""
        self._at_step[step] = self.total

    def go_back(self, step: int) -> None:
        """Undo everything after `step`; for a step without a mark, the nearest earlier mark is used."""
        self._at_step = {marked: seconds for marked, seconds in self._at_step.items() if marked <= step}
        kept = self._at_step[max(self._at_step)] if self._at_step else 0.0
        undone, self.total = self.total - kept, kept
        self.in_interval = max(0.0, self.in_interval - undone)

    def next_interval(self) -> None:
        """Begin a new interval; the total is unaffected."""
        self.in_interval = 0.0
        self._steps = self._counted_steps = 0

    def _add(self, seconds: float) -> None:
        self.total += seconds
        self.in_interval += seconds
