"""Adds up what the stages of a pipeline have, equal on all of them to the bit."""

from __future__ import annotations

from collections.abc import Sequence

import torch
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

    def norm(self, gradients: Sequence[Tensor], device: torch.device, dtype: torch.dtype) -> Tensor:
        """The L2 norm of the gradients of all stages, 0-d. Collective over the pipeline.

        Args:
            gradients: of this rank, each counted by one rank.
            device: of the result.
            dtype: of the result.
        """
        squares = torch.zeros(1, dtype=torch.float64, device=device)
        if gradients:
            norms = torch.stack([norm.to(device) for norm in torch._foreach_norm(list(gradients), 2.0, dtype)])
            squares = norms.double().square().sum().reshape(1)
        return self(squares).sqrt().to(dtype).reshape(())
