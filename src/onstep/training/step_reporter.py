"""What the loop keeps for `training_log` from step to step, and when it calls it."""

from __future__ import annotations

from collections import deque
from typing import Any

from torch import Tensor, nn

from onstep.metrics.params_l2_norm import unread_params_l2_norm
from onstep.schedules import is_due
from onstep.training.bridge_log import LogContext, report_interval, training_log
from onstep.training.log_step import decoupled_learning_rate, learning_rate
from onstep.training.state import GlobalState
from onstep.training.step import TrainStepResult, loss_dict
from onstep.training.tags import StepValues

REPORTER = "training_log"
"""Name of the reporter among `GlobalState.loop_parts`, which checkpoints save."""


class StepReporter:
    """Hands each step to `training_log`; the interval so far is saved with checkpoints.

    Args:
        state: the run's state.
        model: list of model chunks.
        optimizer: gives learning rate and loss scale.
        writes: whether any rank has a tracker to write to.
    """

    def __init__(self, state: GlobalState, model: list[nn.Module], optimizer: Any, writes: bool = True) -> None:
        self._state, self._model, self._optimizer, self._writes = state, model, optimizer, writes
        self._totals: dict[str, Any] = {}
        # two entries make the shortest window
        self._history: deque[float] = deque(maxlen=max(2, state.cfg.logger.throughput_window_size))
        self._reports_memory = True
        self._pending: TrainStepResult | None = None
        self._last: StepValues | None = None
        self._seconds_before = 0.0

    def begin(self) -> None:
        """Start the clocks, at the step that this process continues from or that the run has gone back to."""
        state = self._state
        self._pending = None
        state.start_step = state.train_state.step
        state.training_start_time = state.clock.wall()
        state.interval_start = state.clock.elapsed() - self._seconds_before
        self._seconds_before = 0.0
        self._history.clear()

    def take_up(self, result: TrainStepResult) -> None:
        """Keep what a step gave, once it is counted, until it is known whether the step is logged."""
        self._pending = result
        if self._state.cfg.logger.log_throughput_to_tensorboard:
            self._history.append(self._state.clock.elapsed())

    def report(self, is_logged: bool) -> None:
        """Call `training_log` for the step that was taken up. All ranks call it.

        Without one, as at the end of an epoch, a logged step reports the interval so far.
        """
        state = self._state
        result, self._pending = self._pending, None
        if result is None:
            if is_logged and self._last is not None:
                context = LogContext(state.cfg, state, self._model, loaded_iteration=state.start_step)
                self._reports_memory = report_interval(context, self._last, self._totals, self._reports_memory)
        else:
            state.is_logged_step = is_logged
            self._reports_memory = self._log(result, is_logged)
            state.is_logged_step = None

    def state_dict(self) -> dict[str, Any]:
        """The sums and counters of the interval, and its seconds so far."""
        state = self._state
        return {
            "totals": dict(self._totals),
            "samples": state.interval_samples,
            "interval_runtime": state.clock.elapsed() - state.interval_start,
            "reports_memory": self._reports_memory,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue the interval of a checkpoint."""
        device = self._state.world.device
        self._totals = {
            name: value.to(device) if isinstance(value, Tensor) else value
            for name, value in state_dict["totals"].items()
        }
        self._state.interval_samples = state_dict["samples"]
        self._seconds_before = state_dict["interval_runtime"]

    def _log(self, result: TrainStepResult, is_logged: bool) -> bool:
        state = self._state
        scaler = state.loss_scaler(self._optimizer)
        values = StepValues(
            losses=result.loss_dict or loss_dict(state.last_step_loss),
            learning_rate=learning_rate(self._optimizer),
            decoupled_learning_rate=decoupled_learning_rate(self._optimizer),
            loss_scale=1.0 if scaler is None else scaler.scale,
            grad_norm=result.grad_norm,
            num_zeros=result.num_zeros_in_grad,
            params_norm=self._params_norm(is_logged),
            max_attention_logit=state.max_attention_logit,
        )
        self._last = values
        return training_log(
            values.losses,
            self._totals,
            values.learning_rate,
            values.decoupled_learning_rate,
            values.loss_scale,
            self._reports_memory,
            result.skipped_iter,
            values.grad_norm,
            values.params_norm,
            values.num_zeros,
            state.cfg,
            state,
            self._history,
            self._model,
            log_max_attention_logit=values.max_attention_logit,
            loaded_iteration=state.start_step,
        )

    def _params_norm(self, is_logged: bool) -> Tensor | None:
        """The L2 norm of all parameters, where it is asked for and will be reported. Collective for sharded ones."""
        options = self._state.cfg.logger
        if not options.log_params_norm:
            return None
        is_written = self._writes and is_due(self._state.train_state.step, options.tensorboard_log_interval)
        if not (is_written or is_logged):
            return None
        return unread_params_l2_norm(self._model, self._state.cfg.model)


def reporter_for(state: GlobalState, model: list[nn.Module], optimizer: Any) -> StepReporter | None:
    """A reporter where any rank has something to report: console lines, tags, times, a memory snapshot. Collective."""
    options = state.cfg.logger
    others = state.prints_console_line or state.cfg.profiling.record_memory_history or options.timing_log_level > 0
    writes, reports = state.world.agree([int(state.trackers.is_wanted), int(others)])
    return StepReporter(state, model, optimizer, bool(writes)) if writes or reports else None
