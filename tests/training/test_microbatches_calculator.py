"""Megatron's calculator outside of a run, by its own functions."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from onstep.errors import ConfigError
from onstep.training import (
    destroy_num_microbatches_calculator,
    get_current_global_batch_size,
    get_current_running_global_batch_size,
    get_micro_batch_size,
    get_num_microbatches,
    init_num_microbatches_calculator,
    reconfigure_num_microbatches_calculator,
    unset_num_microbatches_calculator,
    update_num_microbatches,
)


@pytest.fixture(autouse=True)
def _without_calculator() -> Iterator[None]:
    yield
    destroy_num_microbatches_calculator()


def test_a_constant_size_is_divided_among_ranks() -> None:
    init_num_microbatches_calculator(0, None, 24, 2, 3)
    assert get_num_microbatches() == 4
    assert (get_current_global_batch_size(), get_current_running_global_batch_size()) == (24, 24)
    assert get_micro_batch_size() == 2


def test_a_size_that_is_no_multiple_is_refused_or_rounded_down() -> None:
    with pytest.raises(ConfigError, match="26 must be a multiple"):
        init_num_microbatches_calculator(0, None, 26, 2, 3)
    init_num_microbatches_calculator(0, None, 26, 2, 3, decrease_batch_size_if_needed=True)
    assert (get_current_global_batch_size(), get_current_running_global_batch_size()) == (26, 24)
    assert get_num_microbatches() == 4


def test_a_ramp_moves_with_the_consumed_samples() -> None:
    init_num_microbatches_calculator(0, [4, 4, 30], 16, 2, 2)
    sizes = []
    for consumed in (0, 9, 10, 19, 20, 29, 30, 31, 1000):
        update_num_microbatches(consumed)
        sizes.append((get_current_global_batch_size(), get_num_microbatches()))
    assert sizes == [(4, 1), (4, 1), (8, 2), (8, 2), (12, 3), (12, 3), (16, 4), (16, 4), (16, 4)]


def test_only_a_check_refuses_a_size_in_the_middle_of_a_ramp() -> None:
    init_num_microbatches_calculator(0, [4, 3, 8], 10, 2, 2)
    update_num_microbatches(4, consistency_check=False)
    assert get_current_global_batch_size() == 7
    with pytest.raises(ConfigError, match="7 must be a multiple of micro_batch_size"):
        update_num_microbatches(4)


def test_there_is_one_at_a_time() -> None:
    init_num_microbatches_calculator(0, None, 8, 2, 1)
    with pytest.raises(ConfigError, match="already set up"):
        init_num_microbatches_calculator(0, None, 16, 2, 1)
    reconfigure_num_microbatches_calculator(0, None, 16, 2, 1)
    assert get_num_microbatches() == 8
    unset_num_microbatches_calculator()
    with pytest.raises(ConfigError, match="outside of a run"):
        get_num_microbatches()
