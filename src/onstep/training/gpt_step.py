"""Megatron Bridge's import path of the forward step of language models."""

from onstep.training.stages.forward_step import forward_step

__all__ = ["forward_step"]
