"""Tells which stage of a pipeline a model chunk is."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from onstep.config.parallel_sizes import ParallelSizes
from onstep.config.pipelines import layers_of_stages, stages_of_rank
from onstep.config.sections.parallel import ParallelConfig


@dataclass(frozen=True)
class Seat:
    """The place of a chunk in a pipeline."""

    stage: int
    """Its number, from 0."""
    num_stages: int
    """The number of stages of all ranks."""
    layers: range
    """Its layers, by their numbers in the whole model."""

    @property
    def is_first(self) -> bool:
        """Whether it embeds tokens."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether it ends in the loss."""
        return self.stage == self.num_stages - 1


class Computed(BaseException):
    """Ends a forward step on a stage without a loss: its output is known, and the rest would compute the loss.

    Args:
        output: the hidden states.
    """

    def __init__(self, output: object) -> None:
        super().__init__("a stage of a pipeline can be called in the forward step only")
        self.output = output


def seats_of_rank(parallel: ParallelConfig, num_layers: int, sizes: ParallelSizes, rank: int) -> list[Seat]:
    """The stages of a rank, ascending.

    Args:
        parallel: the section `parallel` of a configuration.
        num_layers: the layers of the whole model.
        sizes: the number of ranks along each axis.
        rank: among all ranks.
    """
    layers = layers_of_stages(parallel, num_layers)
    return [
        Seat(stage, len(layers), layers[stage]) for stage in stages_of_rank(parallel, rank // (sizes.ranks // sizes.pp))
    ]


def seat_of(chunk: nn.Module) -> Seat | None:
    """The place of a chunk in a pipeline; None for a whole model."""
    found = getattr(chunk, "pipeline_seat", None)
    return found if isinstance(found, Seat) else None


def names_of_whole(chunk: nn.Module) -> Collection[str]:
    """The names of all weights of the model that a chunk is a stage of; none for a whole model."""
    names: Mapping[str, object] = getattr(chunk, "whole_shapes", {})
    return names.keys()


def is_staged(chunks: Sequence[nn.Module]) -> bool:
    """Whether chunks are stages of a pipeline, whose other stages are on other ranks."""
    return bool(chunks) and all(seat_of(chunk) is not None for chunk in chunks)
