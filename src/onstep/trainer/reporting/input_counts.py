"""Counts the inputs of a training as Hugging Face's Trainer does: tokens, and FLOPs by the user's own formula."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import nn

from onstep.data import Batch
from onstep.errors import warn_once
from onstep.events import Callback, CallbackContext
from onstep.trainer.reporting.memory_metrics import MemoryMetrics
from onstep.training.run import Run

logger: logging.Logger = logging.getLogger(__name__)


class Counted(Protocol):
    """The parts of a Trainer that counting uses."""

    current_flos: float
    memory: MemoryMetrics
    model: nn.Module | None
    processing_class: object
    floating_point_ops: Callable[[Batch], int]
    store_flos: Callable[[], None]
    _track_num_input_tokens: Callable[[Batch], None]


class InputCounts(Callback):
    """Counts the input tokens of every step on the host, and adds them up over the ranks where a record is due.

    Args:
        trainer: its `floating_point_ops` is called for every micro-batch if `counts_flops`, and its
            `_track_num_input_tokens` if `tracks`, in place of counting here.
        kind: `include_num_input_tokens_seen`: no | all | non_padding.
    """

    reads_weights = False

    def __init__(self, trainer: Counted, run: Run, *, kind: str, counts_flops: bool, tracks: bool) -> None:
        self._trainer, self._run, self._kind, self._counts_flops = trainer, run, kind, counts_flops
        self._tracks = tracks
        self._local = 0
        """Tokens of this rank that are not in the run's count yet."""
        self._at_start = 0

    def on_train_start(self, context: CallbackContext) -> None:
        """Remember what was counted before this training."""
        self._at_start = self.tokens

    def on_train_step_start(self, context: CallbackContext) -> None:
        """Count a step; a micro-batch that repeats another rank's samples does not count."""
        batches = context.micro_batches or ()
        for index, inputs in enumerate(batches):
            if context.sample_ids is not None and not context.sample_ids[index]:
                continue
            if self._tracks:
                self._trainer._track_num_input_tokens(inputs)
            elif self._kind != "no":
                self.count(inputs)
            if self._counts_flops:
                self._trainer.current_flos += float(self._trainer.floating_point_ops(inputs))

    def count(self, inputs: Batch) -> None:
        """Count the tokens of a micro-batch on this rank."""
        self._local += self._tokens_of(inputs)

    def on_log_step(self, context: CallbackContext) -> None:
        """Add up what the ranks counted. Collective."""
        self._settle()

    def on_final_metrics(self, context: CallbackContext) -> None:
        """Likewise before the last record, which also has the memory that the training took."""
        self._settle()
        if context.logs is not None:
            context.logs.update(self._trainer.memory.current())

    def on_checkpoint_save_start(self, context: CallbackContext) -> None:
        """Likewise before a checkpoint, which contains the operations since the last record, too."""
        self._settle()
        if self._counts_flops:
            self._trainer.store_flos()

    @property
    def tokens(self) -> int:
        """Input tokens of the run, over all ranks, up to the last record or checkpoint."""
        return self._run.train_state.num_input_tokens_seen or 0

    def rate_since(self, start_time: float) -> float:
        """Tokens per second of this training, which began at a Unix time."""
        seconds = time.time() - start_time
        return round((self.tokens - self._at_start) / seconds, 3) if seconds > 0 else 0.0

    def _settle(self) -> None:
        if self._kind == "no":
            return
        local, self._local = self._local, 0
        self._run.train_state.num_input_tokens_seen = self.tokens + sum(self._run.world.data.gather(local))

    def _tokens_of(self, inputs: Batch) -> int:
        name = main_input_name(self._trainer.model)
        ids = inputs.get(name) if isinstance(inputs, Mapping) else None
        if not isinstance(ids, torch.Tensor):
            warn_once(
                logger,
                f"include_num_input_tokens_seen counts nothing: the batches have no tensor {name!r}; set "
                "main_input_name of the model's class to the name of its input",
            )
            return 0
        if self._kind == "non_padding":
            mask, padding = inputs.get("attention_mask"), getattr(self._trainer.processing_class, "pad_token_id", None)
            if mask is not None:
                return int(mask.sum())
            if padding is not None:
                return int((ids != padding).sum())
            warn_once(
                logger,
                "include_num_input_tokens_seen='non_padding' counts all tokens: the batches have no attention_mask, "
                "and the processing_class has no pad_token_id",
            )
        return ids.numel()


def main_input_name(model: nn.Module | None) -> str:
    """The name of a model's main input, as models of `transformers` declare it."""
    return str(getattr(model, "main_input_name", "input_ids"))


def num_input_flops(model: nn.Module | None, inputs: Batch) -> int:
    """6 FLOPs for each input element and each parameter outside the embeddings; 0 if the model cannot count these.

    Source: `floating_point_ops` of transformers 5.23, after Kaplan et al. 2020.
    """
    ids = inputs.get(main_input_name(model)) if isinstance(inputs, Mapping) else None
    num_parameters = getattr(model, "num_parameters", None)
    if ids is None or num_parameters is None:
        return 0
    return 6 * int(ids.numel()) * int(num_parameters(exclude_embeddings=True))
