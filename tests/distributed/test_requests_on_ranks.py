"""Whatever callbacks on some ranks request, at any event: all ranks do the same, end alike, and within their limits."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.forked_processes import Processes, output_of
from tests.support.jobs.request_jobs import plan

pytestmark = pytest.mark.distributed
JOBS = "tests.support.jobs.request_jobs"


def settings_of(corpus: Path, token_cache: Path, directory: Path, **more: Any) -> dict[str, Any]:
    return {"corpus": str(corpus), "cache": str(token_cache), "runs": str(directory / "runs"), **more}


@pytest.mark.parametrize(
    ("ranks", "shards", "seeds"),
    [
        (2, 1, (0, 1, 3, 29)),
        (2, 2, (29,)),
        *(
            pytest.param(ranks, shards, range(10 * ranks, 10 * ranks + 20), marks=pytest.mark.slow)
            for ranks, shards in ((2, 1), (3, 1), (4, 1), (2, 2), (4, 2))
        ),
    ],
)
def test_all_ranks_do_the_same_and_end_alike(
    processes: Processes, corpus: Path, token_cache: Path, tmp_path: Path, ranks: int, shards: int, seeds: Sequence[int]
) -> None:
    settings = settings_of(corpus, token_cache, tmp_path, seeds=list(seeds), shards=shards)
    found = processes.results(JOBS, "request", tmp_path, settings, ranks=ranks)
    for seed, *outcomes in zip(seeds, *found, strict=True):
        assert all(one == outcomes[0] for one in outcomes), (plan(seed, ranks, ends=False), outcomes)
        assert not list((tmp_path / "runs" / f"run-{seed}").glob("first-culprit-*")), "no rank has waited in vain"


@pytest.mark.parametrize(
    ("ranks", "seed"),
    [
        (2, 1),
        pytest.param(2, 0, marks=pytest.mark.slow),
        *(pytest.param(2 + seed % 3, seed, marks=pytest.mark.slow) for seed in range(2, 20)),
    ],
)
def test_a_rank_that_an_action_ends_alone_ends_all(
    processes: Processes, corpus: Path, token_cache: Path, tmp_path: Path, ranks: int, seed: int
) -> None:
    actions = plan(seed, ranks, ends=True)
    codes = processes.run(JOBS, "end", tmp_path, settings_of(corpus, token_cache, tmp_path, seed=seed), ranks=ranks)
    assert all(codes), (codes, actions, output_of(tmp_path))
    content = json.loads((tmp_path / "runs" / f"run-{seed}" / "run.json").read_text())
    assert content["status"] == "failed", (content, actions)
    culprit = actions[-1]
    assert f"rank {culprit.rank} " in content["error"] or "of the test" in content["error"], (content, actions)
    assert "hangs" not in content["error"], (content["error"], actions)
