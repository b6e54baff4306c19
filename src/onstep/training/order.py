"""What happens in one step of training, in order: the moments that callbacks are told of, and the loop's own work.

The documentation shows this table, and a test holds it against a real step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from onstep.training import exits, growth, housekeeping, log_step, reading, step
from onstep.training.actions import run_evaluation
from onstep.training.decisions import agree
from onstep.training.losses import reduce_step
from onstep.training.profiling import handle_profiling_stop


@dataclass(frozen=True)
class Work:
    """Something that the loop does in a step."""

    function: Callable[..., Any]
    """What does it."""
    what: str
    when: str = "always"
    """Configuration keys that decide whether it is done, or when it is."""

    @property
    def name(self) -> str:
        """The function's name, with that of its class."""
        return self.function.__qualname__


STEP_ORDER: tuple[Work | str, ...] = (
    Work(
        housekeeping.Housekeeping.before_step,
        "Profilers go on to the next step; one whose window begins is started",
        "profiling.use_pytorch_profiler, profiling.use_nsys_profiler",
    ),
    Work(
        reading.is_passed_over,
        "A step that is to be skipped is read and counted, and nothing below happens at it but the last row",
        "train.iterations_to_skip",
    ),
    "on_step_begin",
    Work(reading.read_batches, "The step's micro-batches are read"),
    "on_train_step_start",
    Work(step.clear_gradients, "Gradients are cleared, also in the buffers of somebody else's chunks"),
    "on_forward_backward_start",
    "on_forward_backward_end",
    "on_substep_end",
    Work(reduce_step, "Losses and label counts of all micro-batches and ranks are added up"),
    Work(
        step.empty_unused_memory,
        "Unused device memory is given back",
        "train.empty_unused_memory_level from 1 on; 2 does it after the update too",
    ),
    "on_pre_optimizer_step",
    "on_optimizer_step",
    Work(step.schedule_increment, "The schedule moves on by the samples of the step, where the update was applied"),
    "on_train_metrics",
    "on_train_step_end",
    Work(reading.advance, "The step and its samples are counted"),
    "on_step_end",
    Work(agree, "The ranks agree on what was asked for"),
    Work(log_step.log_step, "The steps since the last report are reported", "logger.log_interval"),
    "on_log_step",
    "on_log",
    Work(run_evaluation, "The validation set is evaluated", "validation.eval_interval"),
    "on_eval_start",
    "on_eval_step_start",
    "on_eval_step_end",
    "on_eval_end",
    Work(exits.checkpoint_and_decide_exit, "What is due is saved, and the process leaves if it is to"),
    "on_checkpoint_save_start",
    "on_checkpoint_save",
    Work(housekeeping.maybe_synchronize_training_step, "The host waits for the device", "train.train_sync_interval"),
    Work(
        housekeeping.maybe_report_stragglers,
        "The speed of the ranks is compared",
        "straggler.log_straggler, every logger.log_interval",
    ),
    Work(
        housekeeping.maybe_check_weight_hash_across_dp_replicas,
        "The replicas' weights are compared",
        "train.check_weight_hash_across_dp_replicas_interval; before the first step too",
    ),
    Work(handle_profiling_stop, "A profile whose window is over is written", "profiling.profile_step_end"),
    Work(
        housekeeping.maybe_run_manual_gc,
        "Garbage is collected",
        "train.manual_gc, every train.manual_gc_interval",
    ),
    Work(
        growth.take_up_size,
        "The size of the next step is taken up; where it has grown, a checkpoint is written",
        "train.rampup_batch_size, train.step_batch_size_schedule",
    ),
)
"""One step on which everything is due. A moment is a string; `on_forward_backward_*` come for each micro-batch."""
