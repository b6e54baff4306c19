"""Names for parts of a step that Nsight Systems shows."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from onstep.training.profiling import warn_once


class NvtxRanges:
    """Opens a named range for the time of a `with` block; one that is off does nothing.

    Args:
        enabled: whether the configuration asks for ranges.
        is_on_gpu: whether the run computes on one. Elsewhere, and without CUDA, there are no ranges: that is said once.
    """

    def __init__(self, enabled: bool, is_on_gpu: bool = True) -> None:
        self.enabled = enabled and is_on_gpu and torch.cuda.is_available()
        if enabled and not self.enabled:
            warn_once("profiling.nvtx_ranges does nothing: this run computes on no CUDA GPU; set it to false")

    def __call__(self, name: str) -> AbstractContextManager[Any]:
        """A range called `name`."""
        if not self.enabled:
            return _NOTHING
        made: AbstractContextManager[Any] = torch.cuda.nvtx.range(name)
        return made


_NOTHING: AbstractContextManager[Any] = nullcontext()
