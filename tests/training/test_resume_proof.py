"""The comparison of two runs names the first step, rank and item in which they differ."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from onstep.config.parallel_sizes import ParallelSizes
from onstep.training.verification.comparison import first_difference
from onstep.training.verification.trajectory_hash import ITEMS


def step(number: int, **changed: Any) -> dict[str, Any]:
    return {"step": number, **dict.fromkeys(ITEMS, "a"), "loss": (2.5).hex(), "chain": "c", **changed}


def made(directory: Path, *records: dict[str, Any], weights: bytes = b"w", metrics_log: Any = ()) -> Path:
    for name in ("certificate", "model"):
        (directory / name).mkdir(parents=True)
    (directory / "certificate" / "chain.json").write_text(json.dumps(records))
    (directory / "model" / "model.safetensors").write_bytes(weights)
    (directory / "trainer_logs.json").write_text(json.dumps(list(metrics_log)))
    return directory


def of_older_version(directory: Path, *ranks: list[dict[str, Any]]) -> Path:
    (made(directory) / "certificate" / "chain.json").unlink()
    for rank, records in enumerate(ranks):
        (directory / "certificate" / f"rank_{rank}.json").write_text(json.dumps(records))
    return directory


def test_equal_runs_have_none_whatever_the_clock_says(tmp_path: Path) -> None:
    runs = [
        made(tmp_path / name, step(1), metrics_log=[{"timestamp": time, "loss": float("nan")}])
        for name, time in (("left", 1.0), ("right", 2.0))
    ]
    for seconds, run in enumerate(runs):
        (run / "model" / "README.md").write_text(f"- train_runtime: {seconds}")
    assert first_difference(*runs) is None


@pytest.mark.parametrize("item", ITEMS)
def test_every_item_is_named_with_its_step_and_the_rank_of_what_ranks_have_of_their_own(
    tmp_path: Path, item: str
) -> None:
    values = [(number / 2).hex() for number in range(3)]
    for common, other, rank in ((values[0], values[1], None), (values[:2], [values[0], values[2]], 1)):
        runs = [
            made(tmp_path / f"{name}-{rank}", step(1), step(2, **{item: value, "chain": name}))
            for name, value in (("left", common), ("right", other))
        ]
        found = first_difference(*runs)
        assert found is not None
        assert (found.step, found.rank, found.item) == (2, rank, item)
        place = "" if rank is None else ", rank 1, dp_shard 1"
        assert found.described(ParallelSizes(dp_shard=2).place).startswith(f"step 2{place}: {item} differs")


def test_the_earliest_step_comes_first_and_its_cause_before_its_consequence(tmp_path: Path) -> None:
    left = made(tmp_path / "left", step(1), step(2), step(3))
    changed = step(2, weights="b", loss=[(1.5).hex(), (2.5).hex()])
    found = first_difference(left, made(tmp_path / "right", step(1), changed, step(3, samples="b")))
    assert str(found) == "step 2, rank 0: loss differs, 2.5 (0x1.4000000000000p+1) and 1.5 (0x1.8000000000000p+0)"


def test_a_missing_step_and_a_missing_rank_are_differences(tmp_path: Path) -> None:
    left = made(tmp_path / "left", step(1), step(2))
    short = first_difference(left, made(tmp_path / "short", step(1)))
    assert str(short) == "step 2: the number of steps differs, step 2 and nothing"
    runs = [made(tmp_path / f"{size}", step(1, rng=[*"abc"[:size]])) for size in (2, 3)]
    assert str(first_difference(*runs)) == "step 1: the number of ranks with rng differs, 2 and 3"


def test_hashes_of_each_rank_by_an_older_version_are_compared_with_each_other(tmp_path: Path) -> None:
    left = of_older_version(tmp_path / "left", [step(1), step(2)], [step(1), step(2)])
    assert first_difference(left, left) is None
    changed = of_older_version(tmp_path / "changed", [step(1), step(2)], [step(1), step(2, rng="b")])
    assert str(first_difference(left, changed)) == "step 2, rank 1: rng differs, a and b"
    alone = of_older_version(tmp_path / "alone", [step(1), step(2)])
    assert str(first_difference(left, alone)) == "step 1, rank 1: the number of steps differs, step 1 and nothing"
    found = str(first_difference(left, made(tmp_path / "new", step(1))))
    assert found.startswith("the format of the trajectory hash differs, a chain of each rank (by an older version")


def test_final_weights_and_metrics_log_count_too(tmp_path: Path) -> None:
    records = [{"global_step": 4, "loss": 1.0, "timestamp": 1.0}]
    left = made(tmp_path / "left", step(1), metrics_log=records)
    weights = first_difference(left, made(tmp_path / "weights", step(1), weights=b"v", metrics_log=records))
    assert weights is not None
    assert "model.safetensors" in weights.item
    metrics_log = first_difference(left, made(tmp_path / "journal", step(1), metrics_log=[{**records[0], "loss": 2.0}]))
    assert str(metrics_log) == "step 4: loss in the metrics log differs, 1.0 and 2.0"
    shorter = first_difference(left, made(tmp_path / "shorter", step(1)))
    assert str(shorter) == "step 4: global_step in the metrics log differs, 4 and nothing"


def test_a_run_without_trajectory_hash_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"checkpoint\.certify=true"):
        first_difference(tmp_path, tmp_path)
