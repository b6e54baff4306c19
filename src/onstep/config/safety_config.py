"""The parts of a configuration that say what becomes of checkpoints, anomalies and suspicious results."""

from __future__ import annotations

from dataclasses import dataclass, field

from onstep.config.part import ConfigPart


@dataclass
class CheckpointConfig(ConfigPart):
    """When checkpoints are saved, what they hold, which are kept, and how a run continues from them."""

    save: str | None = None
    """Folder of the checkpoints; None is `<run>/checkpoints`, and no checkpoints where the run has no folder."""
    save_interval: int | None = None
    """Steps between checkpoints; None saves at the end, on request and on signals only."""
    save_each_epoch: bool = False
    """Save at the end of each epoch."""
    save_on_best: bool = False
    """Save when an evaluation gives the best `validation.metric_for_best_model` so far."""
    save_at_end: bool = True
    """Save after the last step, so that the run can be extended."""
    non_persistent_save_interval: int | None = None
    """Steps between checkpoints of which only the newest is kept."""
    async_save: bool = False
    """Write in a thread: training waits only while the tensors are copied."""
    save_optim: bool = True
    """Save the optimizer and the scheduler."""
    save_rng: bool = True
    """Save the random generators."""
    components: list[str] | None = None
    """Save only these: model, optimizer, scheduler, trainer, dataset, rng, callbacks; None is all."""
    on_save_error: str = "stop"
    """What a save that fails does: stop (training ends with the error) | continue (a warning; the last one stays)."""
    resume: bool = True
    """Continue from the run's newest verified checkpoint."""
    load: str | None = None
    """A checkpoint, or a folder of checkpoints, to start from; None is the run's own."""
    ckpt_step: int | None = None
    """Start from the checkpoint of this step instead of the newest."""
    pretrained_checkpoint: str | None = None
    """Weights that `finetune` starts from: a Hugging Face folder, a run, or a checkpoint."""
    finetune: bool = False
    """Of what `load` names, load the weights alone: steps, optimizer and random state start anew."""
    exit_on_missing_checkpoint: bool = False
    """Refuse to start from nothing where `load` is the folder that the run saves to, and holds no checkpoint yet."""
    load_optim: bool = True
    """Load the optimizer and the scheduler."""
    load_rng: bool = True
    """Load the random generators."""
    on_config_change: str = "error"
    """What a changed configuration does on resume: error | keep (the stored values) | apply (today's values)."""
    most_recent_k: int = -1
    """Checkpoints to keep; -1 keeps all."""
    keep_every_n: int | None = None
    """Keep checkpoints of steps that are a multiple of this, beyond `most_recent_k`."""
    keep_best_n: int = 0
    """Keep the best checkpoints by `validation.metric_for_best_model` (default `loss`), beyond `most_recent_k`."""
    load_best_model_at_end: bool = False
    """Load the weights of the best checkpoint after training; progress stays."""
    validate_replication: bool = False
    """Compare replicated state across ranks at each save."""
    certify: bool = False
    """Extend a hash chain at each step (samples, random state, learning rate, loss, weights), kept in checkpoints."""


@dataclass
class AnomalyConfig(ConfigPart):
    """Spikes of loss or gradient norm, and the limits of what skips and rollbacks may do."""

    on_spike: str = "ignore"
    """What a spike does, before the update: ignore | raise | stop | skip | rollback."""
    spike_metrics: list[str] = field(default_factory=lambda: ["loss", "grad_norm"])
    """What is watched: loss, grad_norm."""
    spike_threshold: float = 10.0
    """How many robust standard deviations (1.4826 times the median absolute deviation) above the median is a spike."""
    spike_window: int = 100
    """Steps that median and deviation are taken over."""
    spike_warmup: int = 20
    """Steps before a spike is looked for."""
    max_skips: int = 100
    """Steps that may be skipped before the run fails."""
    max_rollbacks: int = 3
    """Rollbacks before the run fails."""
    rollback_lr_factor: float = 1.0
    """Multiplies the learning rate at each rollback, from there on."""


@dataclass
class RerunStateMachineConfig(ConfigPart):
    """Recompute suspicious results, in place and after a restart, to tell a fault of the machine from a true value."""

    rerun_mode: str = "disabled"
    """disabled | validate_results | report_determinism_stats"""
    check_for_nan_in_loss: bool = True
    """Validate that losses are finite, where the forward step asks the machine."""
    check_for_spiky_loss: bool = False
    """Validate losses against `spiky_loss_factor`."""
    spiky_loss_factor: float = 10.0
    """A loss above this many times the largest of the first 100 is suspicious."""
    error_injection_rate: int = 0
    """Inject a simulated error at one in this many validations; 0 injects none."""
    error_injection_type: str = "transient_error"
    """correct_result | transient_error | persistent_error"""
