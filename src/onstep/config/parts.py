"""A run's configuration and its parts. Names and defaults are Megatron Bridge's where it has them."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from onstep.config.model_config import ModelConfig, OptimizerConfig, SchedulerConfig
from onstep.config.part import INCOMPATIBLE, SAFE, TRAJECTORY, Bound, ConfigPart, option
from onstep.config.reporting import LoggerConfig, ProfilingConfig
from onstep.config.safety_config import (
    AnomalyConfig,
    CheckpointConfig,
    FaultToleranceConfig,
    NVRxStragglerDetectionConfig,
    PeftConfig,
    RerunStateMachineConfig,
    StragglerDetectionConfig,
)

__all__ = [
    "AnomalyConfig",
    "CheckpointConfig",
    "ConfigContainer",
    "DatasetConfig",
    "DistributedDataParallelConfig",
    "DistributedInitConfig",
    "FaultToleranceConfig",
    "LoggerConfig",
    "ModelConfig",
    "NVRxStragglerDetectionConfig",
    "OptimizerConfig",
    "PeftConfig",
    "ProfilingConfig",
    "RNGConfig",
    "RerunStateMachineConfig",
    "RunConfig",
    "SchedulerConfig",
    "StragglerDetectionConfig",
    "TokenizerConfig",
    "TrainingConfig",
    "ValidationConfig",
]

_MEMORY_LEVEL = Bound("0 (never), 1 (before each update) or 2 (before and after it)", lambda level: level in (0, 1, 2))


@dataclass
class TrainingConfig(ConfigPart):
    """How long and in what batches to train."""

    micro_batch_size: int | None = option(None, SAFE, bound="> 0")
    """Samples of one forward pass on one rank."""
    global_batch_size: int | None = option(None, TRAJECTORY, bound="> 0")
    """Samples of one optimizer step over all ranks; None is one micro-batch on every rank."""
    train_iters: int | None = option(None, TRAJECTORY, bound="> 0")
    """Optimizer steps. Exactly one of `train_iters`, `train_samples`, `num_epochs` is set."""
    train_samples: int | None = option(None, TRAJECTORY, bound="> 0")
    """The run's length in samples."""
    num_epochs: float | None = option(None, TRAJECTORY, bound="> 0")
    """The run's length in passes over the data; a part of one is rounded up to a step."""
    rampup_batch_size: list[int] | None = option(None, TRAJECTORY)
    """[start, increment, samples]: the global batch grows from `start` by `increment` up to `global_batch_size` while
    this many samples are consumed. Where it grows, a checkpoint is written."""
    step_batch_size_schedule: str | None = option(None, TRAJECTORY)
    """Global batches by consumed samples, '0:32 100K:64 1M:128' (K, M, B, T); a threshold that ends in `tok` is in
    tokens. Sizes never shrink; the last one is `global_batch_size`."""
    decrease_batch_size_if_needed: bool = option(False, TRAJECTORY)
    """A global batch that is no multiple of micro-batch times ranks is rounded down to one, instead of refused; the
    difference is counted as skipped samples."""
    iterations_to_skip: list[int] = option([], TRAJECTORY)
    """Steps, counted from 1, whose samples are passed over without training on them; they count as consumed and as
    skipped, and nothing else happens at such a step (but a save where the batch grows)."""
    empty_unused_memory_level: int = option(0, SAFE, _MEMORY_LEVEL)
    """Give a GPU's unused memory back: 0 never, 1 before each update and after each batch of an evaluation, 2 after
    each update too."""
    check_weight_hash_across_dp_replicas_interval: int | None = option(None, SAFE, bound="> 0")
    """Steps between comparisons of the weights of all replicas, by hash, the first one before the first step; None
    compares none. Replicas that differ end the run."""
    train_sync_interval: int | None = option(None, SAFE, bound="> 0")
    """Steps between waits of the host for the GPU; None waits where values are read only."""
    check_optimizer_step_success: bool = option(True, SAFE)
    """A step counts as skipped on all ranks of the model where one rank's optimizer skipped it."""
    skip_sync_grad_norm_across_mp: bool = option(False, SAFE)
    """Take the gradient norm as each rank of the model reports it."""
    drop_last: bool = option(True, TRAJECTORY)
    """Drop the tail of an epoch that is shorter than one global batch; False trains on it as a smaller step."""
    loss_weighting: str = option("auto", TRAJECTORY, choices=("auto", "tokens", "samples", "microbatches"))
    """How the mean losses of micro-batches are weighted: tokens | samples | microbatches | auto (tokens where labels
    are known, else samples). Losses that come as (sum, count) or take `num_items_in_batch` are exact by themselves."""
    on_nonfinite: str = option("raise", TRAJECTORY, choices=("raise", "stop", "skip", "rollback"))
    """What a NaN or infinite loss or gradient norm does, before the update: raise (an error) | stop (a clean end) |
    skip (no update; the samples are remembered and never met again) | rollback (to the last checkpoint, past the
    samples)."""
    exit_interval: int | None = option(None, SAFE, bound="> 0")
    """Save and leave at steps that are a multiple of this; the same command goes on."""
    exit_duration_in_mins: float | None = option(None, SAFE, bound="> 0")
    """Save and leave after this many minutes, by the clock of rank 0; the same command goes on."""
    exit_signal_handler: bool = option(True, SAFE)
    """Answer `exit_signals` by one checkpoint on all ranks and exit code 75."""
    exit_signals: list[str] = option(["SIGTERM", "SIGINT", "SIGUSR1"], SAFE)
    """Names of the signals that mean: save and leave."""
    data_timeout: float | None = option(None, SAFE, bound="> 0")
    """Seconds that a signalled run waits for a training batch before it gives up on it; None waits for the data."""
    manual_gc: bool = option(False, SAFE)
    """Switch Python's automatic garbage collection off while training, so that ranks collect together."""
    manual_gc_interval: int = option(0, SAFE, bound=">= 0")
    """Steps between collections; 0 never collects."""
    manual_gc_eval: bool = option(True, SAFE)
    """Collect before an evaluation in the loop, and the youngest objects after it, with `manual_gc`."""


@dataclass
class ValidationConfig(ConfigPart):
    """When and on how much to evaluate."""

    eval_iters: int | None = option(100, SAFE, bound=">= 0")
    """Global batches of one evaluation; None is the whole split, 0 no evaluation."""
    eval_interval: int | None = option(None, SAFE, bound="> 0")
    """Steps between evaluations; None evaluates after training only."""
    start_eval_at_iter: int | None = option(None, SAFE, bound=">= 0")
    """No evaluation before this step."""
    eval_global_batch_size: int | None = option(None, SAFE, bound="> 0")
    """Samples of one evaluation batch over all ranks; None is the training's."""
    eval_micro_batch_size: int | None = option(None, SAFE, bound="> 0")
    """Samples of one forward pass on one rank; None is the training's."""
    skip_train: bool = option(False, SAFE)
    """Evaluate only."""
    eval_on_start: bool = option(False, SAFE)
    """Evaluate before the first step."""
    eval_each_epoch: bool = option(False, SAFE)
    """Evaluate at the end of each epoch."""
    eval_on_save: bool = option(False, SAFE)
    """Evaluate before each checkpoint that `checkpoint.save_interval` or `save_each_epoch` writes."""
    metric_for_best_model: str | None = option(None, TRAJECTORY)
    """The metric that `best_metric` follows, early stopping watches and the best checkpoints are chosen by, with or
    without its `eval_` prefix; None is `loss` where checkpoints are chosen."""
    greater_is_better: bool | None = option(None, TRAJECTORY)
    """None is False for names that end in `loss` or `perplexity`, else True."""
    start_eval_at_epoch: float | None = option(None, SAFE, bound=">= 0")
    """`eval_each_epoch` starts when this many epochs are done."""
    eval_after_training: bool = option(True, SAFE)
    """Evaluate after the last step (where it was not evaluated anyway). False with neither `eval_interval` nor
    `eval_each_epoch` is a run without evaluation."""


@dataclass
class DatasetConfig(ConfigPart):
    """The corpus and how its samples are read."""

    kind: str = option("text", TRAJECTORY, choices=("text", "megatron", "huggingface", "chat"))
    """text (cut into sequences) | megatron (`.bin` and `.idx` files) | huggingface (a dataset of the `datasets`
    library) | chat (prompts and answers, with a loss on the answers)"""
    paths: list[str] = option([], TRAJECTORY)
    """Of `text`: files, folders, globs or JSONL files; empty is the source of Python's own standard library. Of
    `megatron`: prefixes of pairs of `.bin` and `.idx` files. Of `huggingface`: folders of `save_to_disk`, json,
    parquet, arrow or csv files, folders or globs of such, or names on the hub. Of `chat`: JSONL files or folders of
    them, or what `huggingface` takes."""
    text_key: str = option("text", TRAJECTORY)
    """The key of a JSONL record, or the column of a Hugging Face dataset, that holds the text."""
    weights: list[float] | None = option(None, TRAJECTORY)
    """Share of each path in a blend of Megatron's files, divided by their sum; an epoch then is as long as it takes to
    meet every sample once, and smaller files come again. None is by their sizes: each sample once."""
    hf_subset: str | None = option(None, TRAJECTORY)
    """Configuration of a dataset on the hub."""
    hf_split: str = option("train", TRAJECTORY)
    """Split of a Hugging Face dataset that is trained on. Its own validation and test splits are taken where it has
    them and `split` has a share for them; for what it has not, `split` divides this one."""
    messages_key: str = option("messages", TRAJECTORY)
    """The key of a chat record that holds its messages, each with `role` and `content`; those of the role `assistant`
    are trained on."""
    prompt_key: str = option("prompt", TRAJECTORY)
    """The key of a prompt, in records without messages."""
    response_key: str = option("response", TRAJECTORY)
    """The key of its answer."""
    packing: bool = option(True, TRAJECTORY)
    """Put several conversations into one sequence, with attention within each; False pads each to its own sequence."""
    eod_mask_loss: bool = option(False, TRAJECTORY)
    """No loss at the token that ends a document, where the label is the first token of the next one. (The end token
    itself is learned as a label all the same.)"""
    reset_attention_mask: bool = option(False, TRAJECTORY)
    """Attention within documents only, and positions start again at each; a document reaches to its end token."""
    split: str = option("90,5,5", TRAJECTORY)
    """Shares of train, validation and test: contiguous ranges, of tokens (`text`, `huggingface`), of documents
    (`megatron`) or of conversations (`chat`)."""
    seq_length: int = option(256, TRAJECTORY, bound="> 0")
    cache_dir: str | None = option(None, SAFE)
    """Where token files are kept; None is `$ONSTEP_CACHE` or the user's cache folder."""
    shuffle: bool = option(True, TRAJECTORY)
    """Shuffle each epoch, by a pure function of seed and epoch."""
    num_workers: int = option(2, SAFE, bound=">= 0")
    """Loader processes; 0 reads in the training process."""
    pin_memory: bool = option(True, SAFE)
    """Read into pinned memory where there is a GPU."""
    persistent_workers: bool = option(True, SAFE)
    """Keep loader processes from epoch to epoch."""


@dataclass
class TokenizerConfig(ConfigPart):
    """How text becomes tokens."""

    tokenizer_type: str = option("bytes", INCOMPATIBLE, choices=("bytes", "bpe", "tokenizers", "huggingface"))
    """bytes | bpe (learned from the corpus, once, and kept in the run's folder) | tokenizers (a
    `tokenizer.json`) | huggingface (a local `transformers` tokenizer folder)"""
    tokenizer_model: str | None = option(None, TRAJECTORY)
    """Path of the tokenizer's file or folder."""
    vocab_size: int | None = option(None, INCOMPATIBLE, bound="> 0")
    """Tokens that `bpe` learns, the 256 bytes and the end token included; None is 8192."""


@dataclass
class RunConfig(ConfigPart):
    """What a run is called and where it is kept."""

    name: str | None = option(None, SAFE)
    """Folder of the run below `output_dir`. None keeps no folder; `onstep train` puts the recipe's name here."""
    output_dir: str = option("runs", SAFE)
    """Where run folders are kept."""
    recipe: str | None = option(None, SAFE)
    """Name of the recipe that this configuration started from."""
    fresh: bool = option(False, SAFE)
    """Start a new run `<name>-2` where a run of this name exists."""
    default_callbacks: bool = option(True, SAFE)
    """Put DefaultMetrics, ProgressCallback and InfoCallback first (`Trainer` and `onstep train`)."""
    save_weights: bool = option(True, SAFE)
    """Write the final weights to `<run>/model` as safetensors."""


@dataclass
class DistributedDataParallelConfig(ConfigPart):
    """Plain data parallelism (torch's DistributedDataParallel)."""

    bucket_cap_mb: float = option(25.0, SAFE, bound="> 0")
    """Size of a gradient bucket in MiB."""
    find_unused_parameters: bool = option(False, SAFE)
    """Look for parameters that a step did not use."""
    broadcast_buffers: bool = option(False, TRAJECTORY)
    """Send buffers from rank 0 at each forward pass."""
    gradient_as_bucket_view: bool = option(True, SAFE)
    """Let gradients be views of the buckets."""


@dataclass
class DistributedInitConfig(ConfigPart):
    """The process group."""

    distributed_backend: str | None = option(None, SAFE, choices=("gloo", "nccl"))
    """gloo | nccl; None is nccl where every rank has a GPU, else gloo."""
    distributed_timeout_minutes: float = option(10.0, SAFE, bound="> 0")
    """How long a collective may take."""
    device: str | None = option(None, SAFE)
    """cpu | cuda | cuda:<n>; None is CUDA where there is one."""


@dataclass
class RNGConfig(ConfigPart):
    """Where randomness starts."""

    seed: int = option(1234, TRAJECTORY, bound=">= 0")
    """Seed of weights and dropout."""
    data_seed: int | None = option(None, TRAJECTORY, bound=">= 0")
    """Order of the samples; None is `seed`."""


@dataclass
class ConfigContainer(ConfigPart):
    """Everything that makes a run. The user may change it until training starts, which validates a deep copy."""

    train: TrainingConfig = field(default_factory=TrainingConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
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
    ft: FaultToleranceConfig = field(default_factory=FaultToleranceConfig)
    straggler: StragglerDetectionConfig = field(default_factory=StragglerDetectionConfig)
    nvrx_straggler: NVRxStragglerDetectionConfig = field(default_factory=NVRxStragglerDetectionConfig)
    peft: PeftConfig = field(default_factory=PeftConfig)
    run: RunConfig = field(default_factory=RunConfig)
    mixed_precision: str | None = option(None, TRAJECTORY)
    """None (float32), bf16_mixed or fp16_mixed (autocast over float32 weights; float16 with a loss scale)."""
    env_vars: dict[str, str] = option({}, SAFE)
    """Environment variables set before anything starts, unless they are set already."""
    trainer: dict[str, Any] = option({}, SAFE)
    """Fields of `TrainingArguments` that no part above names (`label_names`, `disable_tqdm`, ...), where they differ
    from their default. Only `Trainer` reads them."""

    def to_dict(self) -> dict[str, Any]:
        """Plain nested dictionaries, as they go to YAML."""
        return asdict(self)
