"""Megatron Bridge's import path of the configuration; the names live in `onstep.config`."""

from onstep.config import *  # noqa: F403
from onstep.config import __all__ as __all__
