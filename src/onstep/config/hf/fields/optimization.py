"""Declares the arguments for optimizer, learning-rate schedule and gradients."""

from __future__ import annotations

from dataclasses import dataclass

from onstep.config.hf.argument import SCHEDULES, Steps, Texts, Values, argument, declares_arguments
from onstep.config.hf.optimizers import OPTIMIZERS


@declares_arguments
@dataclass(kw_only=True)
class OptimizationArguments:
    """Optimizer, learning-rate schedule and gradients."""

    learning_rate: float = argument(5e-5, bound=">= 0")
    lr_scheduler_type: str = argument("linear", choices=SCHEDULES)
    """linear | cosine | cosine_with_restarts | polynomial | constant | constant_with_warmup | inverse_sqrt |
    reduce_lr_on_plateau | cosine_with_min_lr | cosine_warmup_with_min_lr | warmup_stable_decay | greedy"""
    lr_scheduler_kwargs: Values | None = None
    """Its keywords in `transformers.get_scheduler`, such as `num_cycles`."""
    warmup_steps: Steps = argument(0, bound=">= 0")
    """Steps; below 1 it is a share of the run."""
    optim: str = argument("adamw_torch_fused", choices=tuple(OPTIMIZERS))
    """adamw_torch_fused | adamw_torch | sgd | adagrad | rmsprop | adafactor, or a name of transformers for an optimizer
    of a package to install: bitsandbytes, torchao, GaLore, APOLLO, schedulefree, grokadamw, torch-optimi."""
    optim_args: str | None = None
    """Options of the optimizer, as 'momentum=0.9,nesterov=True'."""
    optim_target_modules: Texts = None
    """The linear layers that GaLore and APOLLO project: names, a regular expression, or 'all-linear'."""
    weight_decay: float = 0.0
    adam_beta1: float = argument(0.9)  # these two and data_seed are checked when the run starts
    adam_beta2: float = argument(0.999)
    adam_epsilon: float = 1e-8
    max_grad_norm: float | None = argument(1.0, bound=">= 0")
    """Largest global gradient norm; 0 or None does not clip."""
