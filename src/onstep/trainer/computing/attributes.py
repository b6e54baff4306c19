"""Sets what Hugging Face's Trainer exposes as attributes and subclasses read."""

from __future__ import annotations

import logging
from typing import Any

from onstep.config import TrainingArguments
from onstep.config.hf.accelerate_state import accelerator_state
from onstep.errors import ConfigError
from onstep.trainer.computing.accelerator import Accelerator
from onstep.trainer.computing.label_smoothing import LabelSmoother

logger = logging.getLogger(__name__)


def set_attributes(trainer: Any) -> None:
    """Create the accelerator, and set the attributes that depend on nothing but the constructor's arguments.

    Raises:
        ConfigError: as `follow_arguments`.
    """
    follow_arguments(trainer)
    trainer.is_deepspeed_enabled = trainer.is_tp_enabled = False
    trainer.is_fsdp_xla_enabled = trainer.is_fsdp_xla_v1_enabled = trainer.is_fsdp_xla_v2_enabled = False
    trainer.is_distributed_loading_by_transformers = False
    trainer.deepspeed = trainer.hub_model_id = trainer.hp_name = trainer.hp_search_backend = None


def follow_arguments(trainer: Any) -> None:
    """Set the attributes that depend on `args`; called again for each trial of a search.

    Raises:
        ConfigError: if `create_accelerator_and_postprocess` is overridden with another kind of accelerator.
    """
    trainer.create_accelerator_and_postprocess()
    if not isinstance(getattr(trainer, "accelerator", None), Accelerator):
        raise ConfigError(
            f"{type(trainer).__name__}.create_accelerator_and_postprocess must leave Onstep's own self.accelerator, "
            f"whose ranks and precision are those of the run; call super(), and configure with TrainingArguments."
        )
    accelerator_state(trainer.args, trainer.accelerator.mixed_precision)
    trainer.is_fsdp_enabled = trainer.accelerator.is_fsdp2
    trainer.neftune_noise_alpha = trainer.args.neftune_noise_alpha
    trainer.label_smoother = _label_smoother(trainer.args, trainer.model)


def _label_smoother(args: TrainingArguments, model: object) -> LabelSmoother | None:
    if not args.label_smoothing_factor:
        return None
    if getattr(getattr(model, "config", None), "problem_type", None) == "multi_label_classification":
        logger.warning("label_smoothing_factor has no effect on multi-label classification")
        return None
    return LabelSmoother(epsilon=args.label_smoothing_factor)
