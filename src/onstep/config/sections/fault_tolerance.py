"""Ranks that hang, fail or are slow."""

from __future__ import annotations

from dataclasses import dataclass

from onstep.config.section import SAFE, SECONDS, YEAR_SECONDS, Bound, ConfigSection, option

_SECONDS = Bound(
    f"at least 1 and at most {YEAR_SECONDS:,}, a year: ranks look at each other a few times in it; choose more than "
    "the longest single operation lasts, or null to watch nothing",
    lambda seconds: 1 <= seconds <= YEAR_SECONDS,
)
_DELAY = Bound(f">= 0 and at most {YEAR_SECONDS:,}, a year", lambda seconds: 0 <= seconds <= YEAR_SECONDS)
_PORT = Bound("from 1 to 65535: a free port", lambda port: 1 <= port <= 65535)
_SHARE = Bound("above 0 and below 1: the share of a healthy speed; such as 0.7", lambda share: 0 < share < 1)


@dataclass
class FaultToleranceConfig(ConfigSection):
    """The watchdog: a rank that hangs or fails ends the whole run, with one diagnosis of the rank that was first."""

    watchdog_seconds: float | None = option(
        600.0,
        SAFE,
        bound=_SECONDS,
        help="Seconds without progress of a rank (an event fired, a micro-batch, a component saved) after which "
        "the run is ended with a diagnosis of the rank that stopped first; choose more than the longest "
        "single operation lasts. The first step has one and a half times as long, and ranks that are all in "
        "collectives, where nobody can arrive, a quarter. Set-up is not limited, except for its callbacks. None "
        "disables the watchdog.",
    )
    calc_ft_timeouts: bool = option(
        False,
        SAFE,
        help="Learn the timeouts of set-up, steps and saves: five times the longest seen, at least 60 s; kept in "
        "`ft_state.json` beside the checkpoints.",
    )
    enable_ft_package: bool = option(
        False,
        SAFE,
        help="Send heartbeats to the monitor of `nvidia-resiliency-ext` (started by its launcher, `ft_launcher`) "
        "instead of using the built-in watchdog.",
    )
    simulate_fault: bool = option(False, SAFE, help="Make a rank fail, to test fault tolerance.")
    simulated_fault_type: str = option(
        "random",
        SAFE,
        choices=("random", "rank_killed", "rank_hung"),
        needs="ft.simulate_fault=true",
        help="Kind of simulated fault: random | rank_killed (SIGKILL) | rank_hung (SIGSTOP).",
    )
    simulated_fault_rank: int | None = option(
        None,
        SAFE,
        bound=">= 0",
        needs="ft.simulate_fault=true",
        help="The rank that fails; None chooses one at random.",
    )
    simulated_fault_base_delay: float = option(
        0.0,
        SAFE,
        bound=_DELAY,
        needs="ft.simulate_fault=true",
        help="Least delay in seconds before it fails; the actual delay is random, up to 1.2 times this.",
    )


@dataclass
class StragglerDetectionConfig(ConfigSection):
    """Detection of slow ranks, and of the cause: data, computation or communication."""

    NEEDS = "straggler.log_straggler=true"

    log_straggler: bool = option(False, SAFE, help="Compare the ranks every `logger.log_interval` steps.")
    straggler_minmax_count: int = option(
        1, SAFE, bound="> 0", help="Above 1, the number of slowest and fastest ranks to list."
    )
    straggler_ctrlr_port: int = option(
        65535,
        SAFE,
        bound=_PORT,
        help="Accepted for configurations of Megatron Bridge, without effect: nothing listens there.",
    )
    open_port: bool = option(
        False,
        SAFE,
        help="Accepted for configurations of version 0.4, without effect: `onstep control set log_straggler=0|1` turns "
        "the detection on and off.",
    )
    disable_straggler_on_startup: bool = option(
        False, SAFE, help="Start with detection off, until `onstep control set log_straggler=1` turns it on."
    )
    threshold: float = option(
        0.7,
        SAFE,
        bound=_SHARE,
        help="A rank is slow when its speed, by its own data and computation, is below this fraction of the median "
        "rank's.",
    )
    stop_if_detected: bool = option(False, SAFE, help="Save and exit when a rank is slow.")


@dataclass
class NVRxStragglerDetectionConfig(ConfigSection):
    """The detection of `nvidia-resiliency-ext`, where it is installed."""

    NEEDS = "nvrx_straggler.enabled=true"

    enabled: bool = option(False, SAFE, help="Use the detection of `nvidia-resiliency-ext`.")
    report_time_interval: float = option(300.0, SAFE, bound=SECONDS, help="Seconds between reports.")
    calc_relative_gpu_perf: bool = option(True, SAFE, help="Compare each GPU with the others.")
    calc_individual_gpu_perf: bool = option(True, SAFE, help="Compare each GPU with its own past.")
    num_gpu_perf_scores_to_print: int = option(
        5, SAFE, bound=">= 0", help="Number of best and worst scores to print; 0 prints none."
    )
    gpu_relative_perf_threshold: float = option(
        0.7, SAFE, bound=_SHARE, help="A GPU is slow below this fraction of the fastest one's speed."
    )
    gpu_individual_perf_threshold: float = option(
        0.7, SAFE, bound=_SHARE, help="A GPU is slow below this fraction of its own best speed."
    )
    stop_if_detected: bool = option(False, SAFE, help="Save and exit when a GPU is slow.")
    enable_logging: bool = option(True, SAFE, help="Print scores, and report them to the trackers.")
    profiling_interval: int = option(1, SAFE, bound="> 0", help="Steps between measurements.")
