"""Provides Megatron Bridge's loss of language models, over the tokens that a mask selects."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

TokenLosses = Tensor | tuple[Tensor, Tensor]
SummedLoss = tuple[Tensor, Tensor, dict[str, Tensor]]


def masked_next_token_loss(
    loss_mask: Tensor,
    output_tensor: TokenLosses,
    check_for_nan_in_loss: bool = True,
    check_for_spiky_loss: bool = False,
) -> SummedLoss:
    """The sum of the losses of the tokens that the mask selects.

    Args:
        loss_mask: weight of each token, of any shape.
        output_tensor: loss of each token, of as many elements; or a tuple of it and the mask to use instead.
        check_for_nan_in_loss: accepted for Megatron Bridge. The loop checks every step before its update, as
            `train.on_nonfinite` says.
        check_for_spiky_loss: likewise; `anomaly.on_spike` says what happens.

    Returns:
        The sum of the losses, float32; the number of tokens, int32; and the report `lm loss`, shape (2,): both of them.

    Source: Megatron Bridge, `bridge.training.losses`.
    """
    if isinstance(output_tensor, tuple):
        output_tensor, loss_mask = output_tensor
    mask = loss_mask.reshape(-1).float()
    loss = torch.sum(output_tensor.reshape(-1).float() * mask)
    num_tokens = mask.sum().detach().to(torch.int32)
    return loss, num_tokens, {"lm loss": torch.stack([loss.detach(), num_tokens.to(loss.dtype)])}


def create_masked_next_token_loss_function(
    loss_mask: Tensor, check_for_nan_in_loss: bool = True, check_for_spiky_loss: bool = False
) -> Callable[[TokenLosses], SummedLoss]:
    """`masked_next_token_loss` with its mask, as a forward step returns it beside the output."""
    return partial(
        masked_next_token_loss,
        loss_mask,
        check_for_nan_in_loss=check_for_nan_in_loss,
        check_for_spiky_loss=check_for_spiky_loss,
    )
