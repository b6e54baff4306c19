"""Length of the training, its batches, and its evaluations."""

from __future__ import annotations

from dataclasses import dataclass

from onstep.config.section import EPOCHS, MINUTES, NEW_LENGTH, SAFE, SECONDS, TRAJECTORY, Bound, ConfigSection, option

EVALUATIONS = "evaluations: validation.eval_iters=null or > 0"
VALIDATION_SHARE = "a validation share in dataset.split"
_MEMORY_LEVEL = Bound("0 (never), 1 (before each update) or 2 (before and after it)", lambda level: level in (0, 1, 2))


@dataclass
class TrainingConfig(ConfigSection):
    """The length of the run, its batches, and how it handles signals and memory."""

    micro_batch_size: int | None = option(
        None,
        SAFE,
        bound="> 0",
        hf="per_device_train_batch_size",
        common=True,
        help="Samples of one forward pass on one rank.",
    )
    global_batch_size: int | None = option(
        None,
        TRAJECTORY,
        bound="> 0",
        effect="the position in samples stays; steps count on from where they are",
        known_as=("batch_size", "train_batch_size"),
        common=True,
        help="Samples of one optimizer step over all ranks; None is one micro-batch on every rank.",
    )
    train_iters: int | None = option(
        None,
        TRAJECTORY,
        bound="> 0",
        effect=NEW_LENGTH,
        known_as=("max_steps", "steps", "num_steps", "total_steps", "max_iters", "num_iters", "iterations"),
        common=True,
        help="Length of the run in optimizer steps. Set exactly one of `train_iters`, `train_samples`, `num_epochs`.",
    )
    train_samples: int | None = option(
        None, TRAJECTORY, bound="> 0", effect=NEW_LENGTH, help="Length of the run in samples."
    )
    num_epochs: float | None = option(
        None,
        TRAJECTORY,
        bound=EPOCHS,
        effect=NEW_LENGTH,
        known_as=("epochs", "num_train_epochs", "max_epochs"),
        common=True,
        help="Length of the run in epochs; a fraction of an epoch is rounded up to a step.",
    )
    rampup_batch_size: list[int] | None = option(
        None,
        TRAJECTORY,
        help="[start, increment, samples]: ramp the global batch up from `start` by `increment` to "
        "`global_batch_size` over this many samples. Each increase saves a checkpoint.",
    )
    step_batch_size_schedule: str | None = option(
        None,
        TRAJECTORY,
        help="Global batch sizes by consumed samples, such as '0:32 100K:64 1M:128' (K, M, B, T); a threshold that "
        "ends in `tok` counts tokens. Sizes never shrink; the last one is `global_batch_size`.",
    )
    decrease_batch_size_if_needed: bool = option(
        False,
        TRAJECTORY,
        help="Round a global batch that is not a multiple of micro-batch size times ranks down to one, instead of "
        "refusing it; the difference counts as skipped samples.",
    )
    iterations_to_skip: list[int] = option(
        [],
        TRAJECTORY,
        help="Steps, counted from 1, whose samples are skipped: they count as consumed and as skipped, and nothing "
        "else happens at such a step (except a save when the batch ramps up).",
    )
    empty_unused_memory_level: int = option(
        0,
        SAFE,
        bound=_MEMORY_LEVEL,
        help="When to release a GPU's unused memory: 0 never, 1 before each update and after each evaluation "
        "batch, 2 after each update too.",
    )
    torch_compile: bool = option(
        False,
        SAFE,
        hf="torch_compile",
        help="Run the model as compiled code (`torch.compile`); its weights keep their names.",
    )
    torch_compile_backend: str | None = option(
        None,
        SAFE,
        hf="torch_compile_backend",
        needs="train.torch_compile=true",
        help="Backend of `torch_compile`; None is inductor.",
    )
    torch_compile_mode: str | None = option(
        None,
        SAFE,
        hf="torch_compile_mode",
        choices=("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"),
        needs="train.torch_compile=true",
        help="Mode of `torch_compile`; None is default.",
    )
    deterministic: bool | None = option(
        None,
        TRAJECTORY,
        effect="steps compute with other algorithms from here on, which differ in their last bits",
        known_as=("full_determinism", "use_deterministic_algorithms"),
        help="Compute with deterministic algorithms only, so that a repeated or resumed run has the same bits on a GPU "
        "too; slower there, and an error where torch has no such algorithm. None is true with `checkpoint.certify`.",
    )
    tf32: bool | None = option(
        None,
        SAFE,
        hf="tf32",
        known_as=("float32_matmul_precision", "matmul_precision", "allow_tf32", "enable_tf32"),
        help="Compute products of float32 matrices on a GPU in TensorFloat-32: several times faster, rounded to 10 "
        "bits. False computes them in float32. None leaves torch's setting, which is float32.",
    )
    empty_unused_memory_interval: int | None = option(
        None,
        SAFE,
        bound="> 0",
        hf="torch_empty_cache_steps",
        help="Steps between releases of a GPU's unused memory, before the backward passes of a step; None releases as "
        "`empty_unused_memory_level` says.",
    )
    check_weight_hash_across_dp_replicas_interval: int | None = option(
        None,
        SAFE,
        bound="> 0",
        help="Steps between comparisons of all replicas' weights by hash, the first one before the first step; "
        "None never compares. Replicas that differ end the run.",
    )
    train_sync_interval: int | None = option(
        None,
        SAFE,
        bound="> 0",
        help="Steps between forced waits of the host for the GPU; None waits only where values are read.",
    )
    check_optimizer_step_success: bool = option(
        True, SAFE, help="Count a step as skipped on all ranks of a model when one rank's optimizer skipped it."
    )
    skip_sync_grad_norm_across_mp: bool = option(
        False, SAFE, help="Use the gradient norm that each rank of the model computes, without agreeing on it."
    )
    drop_last: bool = option(
        True,
        TRAJECTORY,
        hf="dataloader_drop_last",
        help="Drop the tail of an epoch that is shorter than one global batch; False trains on it as a smaller step.",
    )
    loss_weighting: str = option(
        "auto",
        TRAJECTORY,
        choices=("auto", "tokens", "samples", "microbatches"),
        help="How the mean losses of micro-batches are weighted: tokens | samples | microbatches | auto (tokens "
        "where labels are known, else samples). Losses given as (sum, count), or computed with "
        "`num_items_in_batch`, are exact already.",
    )
    on_nonfinite: str = option(
        "raise",
        TRAJECTORY,
        choices=("raise", "stop", "skip", "rollback"),
        help="Policy for a NaN or infinite loss or gradient norm, before the update: raise (an error) | stop (a "
        "clean end) | skip (no update; the samples are recorded and never used again) | rollback (to the last "
        "checkpoint, past the samples).",
    )
    exit_interval: int | None = option(
        None,
        SAFE,
        bound="> 0",
        help="Save and exit at steps that are a multiple of this; the same command continues the run.",
    )
    exit_duration_in_mins: float | None = option(
        None,
        SAFE,
        bound=MINUTES,
        help="Save and exit after this many minutes by the clock of rank 0; the same command continues the run.",
    )
    exit_margin_seconds: float | None = option(
        60.0,
        SAFE,
        bound=SECONDS,
        help="In a SLURM job: save and exit with code 75 so early that this many seconds of it are left when "
        "the checkpoint is written, by the longest save and step so far; None waits for a signal.",
    )
    exit_signal_handler: bool = option(
        True, SAFE, help="Handle `exit_signals`: save one checkpoint on all ranks and exit with code 75."
    )
    exit_signals: list[str] = option(
        ["SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2"],
        SAFE,
        needs="train.exit_signal_handler=true",
        help="Names of the signals that ask a run to save and exit.",
    )
    exit_signal: str | int | None = option(
        None,
        SAFE,
        help="Name or number of the only signal that asks a run to save and exit, in place of `exit_signals` (Megatron "
        "Bridge's name).",
    )
    data_timeout: float | None = option(
        None,
        SAFE,
        bound=SECONDS,
        needs="train.exit_signal_handler=true",
        help="Seconds that a run waits for a training batch after a signal before it gives up on it; None waits "
        "for the data.",
    )
    manual_gc: bool = option(
        False,
        SAFE,
        help="Turn Python's automatic garbage collection off during training, so that ranks collect together.",
    )
    manual_gc_interval: int = option(
        0, SAFE, bound=">= 0", needs="train.manual_gc=true", help="Steps between collections; 0 never collects."
    )
    manual_gc_eval: bool = option(
        True,
        SAFE,
        needs="train.manual_gc=true",
        help="With `manual_gc`, collect before each evaluation in the loop, and the youngest objects after it.",
    )


@dataclass
class ValidationConfig(ConfigSection):
    """Schedule and size of evaluations."""

    eval_iters: int | None = option(
        100,
        SAFE,
        bound=">= 0",
        common=True,
        help="Global batches of one evaluation; None is the whole split, 0 disables evaluation.",
    )
    eval_interval: int | None = option(
        None,
        SAFE,
        bound="> 0",
        common=True,
        known_as=("eval_steps", "eval_every"),
        needs=(EVALUATIONS, VALIDATION_SHARE),
        help="Steps between evaluations; None evaluates only after training.",
    )
    start_eval_at_iter: int | None = option(
        None,
        SAFE,
        bound=">= 0",
        needs=(EVALUATIONS, "validation.eval_interval"),
        help="No evaluation before this step.",
    )
    eval_global_batch_size: int | None = option(
        None,
        SAFE,
        bound="> 0",
        needs=EVALUATIONS,
        help="Samples of one evaluation batch over all ranks; None uses the training's.",
    )
    eval_micro_batch_size: int | None = option(
        None,
        SAFE,
        bound="> 0",
        hf="per_device_eval_batch_size",
        help="Samples of one forward pass of evaluation on one rank; None uses the training's.",
    )
    skip_train: bool = option(False, SAFE, help="Evaluate without training.")
    eval_on_start: bool = option(
        False, SAFE, hf="eval_on_start", needs=(EVALUATIONS, VALIDATION_SHARE), help="Evaluate before the first step."
    )
    eval_each_epoch: bool = option(
        False, SAFE, needs=(EVALUATIONS, VALIDATION_SHARE), help="Evaluate at the end of each epoch."
    )
    eval_on_save: bool = option(
        False,
        SAFE,
        hf="eval_on_save",
        needs=VALIDATION_SHARE,
        help="Evaluate before each checkpoint that `checkpoint.save_interval` or `save_each_epoch` writes.",
    )
    metric_for_best_model: str | None = option(
        None,
        TRAJECTORY,
        bound=Bound("the name of a metric, or null", lambda name: bool(name.strip())),
        effect="the current metric is followed from the next evaluation on",
        hf="metric_for_best_model",
        common=True,
        needs=EVALUATIONS,
        help="The metric that `best_metric`, early stopping and the choice of the best checkpoints follow, with or "
        "without its `eval_` prefix; None is `loss` where checkpoints are chosen.",
    )
    greater_is_better: bool | None = option(
        None,
        TRAJECTORY,
        hf="greater_is_better",
        needs=(EVALUATIONS, "validation.metric_for_best_model"),
        help="Whether a higher metric is better; None is False for names that end in `loss` or `perplexity`, else "
        "True.",
    )
    start_eval_at_epoch: float | None = option(
        None,
        SAFE,
        bound=">= 0",
        needs=(EVALUATIONS, "validation.eval_each_epoch=true"),
        help="With `eval_each_epoch`, the epochs to train before the first evaluation.",
    )
    eval_after_training: bool = option(
        True,
        SAFE,
        help="Evaluate after the last step, unless that step was evaluated already. False with neither "
        "`eval_interval` nor `eval_each_epoch` is a run without evaluation.",
    )
