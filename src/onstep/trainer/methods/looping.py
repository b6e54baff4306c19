"""Hugging Face's methods of its loop: the batches of a step, its gradients and rate, and what is due after it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from onstep.config import TrainingArguments
from onstep.data import Batch
from onstep.errors import ConfigError
from onstep.trainer.base_trainer import BaseTrainer
from onstep.trainer.reporting.input_counts import InputCounts


class LoopingMethods(BaseTrainer):
    """Hugging Face's methods of its loop. A run without overrides of them does the same without calling them."""

    _tr_loss: Tensor | None = None
    """With an overridden `_maybe_log_save_evaluate`, the sum of the losses since the last record."""
    _total_loss_scalar: float = 0.0
    """Likewise the sum of the losses that are in records."""
    _globalstep_last_logged: int = 0
    """Likewise the step of the last record."""
    fillers: tuple[Batch, ...] = ()
    """The micro-batches of the current step that repeat another rank's samples, and count as zero."""
    do_due: Callable[[], None] | None = None
    """Does what is due, while `_maybe_log_save_evaluate` runs."""
    input_counts: InputCounts | None
    """Counts the input tokens, with `include_num_input_tokens_seen`."""

    # ---- a training

    def _update_auto_batch_size(self, batch_size: int) -> None:
        """The size of micro-batches that is tried next, with `auto_find_batch_size`; it is in effect already."""

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        """Samples of an optimizer step over all ranks.

        The result of an override is the `effective_batch_size` of the final record, and in its samples per second.
        """
        ranks = (
            args.parallel_sizes.ranks
            // args.parallel_sizes.pp
            // self.get_tp_size()
            // self.get_cp_size()
            // self.get_sp_size()
        )
        return int(self._train_batch_size * args.gradient_accumulation_steps * ranks)

    # ---- a step

    def get_batch_samples(
        self, epoch_iterator: Iterator[Batch], num_batches: int, device: torch.device
    ) -> tuple[list[Batch], Tensor | int | None]:
        """The micro-batches of a step, on the device, and `num_items_in_batch`. Collective.

        An override gets an iterator over the micro-batches of one step, and reads them all.

        Args:
            epoch_iterator: the iterator over the micro-batches of an epoch.
            num_batches: micro-batches of the step on this rank.
            device: the device of the returned count.
        """
        samples = [batch for _, batch in zip(range(num_batches), epoch_iterator, strict=False)]
        counted = [batch for batch in samples if not any(batch is filler for filler in self.fillers)]
        return samples, self._get_num_items_in_batch(counted, device)

    def _track_num_input_tokens(self, inputs: Batch) -> None:
        """Count the input tokens of a micro-batch, with `include_num_input_tokens_seen`."""
        if self.input_counts is not None:
            self.input_counts.count(inputs)

    def _clip_grad_norm(self, model: nn.Module) -> Tensor | float:
        """Clip the gradients to `max_grad_norm`; returns their norm before."""
        norm: Tensor = self.accelerator.clip_grad_norm_(model.parameters(), float(self.args.max_grad_norm or 0.0))
        return norm

    def _get_grad_norm(self, model: nn.Module, grad_norm: Tensor | float | None = None) -> Tensor | float:
        """The norm that is logged: the one before clipping, computed if nothing was clipped."""
        if grad_norm is not None:
            return grad_norm
        norm: Tensor = self.accelerator.clip_grad_norm_(model.parameters(), torch.inf)
        return norm

    def _get_learning_rate(self) -> float:
        """The current learning rate, of the first parameter group; it is logged as it was before the schedule moves."""
        if self.optimizer is None:
            raise ConfigError("Trainer._get_learning_rate requires an optimizer, which train() creates.")
        return float(self.optimizer.param_groups[0]["lr"])

    # ---- what is due after it

    def _maybe_log_save_evaluate(
        self,
        tr_loss: Tensor,
        grad_norm: Tensor | float | None,
        model: nn.Module,
        trial: object,
        epoch: float,
        ignore_keys_for_eval: list[str] | None,
        start_time: float,
        learning_rate: float | None = None,
    ) -> None:
        """Log, evaluate and save, what of it `control` says. Collective.

        An override is called after every step and every epoch. It may do these itself: log a record with `self.log`
        (and set `self._globalstep_last_logged`), call `_evaluate` and `_determine_best_metric`, and `_save_checkpoint`.

        Raises:
            ConfigError: at any other time.
        """
        if self.do_due is None:
            raise ConfigError(
                "Trainer._maybe_log_save_evaluate is called after a step; to log, evaluate or save at another time, "
                "set the flags of control in a callback."
            )
        self.do_due()

    accelerator: Any
    _train_batch_size: Any
    get_tp_size: Callable[[], int]
    get_cp_size: Callable[[], int]
    get_sp_size: Callable[[], int]
    _get_num_items_in_batch: Callable[..., Tensor | int | None]
