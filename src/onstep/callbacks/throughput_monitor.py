"""Measures throughput, goodput and MFU of a run, and where its wall time goes."""

from __future__ import annotations

import logging
import math
import time
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onstep.config import TrainingArguments
from onstep.config.field_types import is_number
from onstep.errors import require
from onstep.events import Callback, CallbackContext, CallbackTimer, Control, RunState, TrainerCallback
from onstep.metrics.device_peaks import peak_of
from onstep.metrics.throughput import CountedSeconds, TimeBreakdown
from onstep.record.kinds import Metrics

logger: logging.Logger = logging.getLogger(__name__)

ACCOUNTS = ("other", "data", "forward_backward", "optimizer", "device_wait", "save", "eval")
"""The categories of wall time, besides `callbacks`."""
_STEP = ("forward_backward", "optimizer")
_UNTIMED = ("save", "eval")


class DefaultMetrics(TrainerCallback):
    """Adds tokens per second, MFU and peak memory to `logs`, before they are reported at `on_log`.

    - `tok_per_sec`: tokens of all ranks per second of wall time since the last logged step (including evaluation,
      saving and logging), an integer; from the second logged step on.
    - `mfu`: model FLOPs utilization, a fraction: FLOPs since the last logged step per second spent inside steps,
      divided by `peak_hardware_flops`.
    - `peak_mem`: `peak_mem_allocated` under the name that the console shows, a list of bytes with one entry per rank.

    Args:
        peak_hardware_flops: Peak FLOP/s of all GPUs of the job together (dense bfloat16, float32 accumulation: 312e12
            for one A100, 989e12 for one H100 SXM); None omits `mfu`. Set it before the callback is registered.
    """

    reads_weights = False
    ranks = "main"
    needs_onstep = "it reports tokens and memory that only Onstep's loop counts"

    def __init__(self, peak_hardware_flops: float | None = None) -> None:
        self.peak_hardware_flops = peak_hardware_flops
        self.clock = time.monotonic
        """Returns seconds; replace it to measure with another clock."""
        self._last_log_time: float | None = None
        self._step_start: float | None = None
        self._step_seconds = self._last_total_flos = 0.0

    def skips_event(self, name: str) -> bool:
        """Skip the events that time steps unless `mfu` is requested.

        Args:
            name: the name of the event.
        """
        return not self.peak_hardware_flops and name in ("on_step_begin", "on_step_end")

    def on_train_begin(self, args: TrainingArguments, state: RunState, control: Control, **kwargs: object) -> None:
        """Reset the interval, starting from the FLOPs of a resumed run."""
        super().on_train_begin(args, state, control, **kwargs)  # type: ignore[misc]
        self._last_log_time = self._step_start = None
        self._step_seconds = 0.0
        self._last_total_flos = state.total_flos or 0.0

    def on_step_begin(self, args: object, state: object, control: object, **kwargs: object) -> None:
        """Record the start time of the step."""
        self._step_start = self.clock()

    def on_step_end(self, args: object, state: object, control: object, **kwargs: object) -> None:
        """Add the step's duration."""
        if self._step_start is not None:
            self._step_seconds += self.clock() - self._step_start
            self._step_start = None

    def on_log_step(self, args: object, state: RunState, control: object, logs: Metrics, **kwargs: object) -> None:
        """Add the metrics and start the next interval."""
        if not state.is_world_process_zero:
            return
        now = self.clock()
        total_flos = logs.get("total_flos")
        if total_flos is None:
            total_flos = state.total_flos or 0.0
        if "tokens" in logs and self._last_log_time is not None and now > self._last_log_time:
            logs["tok_per_sec"] = round(float(logs["tokens"]) / (now - self._last_log_time))
        flos = total_flos - self._last_total_flos
        if self.peak_hardware_flops and self._step_seconds > 0 and flos > 0:
            logs["mfu"] = float(flos / self._step_seconds / self.peak_hardware_flops)
        if "peak_mem_allocated" in logs:
            logs["peak_mem"] = logs["peak_mem_allocated"]
        self._last_log_time = now
        self._step_seconds = 0.0
        self._last_total_flos = total_flos


class _Done(NamedTuple):
    """Progress of the run over all ranks: totals at a point in time, or the amount in an interval."""

    samples: float
    tokens: float
    flops: float

    @classmethod
    def by(cls, context: CallbackContext) -> _Done:
        progress = context.state.train_state
        tokens, flops = progress.consumed_tokens, progress.floating_point_operations_so_far
        return cls(progress.consumed_train_samples, tokens, flops)


class ThroughputMonitor(Callback):
    """Adds throughput, goodput and a breakdown of the wall time to `logs`, and to the final metrics.

    - `seconds_data`, `seconds_forward_backward`, `seconds_optimizer`, `seconds_device_wait`, `seconds_save`,
      `seconds_eval`, `seconds_callbacks`, `seconds_other`: how rank 0 spent the wall time since the last logged step;
      they add up to it.
    - `goodput`: fraction of that time spent in productive steps: forward, backward, update and waiting for the device,
      for steps whose update was applied and not undone by a rollback.
    - `samples_per_second`, `tokens_per_second_per_device`: over that time, excluding evaluations and saves. Tokens are
      labels trained on, without padding.
    - `mfu`: model FLOPs utilization over the same time, if the device's peak is known; its definition is logged.

    The final metrics have the same keys, over the whole training of this process: work done before a resume does not
    count, nor does work undone by a rollback. When the run ends, the breakdown is logged with the time of each
    callback.

    GPUs run asynchronously: their time shows up where the host waits for them, mostly as `device_wait` or
    `forward_backward`. The sum and the goodput are still correct.

    Args:
        peak_flops_per_device: FLOP/s of one device; None looks it up in `onstep.metrics.device_peaks`, and omits `mfu`
            for an unknown device.
        breakdown: whether to add the `seconds_...` keys to `logs`.

    Raises:
        ConfigError: if the peak is not positive.
    """

    reads_weights = False
    ranks = "main"

    def __init__(self, peak_flops_per_device: float | None = None, breakdown: bool = True) -> None:
        peak = peak_flops_per_device
        is_rate = peak is None or (is_number(peak) and 0 < peak < math.inf)
        require(is_rate, "peak_flops_per_device", "a number > 0", peak, "; pass None to look it up.")
        self.peak_flops_per_device = peak_flops_per_device
        self.breakdown = breakdown
        self.clock = time.perf_counter
        """Returns seconds; replace it to measure with another clock."""
        self.totals: dict[str, float] = {}
        """Seconds per category, for the training that ended last."""
        self._breakdown: TimeBreakdown | None = None
        self._callback_timer: CallbackTimer | None = None
        self._account_before: str | None = None

    def on_train_start(self, context: CallbackContext) -> None:
        """Start the clock."""
        clock = context.callback_timer
        assert clock is not None
        self._end_measurement()
        clock.start(self.clock)
        self._callback_timer = clock
        self._breakdown = TimeBreakdown(ACCOUNTS, clock.reading)
        self._counted = CountedSeconds(context.state.train_state.step)
        self._interval_start = self._breakdown.balance()
        self._done_at_log = _Done.by(context)
        self._done = _Done(0, 0.0, 0.0)
        self._own_tokens: Tensor | float = 0
        """Labels of the first interval, counted here because a resumed run's interval begins before this process."""
        self._is_first_interval, self._saving_step = True, -1
        self._account_before = None
        self._seconds_of_steps, self._is_applied = 0.0, True
        self._peak = self._find_peak(context)

    def on_step_begin(self, context: CallbackContext) -> None:
        """Charge the time that follows to reading data."""
        self._enter("data")

    def on_forward_backward_start(self, context: CallbackContext) -> None:
        """Charge the time so far to moving the micro-batch to the device."""
        if self._breakdown is not None:
            self._breakdown.recharge("data")
            self._enter("forward_backward")

    def on_forward_backward_end(self, context: CallbackContext) -> None:
        """Charge the time that follows to the update, unless another micro-batch follows."""
        self._enter("optimizer")

    def on_train_step_end(self, context: CallbackContext) -> None:
        """Note whether the update was applied."""
        self._is_applied = not context.skipped_iter

    def on_step_end(self, context: CallbackContext) -> None:
        """Count the step and its seconds."""
        if self._breakdown is None:
            return
        self._enter()
        before, self._seconds_of_steps = self._seconds_of_steps, self._breakdown.of(*_STEP)
        self._counted.add_step(self._seconds_of_steps - before, self._is_applied)
        if self._is_first_interval:
            state: Any = context.state  # reads more than `RunView` declares
            self._own_tokens = self._own_tokens + (state.last_step_loss.tokens or 0)

    def on_log_step(self, context: CallbackContext) -> None:
        """Add the metrics of the interval since the last logged step."""
        ledger, logs = self._breakdown, context.logs
        if ledger is None or logs is None:
            return
        before = ledger.of("device_wait")
        ledger.recharge("device_wait")
        self._counted.add_wait(ledger.of("device_wait") - before)
        self._enter()
        now = ledger.balance()
        seconds = {account: now[account] - self._interval_start[account] for account in now}
        done = self._record_step(context)
        logs |= self._metrics(context, seconds, done, self._counted.in_interval)
        self._counted.next_interval()
        self._interval_start = now

    def on_eval_start(self, context: CallbackContext) -> None:
        """Charge the time that follows to evaluation."""
        if self._breakdown is not None:
            self._account_before = self._breakdown.account
            self._enter("eval")

    def on_eval_end(self, context: CallbackContext) -> None:
        """Charge the time that follows as before the evaluation."""
        self._enter(self._account_before)

    def on_test_start(self, context: CallbackContext) -> None:
        """Charge the time that follows to evaluation."""
        self.on_eval_start(context)

    def on_test_end(self, context: CallbackContext) -> None:
        """Charge the time that follows as before the test."""
        self.on_eval_end(context)

    def on_checkpoint_save_start(self, context: CallbackContext) -> None:
        """Charge the time that follows to saving."""
        if self._breakdown is not None and context.checkpoint_step is not None:
            self._counted.mark(context.checkpoint_step)
            self._saving_step = context.checkpoint_step
            self._enter("save")

    def on_checkpoint_save(self, context: CallbackContext) -> None:
        """Stop charging to saving; an asynchronous save is already charged elsewhere by now."""
        if (
            self._breakdown is not None
            and self._breakdown.account == "save"
            and context.checkpoint_step == self._saving_step
        ):
            self._enter()

    def on_checkpoint_load(self, context: CallbackContext) -> None:
        """Uncount the steps that a rollback undid."""
        if self._breakdown is not None and context.checkpoint_step is not None:
            self._counted.go_back(context.checkpoint_step)
            self._enter()

    def on_epoch_end(self, context: CallbackContext) -> None:
        """Stop charging to reading data."""
        self._enter()

    def on_final_metrics(self, context: CallbackContext) -> None:
        """Add the metrics of the whole training of this process."""
        if self._breakdown is None or context.logs is None:
            return
        self._record_step(context)
        context.logs.update(self._metrics(context, self._breakdown.balance(), self._done, self._counted.total))
        context.logs.pop("samples_per_second", None)  # the final metrics have train_samples_per_second

    def on_train_end(self, context: CallbackContext) -> None:
        """Charge the time that follows to `other`."""
        self._enter()

    def on_run_end(self, context: CallbackContext) -> None:
        """Log where the time of the run went, and stop the clock."""
        if self._breakdown is not None:
            self.totals = self._breakdown.balance()
            logger.info("%s", self._report())
        self._end_measurement()

    def _enter(self, account: str | None = None) -> None:
        if self._breakdown is not None:
            self._breakdown.enter(account)

    def _end_measurement(self) -> None:
        if self._callback_timer is not None:
            self._callback_timer.stop()
        self._breakdown = self._callback_timer = None

    def _record_step(self, context: CallbackContext) -> _Done:
        """Progress of this process since the last logged step."""
        now = _Done.by(context)
        samples, tokens, flops = (max(0, there - here) for there, here in zip(now, self._done_at_log, strict=True))
        if self._is_first_interval and tokens:
            own_tokens = min(tokens, float(self._own_tokens))
            tokens, flops = own_tokens, flops * own_tokens / tokens
        self._done_at_log, self._is_first_interval = now, False
        self._done = _Done(self._done.samples + samples, self._done.tokens + tokens, self._done.flops + flops)
        return _Done(samples, tokens, flops)

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
        """FLOP/s of one device; logs once how `mfu` is defined, or why there is none."""
        peak, source = self.peak_flops_per_device, "peak_flops_per_device"
        if peak is None:
            device = context.state.world.device
            name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
            known = peak_of(name)
            if known is None:
                logger.info("no mfu: the peak of %r is unknown; pass peak_flops_per_device to ThroughputMonitor", name)
                return None
            peak, source = known.flops_per_second, f"dense bfloat16, {known.source}"
        logger.info(
            "mfu: FLOPs of the tokens between two logged steps (labels, without padding; %.4g FLOPs per token) / the "
            "seconds between them without evaluations and saves / %d device(s) / %.4g FLOP/s (%s)",
            context.state.flops_per_token,
            context.state.world.size,
            peak,
            source,
        )
        return peak

    def _report(self) -> str:
        wall = sum(self.totals.values())
        lines = [f"where the time went: {wall:.1f} s, of which {self._counted.total:.1f} s in productive steps"]
        for account, seconds in sorted(self.totals.items(), key=lambda item: -item[1]):
            share = seconds / wall if wall > 0 else 0.0
            lines.append(f"  {account:<17} {seconds:10.2f} s {share:6.1%}")
        assert self._callback_timer is not None
        each = sorted(self._callback_timer.seconds.items(), key=lambda item: -item[1])
        lines += [f"    {author:<24} {seconds:10.3f} s" for author, seconds in each]
        return "\n".join(lines)
