"""Spikes, and the recomputation of suspicious results."""

from __future__ import annotations

from dataclasses import dataclass

from onstep.config.section import SAFE, TRAJECTORY, ConfigSection, option


@dataclass
class AnomalyConfig(ConfigSection):
    """Spikes of loss or gradient norm, and the limits of what skips and rollbacks may do."""

    on_spike: str = option(
        "ignore",
        TRAJECTORY,
        choices=("ignore", "raise", "stop", "skip", "rollback"),
        help="Policy for a spike, before the update: ignore | raise | stop | skip | rollback.",
    )
    spike_metrics: list[str] = option(
        ["loss", "grad_norm"],
        TRAJECTORY,
        elements=("loss", "grad_norm"),
        needs="anomaly.on_spike other than ignore",
        help="Metrics that are watched for spikes: loss, grad_norm.",
    )
    spike_threshold: float = option(
        10.0,
        TRAJECTORY,
        bound="> 0",
        needs="anomaly.on_spike other than ignore",
        help="Robust standard deviations (1.4826 times the median absolute deviation) above the median from which "
        "a value is a spike.",
    )
    spike_window: int = option(
        100,
        TRAJECTORY,
        bound="> 0",
        needs="anomaly.on_spike other than ignore",
        help="Steps over which median and deviation are computed.",
    )
    spike_warmup: int = option(
        20,
        TRAJECTORY,
        bound="> 0",
        needs="anomaly.on_spike other than ignore",
        help="Steps before spikes are detected.",
    )
    max_skips: int = option(100, SAFE, bound=">= 0", help="Skipped steps after which the run fails.")
    max_rollbacks: int = option(3, SAFE, bound=">= 0", help="Rollbacks after which the run fails.")
    rollback_lr_factor: float = option(
        1.0, TRAJECTORY, bound="> 0", help="Factor on the learning rate from each rollback on."
    )


@dataclass
class RerunStateMachineConfig(ConfigSection):
    """Recompute suspicious results, in place and after a restart, to tell a fault of the machine from a true value."""

    NEEDS = "rerun_state_machine.rerun_mode other than disabled"

    rerun_mode: str = option(
        "disabled",
        SAFE,
        choices=("disabled", "validate_results", "report_determinism_stats"),
        help="Mode: disabled | validate_results | report_determinism_stats.",
    )
    check_for_nan_in_loss: bool = option(
        True, SAFE, help="Check that losses are finite, where the forward step uses the state machine."
    )
    check_for_spiky_loss: bool = option(False, SAFE, help="Check losses against `spiky_loss_factor`.")
    spiky_loss_factor: float = option(
        10.0, SAFE, bound="> 0", help="A loss above this multiple of the largest of the first 100 is suspicious."
    )
    error_injection_rate: int = option(
        0, SAFE, bound=">= 0", help="Inject a simulated error in one of this many checks; 0 injects none."
    )
    error_injection_type: str = option(
        "transient_error",
        SAFE,
        choices=("correct_result", "transient_error", "persistent_error"),
        help="Kind of simulated error: correct_result | transient_error | persistent_error.",
    )
