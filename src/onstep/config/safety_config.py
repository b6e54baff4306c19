"""The parts of a configuration about what may go wrong: checkpoints, anomalies, reruns, ranks that hang or are slow."""

from __future__ import annotations

from dataclasses import dataclass

from onstep.config.part import INCOMPATIBLE, SAFE, TRAJECTORY, Bound, ConfigPart, option

_SHARE = Bound("above 0 and below 1: the share of a healthy speed; such as 0.7", lambda share: 0 < share < 1)


@dataclass
class CheckpointConfig(ConfigPart):
    """When checkpoints are saved, what they hold, which are kept, and how a run continues from them."""

    save: str | None = option(None, SAFE)
    """Folder of the checkpoints; None is `<run>/checkpoints`, and no checkpoints where the run has no folder."""
    save_interval: int | None = option(None, SAFE, bound="> 0")
    """Steps between checkpoints; None saves at the end, on request and on signals only."""
    save_each_epoch: bool = option(False, SAFE)
    """Save at the end of each epoch."""
    save_on_best: bool = option(False, SAFE)
    """Save when an evaluation gives the best `validation.metric_for_best_model` so far."""
    save_at_end: bool = option(True, SAFE)
    """Save after the last step, so that the run can be extended."""
    non_persistent_save_interval: int | None = option(None, SAFE, bound="> 0")
    """Steps between checkpoints of which only the newest is kept."""
    async_save: bool = option(False, SAFE)
    """Write in a thread: training waits only while the tensors are copied."""
    save_optim: bool = option(True, SAFE)
    """Save the optimizer and the scheduler."""
    save_rng: bool = option(True, SAFE)
    """Save the random generators."""
    components: list[str] | None = option(None, SAFE)
    """Save only these: model, optimizer, scheduler, trainer, dataset, rng, callbacks; None is all."""
    on_save_error: str = option("stop", SAFE, choices=("stop", "continue"))
    """What a save that fails does: stop (training ends with the error) | continue (a warning; the last one stays)."""
    resume: bool = option(True, SAFE)
    """Continue from the run's newest verified checkpoint."""
    load: str | None = option(None, SAFE)
    """A checkpoint, or a folder of checkpoints, to start from; None is the run's own."""
    ckpt_step: int | None = option(None, SAFE, bound=">= 0")
    """Start from the checkpoint of this step instead of the newest."""
    pretrained_checkpoint: str | None = option(None, TRAJECTORY)
    """Weights that `finetune` starts from: a Hugging Face folder, a run, or a checkpoint."""
    finetune: bool = option(False, TRAJECTORY)
    """Of what `load` names, load the weights alone: steps, optimizer and random state start anew."""
    exit_on_missing_checkpoint: bool = option(False, SAFE)
    """Refuse to start from nothing where `load` is the folder that the run saves to, and holds no checkpoint yet."""
    load_optim: bool = option(True, TRAJECTORY)
    """Load the optimizer and the scheduler."""
    load_rng: bool = option(True, TRAJECTORY)
    """Load the random generators."""
    on_config_change: str = option("error", SAFE, choices=("error", "keep", "apply"))
    """What a changed configuration does on resume: error | keep (the stored values) | apply (today's values)."""
    most_recent_k: int = option(-1, SAFE)
    """Checkpoints to keep; -1 keeps all."""
    keep_every_n: int | None = option(None, SAFE, bound="> 0")
    """Keep checkpoints of steps that are a multiple of this, beyond `most_recent_k`."""
    keep_best_n: int = option(0, SAFE, bound=">= 0")
    """Keep the best checkpoints by `validation.metric_for_best_model` (default `loss`), beyond `most_recent_k`."""
    load_best_model_at_end: bool = option(False, SAFE)
    """Load the weights of the best checkpoint after training; progress stays."""
    validate_replication: bool = option(False, SAFE)
    """Compare replicated state across ranks at each save."""
    certify: bool = option(False, SAFE)
    """Extend a hash chain at each step (samples, random state, learning rate, loss, weights), kept in checkpoints."""


@dataclass
class AnomalyConfig(ConfigPart):
    """Spikes of loss or gradient norm, and the limits of what skips and rollbacks may do."""

    on_spike: str = option("ignore", TRAJECTORY, choices=("ignore", "raise", "stop", "skip", "rollback"))
    """What a spike does, before the update: ignore | raise | stop | skip | rollback."""
    spike_metrics: list[str] = option(["loss", "grad_norm"], TRAJECTORY)
    """What is watched: loss, grad_norm."""
    spike_threshold: float = option(10.0, TRAJECTORY, bound="> 0")
    """How many robust standard deviations (1.4826 times the median absolute deviation) above the median is a spike."""
    spike_window: int = option(100, TRAJECTORY, bound="> 0")
    """Steps that median and deviation are taken over."""
    spike_warmup: int = option(20, TRAJECTORY, bound="> 0")
    """Steps before a spike is looked for."""
    max_skips: int = option(100, SAFE, bound=">= 0")
    """Steps that may be skipped before the run fails."""
    max_rollbacks: int = option(3, SAFE, bound=">= 0")
    """Rollbacks before the run fails."""
    rollback_lr_factor: float = option(1.0, TRAJECTORY, bound="> 0")
    """Multiplies the learning rate at each rollback, from there on."""


@dataclass
class RerunStateMachineConfig(ConfigPart):
    """Recompute suspicious results, in place and after a restart, to tell a fault of the machine from a true value."""

    rerun_mode: str = option("disabled", SAFE, choices=("disabled", "validate_results", "report_determinism_stats"))
    """disabled | validate_results | report_determinism_stats"""
    check_for_nan_in_loss: bool = option(True, SAFE)
    """Validate that losses are finite, where the forward step asks the machine."""
    check_for_spiky_loss: bool = option(False, SAFE)
    """Validate losses against `spiky_loss_factor`."""
    spiky_loss_factor: float = option(10.0, SAFE, bound="> 0")
    """A loss above this many times the largest of the first 100 is suspicious."""
    error_injection_rate: int = option(0, SAFE, bound=">= 0")
    """Inject a simulated error at one in this many validations; 0 injects none."""
    error_injection_type: str = option(
        "transient_error", SAFE, choices=("correct_result", "transient_error", "persistent_error")
    )
    """correct_result | transient_error | persistent_error"""


@dataclass
class FaultToleranceConfig(ConfigPart):
    """The watchdog: a rank that stands still or fails ends the whole run, with one report of who was first and
    where."""

    watchdog_seconds: float | None = option(1800.0, SAFE, bound="> 0")
    """Seconds without any progress of a rank (a moment told, a micro-batch, a part of a save) after which the run is
    ended, with a report of the first culprit; choose more than the longest single operation takes. The set-up is not
    limited by it, but for its callbacks. None watches nothing."""
    calc_ft_timeouts: bool = option(False, SAFE)
    """Learn the time limits of set-up, steps and saves: five times the longest seen, at least 60 s; kept in
    `ft_state.json` beside the checkpoints."""
    enable_ft_package: bool = option(False, SAFE)
    """Send heartbeats to the monitor of `nvidia-resiliency-ext` (started by its launcher, `ft_launcher`) instead
    of watching ourselves."""
    simulate_fault: bool = option(False, SAFE)
    """Make a rank fail, to try all this."""
    simulated_fault_type: str = option("random", SAFE, choices=("random", "rank_killed", "rank_hung"))
    """random | rank_killed (SIGKILL) | rank_hung (SIGSTOP)"""
    simulated_fault_rank: int | None = option(None, SAFE, bound=">= 0")
    """The rank that fails; None draws one."""
    simulated_fault_base_delay: float = option(0.0, SAFE, bound=">= 0")
    """Seconds before it fails, drawn between this and 1.2 times this."""


@dataclass
class StragglerDetectionConfig(ConfigPart):
    """Which rank is slow, and in what: data, computation or communication."""

    log_straggler: bool = option(False, SAFE)
    """Compare the ranks every `logger.log_interval` steps."""
    straggler_minmax_count: int = option(1, SAFE, bound="> 0")
    """Above 1, how many of the slowest and fastest ranks to list."""
    straggler_ctrlr_port: int = option(65535, SAFE, bound="> 0")
    """Port on rank 0's loopback where a request switches the detection on and off; opened only with `open_port`."""
    open_port: bool = option(False, SAFE)
    """Listen on that port."""
    disable_straggler_on_startup: bool = option(False, SAFE)
    """Wait for that request before anything is measured."""
    threshold: float = option(0.7, SAFE, _SHARE)
    """A rank is slow whose speed, by its own data and computation, is below this share of the median rank's."""
    stop_if_detected: bool = option(False, SAFE)
    """Save and leave when a rank is slow."""


@dataclass
class NVRxStragglerDetectionConfig(ConfigPart):
    """The detection of `nvidia-resiliency-ext`, where it is installed."""

    enabled: bool = option(False, SAFE)
    """Use it."""
    report_time_interval: float = option(300.0, SAFE, bound="> 0")
    """Seconds between reports."""
    calc_relative_gpu_perf: bool = option(True, SAFE)
    """Compare each GPU with the others."""
    calc_individual_gpu_perf: bool = option(True, SAFE)
    """Compare each GPU with its own past."""
    num_gpu_perf_scores_to_print: int = option(5, SAFE, bound=">= 0")
    """Best and worst scores to print; 0 prints none."""
    gpu_relative_perf_threshold: float = option(0.7, SAFE, _SHARE)
    """A GPU below this share of the fastest is slow."""
    gpu_individual_perf_threshold: float = option(0.7, SAFE, _SHARE)
    """A GPU below this share of its own best is slow."""
    stop_if_detected: bool = option(False, SAFE)
    """Save and leave when a GPU is slow."""
    enable_logging: bool = option(True, SAFE)
    """Print scores, and hand them to the trackers."""
    profiling_interval: int = option(1, SAFE, bound="> 0")
    """Steps between measurements."""


@dataclass
class PeftConfig(ConfigPart):
    """Fine-tuning of a few added weights, by the `peft` library."""

    peft_scheme: str | None = option(None, INCOMPATIBLE, choices=("lora",))
    """lora; None trains all weights."""
    dim: int = option(16, INCOMPATIBLE, bound="> 0")
    """Rank of the added matrices."""
    alpha: float = option(32.0, TRAJECTORY, bound="> 0")
    """Their sum is scaled by `alpha / dim`."""
    dropout: float = option(0.0, TRAJECTORY, bound="at least 0 and below 1")
    """Dropout before them."""
    target_modules: list[str] | None = option(None, INCOMPATIBLE)
    """Ends of the names of the layers that get them; None is every projection of attention and feed-forward block."""
