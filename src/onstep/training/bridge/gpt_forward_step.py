"""Provides Megatron Bridge's `GPTForwardStep` and the `get_batch` that its forward steps read micro-batches with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from onstep.config import ConfigContainer
from onstep.errors import ConfigError
from onstep.training.bridge.global_state import GlobalState
from onstep.training.compute.losses import IGNORE_INDEX, Scalar
from onstep.training.compute.packed_inputs import packed_inputs
from onstep.training.compute.step import MicroBatches
from onstep.training.stages.forward_step import next_token_loss

LossFunction = Callable[[Tensor], tuple[Tensor, Scalar, dict[str, object]]]


class GPTBatch(NamedTuple):
    """A micro-batch in Megatron Bridge's order; all tensors have the shape (batch, seq) unless said otherwise."""

    tokens: Tensor
    labels: Tensor
    """Already shifted."""
    loss_mask: Tensor
    """1.0 for labels that are trained on, 0.0 for the others."""
    attention_mask: Tensor | None
    """None: causal attention is the model's own."""
    position_ids: Tensor
    cu_seqlens: Tensor | None
    """Where each document of a packed sequence begins, and the end of the last; int32, shape (documents + 1,)."""
    cu_seqlens_argmin: Tensor | None
    """None: `cu_seqlens` is not padded."""
    max_seqlen: Tensor | None
    """Length of the longest document of a packed sequence, on the CPU."""
    cu_seqlens_unpadded: Tensor | None
    cu_seqlens_unpadded_argmin: Tensor | None


def get_batch(
    data_iterator: Iterator[Mapping[str, Tensor]],
    cfg: ConfigContainer | None = None,
    use_mtp: bool = False,
    *,
    pg_collection: object = None,
) -> GPTBatch:
    """The next micro-batch, already on the device.

    Args:
        data_iterator: gives micro-batches with `tokens` and `labels`.
        cfg: not read: what a micro-batch has says everything.
        use_mtp: not read: tokens and labels are on every rank.
        pg_collection: not read: there is one stage, and sequences are whole.

    Raises:
        ConfigError: for packed sequences in a micro-batch of several.
    """
    batch = next(data_iterator)
    tokens, labels, positions = batch["tokens"], batch["labels"], batch.get("position_ids")
    if positions is None:
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    mask = batch.get("loss_mask")
    if mask is None:
        mask = labels.ne(IGNORE_INDEX).float()
    documents = batch.get("document_ids")
    if documents is not None and isinstance(data_iterator, MicroBatches):
        documents = data_iterator.on_host["document_ids"]  # nothing waits for the device
    starts, longest = _packing(documents)
    starts = None if starts is None else starts.to(tokens.device, non_blocking=True)
    return GPTBatch(tokens, labels, mask, None, positions, starts, None, longest, None, None)


class GPTForwardStep:
    """Next-token prediction as an object: pass an instance as the forward step, or a subclass of your own.

    `read` and `loss_function` can be overridden; an instance with `state_dict` and `load_state_dict` is saved in
    checkpoints. The default computes exactly what `forward_step` does.
    """

    def __call__(
        self,
        state: GlobalState,
        data_iterator: Iterator[dict[str, Tensor]],
        model: nn.Module,
        return_schedule_plan: bool = False,
    ) -> tuple[Tensor, LossFunction]:
        """The model's output for the next micro-batch, and the function that makes a loss of it.

        Args:
            state: the run's state.
            data_iterator: gives micro-batches.
            model: the model chunk.
            return_schedule_plan: for pipeline schedules, which do not exist here: refused.

        Raises:
            ConfigError: for `return_schedule_plan`.
        """
        if return_schedule_plan:
            raise ConfigError("return_schedule_plan must be False: there is no pipeline that would overlap schedules.")
        batch = self.read(state, data_iterator)
        packed = packed_inputs(batch, data_iterator, model)
        output = model(batch["tokens"], batch["labels"], reduction="sum", **packed)
        return output, self.loss_function(state, batch) or partial(next_token_loss, batch)

    def read(self, state: GlobalState, data_iterator: Iterator[dict[str, Tensor]]) -> dict[str, Tensor]:
        """The next micro-batch: `tokens`, `labels` and, for packed sequences, `position_ids` and `document_ids`."""
        return next(data_iterator)

    def loss_function(self, state: GlobalState, batch: dict[str, Tensor]) -> LossFunction | None:
        """The function from the model's output, the sum of the losses, to `(loss_sum, num_tokens, report)`; None is
        next-token prediction."""
        return None


def _packing(documents: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """`cu_seqlens` and `max_seqlen` of packed sequences."""
    if documents is None:
        return None, None
    if documents.shape[0] != 1:
        raise ConfigError(
            f"get_batch reads packed sequences from micro-batches of 1, as Megatron Bridge does, got "
            f"{documents.shape[0]}; set train.micro_batch_size=1, or read `document_ids` from the batch itself."
        )
    row = documents[0]
    begins = torch.nonzero(row[1:] != row[:-1]).flatten() + 1
    ends = torch.tensor([0, len(row)], device=row.device)
    starts = torch.cat([ends[:1], begins, ends[1:]]).to(torch.int32)
    return starts, starts.diff().max().cpu()
