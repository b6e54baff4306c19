"""The orders of passes that torch's schedules have for each rank of a pipeline, and what is held while they run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

from onstep.config.pipelines import SCHEDULES

FORWARD, INPUT, WEIGHT, FULL = "FORWARD", "BACKWARD_INPUT", "BACKWARD_WEIGHT", "FULL_BACKWARD"


def orders_of(name: str, ranks: int, micro_batches: int, stages: list[int]) -> dict[int, list[tuple[str, int]]]:
    """The passes of each rank: what one computes, and its stage.

    Args:
        name: of the schedule.
        ranks: of the pipeline.
        micro_batches: of a step.
        stages: those of rank 0.
    """
    from torch.distributed.pipelining import schedules

    outlines: list[Any] = [
        SimpleNamespace(
            stage_index=index, num_stages=ranks * len(stages), group_size=ranks, group_rank=0, submod=None,
            has_backward=True, is_first=index == 0, is_last=False, device="cpu", group=None,
        )
        for index in stages
    ]  # fmt: skip
    kind: Any = schedules.get_schedule_class(name)
    given = outlines[0] if SCHEDULES[name].chunks == "one" else outlines
    plan = kind(given, micro_batches, loss_fn=lambda loss, _: loss)
    return {rank: list(_passes(order)) for rank, order in plan.pipeline_order.items()}


def _passes(order: list[Any]) -> Iterator[tuple[str, int]]:
    for action in order:
        for part in getattr(action, "sub_actions", None) or [action]:
            kind = getattr(getattr(part, "computation_type", None), "name", None)
            if kind in (FORWARD, INPUT, WEIGHT, FULL):
                yield kind, part.stage_index


def most_at_once(order: list[tuple[str, int]], changes: Callable[[str, int], int]) -> int:
    """The most that is held at once while passes run; nothing is held after them.

    Args:
        order: the passes of a rank.
        changes: what a pass of a stage adds to what is held.
    """
    held = [0]
    for one in order:
        held.append(held[-1] + changes(*one))
    assert held[-1] == 0
    return max(held)
