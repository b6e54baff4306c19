"""Names the arguments of a Trainer that have no effect in its training."""

from __future__ import annotations

import logging

from torch.utils.data import DataLoader

from onstep.config.checks import idle_in_trainer, idle_line
from onstep.config.hf.checks import idle_arguments
from onstep.models.generation.generate import inner_transformer
from onstep.trainer.call import Session
from onstep.trainer.methods import TrainerMethods

logger = logging.getLogger(__name__)


def name_idle_arguments(trainer: TrainerMethods, session: Session) -> None:
    """Say in one line which arguments have no effect in this training; in a search, once for all trials."""
    transformer = inner_transformer(session.module)
    found = idle_in_trainer(session.state.cfg, None if transformer is None else transformer.config)
    if isinstance(trainer.train_dataset, DataLoader) and trainer.has_own_collator:
        found.append(("a train_dataset that is not a DataLoader, which has its own", ["data_collator"]))
    if trainer.args.prediction_loss_only and trainer.compute_metrics is not None:
        found.append(("prediction_loss_only=False", ["compute_metrics"]))
    if trainer.label_smoother is not None and trainer.compute_loss_func is not None:
        found.append(("no compute_loss_func", ["label_smoothing_factor"]))
    if trainer.enable_activation_checkpoint_fn is not None and not trainer.args.activation_checkpointing:
        found.append(("gradient_checkpointing=True", ["enable_activation_checkpoint_fn"]))
    if trainer.args.dataloader_num_workers and hasattr(trainer.train_dataset, "_ex_iterable"):
        found.append(("a train_dataset that is not a stream of datasets", ["dataloader_num_workers"]))
    if getattr(trainer.args, "predict_with_generate", False) and not hasattr(trainer, "_gen_kwargs"):
        found.append(("a Seq2SeqTrainer", ["predict_with_generate"]))
    found = [*idle_arguments(trainer.args), *found]
    line = idle_line(found)
    names = {setting.partition("=")[0] for _, settings in found for setting in settings}  # values differ by trial
    is_said = trainer.sweep is not None and names <= trainer.idle_in_search
    trainer.idle_in_search |= names
    if line is not None and not is_said:
        logger.warning("%s", line)
