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
    rampup_batch_size: list[int] | None = None
    """[start, increment, samples]: the global batch grows from `start` by `increment` up to `global_batch_size` while
    this many samples are consumed. Where it grows, a checkpoint is written."""
    step_batch_size_schedule: str | None = None
    """Global batches by consumed samples, '0:32 100K:64 1M:128' (K, M, B, T); a threshold that ends in `tok` is in
    tokens. Sizes never shrink; the last one is `global_batch_size`."""
    decrease_batch_size_if_needed: bool = False
    """A global batch that is no multiple of micro-batch times ranks is rounded down to one, instead of refused; the
    difference is counted as skipped samples."""
    iterations_to_skip: list[int] = field(default_factory=list)
    """Steps, counted from 1, whose samples are passed over without training on them; they count as consumed and as
    skipped, and nothing else happens at such a step (but a save where the batch grows)."""
    empty_unused_memory_level: int = 0
    """Give a GPU's unused memory back: 0 never, 1 before each update and after each batch of an evaluation, 2 after
    each update too."""
    check_weight_hash_across_dp_replicas_interval: int | None = None
    """Steps between comparisons of the weights of all replicas, by hash, the first one before the first step; None
    compares none. Replicas that differ end the run."""
    train_sync_interval: int | None = None
    """Steps between waits of the host for the GPU; None waits where values are read only."""
    check_optimizer_step_success: bool = True
    """A step counts as skipped on all ranks of the model where one rank's optimizer skipped it."""
    skip_sync_grad_norm_across_mp: bool = False
    """Take the gradient norm as each rank of the model reports it."""
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
    manual_gc_eval: bool = True
    """Collect before an evaluation in the loop, and the youngest objects after it, with `manual_gc`."""


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
