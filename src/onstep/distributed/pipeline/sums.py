"""Adds up what the stages of a pipeline have, equal on all of them to the bit."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


class StageSums:
    """Sums over the ranks of a pipeline, each of which adds in the same order.

    Args:
        group: the ranks of the pipeline.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._group, self._size = group, dist.get_world_size(group)

    def __call__(self, values: Tensor) -> Tensor:
        """The sums of values over the stages. Collective over the pipeline.

        Args:
            values: this rank's part of each, (num_values,).
        """
        of_ranks = values.new_empty(self._size, len(values))
        dist.all_gather(list(of_ranks.unbind()), values.contiguous(), group=self._group)
        total: Tensor = of_ranks.sum(0)
        return total

    def norm(self, squares: Tensor) -> Tensor:
        """The L2 norm of the gradients of all stages, 0-d float64. Collective over the pipeline.

        Args:
            squares: the sum of those of this rank's stages, each gradient counted by one rank, 0-d float64.
        """
        return self(squares.reshape(1)).sqrt().reshape(())
