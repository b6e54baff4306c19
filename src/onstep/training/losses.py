"""Megatron Bridge's import path of the loss of language models."""

from onstep.training.bridge.losses import create_masked_next_token_loss_function, masked_next_token_loss

__all__ = ["create_masked_next_token_loss_function", "masked_next_token_loss"]
