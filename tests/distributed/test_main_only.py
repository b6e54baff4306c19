"""A collective in what rank 0 does alone: an error that names it, in place of a wait for the other ranks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from onstep.distributed import World
from tests.support.forked_processes import Processes

JOBS = "tests.support.jobs.main_only_jobs"


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_collective_of_one_rank_raises_and_leaves_nothing_behind(
    processes: Processes, tmp_path: Path, ranks: int
) -> None:
    first, *others = processes.results(JOBS, "collectives", tmp_path, ranks=ranks)
    for name, text in first["refused"].items():
        assert f"the collective '{name.split()[0]}'" in text, name
        assert re.match(r"the test called [\w.]+\(\) at \S+main_only_jobs.py:\d+, which calls the coll", text), text
        assert text.endswith(f"for all {ranks} ranks: leave it out.")
    assert len(first["refused"]) == 16
    for one in (first, *others):
        assert one["harmless"] == [True]
        assert (one["sum"], one["whole"], one["agreed"]) == (ranks, ranks, [1, 0])


@pytest.fixture
def run(processes: Processes, tmp_path: Path, corpus: Path, token_cache: Path) -> Any:
    def run(event: str, **settings: Any) -> list[dict[str, Any]]:
        settings |= {"event": event, "corpus": str(corpus), "cache": str(token_cache)}
        return processes.results(JOBS, "callback", tmp_path, settings)

    return run


@pytest.mark.parametrize(
    ("event", "steps", "options"),
    [
        ("on_train_start", [], {}),
        ("on_train_step_end", [1], {"collective": "sum"}),
        ("on_step_end", [1], {}),
        ("on_eval_end", [1, 2], {}),
        ("on_train_end", [1, 2], {}),
    ],
)
def test_a_callback_of_rank_0_that_waits_for_the_others_ends_the_run_on_all_ranks(
    run: Any, event: str, steps: list[int], options: dict[str, Any]
) -> None:
    main, other = run(event, options=options)
    assert main["error"] == other["error"] == "MainOnlyError"
    assert main["text"] == other["text"]
    called = "World.sum" if options else "torch.distributed.barrier"
    place = r"\S+main_only_jobs.py:\d+, which calls the collective '\w+', on rank 0 alone"
    assert re.match(rf"callback 'Exporter' during '{event}' called {called}\(\) at {place}", main["text"])
    assert "declare ranks = 'all' in the callback" in main["text"]
    assert main["seen"] == other["seen"] == [*steps, "failed"]


def test_such_a_callback_may_be_tolerated_as_any_other(run: Any) -> None:
    for one in run("on_step_end", options={"on_error": "warn"}):
        assert (one["error"], one["seen"]) == (None, [1, 2, "completed"])


def test_at_the_very_end_rank_0_raises_and_the_others_learn_of_it(run: Any) -> None:
    main, other = run("on_run_end")
    assert (main["error"], other["error"]) == ("MainOnlyError", "RankFailedError")
    assert "rank 0" in other["text"]


def test_a_world_of_one_has_nobody_to_wait_for() -> None:
    world = World()
    with world.main_only():
        assert world.agree([1]) == [1]


@pytest.mark.parametrize("kind", ["own", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_all_ranks_generate_with_a_model_that_is_sharded(processes: Processes, tmp_path: Path, kind: str) -> None:
    main, other = processes.results(JOBS, "generate", tmp_path, {"kind": kind})
    assert len(main["whole"]) == 1
    assert main["sharded"] == main["whole"]
    assert other["sharded"] == other["whole"] == []
    for one in (main, other):
        assert one["is_sharded"]
        assert one["sharded norm"] == pytest.approx(one["whole norm"], rel=1e-5)


@pytest.mark.parametrize(("fails_on", "error"), [([0, 1], None), ([1], "RankFailedError")])
def test_a_generation_that_fails_on_some_ranks_only_ends_the_run(
    processes: Processes, tmp_path: Path, fails_on: list[int], error: str | None
) -> None:
    for one in processes.results(JOBS, "generate", tmp_path, {"kind": "own", "fails_on": fails_on}):
        assert (one.get("error") or "None").split(":")[0] == str(error)
