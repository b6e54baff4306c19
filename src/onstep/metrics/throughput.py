"""How much a run gets done in a second, and where its time went."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from onstep.config.parts import TrainingConfig
from onstep.distributed import shards
from onstep.errors import ConfigError
from onstep.progress import TrainState


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
    """Batches, samples and tokens a second, of all ranks and of one, over a window of steps.

    The window spans `window_size - 1` steps: with W = `window_size` and T the time from the first entry to the last,
    the rate is (W-1)/T. It is the true rate when `history_wct` has W entries.

    Args:
        train_config: gives the sizes of batch and micro-batch.
        iteration: the step that was just done, for messages.
        seq_length: tokens of a sequence; 0 leaves the tokens out.
        history_wct: seconds at the end of each of the latest steps, on any clock, in order.
        window_size: entries that a report needs; with fewer of them it is empty.
        batch_size: samples of a step where they are not `train_config.global_batch_size`.
        world_size: ranks, each of which counts as a device; None asks `torch.distributed`.

    Returns:
        `throughput/{batches,samples,tokens}_per_sec`, the same under `throughput/device/`,
        `throughput/micro_batch_size` and `throughput/global_batch_size`; `{}` before the window is full, or where no
        time has passed.

    Raises:
        ConfigError: where no batch size is known.
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
            "train.global_batch_size is None, and a throughput needs the samples of a step; set it, or hand batch_size."
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
"""The units that `report_runtime` counts in."""


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
    """Progress and time of a run, with an estimate of what remains at the pace of this process so far.

    Args:
        train_state: progress of the whole run, over all its restarts.
        start_time: unix seconds when this process began to train.
        seq_length: tokens of a sequence.
        train_iters: steps of the whole run.
        time_unit: seconds, minutes, hours or days.
        start_step: step that this process continued from. `train_state.step` counts the steps of earlier processes
            too, whose time is not in `now - start_time`.
        now: unix seconds; None reads the clock.

    Returns:
        `time/remaining_estimate` (absent before this process has done a step), `time/tokens`, `time/samples`,
        `time/batches` and `time/total`, which is the time of this process.

    Raises:
        ConfigError: for another unit.
    """
    if time_unit not in SECONDS_OF_UNIT:
        units = ", ".join(SECONDS_OF_UNIT)
        raise ConfigError(f"the unit of time must be one of {units}, got {time_unit!r}; set logger.runtime_time_unit.")
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


class TimeLedger:
    """Charges all time that passes to the account that is open, less the time that callbacks took.

    The accounts sum to the time between `start` and the last `enter`, `recharge` or `balance`, exactly: no second is
    measured twice and none is left out.

    Args:
        accounts: names of the accounts; the first is the one that time goes to unless another is entered.
        reading: now, in seconds, and the seconds that callbacks took until now; of one look at one clock.
    """

    CALLBACKS = "callbacks"

    def __init__(self, accounts: tuple[str, ...], reading: Callable[[], tuple[float, float]]) -> None:
        self._reading = reading
        self._default = self.account = accounts[0]
        self._seconds: dict[str, float] = dict.fromkeys((*accounts, self.CALLBACKS), 0.0)
        self._last, self._last_callbacks = reading()

    def enter(self, account: str | None = None) -> None:
        """Charge what has passed to the open account, and open another one (None: the first)."""
        self._charge()
        self.account = account or self._default
        assert self.account in self._seconds

    def recharge(self, account: str) -> None:
        """What has passed since the last entry belongs to `account`: only now it is known. It is the open one now."""
        self.account = account
        self._charge()

    def of(self, *accounts: str) -> float:
        """Seconds charged to some accounts so far; what has passed since the last entry is not in it yet."""
        return sum(self._seconds[account] for account in accounts)

    def balance(self) -> dict[str, float]:
        """Seconds of every account since the start, up to now."""
        self._charge()
        return dict(self._seconds)

    def _charge(self) -> None:
        now, callbacks = self._reading()
        in_callbacks = callbacks - self._last_callbacks
        self._seconds[self.CALLBACKS] += in_callbacks
        self._seconds[self.account] += now - self._last - in_callbacks
        self._last, self._last_callbacks = now, callbacks


class CountedSeconds:
    """Sums the seconds of steps, and takes back those of steps that a rollback has undone.

    Args:
        start_step: completed steps when the process began; going back to it undoes everything.
    """

    def __init__(self, start_step: int) -> None:
        self.total = 0.0
        """Seconds of all steps that count so far."""
        self.in_interval = 0.0
        """The part of them since the last `next_interval`."""
        self._steps = self._counted_steps = 0
        self._at_step = {start_step: 0.0}

    def add_step(self, seconds: float, is_applied: bool) -> None:
        """A step took `seconds`; one whose update was left out does not count."""
        self._steps += 1
        if is_applied:
            self._counted_steps += 1
            self._add(seconds)

    def add_wait(self, seconds: float) -> None:
        """The device took `seconds` more for the steps of this interval; counts as far as they do."""
        if self._steps:
            self._add(seconds * self._counted_steps / self._steps)

    def mark(self, step: int) -> None:
        """Training may come back to here: a checkpoint is taken."""
        self._at_step[step] = self.total

    def go_back(self, step: int) -> None:
        """What came after `step` is undone; a step without a mark stands for the nearest mark before it."""
        self._at_step = {marked: seconds for marked, seconds in self._at_step.items() if marked <= step}
        kept = self._at_step[max(self._at_step)] if self._at_step else 0.0
        undone, self.total = self.total - kept, kept
        self.in_interval = max(0.0, self.in_interval - undone)

    def next_interval(self) -> None:
        """Begin a new interval; what was counted stays counted."""
        self.in_interval = 0.0
        self._steps = self._counted_steps = 0

    def _add(self, seconds: float) -> None:
        self.total += seconds
        self.in_interval += seconds
