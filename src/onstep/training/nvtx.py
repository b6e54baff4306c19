"""Names for parts of a step that Nsight Systems shows."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


class NvtxRanges:
    """Opens a named range for the time of a `with` block; one that is off does nothing.

    Args:
        enabled: whether the configuration asks for ranges; without CUDA there are none.
    """

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled and torch.cuda.is_available()

    def __call__(self, name: str) -> AbstractContextManager[Any]:
        """A range called `name`."""
        if not self.enabled:
            return _NOTHING
        made: AbstractContextManager[Any] = torch.cuda.nvtx.range(name)
        return made


_NOTHING: AbstractContextManager[Any] = nullcontext()
