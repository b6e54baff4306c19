"""The parts of a configuration that say how long, in what batches and on how much to train and evaluate."""

from __future__ import annotations

from dataclasses import dataclass, field

from onstep.config.part import ConfigPart


@dataclass
class TrainingConfig(ConfigPart):
    """How long and in what batches to train."""

    micro_batch_size: int | None = None
    """Samples of one forward pass on one rank."""
    global_batch_size: int | None = None
    """Samples of one optimizer step over all ranks; None is one micro-batch on every rank."""
    train_iters: int | None = None
    """Optimizer steps. Exactly one of `train_iters`, `train_samples`, `num_epochs` is set."""
    train_samples: int | None = None
    """The run's length in samples."""
    num_epochs: float | None = None
    """The run's length in passes over the data; a part of one is rounded up to a step."""
    drop_last: bool = True
    """Drop the tail of an epoch that is shorter than one global batch; False trains on it as a smaller step."""
    loss_weighting: str = "auto"
    """How the mean losses of micro-batches are weighted: tokens | samples | microbatches | auto (tokens where labels
    are known, else samples). Losses that come as (sum, count) or take `num_items_in_batch` are exact by themselves."""
    on_nonfinite: str = "raise"
    """What a NaN or infinite loss or gradient norm does, before the update: raise (an error) | stop (a clean end) |
    skip (no update; the samples are remembered and never met again) | rollback (to the last checkpoint, past the
    samples)."""
    exit_interval: int | None = None
    """Save and leave at steps that are a multiple of this; the same command goes on."""
    exit_duration_in_mins: float | None = None
    """Save and leave after this many minutes, by the clock of rank 0; the same command goes on."""
    exit_signal_handler: bool = True
    """Answer `exit_signals` by one checkpoint on all ranks and exit code 75."""
    exit_signals: list[str] = field(default_factory=lambda: ["SIGTERM", "SIGINT", "SIGUSR1"])
    """Names of the signals that mean: save and leave."""
    data_timeout: float | None = None
    """Seconds that a signalled run waits for a training batch before it gives up on it; None waits for the data."""
    manual_gc: bool = False
    """Switch Python's automatic garbage collection off while training, so that ranks collect together."""
    manual_gc_interval: int = 0
    """Steps between collections; 0 never collects."""


@dataclass
class ValidationConfig(ConfigPart):
    """When and on how much to evaluate."""

    eval_iters: int | None = 100
    """Global batches of one evaluation; None is the whole split, 0 no evaluation."""
    eval_interval: int | None = None
    """Steps between evaluations; None evaluates after training only."""
    start_eval_at_iter: int | None = None
    """No evaluation before this step."""
    eval_global_batch_size: int | None = None
    """Samples of one evaluation batch over all ranks; None is the training's."""
    eval_micro_batch_size: int | None = None
    """Samples of one forward pass on one rank; None is the training's."""
    skip_train: bool = False
    """Evaluate only."""
    eval_on_start: bool = False
    """Evaluate before the first step."""
    eval_each_epoch: bool = False
    """Evaluate at the end of each epoch."""
    eval_on_save: bool = False
    """Evaluate before each checkpoint that `checkpoint.save_interval` or `save_each_epoch` writes."""
    metric_for_best_model: str | None = None
    """The metric that `best_metric` follows, early stopping watches and the best checkpoints are chosen by, with or
    without its `eval_` prefix; None is `loss` where checkpoints are chosen."""
    greater_is_better: bool | None = None
    """None is False for names that end in `loss` or `perplexity`, else True."""
    start_eval_at_epoch: float | None = None
    """`eval_each_epoch` starts when this many epochs are done."""
    eval_after_training: bool = True
    """Evaluate after the last step (where it was not evaluated anyway). False with neither `eval_interval` nor
    `eval_each_epoch` is a run without evaluation."""
