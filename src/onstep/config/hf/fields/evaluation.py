"""Declares the arguments for evaluations during training."""

from __future__ import annotations

from dataclasses import dataclass, field

from onstep.config.hf.argument import Steps, argument, declares_arguments


@declares_arguments
@dataclass(kw_only=True)
class EvaluationArguments:
    """Evaluations during training."""

    do_eval: bool = False
    """Whether the user's script evaluates; set by any `eval_strategy` but `no`. `train()` and `evaluate()` do not
    read it."""
    eval_strategy: str = argument("no", choices=("no", "steps", "epoch"))
    """no | steps | epoch"""
    eval_steps: Steps | None = argument(None, bound=">= 0")
    """Steps; below 1 it is a share of the run. None is `logging_steps`."""
    eval_delay: Steps = argument(0, bound=">= 0")
    """Steps (epochs with `eval_strategy='epoch'`) before the first evaluation."""
    eval_on_start: bool = False
    eval_on_save: bool = False
    """Evaluate before each checkpoint, so that checkpoints can be compared."""
    per_device_eval_batch_size: int = 8
    max_eval_steps: int = -1
    """Global batches of one evaluation; -1 is the whole set."""
    prediction_loss_only: bool = False
    """Whether evaluations compute the loss only, and keep no outputs."""
    eval_accumulation_steps: int | None = argument(None, bound="> 0")
    """At most so many batches of predictions are on the device; they are moved off it after each one."""
    eval_do_concat_batches: bool = True
    """Join the predictions of all batches; False gives a list with an item for each."""
    eval_use_gather_object: bool = False
    """Predictions and labels that are lists, with an object for each sample, are continued from rank to rank."""
    batch_eval_metrics: bool = False
    """Call `compute_metrics` after every batch, with `compute_result=True` after the last; no predictions are kept."""
    bf16_full_eval: bool = False
    """Cast the weights to bfloat16 for an evaluation outside of training; they are unchanged after it."""
    fp16_full_eval: bool = False
    """The same for float16."""
    include_for_metrics: list[str] = field(default_factory=list)
    """What `compute_metrics` receives besides predictions and labels: inputs | loss."""
    metric_for_best_model: str | None = None
    """The metric that `best_metric`, early stopping and the choice of the best checkpoints follow; None becomes 'loss'
    with `load_best_model_at_end`."""
    greater_is_better: bool | None = None
    """None is False for names that end in `loss` or `perplexity`, else True."""
    best_model_metric: str = "loss"
    """Forgather's name of `metric_for_best_model`, with `preserve_best_model`."""
    best_model_greater_is_better: bool | None = None
    """Forgather's name of `greater_is_better`, with `preserve_best_model`."""
