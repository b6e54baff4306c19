"""The parts of a run's configuration. Names and defaults are Megatron Bridge's where it has them."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from onstep.config.part import ConfigPart
from onstep.config.reporting import LoggerConfig, ProfilingConfig


@dataclass
class RunConfig(ConfigPart):
    """What a run is called and where it is kept."""

    name: str | None = None
    """Folder of the run below `output_dir`. None keeps no folder; `onstep train` puts the recipe's name here."""
    output_dir: str = "runs"
    """Where run folders are kept."""
    recipe: str | None = None
    """Name of the recipe that this configuration started from."""
    fresh: bool = False
    """Start a new run `<name>-2` where a run of this name exists."""
    default_callbacks: bool = True
    """Put DefaultMetrics, ProgressCallback and InfoCallback first (`Trainer` and `onstep train`)."""
    save_weights: bool = True
    """Write the final weights to `<run>/model` as safetensors."""


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


@dataclass
class OptimizerConfig(ConfigPart):
    """The optimizer: AdamW (`adam`) or `sgd`."""

    optimizer: str = "adam"
    """adam (AdamW) | sgd"""
    lr: float | None = None
    """Largest learning rate."""
    min_lr: float | None = None
    """Where the schedule ends; None is 0."""
    weight_decay: float = 0.01
    """Decoupled decay of matrices; vectors do not decay."""
    adam_beta1: float = 0.9
    """Decay of the first moment."""
    adam_beta2: float = 0.999
    """Decay of the second moment."""
    adam_eps: float = 1e-8
    """Added to the denominator."""
    sgd_momentum: float = 0.9
    """Momentum of SGD."""
    clip_grad: float | None = 1.0
    """Largest global gradient norm; None or 0 does not clip. The norm is computed either way."""
    loss_scale: float | None = None
    """A constant loss scale for float16; None scales dynamically."""
    initial_loss_scale: float = 2.0**32
    """Where the dynamic loss scale starts."""
    min_loss_scale: float = 1.0
    """Where it ends falling: an overflow there is an anomaly."""
    loss_scale_window: int = 1000
    """Clean steps after which it doubles."""
    hysteresis: int = 2
    """Overflows after which it halves."""


@dataclass
class SchedulerConfig(ConfigPart):
    """Learning rate and weight decay as a function of progress."""

    lr_decay_style: str = "linear"
    """constant | linear | cosine | inverse-square-root | WSD"""
    lr_wsd_decay_style: str = "exponential"
    """linear | cosine | exponential | minus_sqrt"""
    lr_decay_iters: int | None = None
    """Step at which the schedule ends; None is the run's last."""
    lr_decay_samples: int | None = None
    """The same in samples."""
    lr_wsd_decay_iters: int | None = None
    """Length of WSD's last phase in steps."""
    lr_wsd_decay_samples: int | None = None
    """The same in samples."""
    lr_warmup_fraction: float | None = None
    """Warm-up as a share of the schedule."""
    lr_warmup_iters: int = 0
    """Warm-up in steps."""
    lr_warmup_samples: int = 0
    """Warm-up in samples."""
    lr_warmup_init: float = 0.0
    """Learning rate at step 0 of the warm-up."""
    start_weight_decay: float | None = None
    """Weight decay at step 0; None is `optimizer.weight_decay`."""
    end_weight_decay: float | None = None
    """Weight decay at the end; None is `optimizer.weight_decay`."""
    weight_decay_incr_style: str = "constant"
    """constant | linear | cosine"""
    max_steps: int | None = None
    """Build the schedule for a run of this many steps (at least `train_iters`)."""


@dataclass
class ModelConfig(ConfigPart):
    """A decoder-only transformer of the Llama/Qwen2 family. Sizes are in elements."""

    num_layers: int = 4
    """Transformer layers."""
    hidden_size: int = 128
    """Width of the residual stream."""
    ffn_hidden_size: int | None = None
    """Width of the SwiGLU; None is 8/3 of `hidden_size`, rounded up to a multiple of 64."""
    num_attention_heads: int = 4
    """Query heads of a layer."""
    num_query_groups: int | None = None
    """Key/value heads; None is one for each attention head."""
    kv_channels: int | None = None
    """Width of a head; None is `hidden_size / num_attention_heads`."""
    vocab_size: int | None = None
    """None takes the tokenizer's, rounded up to a multiple of `make_vocab_size_divisible_by`."""
    make_vocab_size_divisible_by: int = 1
    """The vocabulary is padded to a multiple of this."""
    seq_length: int = 256
    """Tokens of a training sequence; the same as `dataset.seq_length`."""
    rotary_base: float = 10000.0
    """Base of the rotary frequencies."""
    layernorm_epsilon: float = 1e-5
    """Added under the root of RMSNorm."""
    add_qkv_bias: bool = False
    """Bias of the query, key and value projections (Qwen2)."""
    share_embeddings_and_output_weights: bool = False
    """One matrix for embedding and output."""
    init_method_std: float = 0.02
    """Standard deviation of initial weights."""
    attention_dropout: float = 0.0
    """Dropout of attention weights."""
    hidden_dropout: float = 0.0
    """Dropout of the residual branches."""


@dataclass
class DatasetConfig(ConfigPart):
    """The corpus and how its samples are read."""

    paths: list[str] = field(default_factory=list)
    """Text files, folders, globs or JSONL files; empty is the source of Python's own standard library."""
    text_key: str = "text"
    """The key of a JSONL record that holds the text."""
    split: str = "90,5,5"
    """Shares of train, validation and test."""
    seq_length: int = 256
    cache_dir: str | None = None
    """Where token files are kept; None is `$ONSTEP_CACHE` or the user's cache folder."""
    shuffle: bool = True
    """Shuffle each epoch, by a pure function of seed and epoch."""
    num_workers: int = 2
    """Loader processes; 0 reads in the training process."""
    pin_memory: bool = True
    """Read into pinned memory where there is a GPU."""
    persistent_workers: bool = True
    """Keep loader processes from epoch to epoch."""


@dataclass
class TokenizerConfig(ConfigPart):
    """How text becomes tokens."""

    tokenizer_type: str = "bytes"
    """bytes | tokenizers (a `tokenizer.json`) | huggingface (a local `transformers` tokenizer folder)"""
    tokenizer_model: str | None = None
    """Path of the tokenizer's file or folder."""


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


@dataclass
class DistributedDataParallelConfig(ConfigPart):
    """Plain data parallelism (torch's DistributedDataParallel)."""

    bucket_cap_mb: float = 25.0
    """Size of a gradient bucket in MiB."""
    find_unused_parameters: bool = False
    """Look for parameters that a step did not use."""
    broadcast_buffers: bool = False
    """Send buffers from rank 0 at each forward pass."""
    gradient_as_bucket_view: bool = True
    """Let gradients be views of the buckets."""


@dataclass
class DistributedInitConfig(ConfigPart):
    """The process group."""

    distributed_backend: str | None = None
    """gloo | nccl; None is nccl where every rank has a GPU, else gloo."""
    distributed_timeout_minutes: float = 10.0
    """How long a collective may take."""
    device: str | None = None
    """cpu | cuda | cuda:<n>; None is CUDA where there is one."""


@dataclass
class RNGConfig(ConfigPart):
    """Where randomness starts."""

    seed: int = 1234
    """Seed of weights and dropout."""
    data_seed: int | None = None
    """Order of the samples; None is `seed`."""


@dataclass
class ConfigContainer(ConfigPart):
    """Everything that makes a run. The user may change it until training starts, which validates a deep copy."""

    train: TrainingConfig = field(default_factory=TrainingConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """adam (AdamW) | sgd"""
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    dataset: DatasetConfig = field(default_factory=DatasetConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    profiling: ProfilingConfig = field(default_factory=ProfilingConfig)
    ddp: DistributedDataParallelConfig = field(default_factory=DistributedDataParallelConfig)
    dist: DistributedInitConfig = field(default_factory=DistributedInitConfig)
    rng: RNGConfig = field(default_factory=RNGConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    anomaly: AnomalyConfig = field(default_factory=AnomalyConfig)
    rerun_state_machine: RerunStateMachineConfig = field(default_factory=RerunStateMachineConfig)
    run: RunConfig = field(default_factory=RunConfig)
    mixed_precision: str | None = None
    """None (float32), bf16_mixed or fp16_mixed (autocast over float32 weights; float16 with a loss scale)."""
    env_vars: dict[str, str] = field(default_factory=dict)
    """Environment variables set before anything starts, unless they are set already."""
    trainer: dict[str, Any] = field(default_factory=dict)
    """Fields of `TrainingArguments` that no part above names (`label_names`, `disable_tqdm`, ...), where they differ
    from their default. Only `Trainer` reads them."""

    def to_dict(self) -> dict[str, Any]:
        """Plain nested dictionaries, as they go to YAML."""
        return asdict(self)
