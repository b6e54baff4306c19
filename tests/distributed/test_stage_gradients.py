"""The gradients of the stages of a pipeline: what replicas of a stage sum, and hooks that a schedule does not call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from onstep.config import ModelConfig, ParallelConfig
from onstep.config.parallel_sizes import ParallelSizes
from onstep.distributed.pipeline.gradients import StageGradients
from onstep.distributed.pipeline.seats import Seat, check_seats
from onstep.errors import ConfigError
from onstep.models.stages import cut
from onstep.models.transformer import build_transformer
from onstep.training.stages.staged import check_hooks
from tests.support.small_configs import SIZES


class TwoAlike:
    """Two replicas with the same gradients."""

    size = 2

    def sum(self, flat: Tensor) -> None:
        flat.mul_(2)


class Replicas:
    """The ranks of a run in which this stage has one replica beside it."""

    data = TwoAlike()


def test_replicas_sum_what_is_trained_now_whatever_was_frozen_when_they_began() -> None:
    first, second = stage = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    first.requires_grad_(False)
    world: Any = Replicas()
    gradients = StageGradients([stage], world, tied=[])
    second(torch.ones(2)).sum().backward()
    gradients.exchange()
    assert first.weight.grad is None
    assert torch.equal(second.weight.grad, torch.full((2, 2), 2.0))
    first.requires_grad_(True)
    second.requires_grad_(False)
    first(torch.ones(2)).sum().backward()
    gradients.exchange()
    assert torch.equal(first.weight.grad, torch.full((2, 2), 2.0))
    assert torch.equal(second.weight.grad, torch.full((2, 2), 2.0))


def test_a_rank_that_is_given_some_of_its_stages_only_is_refused_by_name() -> None:
    parallel = ParallelConfig(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2)
    sizes = ParallelSizes(pp=2)
    stages = tuple(range(number, number + 1) for number in range(4))
    whole = build_transformer(ModelConfig(**{**SIZES, "num_layers": 4}), seed=0)
    chunks = cut(whole, [Seat(1, stages), Seat(3, stages)])
    check_seats(chunks, parallel, sizes, 1)
    check_seats([whole], ParallelConfig(), ParallelSizes(), 0)
    given: list[tuple[list[nn.Module], int, str]] = [
        (chunks[:1], 1, "the stages 1, 3 of 4, got the stages 1 of 4"),
        (chunks[::-1], 1, "got the stages 3 of 4, 1 of 4"),
        ([*chunks], 0, "the stages 0, 2 of 4, got"),
        ([whole], 1, "got the stages none: it is whole; pass all chunks"),
    ]
    for wrong, rank, said in given:
        with pytest.raises(ConfigError, match=said):
            check_seats(wrong, parallel, sizes, rank)
    with pytest.raises(ConfigError, match="the stages of no pipeline of 1, got the stages 1 of 4"):
        check_seats(chunks[:1], ParallelConfig(), ParallelSizes(), 0)


@pytest.mark.parametrize("hook", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook_of_a_parameter_that_a_schedule_does_not_call_is_refused_by_name(hook: str) -> None:
    whole = build_transformer(ModelConfig(**SIZES), seed=0)
    chunks = cut(whole, [Seat(0, (range(1), range(1, 2)))])
    zero_bubble = ParallelConfig(pipeline_model_parallel_size=2, pipeline_schedule="ZBVZeroBubble")
    check_hooks(zero_bubble, chunks)
    getattr(chunks[0].embedding.weight, hook)(lambda one: None)
    check_hooks(ParallelConfig(pipeline_model_parallel_size=2), chunks)
    with pytest.raises(ConfigError, match=r"=ZBVZeroBubble .* does not call the hook of embedding\.weight; remove it"):
        check_hooks(zero_bubble, chunks)
