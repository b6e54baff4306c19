"""Makes the forward step of a Trainer: finds what kind of loss its code returns."""

from __future__ import annotations

import logging

from torch import nn

from onstep.trainer.base_trainer import BaseTrainer
from onstep.trainer.computing.custom_step import METHODS, CustomStep
from onstep.trainer.loss_convention import (
    Convention,
    Labels,
    hands_on,
    inner_module,
    multiplies_by_ranks,
    of_function,
    of_model,
)
from onstep.trainer.model_step import ModelStep, StepOptions
from onstep.trainer.overrides import overrides
from onstep.training.compute.forward_errors import check_forward
from onstep.training.run import Run

logger = logging.getLogger(__name__)


def forward_step_of(trainer: BaseTrainer, module: nn.Module, labels: Labels, state: Run) -> ModelStep:
    """The forward step that calls a Trainer's own `compute_loss`, or the methods around it that a subclass overrides.

    Logs, on rank 0, what the loss is.
    """
    weighting = state.cfg.train.loss_weighting
    is_own = any(overrides(trainer, name) for name in METHODS)
    if not is_own and not _has_own_loss(trainer):
        check_forward(inner_module(module))
    convention, source = _convention(trainer, module)
    if weighting != "auto":
        convention = "mean"
    if state.world.is_main:
        unit = "labels if they have any, else by their samples" if weighting == "auto" else weighting
        means = f"means of micro-batches, weighted by their {unit} (train.loss_weighting)"
        logger.info("loss: %s returns %s", source, "a share of the step's loss" if convention == "share" else means)
    averages = convention == "share" and _has_own_loss(trainer) and multiplies_by_ranks(trainer.compute_loss)
    options: StepOptions = {
        "convention": convention,
        "weighting": weighting,
        "world": state.world,
        "num_averaged_ranks": state.world.data.size if averages else 1,
        "evaluation_weighting": trainer._evaluation_weighting if trainer.follows_transformers else "labels",
    }
    if is_own:
        return CustomStep(trainer, labels, scales_shares=not _has_own_loss(trainer), **options)
    return ModelStep(trainer.compute_loss, labels, **options)


def _convention(trainer: BaseTrainer, module: nn.Module) -> tuple[Convention, str]:
    """The kind of loss that `compute_loss` returns, and whose code determines it."""
    stated = trainer.loss_is_scaled_for_ga
    if stated is not None:
        return "share" if stated else "mean", "loss_is_scaled_for_ga"
    if trainer.fused_loss is not None and not _has_own_loss(trainer):
        return of_function(trainer.fused_loss.function(module)), "the function of fused_loss_factory"
    if trainer.stated_loss_kwargs is not None and trainer.compute_loss_func is None:
        return "share" if trainer.stated_loss_kwargs else "mean", "model_accepts_loss_kwargs"
    if _has_own_loss(trainer):
        return of_function(trainer.compute_loss), "compute_loss"
    if trainer.compute_loss_func is not None:
        return of_function(trainer.compute_loss_func), "compute_loss_func"
    if trainer.label_smoother is not None:
        return "share", "label_smoothing_factor"
    return of_model(module), type(module).__name__


def _has_own_loss(trainer: BaseTrainer) -> bool:
    """Whether an overridden `compute_loss` computes the loss without `super().compute_loss`."""
    compute_loss = trainer.compute_loss
    is_overridden = getattr(compute_loss, "__func__", compute_loss) is not BaseTrainer.compute_loss
    return is_overridden and not hands_on(compute_loss)
