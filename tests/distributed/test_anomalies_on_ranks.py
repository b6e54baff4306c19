"""Two real gloo processes: what is wrong on one rank is left out on both, at the same step, with the same weights."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.support.forked_processes import Processes

pytestmark = pytest.mark.distributed

Result = dict[str, Any]


@pytest.fixture(scope="module", params=[False, True], ids=["replicas", "divided updates"])
def results(
    processes: Processes, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> list[dict[str, Result]]:
    """What both ranks report of every scenario, from one start of the processes."""
    directory, settings = tmp_path_factory.mktemp("ranks"), {"divides": request.param}
    return processes.results("tests.support.jobs.anomaly_jobs", "scenarios", directory, settings)


def of(results: list[dict[str, Result]], scenario: str) -> list[Result]:
    pair = [rank[scenario] for rank in results]
    assert [result["rank"] for result in pair] == [0, 1]
    for key in ("hashes", "end", "step", "skip_list", "num_skips", "overrides", "records", "ended_by_anomaly"):
        assert pair[0][key] == pair[1][key], f"{scenario}: the ranks differ in {key}"
    return pair


def unchanged_steps(result: Result) -> list[int]:
    """The steps that left the weights as they were."""
    before = [result["start"], *result["hashes"]]
    return [step for step, (old, new) in enumerate(itertools.pairwise(before), start=1) if old == new]


def met_after(result: Result, step: int) -> set[int]:
    return {one for ids in result["sample_ids"][step:] for one in ids}


@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_a_poisoned_sample_on_rank_1_is_left_out_on_both_and_not_met_again(
    results: list[dict[str, Result]], what: str
) -> None:
    first, second = of(results, f"skip_{what}")
    assert unchanged_steps(first) == [2]
    assert first["skip_list"] == [[0, 14], [0, 15]]
    assert (first["num_skips"], first["step"]) == (1, 7)
    [record] = first["records"]
    assert record["sample_ids"] == "[14, 15]"
    assert "rank 1, micro-batch 1" in record["where"]
    assert "rank 0" not in record["where"]
    assert record["loss" if what == "loss" else "grad_norm"] == "nan"
    assert 14 in second["sample_ids"][1]
    met_again = met_after(first, 3) | met_after(second, 3)
    assert met_again
    assert met_again.isdisjoint({14, 15})


def test_a_nan_gradient_on_one_rank_touches_no_weights_and_the_error_names_it_alone(
    results: list[dict[str, Result]],
) -> None:
    for result in of(results, "raise_gradient"):
        assert result["end"] == result["hashes"][0]
        assert "NonFiniteError" in result["error"]
        assert "rank 1, micro-batch 1: gradient norm nan, sample ids [14, 15]" in result["error"]
        assert "rank 0" not in result["error"]


def test_a_spike_on_rank_1_leaves_out_the_step_with_the_samples_of_all_ranks(results: list[dict[str, Result]]) -> None:
    first, _ = of(results, "skip_spike")
    assert unchanged_steps(first) == [2]
    assert [one for _, one in first["skip_list"]] == list(range(8, 16))
    assert first["records"][0]["anomaly"].startswith("'spike: loss")


def test_the_policy_stop_ends_both_ranks_at_the_bad_step(results: list[dict[str, Result]]) -> None:
    for result in of(results, "stop"):
        assert (result["step"], result["ended_by_anomaly"], result["stopped_by"]) == (2, True, "anomaly gate")
        assert unchanged_steps(result) == [2]


def test_a_stop_that_the_host_learns_of_when_the_data_has_ended_is_known_to_both(
    results: list[dict[str, Result]],
) -> None:
    for result in of(results, "stop_late"):
        assert (result["step"], result["ended_by_anomaly"], result["was_stopped"]) == (3, True, True)
        assert unchanged_steps(result) == [2, 3]


def test_a_skip_asked_by_a_callback_of_rank_1_alone_is_done_on_both(results: list[dict[str, Result]]) -> None:
    first, second = of(results, "asked_skip")
    assert unchanged_steps(first) == [4]
    assert {one for _, one in first["skip_list"]} == {*first["sample_ids"][3], *second["sample_ids"][3]}
    assert "rank 1 says so" in first["records"][0]["anomaly"]
    assert first["num_skips"] == 0


def test_a_rollback_asked_on_rank_1_is_decided_on_both_at_the_same_step(results: list[dict[str, Result]]) -> None:
    for result in of(results, "asked_rollback"):
        assert result["step"] == 3
        assert "step 3 must be undone (going wrong)" in result["error"]


def test_of_two_values_for_one_key_all_ranks_take_that_of_the_higher_rank(results: list[dict[str, Result]]) -> None:
    for result in of(results, "asked_set"):
        assert result["overrides"] == {"lr_factor": 1.5}
