"""Reductions without other ranks: what comes back as it is, and what is refused. With ranks: tests/distributed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from onstep.errors import ConfigError
from onstep.metrics import (
    logical_and_across_model_parallel_group,
    param_is_not_shared,
    reduce_max_stat_across_model_parallel_group,
)
from onstep.metrics.norms.params_l2_norm import is_counted


@pytest.mark.parametrize(
    "stat", [None, -1.0, 3, 2**62, np.True_, torch.tensor(2.0), torch.tensor(2.0, device="meta")], ids=str
)
def test_without_a_group_the_very_statistic_comes_back_unread(stat: Any) -> None:
    assert reduce_max_stat_across_model_parallel_group(stat, None) is stat


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (True, True),
        (False, False),
        (1, True),
        (0, False),
        (np.True_, True),
        (np.bool_(False), False),
        (np.int64(1), True),
        (torch.tensor(True), True),
        (torch.tensor([0]), False),
    ],
)
def test_every_form_of_yes_and_no_is_understood(answer: Any, expected: bool) -> None:
    assert logical_and_across_model_parallel_group(answer, None) is expected


@pytest.mark.parametrize("answer", [None, "yes", 2, -1, 0.5, [], torch.ones(2), np.ones(2), np.float32(0.5)], ids=str)
def test_what_means_neither_is_refused(answer: Any) -> None:
    with pytest.raises(ConfigError, match="must be true or false, got"):
        logical_and_across_model_parallel_group(answer, None)


class Pair:
    """A group of two, of which this test only needs that it is one."""

    def size(self) -> int:
        return 2


@pytest.mark.parametrize("stat", ["3", torch.ones(2), 2**63, -(2**63) - 1, 1j], ids=str)
def test_what_is_no_number_is_refused_before_anything_is_sent(stat: Any) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(ConfigError, match=r"must (be a number|fit into 64 bits)"):
            reduce_max_stat_across_model_parallel_group(stat, Pair())
    finally:
        dist.destroy_process_group()
    with pytest.raises(ConfigError, match=r"must (be a number|fit into 64 bits)"):
        reduce_max_stat_across_model_parallel_group(stat, None)


def test_a_parameter_is_shared_only_where_it_says_so() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    assert param_is_not_shared(parameter)
    parameter.shared = False  # type: ignore[attr-defined]
    assert param_is_not_shared(parameter)
    parameter.shared = True  # type: ignore[attr-defined]
    assert not param_is_not_shared(parameter)


@pytest.mark.parametrize(
    ("marks", "on_ranks"),
    [
        ({}, [True, False]),
        ({"tensor_model_parallel": True}, [True, True]),
        ({"shared": True, "tensor_model_parallel": True}, [False, False]),
        ({"allreduce": False}, [True, False]),
        ({"allreduce": True}, [True, False]),
    ],
    ids=str,
)
def test_marks_say_which_tensor_parallel_rank_counts(marks: dict[str, bool], on_ranks: list[bool]) -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    for name, value in marks.items():
        setattr(parameter, name, value)
    ranks = [(1, 0), (1, 1)] if marks.get("allreduce") is False else [(0, 1), (1, 1)]  # experts have ranks of their own
    counted = [is_counted("w", parameter, *pair) for pair in ranks]
    assert counted == on_ranks


def test_shared_experts_of_one_rank_cannot_be() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.shared, parameter.allreduce = True, False  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="expert parameter w is marked as shared"):
        is_counted("w", parameter, 0, 0)
