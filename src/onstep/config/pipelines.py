"""Divides the layers of a model among the stages of a pipeline, and knows the schedules: arithmetic, without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from onstep.config.sections.parallel import ParallelConfig
from onstep.config.suggestions import nearest
from onstep.errors import ConfigError

_KEY = "parallel.pipeline_schedule"
_VIRTUAL = "parallel.virtual_pipeline_model_parallel_size"
_LAYOUT = "parallel.pipeline_model_parallel_layout"
_SIZE = "parallel.pipeline_model_parallel_size"


@dataclass(frozen=True)
class Schedule:
    """A schedule of `torch.distributed.pipelining`, by the name that torch has for it."""

    name: str
    chunks: Literal["one", "several", "two"]
    """How many stages a rank has; `two` in a V: the first rank has the first stage and the last."""
    in_rounds: bool = False
    """Whether the micro-batches must come in rounds of as many as ranks, or a little more."""
    halves_backward: bool = False
    """Whether a backward pass has two parts, that of activations and that of weights, with others in between."""

    def least(self, ranks: int) -> int:
        """The fewest micro-batches that it runs."""
        return {"1F1B": ranks, "DualPipeV": 2 * ranks}.get(self.name, 1)

    def runs(self, ranks: int, micro_batches: int) -> bool:
        """Whether it runs a step of so many micro-batches."""
        rounds = max(1, micro_batches // ranks)
        return micro_batches >= self.least(ranks) and not (self.in_rounds and micro_batches % rounds)

    @property
    def is_forward_first(self) -> bool:
        """Whether all forward passes of a step run before its first backward pass."""
        return self.name in ("GPipe", "LoopedBFS")

    def most_held(self, ranks: int, rank: int, micro_batches: int, stages: int) -> int:
        """How many passes through stages of a rank have activations at once, at most: with several stages on a rank, a
        micro-batch counts in each of them.

        Exact for torch's orders; of `ZBVZeroBubble` an upper bound below `2 * ranks` micro-batches.

        Args:
            ranks: those of the pipeline.
            rank: which of them.
            micro_batches: those of a step.
            stages: on this rank.
        """
        a_round = micro_batches // max(1, micro_batches // ranks)
        most = {
            "1F1B": ranks - rank,
            "Interleaved1F1B": (stages - 1) * a_round + 2 * (ranks - 1 - rank) + 1,
            "InterleavedZeroBubble": (stages - 1) * a_round + ranks,
            "ZBVZeroBubble": 2 * ranks,
            "DualPipeV": 2 * ranks + 1,
        }
        return min(micro_batches * stages, most.get(self.name, micro_batches * stages))

    @property
    def for_any_number(self) -> Schedule:
        """The schedule of the same stages that runs any number of micro-batches."""
        return SCHEDULES[{"one": "GPipe", "several": "LoopedBFS", "two": "ZBVZeroBubble"}[self.chunks]]


SCHEDULES = {
    one.name: one
    for one in (
        Schedule("GPipe", "one"),
        Schedule("1F1B", "one"),
        Schedule("Interleaved1F1B", "several", in_rounds=True),
        Schedule("LoopedBFS", "several"),
        Schedule("InterleavedZeroBubble", "several", in_rounds=True, halves_backward=True),
        Schedule("ZBVZeroBubble", "two", halves_backward=True),
        Schedule("DualPipeV", "two", halves_backward=True),
    )
}


def schedule_of(parallel: ParallelConfig) -> Schedule:
    """The configured schedule; by default 1F1B, interleaved if a rank has several stages.

    Raises:
        ConfigError: for an unknown name, or a number of stages that it does not run.
    """
    virtual, name = parallel.virtual_pipeline_model_parallel_size, parallel.pipeline_schedule
    if name is None:
        name = "1F1B" if virtual in (None, 1) else "Interleaved1F1B"
    schedule = schedule_named(name)
    found = schedule.name
    if schedule.chunks == "one" and virtual not in (None, 1):
        raise ConfigError(
            f"{_KEY}={found} has one stage on each rank, but {_VIRTUAL}={virtual}; set it to null, or the schedule to "
            f"Interleaved1F1B."
        )
    if schedule.chunks == "several" and virtual in (None, 1):
        raise ConfigError(f"{_KEY}={found} interleaves several stages on each rank; set {_VIRTUAL}=2 or more.")
    if schedule.chunks == "two" and virtual not in (None, 2):
        raise ConfigError(f"{_KEY}={found} has two stages on each rank, but {_VIRTUAL}={virtual}; set it to 2.")
    return schedule


def schedule_named(name: str, where: str = _KEY, also: Mapping[str, str] | None = None) -> Schedule:
    """The schedule of a name of torch.

    Args:
        name: of the schedule, in any case.
        where: what has the name, for the error.
        also: further names, in lower case, each with that of torch.

    Raises:
        ConfigError: for an unknown name.
    """
    also = also or {}
    known = {one.lower(): one for one in SCHEDULES} | dict(also)
    found = known.get(name.lower().removeprefix("schedule"))
    if found is None:
        hint = nearest(name, [*SCHEDULES, *also])
        raise ConfigError(f"{where} must be one of {', '.join(SCHEDULES)}, got {name!r}.{hint}")
    return SCHEDULES[found]


def stages_per_rank(parallel: ParallelConfig) -> int:
    """The number of stages on each rank."""
    schedule = schedule_of(parallel)
    return 2 if schedule.chunks == "two" else parallel.virtual_pipeline_model_parallel_size or 1


def stages_of_rank(parallel: ParallelConfig, rank: int) -> list[int]:
    """The stages of a rank of the pipeline, ascending."""
    ranks, each = parallel.pipeline_model_parallel_size, stages_per_rank(parallel)
    if schedule_of(parallel).chunks == "two":
        return [rank, 2 * ranks - 1 - rank]
    return [rank + ranks * number for number in range(each)]


def layers_of_stages(parallel: ParallelConfig, num_layers: int) -> list[range]:
    """The layers of each stage, in the order of the stages.

    Raises:
        ConfigError: for layers that the stages cannot share, with the nearest number that they can.
    """
    stages = parallel.pipeline_model_parallel_size * stages_per_rank(parallel)
    counts = parallel.pipeline_model_parallel_layout
    counts = _even(parallel, num_layers, stages) if counts is None else counts
    if len(counts) != stages or sum(counts) != num_layers:
        raise ConfigError(
            f"{_LAYOUT}={counts} must have the number of layers of each of the {stages} stages, {num_layers} in all, "
            f"but has {len(counts)} of {sum(counts)}; set it so, or to null for equal stages."
        )
    least = (0, *[1] * (stages - 2), 0)
    if any(count < fewest for count, fewest in zip(counts, least, strict=True)):
        raise ConfigError(
            f"{_LAYOUT}={counts} must have at least one layer on each stage between the first and the last, which may "
            f"have 0 beside the embedding and the loss; move a layer there."
        )
    starts = [sum(counts[:number]) for number in range(stages)]
    return [range(start, start + count) for start, count in zip(starts, counts, strict=True)]


def _even(parallel: ParallelConfig, num_layers: int, stages: int) -> list[int]:
    """Equal stages, of which embedding and loss are layers if asked."""
    at_ends = (parallel.account_for_embedding_in_pipeline_split, parallel.account_for_loss_in_pipeline_split)
    each, rest = divmod(num_layers + sum(at_ends), stages)
    if rest or each < 1:
        counted = "".join(f", {name} counted as one" for name, is_one in zip(_ENDS, at_ends, strict=True) if is_one)
        close = [size for size in (each * stages - sum(at_ends), (each + 1) * stages - sum(at_ends)) if size > 0]
        raise ConfigError(
            f"model.num_layers={num_layers}{counted} cannot be divided into {stages} equal stages; use "
            f"{' or '.join(map(str, close))} layers, another {_SIZE}, or name those of each stage in {_LAYOUT}."
        )
    counts = [each] * stages
    counts[0] -= at_ends[0]
    counts[-1] -= at_ends[1]
    return counts


_ENDS = ("the embedding", "the loss")

Part = Literal["forward", "backward", "input gradient", "weight gradient"]
"""What a pass computes: `backward` is both gradients at once, as most schedules have it."""


PASS_NAME = r"(forward|backward|input gradient|weight gradient) of micro-batch (\d+), stage (\d+)$"
"""Recognizes `name_of_pass`."""


def name_of_pass(part: Part, stage: int, micro_batch: int) -> str:
    """What a recorded trace calls a pass, such as `forward of micro-batch 2, stage 1`; both are counted from 0."""
    return f"{part} of micro-batch {micro_batch}, stage {stage}"
