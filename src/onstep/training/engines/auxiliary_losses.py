"""Collects the auxiliary losses of the routers of a stage, which go to the last stage with its hidden states."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from onstep.models.layers.router import Router


class AuxiliaryLosses:
    """Those of the routers of this rank; see `FurtherLosses`.

    Args:
        chunks: the stages of this rank.
    """

    factor: Tensor | float = 1.0

    def __init__(self, chunks: Sequence[nn.Module]) -> None:
        routers = [one for chunk in chunks for one in chunk.modules() if isinstance(one, Router)]
        self._steps = list({id(router.step): router.step for router in routers}.values())

    def begin(self) -> None:
        """A forward pass of a stage begins."""
        for step in self._steps:
            step.collected = []

    def collected(self) -> list[Tensor]:
        """Those of the forward pass that ends."""
        return [loss for step in self._steps for loss in step.collected or []]
