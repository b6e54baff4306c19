"""Megatron Bridge's import path of the configuration; the names live in `onstep.config`."""

from onstep.config import *  # noqa: F403
from onstep.config import DatasetConfig as GPTDatasetConfig
from onstep.config import DatasetConfig as MockGPTDatasetConfig
from onstep.config import __all__ as _names

__all__ = [*_names, "GPTDatasetConfig", "MockGPTDatasetConfig"]
