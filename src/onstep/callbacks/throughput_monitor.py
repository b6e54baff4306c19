"""How fast a run is, and where its time goes."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from numbers import Real
from typing import Any

from onstep.errors import ConfigError
from onstep.events import Callback, CallbackClock, CallbackContext
from onstep.metrics.device_peaks import peak_of
from onstep.metrics.time_ledger import CountedSeconds, TimeLedger

logger: logging.Logger = logging.getLogger(__name__)

ACCOUNTS = ("other", "data", "forward_backward", "optimizer", "device_wait", "save", "eval")
"""What time is charged to, besides `callbacks`."""
_STEP = ("forward_backward", "optimizer")
_UNTIMED = ("save", "eval")


@dataclass(frozen=True)
class _Done:
    """How far the run was at some moment, over all ranks."""

    samples: int
    tokens: float
    flops: float

    @classmethod
    def of(cls, state: Any) -> _Done:
        progress = state.train_state
        tokens, flops = progress.consumed_tokens, progress.floating_point_operations_so_far
        return cls(progress.consumed_train_samples, tokens, flops)

    def since(self, earlier: _Done) -> _Done:
        samples = max(0, self.samples - earlier.samples)
        return _Done(samples, max(0.0, self.tokens - earlier.tokens), max(0.0, self.flops - earlier.flops))

    def plus(self, other: _Done) -> _Done:
        return _Done(self.samples + other.samples, self.tokens + other.tokens, self.flops + other.flops)

    def limited_to(self, tokens: float) -> _Done:
        """With that many tokens, and the share of the FLOPs that they took."""
        return _Done(self.samples, tokens, self.flops * tokens / self.tokens) if self.tokens else self


class ThroughputMonitor(Callback):
    """Adds throughput, goodput and a breakdown of the wall time to `logs`, and to the final metrics.

    - `seconds_data`, `seconds_forward_backward`, `seconds_optimizer`, `seconds_device_wait`, `seconds_save`,
      `seconds_eval`, `seconds_callbacks`, `seconds_other`: where rank 0 spent the time since the last logged step. They
      sum to it.
    - `goodput`: share of that time in steps that counted: forward, backward, update and waiting for the device, of
      steps whose update was applied and not undone by a rollback.
    - `samples_per_second`, `tokens_per_second_per_device`: over that time without evaluations and saves. Tokens are
      labels trained on, without padding.
    - `mfu`: model FLOPs utilization over the same time, where the device's peak is known; its definition is logged.

    The final metrics have the same keys, over the whole training of this process: what a resumed run did before does
    not count, and neither does what a rollback undid. When the run ends, the breakdown is logged with the time of each
    callback.

    A GPU works while the host goes on: its seconds show where the host waits for it, mostly as `device_wait` or
    `forward_backward`. The sum and the goodput are right all the same.

    Args:
        peak_flops_per_device: FLOP/s of one device; None takes it from `onstep.metrics.device_peaks`, and leaves `mfu`
            out for a device that is not there.
        breakdown: whether to add the `seconds_...` to `logs`.

    Raises:
        ConfigError: for a peak that is not positive.
    """

    ranks = "main"

    def __init__(self, peak_flops_per_device: float | None = None, breakdown: bool = True) -> None:
        peak: Any = peak_flops_per_device
        if peak is not None and (
            isinstance(peak, bool) or not isinstance(peak, Real) or not 0 < float(peak) < float("inf")
        ):
            raise ConfigError(
                f"peak_flops_per_device must be a number > 0, got {peak!r}; pass None for the known ones."
            )
        self.peak_flops_per_device = peak_flops_per_device
        self.breakdown = breakdown
        self.clock = time.perf_counter
        """Seconds; replace it to measure with another clock."""
        self.totals: dict[str, float] = {}
        """Seconds of each account, of the training that ended last."""
        self._ledger: TimeLedger | None = None
        self._callback_clock: CallbackClock | None = None
        self._account_before: str | None = None

    def on_train_start(self, context: CallbackContext) -> None:
        """Start the clock."""
        clock = context.callback_clock
        assert clock is not None
        self._end_measurement()
        clock.start(self.clock)
        self._callback_clock = clock
        self._ledger = TimeLedger(ACCOUNTS, clock.reading)
        self._counted = CountedSeconds(context.state.train_state.step)
        self._interval_start = self._ledger.balance()
        self._done_at_log = _Done.of(context.state)
        self._done = _Done(0, 0.0, 0.0)
        self._own_tokens: Any = 0
        """Labels of the first interval: the interval of a resumed run begins before this process did."""
        self._is_first_interval, self._saving_step = True, -1
        self._account_before = None
        self._seconds_of_steps, self._is_applied = 0.0, True
        self._peak = self._find_peak(context)

    def on_step_begin(self, context: CallbackContext) -> None:
        """Data is being read."""
        self._enter("data")

    def on_forward_backward_start(self, context: CallbackContext) -> None:
        """Until now the micro-batch was brought to the device."""
        if self._ledger is not None:
            self._ledger.recharge("data")
            self._enter("forward_backward")

    def on_forward_backward_end(self, context: CallbackContext) -> None:
        """The update follows, unless there is another micro-batch."""
        self._enter("optimizer")

    def on_train_step_end(self, context: CallbackContext) -> None:
        """Note whether the update was applied."""
        self._is_applied = not context.skipped_iter

    def on_step_end(self, context: CallbackContext) -> None:
        """The step is over."""
        if self._ledger is None:
            return
        self._enter()
        before, self._seconds_of_steps = self._seconds_of_steps, self._ledger.of(*_STEP)
        self._counted.add_step(self._seconds_of_steps - before, self._is_applied)
        if self._is_first_interval:
            state: Any = context.state  # more of it than a callback is promised
            self._own_tokens = self._own_tokens + (state.last_step_loss.tokens or 0)

    def on_log_step(self, context: CallbackContext) -> None:
        """Add the metrics of the steps since the last logged one."""
        ledger, logs = self._ledger, context.logs
        if ledger is None or logs is None:
            return
        before = ledger.of("device_wait")
        ledger.recharge("device_wait")
        self._counted.add_wait(ledger.of("device_wait") - before)
        self._enter()
        now = ledger.balance()
        seconds = {account: now[account] - self._interval_start[account] for account in now}
        done = self._take_up(context)
        logs |= self._metrics(context, seconds, done, self._counted.in_interval)
        self._counted.next_interval()
        self._interval_start = now

    def on_eval_start(self, context: CallbackContext) -> None:
        """An evaluation begins."""
        if self._ledger is not None:
            self._account_before = self._ledger.account
            self._enter("eval")

    def on_eval_end(self, context: CallbackContext) -> None:
        """It is over."""
        self._enter(self._account_before)

    def on_test_start(self, context: CallbackContext) -> None:
        """A test begins."""
        self.on_eval_start(context)

    def on_test_end(self, context: CallbackContext) -> None:
        """It is over."""
        self.on_eval_end(context)

    def on_checkpoint_save_start(self, context: CallbackContext) -> None:
        """A checkpoint is being taken."""
        if self._ledger is not None and context.checkpoint_step is not None:
            self._counted.mark(context.checkpoint_step)
            self._saving_step = context.checkpoint_step
            self._enter("save")

    def on_checkpoint_save(self, context: CallbackContext) -> None:
        """It is durable; an asynchronous one becomes so later, when something else is going on."""
        if self._ledger is not None and self._ledger.account == "save" and context.checkpoint_step == self._saving_step:
            self._enter()

    def on_checkpoint_load(self, context: CallbackContext) -> None:
        """Within a training: a rollback."""
        if self._ledger is not None and context.checkpoint_step is not None:
            self._counted.go_back(context.checkpoint_step)
            self._enter()

    def on_epoch_end(self, context: CallbackContext) -> None:
        """There was no further step."""
        self._enter()

    def on_final_metrics(self, context: CallbackContext) -> None:
        """Add the metrics of the whole training of this process."""
        if self._ledger is None or context.logs is None:
            return
        self._take_up(context)
        context.logs.update(self._metrics(context, self._ledger.balance(), self._done, self._counted.total))
        context.logs.pop("samples_per_second", None)  # the final metrics have train_samples_per_second

    def on_train_end(self, context: CallbackContext) -> None:
        """What follows is no training."""
        self._enter()

    def on_run_end(self, context: CallbackContext) -> None:
        """Log where the time of the whole run went, and stop the clock."""
        if self._ledger is not None:
            self.totals = self._ledger.balance()
            logger.info("%s", self._report())
        self._end_measurement()

    def _enter(self, account: str | None = None) -> None:
        if self._ledger is not None:
            self._ledger.enter(account)

    def _end_measurement(self) -> None:
        if self._callback_clock is not None:
            self._callback_clock.stop()
        self._ledger = self._callback_clock = None

    def _take_up(self, context: CallbackContext) -> _Done:
        """What was done since the last logged step, by this process."""
        now = _Done.of(context.state)
        done, self._done_at_log = now.since(self._done_at_log), now
        if self._is_first_interval:
            done = done.limited_to(min(done.tokens, float(self._own_tokens)))
        self._is_first_interval = False
        self._done = self._done.plus(done)
        return done

    def _metrics(
        self, context: CallbackContext, seconds: dict[str, float], done: _Done, counted: float
    ) -> dict[str, float]:
        wall = sum(seconds.values())
        timed = wall - sum(seconds[account] for account in _UNTIMED)
        devices = context.state.world.size
        metrics: dict[str, float] = {}
        if timed > 0:
            metrics["samples_per_second"] = done.samples / timed
            if done.tokens:
                metrics["tokens_per_second_per_device"] = done.tokens / timed / devices
            if self._peak and done.flops:
                metrics["mfu"] = done.flops / timed / devices / self._peak
        if wall > 0:
            metrics["goodput"] = counted / wall
        if self.breakdown:
            metrics |= {f"seconds_{account}": value for account, value in seconds.items()}
        return metrics

    def _find_peak(self, context: CallbackContext) -> float | None:
        """FLOP/s of one device, and say once what `mfu` means, or why there is none."""
        peak, source = self.peak_flops_per_device, "peak_flops_per_device"
        if peak is None:
            name = _device_name(context.state.world.device)
            known = peak_of(name)
            if known is None:
                logger.info("no mfu: the peak of %r is not known; give ThroughputMonitor(peak_flops_per_device)", name)
                return None
            peak, source = known.flops_per_second, f"dense bfloat16, {known.source}"
        logger.info(
            "mfu: FLOPs of the tokens between two logged steps (labels, without padding; %.4g FLOPs a token) / the "
            "seconds between them without evaluations and saves / %d device(s) / %.4g FLOP/s (%s)",
            context.state.flops_per_token,
            context.state.world.size,
            peak,
            source,
        )
        return peak

    def _report(self) -> str:
        wall = sum(self.totals.values())
        lines = [f"where the time went: {wall:.1f} s, of which {self._counted.total:.1f} s in steps that counted"]
        for account, seconds in sorted(self.totals.items(), key=lambda item: -item[1]):
            share = seconds / wall if wall > 0 else 0.0
            lines.append(f"  {account:<17} {seconds:10.2f} s {share:6.1%}")
        assert self._callback_clock is not None
        each = sorted(self._callback_clock.seconds.items(), key=lambda item: -item[1])
        lines += [f"    {author:<24} {seconds:10.3f} s" for author, seconds in each]
        return "\n".join(lines)


def _device_name(device: Any) -> str:
    if device.type != "cuda":
        return str(device.type)
    import torch

    return torch.cuda.get_device_name(device)
