"""Reports a run as Megatron Bridge does: its console lines, and its tags for the trackers."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from torch import Tensor

from onstep.distributed import groups_within_models
from onstep.metrics.norms.params_l2_norm import unread_params_l2_norm
from onstep.training.compute.step import Step
from onstep.training.experts.experts import Experts
from onstep.training.experts.moe_log import interval_losses
from onstep.training.feature import Feature, is_due
from onstep.training.interval_log.console_line import IntervalValues
from onstep.training.interval_log.interval import LogContext, is_nan, report_interval, report_step, whole
from onstep.training.protocols import StateDict
from onstep.training.reporting.bridge_tags import StepValues
from onstep.training.stages.job import Job
from onstep.training.stages.record import decoupled_learning_rate, learning_rate


class BridgeLog(Feature[Job]):
    """Prints Megatron Bridge's lines and writes its tags, if any rank has something to report.

    The losses of the interval come from the `LossAccumulator`.
    """

    name = "training_log"
    when = "logger.console=bridge, a tracker of tags, logger.timing_log_level, profiling.record_memory_history"
    collective = True
    needs_grad_norm = True
    has_state = True

    @classmethod
    def wanted(cls, host: Job) -> bool:
        run = host.run
        others = run.prints_console_line or run.cfg.profiling.record_memory_history
        return run.bridge_trackers.is_wanted or others or run.cfg.logger.timing_log_level > 0

    def __init__(self, host: Job) -> None:
        super().__init__(host)
        self._state = host.run
        self.reads_weights = host.run.cfg.logger.log_params_norm
        self._writes = True
        """Whether any rank has a tracker to write to."""
        # two entries make the shortest window
        self._history: deque[float] = deque(maxlen=max(2, host.run.cfg.logger.throughput_window_size))
        self._reports_memory = True
        self._pending: Step | None = None
        self._has_reported = False
        self._num_nan: Tensor | int = 0
        """Skipped steps of the interval with a non-finite loss."""
        self._seconds_before = 0.0

    @contextmanager
    def session(self) -> Iterator[None]:
        """Determine whether any rank has a tracker. Collective."""
        [writes] = self._state.world.agree([int(self._state.bridge_trackers.is_wanted)])
        self._writes = bool(writes)
        yield

    def restart_interval(self) -> None:
        """Start the timers at the step that this process continues from or that the run was rolled back to."""
        state = self._state
        self._pending = None
        state.interval.start_step = state.train_state.step
        state.interval.training_start_time = state.clock.wall()
        state.interval.start = state.clock.elapsed() - self._seconds_before
        self._seconds_before = 0.0
        self._history.clear()

    def after_count(self, step: Step) -> None:
        """Keep the step's values until it is known whether it is logged."""
        self._pending = step
        if self._state.cfg.logger.log_throughput_to_tensorboard:
            self._history.append(self._state.clock.elapsed())

    def after_agreement(self) -> None:
        if not self._state.control.should_log:
            self._report(is_logged=False)

    def before_log(self) -> None:
        self._report(is_logged=True)

    def _report(self, is_logged: bool) -> None:
        """Report the recorded step and, if it is logged, the interval. Must be called on all ranks.

        Without a step, as at the end of an epoch, logging reports the interval so far.
        """
        step, self._pending = self._pending, None
        run = LogContext(
            self._state.cfg, self._state, self.host.model, loaded_iteration=self._state.interval.start_step
        )
        if step is not None:
            self._has_reported = True
            if not step.applied:
                self._num_nan = self._num_nan + is_nan(step.loss_dict)
            report_step(run, lambda: self._values(step, is_logged), self._history)
        last = self.host.last
        if is_logged and self._has_reported and last is not None:
            values = self._values(last, step is not None)
            info, num_steps = partial(self._info, values), self.host.accumulator.num_steps
            self._reports_memory = report_interval(run, num_steps, info, self._reports_memory)
            self._num_nan = 0

    def state_dict(self) -> StateDict:
        """The counters of the interval and its elapsed seconds, and which evaluations have been written."""
        state = self._state
        return {
            "num_nan": self._num_nan,
            "samples": state.interval.num_samples,
            "interval_runtime": state.clock.elapsed() - state.interval.start,
            "reports_memory": self._reports_memory,
            "tags": state.bridge_trackers.record.state_dict(),
            "evaluated": dict(state.bridge_trackers.evaluated),
        }

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Continue a checkpoint's interval; of older checkpoints, which hold their own sums, only a counter is used."""
        older = state_dict.get("totals", {}).get("nan iterations", 0)
        self._num_nan = int(state_dict.get("num_nan", older))
        self._state.interval.num_samples = state_dict["samples"]
        self._seconds_before = state_dict["interval_runtime"]
        self._state.bridge_trackers.record.load_state_dict(state_dict.get("tags", {}))
        self._state.bridge_trackers.evaluated = dict(state_dict.get("evaluated", {}))

    def _values(self, step: Step, is_logged: bool) -> StepValues:
        """The values that the step reports. Collective with `logger.log_params_norm`."""
        scaler = self._state.loss_scaler(self.host.optimizer)
        return StepValues(
            losses=step.loss_dict,
            learning_rate=learning_rate(self.host.optimizer),
            decoupled_learning_rate=decoupled_learning_rate(self.host.optimizer),
            loss_scale=1.0 if scaler is None else scaler.scale,
            grad_norm=step.grad_norm,
            num_zeros=whole(step.num_zeros),
            params_norm=self._params_norm(is_logged),
            max_attention_logit=step.max_attention_logit,
        )

    def _info(self, values: StepValues) -> IntervalValues:
        """The console line's values, from the single device read that the record shares."""
        unread = {**values.shown, "num_nan": self._num_nan}
        report = self.host.accumulator.read(experts=interval_losses(self._state.features.find(Experts)), last=unread)
        assert report is not None
        shown, experts = report.extras["last"], report.extras["experts"]
        losses = report.applied
        if losses:
            losses = losses | {name: loss for name, loss in experts.items() if name.endswith("loss")}
        return IntervalValues(values.learning_rate, losses, shown, report.num_skipped, int(shown.pop("num_nan")))

    def _params_norm(self, is_logged: bool) -> Tensor | None:
        """The L2 norm of all parameters, if configured and about to be reported. Collective for sharded parameters."""
        options = self._state.cfg.logger
        if not options.log_params_norm:
            return None
        is_written = self._writes and is_due(self._state.train_state.step, options.tensorboard_log_interval)
        if not (is_written or is_logged):
            return None
        groups = groups_within_models(self._state.world)
        return unread_params_l2_norm(self.host.model, self._state.cfg.model, pg_collection=groups)
