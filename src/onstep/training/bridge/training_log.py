"""Megatron Bridge's `training_log`: interval sums, tags for the trackers, and the console lines."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from onstep.config import ConfigContainer
from onstep.metrics.memory import report_memory, save_memory_snapshot
from onstep.metrics.memory_estimate import report_theoretical_memory
from onstep.metrics.parameter_norms import report_l2_norm_grad
from onstep.metrics.reductions import reduce_max_memory_across_pp_group
from onstep.metrics.throughput import report_runtime, report_throughput
from onstep.schedules import is_due
from onstep.training.bridge.console_line import LineFacts, console_line, memory_line, step_time_line
from onstep.training.bridge.global_state import GlobalState
from onstep.training.interval import read_together
from onstep.training.interval_time import print_timers
from onstep.training.moe_log import add_experts, step_losses
from onstep.training.seams import Loggers
from onstep.training.step_size import describing_config, flops_of_samples, step_batch_size
from onstep.training.tags import GpuEnergy, Point, StepValues, interval_points, report_points, step_points, write_points
from onstep.training.timers import INTERVAL_TIME

ADVANCED, SKIPPED, NAN = COUNTERS = ("advanced iterations", "skipped iterations", "nan iterations")
"""Keys of `total_loss_dict` that are no losses: steps of the interval that updated the weights, those that did not, and
those of the latter whose loss was not finite."""


@dataclass(frozen=True)
class LogContext:
    """What `training_log` is told of the run, the same at each of its steps."""

    config: ConfigContainer
    state: GlobalState
    model: list[nn.Module]
    pg_collection: Any = None
    loaded_iteration: int = 0
    seq_length: int | None = None

    @property
    def loggers(self) -> Loggers:
        """Who gets the tags on this rank, by name; the loop has opened them, another caller gets them opened here."""
        trackers, progress = self.state.trackers, self.state.train_state
        trackers.open(progress.step, progress.consumed_train_samples, adds_only=True)
        return trackers.takers


def training_log(
    loss_dict: Mapping[str, Tensor],
    total_loss_dict: dict[str, Any],
    learning_rate: float | None,
    decoupled_learning_rate: float | None,
    loss_scale: float,
    report_memory_flag: bool,
    skipped_iter: int,
    grad_norm: Tensor | float | None,
    params_norm: Tensor | float | None,
    num_zeros_in_grad: Tensor | int | None,
    config: ConfigContainer,
    global_state: GlobalState,
    history_wct: Sequence[float],
    model: list[nn.Module],
    *,
    pg_collection: Any = None,
    log_max_attention_logit: Tensor | float | None = None,
    loaded_iteration: int = 0,
    seq_length: int | None = None,
) -> bool:
    """Take up the step that was just counted, and report it where that is due. All ranks call it after each step.

    At every `logger.tensorboard_log_interval`-th step the trackers get its tags (`onstep.training.tags`), with values
    on the device handed over unread. At every `logger.log_interval`-th step the console gets Megatron Bridge's lines,
    for which the device is read, and the interval begins anew. Collective where `pg_collection` has several pipeline
    stages, and with gradient norms of sharded parameters.

    Args:
        loss_dict: losses of the step, reduced over the ranks.
        total_loss_dict: sums and counters of the interval, changed in place; an empty dictionary at first.
        learning_rate: the rate of the next step.
        decoupled_learning_rate: that of the embedding and output layer, where they have their own.
        loss_scale: what the loss is multiplied by; 1 without a loss scaler.
        report_memory_flag: what the last call returned; True at first.
        skipped_iter: 1 where the update was not applied.
        grad_norm: L2 norm of the gradients before clipping.
        params_norm: L2 norm of all parameters.
        num_zeros_in_grad: zeros among the gradients.
        config: the run's configuration.
        global_state: the run's progress, clock and loggers.
        history_wct: seconds at the end of each of the latest `logger.throughput_window_size` steps.
        model: list of model chunks; a model that carries its configuration gives the FLOPs.
        pg_collection: process groups; memory reports are reduced over its `pp`. None is data parallelism alone.
        log_max_attention_logit: largest attention logit of the step.
        loaded_iteration: step that this process continued from.
        seq_length: tokens of a sequence, where they are not the configuration's.

    Returns:
        Whether the next logged step reports the memory again.
    """
    run = LogContext(config, global_state, model, pg_collection, loaded_iteration, seq_length)
    values = StepValues(
        losses=loss_dict,
        learning_rate=learning_rate,
        decoupled_learning_rate=decoupled_learning_rate,
        loss_scale=loss_scale,
        grad_norm=grad_norm,
        num_zeros=whole(num_zeros_in_grad),
        params_norm=params_norm,
        max_attention_logit=log_max_attention_logit,
    )
    add_to_interval(loss_dict, total_loss_dict, skipped_iter)
    if not skipped_iter:
        add_experts(step_losses(global_state.experts, config, model), total_loss_dict)
    report_step(run, values, history_wct)
    if not is_due(global_state.train_state.step, config.logger.log_interval):
        return report_memory_flag
    num_steps = total_loss_dict[ADVANCED] + total_loss_dict[SKIPPED]
    facts = partial(facts_of_totals, run, values, total_loss_dict)
    return report_interval(run, num_steps, facts, report_memory_flag, total_loss_dict)


def report_step(run: LogContext, values: StepValues | Callable[[], StepValues], history_wct: Sequence[float]) -> None:
    """Count the samples of a step, take a memory snapshot and hand its tags to the trackers, where that is due.

    Args:
        values: made only where they are written. Collective with `logger.log_params_norm`.
    """
    options, state = run.config.logger, run.state
    state.sums.interval_samples += step_batch_size(run.config, state)
    save_memory_snapshot(run.config.profiling, state.train_state.step)
    if options.skip_train_metrics_log:
        return
    points: list[Point] = []
    if is_due(state.train_state.step, options.tensorboard_log_interval):
        points += tags_of_step(run, values() if callable(values) else values, history_wct)
    if state.experts is not None and run.loggers:
        points += report_points(step_losses(state.experts, run.config, run.model))
    if points:
        write_points(run.loggers, points, state.train_state.step, state.train_state.consumed_train_samples)


def add_to_interval(loss_dict: Mapping[str, Tensor], total_loss_dict: dict[str, Any], skipped_iter: int) -> None:
    """Add a step to the sums of the interval, without reading the device.

    The losses of a skipped step are not added; a NaN or infinite one among them counts it as a nan iteration.
    """
    for counter in COUNTERS:
        total_loss_dict.setdefault(counter, 0)
    total_loss_dict[SKIPPED if skipped_iter else ADVANCED] += 1
    if not skipped_iter:
        for name, loss in loss_dict.items():
            if name in total_loss_dict:
                total_loss_dict[name].add_(loss.detach().reshape(1))
            else:  # a copy: the loss itself may still wait for a tracker
                total_loss_dict[name] = loss.detach().to(torch.float64, copy=True).reshape(1)
    else:
        total_loss_dict[NAN] = total_loss_dict[NAN] + is_nan(loss_dict)


def is_nan(loss_dict: Mapping[str, Tensor]) -> Tensor | int:
    """1 where a loss of a skipped step is not finite, unread, else 0."""
    if not loss_dict:
        return 0
    sums = torch.stack([loss.detach().double().sum() for loss in loss_dict.values()])
    return sums.isfinite().all().logical_not().int()


def tags_of_step(run: LogContext, values: StepValues, history_wct: Sequence[float]) -> list[Point]:
    """A step's tags, where there is somebody to take them. Collective where the reports are."""
    reports = step_reports(run, history_wct)
    if not run.loggers:
        return []
    state = run.state
    batch_size = step_batch_size(run.config, state)
    return report_points(*reports) + step_points(
        values, state.train_state, batch_size, state.world.size, run.config.logger
    )


def step_reports(run: LogContext, history_wct: Sequence[float]) -> list[Mapping[str, Any]]:
    """The reports that the configuration asks for, by tag.

    Collective: the timers, the memory over pipeline stages, the gradients of sharded parameters; the others only where
    there are trackers.
    """
    options, state, progress = run.config.logger, run.state, run.state.train_state
    timers = timer_report(run)
    memory: dict[str, Any] = {}
    gradients: dict[str, float] = {}
    if options.log_memory_to_tensorboard:
        stages = getattr(run.pg_collection, "pp", None)
        report = reduce_max_memory_across_pp_group(report_memory(options.memory_keys), stages)
        memory = {f"memory/{name}": value for name, value in report.items()}
    if options.log_l2_norm_grad_to_tensorboard:
        gradients = report_l2_norm_grad(run.model)
    if not run.loggers:
        return []
    throughput: dict[str, float] = {}
    runtime: dict[str, float] = {}
    length = run.seq_length or run.config.dataset.seq_length
    if options.log_throughput_to_tensorboard:
        throughput = report_throughput(
            run.config.train,
            progress.step,
            length,
            history_wct,
            options.throughput_window_size,
            batch_size=step_batch_size(run.config, state),
            world_size=state.world.size,
        )
    if options.log_runtime_to_tensorboard:
        runtime = report_runtime(
            progress,
            state.sums.training_start_time,
            length,
            state.train_iters or 0,
            options.runtime_time_unit,
            start_step=state.sums.start_step,
            now=state.clock.wall(),
        )
    return [timers, throughput, memory, runtime, gradients]


def timer_report(run: LogContext) -> dict[str, float]:
    """Seconds of a step by `<timer>-time`, of the slowest rank; every tracker gets the same. Collective."""
    options, state = run.config.logger, run.state
    if not options.log_timers_to_tensorboard:
        return {}
    steps = min(options.tensorboard_log_interval, state.train_state.step - state.sums.start_step)
    return state.timers.maxima(state.timers.names(), normalizer=max(1, steps))


def report_interval(
    run: LogContext,
    num_steps: int,
    facts: Callable[[], LineFacts],
    report_memory_flag: bool,
    total_loss_dict: dict[str, Any],
) -> bool:
    """Report the steps since the last report, and begin the next interval; nothing where there was no step.

    Args:
        facts: reads what the console line says, called where it is printed.
        total_loss_dict: sums and counters, zeroed when this returns.

    Returns:
        Whether the next one reports the memory again.
    """
    state, options = run.state, run.config.logger
    if num_steps == 0:
        return report_memory_flag
    prints = state.door.prints_console_line and not options.skip_train_metrics_log
    shown = facts() if prints and state.is_last_rank else None
    seconds = (state.clock.elapsed() - state.sums.interval_start) / num_steps
    teraflops = teraflops_per_device(run, seconds * num_steps)
    energy = energy_per_gpu(state, num_steps, seconds)
    begin_interval(total_loss_dict, state)
    if options.skip_train_metrics_log:
        return report_memory_flag
    write_speed(run, teraflops, seconds, energy)
    if prints:
        print_lines(run, shown, seconds, teraflops, energy)
        if report_memory_flag:
            print_memory(run)
            report_memory_flag = state.train_state.step <= run.loaded_iteration + 1
    print_timers(state, state.timers.names(), normalizer=num_steps)
    return report_memory_flag


def print_lines(
    run: LogContext, facts: LineFacts | None, seconds: float, teraflops: float | None, energy: GpuEnergy | None
) -> None:
    """Print the lines of an interval: of its speed on rank 0, of everything where there are facts."""
    if run.state.world.is_main and teraflops is not None:
        print(step_time_line(seconds, teraflops), flush=True)  # noqa: T201 - Bridge's line
    if facts is not None:
        shown = teraflops if run.config.logger.log_throughput else None
        joules, watts = (None, None) if energy is None else (energy.joules, energy.watts)
        print(console_line(facts, seconds, shown, joules, watts), flush=True)  # noqa: T201 - Bridge's line


def energy_per_gpu(state: GlobalState, num_steps: int, seconds: float) -> GpuEnergy | None:
    """What a GPU takes for a step of `seconds`; None where nobody measures it. Collective where somebody does."""
    monitor = state.energy_monitor
    if monitor is None or not monitor.is_available:
        return None
    joules = monitor.lap() / num_steps / state.world.size
    return GpuEnergy(joules, joules / seconds if seconds > 0 else math.nan)


def teraflops_per_device(run: LogContext, seconds: float) -> float | None:
    """Model TFLOP/s of one device over an interval; None where the FLOPs of the model are not known."""
    flops = flops_of_samples(run.config, run.model, run.state.sums.interval_samples, run.seq_length)
    return flops / seconds / run.state.world.size / 1e12 if flops and seconds > 0 else None


def begin_interval(total_loss_dict: dict[str, Any], state: GlobalState) -> None:
    """Zero the sums and counters, and start the interval's time."""
    for name, value in total_loss_dict.items():
        total_loss_dict[name] = 0 if name in COUNTERS else torch.zeros_like(value)
    state.sums.interval_samples = 0
    state.sums.interval_start = state.clock.elapsed()
    state.timers(INTERVAL_TIME).restart()


def facts_of_totals(run: LogContext, values: StepValues, total_loss_dict: Mapping[str, Any]) -> LineFacts:
    """What the console line shows of the sums that `training_log` was given. Reads the device, once."""
    last = {("last", name): value for name, value in values.shown.items()}
    read = read_together({**total_loss_dict, **last})
    shown = {name: read.pop(("last", name)) for name in values.shown}
    counts = {name: int(read.pop(name)) for name in COUNTERS}
    losses = {name: value / counts[ADVANCED] for name, value in read.items() if counts[ADVANCED]}
    return line_facts(run, values, shown, losses, counts[SKIPPED], counts[NAN])


def line_facts(
    run: LogContext,
    values: StepValues,
    shown: Mapping[str, Any],
    losses: Mapping[str, float],
    num_skipped: int,
    num_nan: int,
) -> LineFacts:
    """What the console line shows of an interval; `shown` are those of the last step, as plain numbers."""
    state, progress = run.state, run.state.train_state
    return LineFacts(
        timestamp=state.clock.wall(),
        step=progress.step,
        train_iters=state.train_iters or 0,
        consumed_samples=progress.consumed_train_samples,
        skipped_samples=progress.skipped_train_samples,
        batch_size=step_batch_size(run.config, state),
        learning_rate=values.learning_rate,
        losses=losses,
        num_skipped=num_skipped,
        num_nan=num_nan,
        **{**shown, "num_zeros": whole(shown["num_zeros"])},
    )


def whole(count: Tensor | float | None) -> Tensor | int | None:
    """A count as a whole number, still on its device."""
    if count is None:
        return None
    return count.detach().to(torch.int64) if isinstance(count, Tensor) else int(count)


def write_speed(run: LogContext, teraflops: float | None, seconds: float, energy: GpuEnergy | None = None) -> None:
    """Hand the interval's speed to the trackers: TFLOP/s of one device, seconds of a step, energy."""
    if not run.loggers:
        return
    options, progress = run.config.logger, run.state.train_state
    points = interval_points(
        teraflops if options.log_throughput_to_tensorboard else None,
        run.state.world.size,
        seconds if options.log_timers_to_tensorboard else None,
        energy,
    )
    write_points(run.loggers, points, progress.step, progress.consumed_train_samples)


def print_memory(run: LogContext) -> None:
    """Print, on rank 0, what training needs in theory and what its GPU holds."""
    state = run.state
    if not state.world.is_main:
        return
    sizes = describing_config(run.config, run.model)
    if sizes is not None and sizes.vocab_size is not None:
        report_theoretical_memory(replace(run.config, model=sizes))
    report = report_memory(run.config.logger.memory_keys)
    if report:
        print(memory_line(state.world.rank, state.train_state.step, report), flush=True)  # noqa: T201 - Bridge's line
