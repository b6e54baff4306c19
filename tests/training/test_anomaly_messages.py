"""Errors about several bad steps stay readable however many samples each of them had."""

from __future__ import annotations

from onstep.events import Request
from onstep.training.anomalies.anomaly import too_many
from onstep.training.stages.actions import RollBack
from tests.support.small_runs import small_state


def test_long_lists_of_samples_are_cut_to_twelve_and_a_count() -> None:
    words = [f"step {step} (rank 0, micro-batch 1: loss nan, sample ids {list(range(64))})" for step in (3, 7)]
    message = str(too_many("rollback", 2, 1, words))
    assert message.count("sample ids [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, ... and 52 more])") == 2
    assert "step 3" in message
    assert "step 7" in message
    assert "63" not in message


def test_a_list_of_twelve_is_shown_whole() -> None:
    ids = list(range(100, 112))
    assert f"sample ids {ids}" in str(too_many("skip", 1, 0, [f"sample ids {ids}"]))


def test_a_rollback_without_a_checkpoint_cuts_them_too() -> None:
    request = Request("rollback", "anomaly gate", "", f"non-finite loss: sample ids {list(range(30))}", 0, {})
    run = small_state(train_iters=9)
    run.train_state.step = 5
    message = str(RollBack.at(run, request).impossible())
    assert "10, 11, ... and 18 more]" in message
    assert "29" not in message
