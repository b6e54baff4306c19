"""The parts of a configuration that watch for ranks that hang, die or are slow."""

from __future__ import annotations

from dataclasses import dataclass

from onstep.config.part import ConfigPart


@dataclass
class FaultToleranceConfig(ConfigPart):
    """The watchdog: a rank that stands still or fails ends the whole run, with one report of who was first and
    where."""

    watchdog_seconds: float | None = 1800.0
    """Seconds without any progress of a rank (a moment told, a micro-batch, a part of a save) after which the run is
    ended, with a report of the first culprit; choose more than the longest single operation takes. The set-up is not
    limited by it, but for its callbacks. None watches nothing."""
    calc_ft_timeouts: bool = False
    """Learn the time limits of set-up, steps and saves: five times the longest seen, at least 60 s; kept in
    `ft_state.json` beside the checkpoints."""
    enable_ft_package: bool = False
    """Send heartbeats to the monitor of `nvidia-resiliency-ext` (started by its launcher, `ft_launcher`) instead
    of watching ourselves."""
    simulate_fault: bool = False
    """Make a rank fail, to try all this."""
    simulated_fault_type: str = "random"
    """random | rank_killed (SIGKILL) | rank_hung (SIGSTOP)"""
    simulated_fault_rank: int | None = None
    """The rank that fails; None draws one."""
    simulated_fault_base_delay: float = 0.0
    """Seconds before it fails, drawn between this and 1.2 times this."""


@dataclass
class StragglerDetectionConfig(ConfigPart):
    """Which rank is slow, and in what: data, computation or communication."""

    log_straggler: bool = False
    """Compare the ranks every `logger.log_interval` steps."""
    straggler_minmax_count: int = 1
    """Above 1, how many of the slowest and fastest ranks to list."""
    straggler_ctrlr_port: int = 65535
    """Port on rank 0's loopback where a request switches the detection on and off; opened only with `open_port`."""
    open_port: bool = False
    """Listen on that port."""
    disable_straggler_on_startup: bool = False
    """Wait for that request before anything is measured."""
    threshold: float = 0.7
    """A rank is slow whose speed, by its own data and computation, is below this share of the median rank's."""
    stop_if_detected: bool = False
    """Save and leave when a rank is slow."""


@dataclass
class NVRxStragglerDetectionConfig(ConfigPart):
    """The detection of `nvidia-resiliency-ext`, where it is installed."""

    enabled: bool = False
    """Use it."""
    report_time_interval: float = 300.0
    """Seconds between reports."""
    calc_relative_gpu_perf: bool = True
    """Compare each GPU with the others."""
    calc_individual_gpu_perf: bool = True
    """Compare each GPU with its own past."""
    num_gpu_perf_scores_to_print: int = 5
    """Best and worst scores to print; 0 prints none."""
    gpu_relative_perf_threshold: float = 0.7
    """A GPU below this share of the fastest is slow."""
    gpu_individual_perf_threshold: float = 0.7
    """A GPU below this share of its own best is slow."""
    stop_if_detected: bool = False
    """Save and leave when a GPU is slow."""
    enable_logging: bool = True
    """Print scores, and hand them to the trackers."""
    profiling_interval: int = 1
    """Steps between measurements."""


@dataclass
class PeftConfig(ConfigPart):
    """Fine-tuning of a few added weights, by the `peft` library."""

    peft_scheme: str | None = None
    """lora; None trains all weights."""
    dim: int = 16
    """Rank of the added matrices."""
    alpha: float = 32.0
    """Their sum is scaled by `alpha / dim`."""
    dropout: float = 0.0
    """Dropout before them."""
    target_modules: list[str] | None = None
    """Ends of the names of the layers that get them; None is every projection of attention and feed-forward block."""
