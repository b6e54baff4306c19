"""Megatron Bridge's import path of the forward step of language models."""

from onstep.training.bridge.gpt_forward_step import GPTForwardStep, get_batch
from onstep.training.stages.forward_step import forward_step

__all__ = ["GPTForwardStep", "forward_step", "get_batch"]
