"""Adds up what the stages of a pipeline have."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


class StageSums:
    """Sums over the ranks of a pipeline, equal on all of them to the bit.

    Args:
        group: the ranks of the pipeline.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group

    def __call__(self, values: Tensor) -> Tensor:
        """The sums of values over the stages. Collective over the pipeline.

        Args:
            values: this rank's part of each, (num_values,).
        """
        total = values.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=self._group)
        return total

    def norm(self, squares: Tensor) -> Tensor:
        """The L2 norm of the gradients of all stages, 0-d float64. Collective over the pipeline.

        Args:
            squares: the sum of those of this rank's stages, each gradient counted by one rank, 0-d float64.
        """
        return self(squares.reshape(1)).sqrt().reshape(())
