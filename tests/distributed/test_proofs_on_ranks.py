"""Proofs over real gloo ranks: fingerprints of shards, the chain of a run, replicas that drift apart."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.forked_processes import Processes

pytestmark = pytest.mark.distributed

JOBS = "tests.support.jobs.proof_jobs"
CALLS = 6
"""Forward passes of each of two ranks in a step."""


@pytest.fixture(scope="module", autouse=True)
def imported(processes: Processes) -> None:
    processes.load("torch.distributed.fsdp", "torch.distributed.tensor", JOBS)


@pytest.fixture(scope="module")
def of_one(processes: Processes, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The fingerprint of one process."""
    [found] = processes.results(JOBS, "fingerprint", tmp_path_factory.mktemp("one"), {"how": "one"}, ranks=1)
    return str(found)


@pytest.mark.parametrize(
    ("how", "ranks"),
    [
        ("ddp", 2),
        ("fsdp but for one", 2),
        ("fsdp", 3),
        ("dims", 4),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in [("fsdp", 2), ("dims", 3), ("hsdp", 4)]),
    ],
)
def test_a_fingerprint_is_that_of_one_process_in_every_layout(
    processes: Processes, tmp_path: Path, of_one: str, how: str, ranks: int
) -> None:
    assert processes.results(JOBS, "fingerprint", tmp_path, {"how": how}, ranks=ranks) == [of_one] * ranks


def test_a_fingerprint_sees_the_last_element_of_the_last_shard(
    processes: Processes, tmp_path: Path, of_one: str
) -> None:
    first, second = processes.results(JOBS, "fingerprint", tmp_path, {"how": "fsdp", "changed": True})
    assert first == second != of_one


@pytest.mark.parametrize(
    ("how", "ranks", "drifts"),
    [("ddp", 2, 1), ("hsdp", 4, 3), pytest.param("fsdp but for one", 2, 1, marks=pytest.mark.slow)],
)
def test_a_chain_serves_all_ranks_and_shows_a_replica_that_drifts(
    processes: Processes, tmp_path: Path, how: str, ranks: int, drifts: int
) -> None:
    settings: dict[str, Any] = {"how": how, "drifts": drifts}
    results = processes.results(JOBS, "chain", tmp_path, settings, ranks=ranks)
    assert all(one == results[0] for one in results), "all ranks have the same chain"
    first, second, state = results[0]
    assert len(set(first["samples"])) == ranks
    assert isinstance(second["samples"], str), "what all ranks have alike is one value"
    assert (first["loss"], first["learning_rate"]) == ((2.5).hex(), (0.5).hex())
    assert isinstance(first["weights"], str)
    assert len(second["weights"]) == ranks
    assert state == {"chain": second["chain"], "num_records": 2}
    if how == "ddp":
        assert [one != second["weights"][0] for one in second["weights"]] == [False, True]


def test_a_change_of_shards_is_no_drift(processes: Processes, tmp_path: Path) -> None:
    results = processes.results(JOBS, "chain", tmp_path, {"how": "fsdp", "drifts": 1})
    first, second, _ = results[0]
    assert isinstance(second["weights"], str)
    assert first["weights"] != second["weights"]


@pytest.mark.parametrize(
    ("how", "ranks", "drifts", "named"),
    [
        pytest.param("ddp", 3, [2], "rank 2 differs in tied, all.1", marks=pytest.mark.slow),
        ("hsdp", 4, [3], "rank 3, dp_shard 1, dp_replicate 1 differs in tied, all.1"),
        ("hsdp", 4, [0, 2], None),
        ("fsdp but for one", 3, [1], "rank 1 differs in tied"),
        pytest.param("fsdp", 2, [1], None, marks=pytest.mark.slow),
    ],
)
def test_a_replica_that_drifts_is_named_by_its_rank_and_its_place(
    processes: Processes, tmp_path: Path, how: str, ranks: int, drifts: list[int], named: str | None
) -> None:
    settings: dict[str, Any] = {"how": how, "drifts": drifts}
    for equal, drifted in processes.results(JOBS, "compared", tmp_path, settings, ranks=ranks):
        assert equal is None
        if named is None:
            assert drifted is None, "these ranks have no replicas, or have changed alike"
        else:
            assert f"across DP replicas after 7 iterations: {named}. A rank modified" in drifted


@pytest.mark.parametrize(
    ("how", "ranks"),
    [pytest.param("ddp", 2, marks=pytest.mark.slow), ("fsdp", 2), pytest.param("hsdp", 4, marks=pytest.mark.slow)],
)
def test_a_resumed_run_has_the_chain_of_an_uninterrupted_one(
    processes: Processes, tmp_path: Path, how: str, ranks: int
) -> None:
    def run(name: str, **settings: Any) -> Any:
        return processes.results(JOBS, "trained", tmp_path / name, {"how": how, **settings}, ranks=ranks)[0]

    whole = run("whole")
    assert [record["step"] for record in whole["chain"]] == [1, 2, 3, 4, 5, 6]
    assert all(isinstance(record["weights"], str) for record in whole["chain"])
    run("killed", dies=3)
    resumed = run("killed", seed=7, **{"async": True})
    assert resumed["chain"] == whole["chain"]
    assert not [line for line in resumed["said"] if "continues on" in line]


def test_a_run_that_continues_on_another_layout_says_that_bits_differ_and_keeps_one_chain(
    processes: Processes, tmp_path: Path
) -> None:
    processes.results(JOBS, "trained", tmp_path, {"how": "fsdp", "dies": 3})
    first, second = processes.results(JOBS, "trained", tmp_path, {"how": "ddp", "seed": 7})
    [said] = [line for line in first["said"] if "continues on" in line]
    assert "was saved on 2 ranks (dp_shard 2), and the run continues on 2 ranks (replicas): each sample" in said
    assert not [line for line in second["said"] if "continues on" in line], "rank 0 says it"
    assert [record["step"] for record in first["chain"]] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("policy", [pytest.param("skip", marks=pytest.mark.slow), "rollback"])
def test_all_ranks_act_alike_on_a_nan_in_one_shard_and_blame_the_same_samples_as_replicas_do(
    processes: Processes, tmp_path: Path, policy: str
) -> None:
    settings = {"on_nonfinite": policy, "bad_sample": 84}
    found = {}
    for how in ("ddp", "fsdp"):
        found[how] = processes.results(JOBS, "trained", tmp_path / how, {"how": how, **settings})
    (first, second), (expected, _) = found["fsdp"], found["ddp"]
    assert first["counts"] == second["counts"] == expected["counts"]
    assert first["counts"][1:] == ([1, 0] if policy == "skip" else [0, 1])
    assert first["skip_list"] == second["skip_list"] == expected["skip_list"] != []
    assert first["losses"] == second["losses"] == pytest.approx(expected["losses"], rel=1e-5)
    for one, place in ((first, "rank 0, dp_shard 0"), (expected, "rank 0")):
        [said] = [line for line in one["said"] if "action: " in line]
        assert re.search(rf"step 4: {place}, micro-batch 4: gradient norm nan, sample ids \[\d+, 84\]", said), said
    assert "rank 0, dp_shard 0" in first["places"]
    assert set(expected["places"]) == {None}, "of replicas, the number of the rank says it all"


def test_all_ranks_recompute_what_is_suspicious_on_one(processes: Processes, tmp_path: Path) -> None:
    settings = {"how": "fsdp", "rerun_mode": "validate_results", "bad_calls": [3 * CALLS + 1]}
    for one in processes.results(JOBS, "trained", tmp_path, settings):
        assert (one["exit_code"], one["num_calls"], one["counts"][0]) == (17, 5 * CALLS, 3)


@pytest.mark.parametrize("how", ["fsdp", pytest.param("ddp", marks=pytest.mark.slow)])
def test_a_step_that_ranks_compute_again_has_the_same_masks_and_buffers(
    processes: Processes, tmp_path: Path, how: str
) -> None:
    def run(mode: str) -> Any:
        settings = {"how": how, "rerun_mode": mode, "drops": True}
        return processes.results(JOBS, "trained", tmp_path / mode, settings)

    for found, expected in zip(run("report_determinism_stats"), run("disabled"), strict=True):
        assert found["num_calls"] == 2 * expected["num_calls"]
        assert (found["chain"], found["losses"]) == (expected["chain"], expected["losses"])


@pytest.mark.slow
def test_a_result_in_question_is_saved_with_the_shards_before_its_step(processes: Processes, tmp_path: Path) -> None:
    def run(name: str, **settings: Any) -> Any:
        return processes.results(JOBS, "trained", tmp_path / name, {"how": "fsdp", **settings})

    whole, *_ = run("whole")
    bad_calls = [3 * CALLS + 1, 4 * CALLS + 1]
    for one in run("persistent", rerun_mode="validate_results", bad_calls=bad_calls):
        assert (one["exit_code"], one["num_calls"], one["counts"][0]) == (16, 5 * CALLS, 3)
    resumed, *_ = run("persistent", seed=7)
    assert len(resumed["losses"]) == 3, "it continues from the shards before the step"
    assert resumed["chain"] == whole["chain"]
