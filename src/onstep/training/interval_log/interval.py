"""Reports a step and an interval with Megatron Bridge's tags and console lines."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from onstep.config import ConfigContainer
from onstep.distributed import groups_within_models
from onstep.metrics.memory.estimate import report_theoretical_memory
from onstep.metrics.memory_peaks import MemoryPeaks
from onstep.metrics.memory_reports import report_memory, save_memory_snapshot
from onstep.metrics.norms.parameter_norms import report_l2_norm_grad
from onstep.metrics.reductions import reduce_max_memory_across_pp_group
from onstep.metrics.throughput import report_runtime, report_throughput
from onstep.training.compute.losses import Scalar
from onstep.training.experts.experts import Experts
from onstep.training.experts.moe_log import step_losses
from onstep.training.feature import is_due
from onstep.training.interval_log.console_line import IntervalValues, console_line
from onstep.training.profiling.instruments import energy_monitor
from onstep.training.protocols import Loggers
from onstep.training.reporting.bridge_tags import STEPS_ONLY, StepValues, step_tags, write_tags
from onstep.training.reporting.timers import INTERVAL_TIME
from onstep.training.run import Run
from onstep.training.stages.step_flops import describing_config, flops_of_samples, step_batch_size


@dataclass(frozen=True)
class LogContext:
    """What the reports of a run need, the same at each of its steps."""

    config: ConfigContainer
    state: Run
    model: list[nn.Module]
    pg_collection: object = None
    loaded_iteration: int = 0
    seq_length: int | None = None

    @property
    def loggers(self) -> Loggers:
        """The recipients of tags on this rank, by name; opened by the loop, or here for another caller."""
        trackers, progress = self.state.bridge_trackers, self.state.train_state
        trackers.open(progress.step, progress.consumed_train_samples, adds_only=True)
        return trackers.recipients


def report_step(run: LogContext, values: Callable[[], StepValues], history_wct: Sequence[float]) -> None:
    """Count the samples of a step, save a memory snapshot and pass its tags to the trackers, as due.

    Args:
        values: called only if they are written. Collective with `logger.log_params_norm`.
    """
    options, state, progress = run.config.logger, run.state, run.state.train_state
    batch_size = step_batch_size(run.config, state)
    state.interval.num_samples += batch_size
    save_memory_snapshot(run.config.profiling, progress.step)
    if options.skip_train_metrics_log:
        return
    tags: dict[str, Scalar] = {}
    curves: dict[str, Scalar] = {}
    if is_due(progress.step, options.tensorboard_log_interval):
        curves = step_tags(values(), progress, batch_size, state.world.size, options)
        tags = step_reports(run, batch_size, history_wct) | curves
    if run.loggers:
        tags |= step_losses(state.features.find(Experts))
        over_samples = [tag for tag in curves if tag not in STEPS_ONLY]
        write_tags(run.loggers, tags, progress.step, progress.consumed_train_samples, over_samples)
        state.bridge_trackers.note_unlogged_tags()


def is_nan(loss_dict: Mapping[str, Tensor]) -> Tensor | int:
    """1 if a loss of a skipped step is not finite (not yet read from the device), else 0."""
    if not loss_dict:
        return 0
    sums = torch.stack([loss.detach().double().sum() for loss in loss_dict.values()])
    return sums.isfinite().all().logical_not().int()


def step_reports(run: LogContext, batch_size: int, history_wct: Sequence[float]) -> dict[str, Scalar]:
    """The configured reports, by tag; empty without a tracker.

    Collective: timers, memory over pipeline stages, gradients of sharded parameters. The others run only with trackers.
    """
    options, state, progress = run.config.logger, run.state, run.state.train_state
    timers: dict[str, float] = {}
    memory: dict[str, float] = {}
    gradients: dict[str, float] = {}
    throughput: dict[str, float] = {}
    runtime: dict[str, float] = {}
    if options.log_timers_to_tensorboard:  # seconds of a step on the slowest rank
        steps = min(options.tensorboard_log_interval, progress.step - state.interval.start_step)
        timers = state.timers.maxima(state.timers.names(), normalizer=max(1, steps))
    if options.log_memory_to_tensorboard:
        stages = getattr(run.pg_collection or groups_within_models(state.world), "pp", None)
        report = reduce_max_memory_across_pp_group(memory_of(run), stages)
        memory = {f"memory/{name}": value for name, value in report.items()}
    if options.log_l2_norm_grad_to_tensorboard:
        gradients = report_l2_norm_grad(run.model)
    if not run.loggers:
        return {}
    length = run.seq_length or run.config.dataset.seq_length
    if options.log_throughput_to_tensorboard:
        throughput = report_throughput(
            run.config.train,
            progress.step,
            length,
            history_wct,
            options.throughput_window_size,
            batch_size=batch_size,
            world_size=state.world.size,
        )
    if options.log_runtime_to_tensorboard:
        runtime = report_runtime(
            progress,
            state.interval.training_start_time or state.start_time,
            length,
            state.train_iters or 0,
            options.runtime_time_unit,
            start_step=state.interval.start_step,
            now=state.clock.wall(),
        )
    return {**timers, **throughput, **memory, **runtime, **gradients}


def report_interval(
    run: LogContext, num_steps: int, info: Callable[[], IntervalValues], report_memory_flag: bool
) -> bool:
    """Report the steps since the last report and begin the next interval; do nothing if there were none.

    Args:
        info: reads the values of the console line; called only if it is printed.

    Returns:
        Whether the next report includes the memory again.
    """
    state, options, progress = run.state, run.config.logger, run.state.train_state
    if num_steps == 0:
        return report_memory_flag
    prints = state.prints_console_line and not options.skip_train_metrics_log
    shown = info() if prints and state.is_last_rank else None
    elapsed = state.clock.elapsed() - state.interval.start
    seconds = elapsed / num_steps
    flops = flops_of_samples(run.config, run.model, state.interval.num_samples, run.seq_length)
    teraflops = flops / elapsed / state.world.size / 1e12 if flops and elapsed > 0 else None
    energy = energy_per_gpu(state, num_steps, seconds)
    state.interval.num_samples, state.interval.start = 0, state.clock.elapsed()
    state.timers(INTERVAL_TIME).restart()
    if options.skip_train_metrics_log:
        return report_memory_flag
    if run.loggers:
        tags = interval_tags(run, seconds, teraflops, energy)
        write_tags(run.loggers, tags, progress.step, progress.consumed_train_samples)
    if prints:
        print_lines(run, shown, seconds, teraflops, energy)
        if report_memory_flag:
            print_memory(run)
            report_memory_flag = progress.step <= run.loaded_iteration + 1
    state.print_timers(state.timers.names(), normalizer=num_steps)
    return report_memory_flag


def print_lines(
    run: LogContext,
    info: IntervalValues | None,
    seconds: float,
    teraflops: float | None,
    energy: tuple[float, float] | None,
) -> None:
    """Print the lines of an interval: its speed on rank 0, the rest if `info` is given."""
    if run.state.world.is_main and teraflops is not None:
        speed = f"Step Time : {seconds:.2f}s GPU utilization: {teraflops:.1f}MODEL_TFLOP/s/GPU"
        print(speed, flush=True)  # noqa: T201 - Bridge's line
    if info is not None:
        batch_size, shown = step_batch_size(run.config, run.state), run.config.logger.log_throughput
        line = console_line(run.state, batch_size, info, seconds, teraflops if shown else None, energy)
        print(line, flush=True)  # noqa: T201 - Bridge's line


def energy_per_gpu(state: Run, num_steps: int, seconds: float) -> tuple[float, float] | None:
    """Joules per step of `seconds` and watts of a GPU; None without a monitor. Collective with one."""
    monitor = energy_monitor(state)
    if monitor is None or not monitor.is_available:
        return None
    joules = monitor.lap() / num_steps / state.world.size
    return joules, joules / seconds if seconds > 0 else math.nan


def interval_tags(
    run: LogContext, seconds: float, teraflops: float | None, energy: tuple[float, float] | None
) -> dict[str, float]:
    """The tags of an interval: TFLOP/s per device and in total, seconds per step, a GPU's joules per step and watts."""
    options, tags = run.config.logger, dict[str, float]()
    if teraflops is not None and options.log_throughput_to_tensorboard:
        tags |= {"throughput/tflops/device": teraflops, "throughput/tflops": teraflops * run.state.world.size}
    if options.log_timers_to_tensorboard:
        tags["iteration-time"] = seconds
    if energy is not None:
        tags["iter-energy/gpu"], tags["power/gpu"] = energy
    return tags


def whole(count: Tensor | float | None) -> Tensor | int | None:
    """A count as an integer, still on its device."""
    if count is None:
        return None
    return count.detach().to(torch.int64) if isinstance(count, Tensor) else int(count)


def memory_of(run: LogContext) -> dict[str, int | float]:
    """The configured statistics of CUDA's allocator, with the peaks of the run."""
    return report_memory(run.config.logger.memory_keys, peaks=run.state.features.room(MemoryPeaks))


def print_memory(run: LogContext) -> None:
    """Print, on rank 0, the memory that training needs in theory and the memory in use on its GPU."""
    state = run.state
    if not state.world.is_main:
        return
    sizes = describing_config(run.config, run.model)
    if sizes is not None and sizes.vocab_size is not None:
        report_theoretical_memory(replace(run.config, model=sizes))
    report = memory_of(run)
    if report:
        held = "".join(f" | {name}: {value}" for name, value in report.items())
        line = f"[Rank {state.world.rank}] (after {state.train_state.step} iterations) memory (GB){held}"
        print(line, flush=True)  # noqa: T201 - Bridge's line
