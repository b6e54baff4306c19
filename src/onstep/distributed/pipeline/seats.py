"""Tells which stage of a pipeline a model chunk is."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from onstep.config.parallel_sizes import ParallelSizes
from onstep.config.pipelines import layers_of_stages, schedule_of, stages_of_rank, stages_per_rank
from onstep.config.sections.parallel import ParallelConfig
from onstep.errors import ConfigError, OtherStageError


@dataclass(frozen=True)
class Seat:
    """The place of a chunk in a pipeline."""

    stage: int
    """Its number, from 0."""
    stages: tuple[range, ...]
    """The layers of each stage of all ranks, by their numbers in the whole model."""

    @property
    def num_stages(self) -> int:
        """The number of stages of all ranks."""
        return len(self.stages)

    @property
    def layers(self) -> range:
        """Its layers, by their numbers in the whole model."""
        return self.stages[self.stage]

    @property
    def num_layers(self) -> int:
        """The number of layers of the whole model."""
        return self.stages[-1].stop

    @property
    def is_first(self) -> bool:
        """Whether it embeds tokens."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether it ends in the loss."""
        return self.stage == self.num_stages - 1

    def stage_of(self, layer: int) -> int:
        """The stage that has a layer.

        Args:
            layer: its number in the whole model.
        """
        return next(stage for stage, layers in enumerate(self.stages) if layer in layers)

    def lacks(self, name: str, stage: int) -> OtherStageError:
        """The error of code that reads what another stage has.

        Args:
            name: of a module or a parameter of the whole model.
            stage: which has it.
        """
        return OtherStageError(
            f"stage {self.stage} of a pipeline has no {name}, which is on stage {stage}: a forward step and its loss "
            f"may read what their own stage has, here {self.content}; leave {name} out of them, or set "
            f"parallel.pipeline_model_parallel_size=1."
        )

    def depends_on(self, stage: int) -> OtherStageError:
        """The error of code that computes with activations of another stage.

        Args:
            stage: which has computed them.
        """
        return OtherStageError(
            f"the forward step or its loss computes on stage {self.stage} of a pipeline with activations of stage "
            f"{stage}, which is on the same rank: between stages, gradients go back through hidden states alone; "
            f"detach() the activations, or set parallel.pipeline_model_parallel_size=1."
        )

    def keeps(self, name: str) -> OtherStageError:
        """The error of a forward hook that keeps activations for a loss, which is computed on the last stage.

        Args:
            name: of the module.
        """
        return OtherStageError(
            f"a forward hook of {name} keeps an activation of stage {self.stage} of a pipeline, of which the loss on "
            f"stage {self.num_stages - 1} could not get a gradient; keep its detach(), or set "
            f"parallel.pipeline_model_parallel_size=1."
        )

    @property
    def content(self) -> str:
        """What it has, in words."""
        first, last = (self.layers.start, self.layers.stop - 1) if self.layers else (0, -1)
        layers = f"layer {first}" if first == last else f"layers {first} to {last}" if self.layers else "no layers"
        ends = [" and the embedding"] * self.is_first + [" and the head"] * self.is_last
        return f"{layers}{''.join(ends)}"


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
    layers = tuple(layers_of_stages(parallel, num_layers))
    return [Seat(stage, layers) for stage in stages_of_rank(parallel, rank // (sizes.ranks // sizes.pp))]


def seat_of(chunk: nn.Module) -> Seat | None:
    """The place of a chunk in a pipeline; None for a whole model."""
    found = getattr(chunk, "pipeline_seat", None)
    return found if isinstance(found, Seat) else None


def names_of_whole(chunk: nn.Module) -> Collection[str]:
    """The names of all weights of the model that a chunk is a stage of; none for a whole model."""
    names: Mapping[str, object] = getattr(chunk, "whole_shapes", {})
    return names.keys()


def other_stage_of(chunk: nn.Module, name: str) -> int | None:
    """The other stage that has a module or weight; None for what is on this one, or on none.

    Args:
        chunk: a stage, or a whole model.
        name: in the whole model.
    """
    elsewhere: Mapping[str, int] = getattr(chunk, "elsewhere", {})
    parts = name.split(".")
    names = (".".join(parts[: depth + 1]) for depth in range(len(parts)))
    return next((elsewhere[one] for one in names if one in elsewhere), None)


def check_seats(chunks: Sequence[nn.Module], parallel: ParallelConfig, sizes: ParallelSizes, rank: int) -> None:
    """Refuse (ConfigError) chunks that are not all the stages of a rank, ascending.

    Args:
        chunks: the model of this rank.
        parallel: the section `parallel` of a configuration.
        sizes: the number of ranks along each axis.
        rank: among all ranks.
    """
    found = [(seat.stage, seat.num_stages) for seat in map(seat_of, chunks) if seat is not None]
    if sizes.pp == 1 and not found:
        return
    schedule, number = schedule_of(parallel), sizes.pp * stages_per_rank(parallel)
    stages = stages_of_rank(parallel, rank // (sizes.ranks // sizes.pp)) if sizes.pp > 1 else []
    if found != [(stage, number) for stage in stages]:
        here = ", ".join(f"{stage} of {count}" for stage, count in found) or "none: it is whole"
        raise ConfigError(
            f"the model must be the chunks of this rank, ascending, with parallel.pipeline_model_parallel_size="
            f"{sizes.pp} and the schedule {schedule.name} the stages {', '.join(map(str, stages)) or 'of no pipeline'} "
            f"of {number}, got the stages {here}; pass all chunks into which the model is cut for this layout."
        )


def is_staged(chunks: Sequence[nn.Module]) -> bool:
    """Whether chunks are stages of a pipeline, whose other stages are on other ranks."""
    return bool(chunks) and all(seat_of(chunk) is not None for chunk in chunks)
