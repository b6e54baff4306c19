"""Megatron Bridge's import path of `TokenizerConfig`, which lives in `onstep.config`."""

from onstep.config import TokenizerConfig

__all__ = ["TokenizerConfig"]
