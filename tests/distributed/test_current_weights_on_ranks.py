"""What is read on ranks that divide the updates is what they read without any overlap, at every moment."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from tests.support.every_moment import check_same
from tests.support.forked_processes import Processes

pytestmark = pytest.mark.distributed

JOBS = "tests.support.jobs.moment_jobs"


@pytest.mark.parametrize(
    ("options", "moments"),
    [
        ({}, {"on_checkpoint_load", "on_command", "on_eval_step_end", "on_step_end", "on_train_end", "comparison"}),
        ({"events": [], "is_async": True}, {"in the evaluation", "saved in checkpoint-6", "after the training"}),
        pytest.param(
            {"fails_in_evaluation": True, "events": ["on_exception", "on_run_end"]},
            {"on_exception", "on_run_end"},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"fails_at": 5, "events": ["on_exception"]},
            {"on_exception", "after the training"},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["all", "none", "error in evaluation", "error"],
)
def test_what_is_read_at_every_moment_does_not_depend_on_the_overlaps(
    processes: Processes, tmp_path: Path, options: dict[str, Any], moments: set[str]
) -> None:
    check_readings(processes, tmp_path, {"options": options}, moments, ranks=2)


@pytest.mark.slow
@pytest.mark.parametrize("is_async", [False, True], ids=["synchronous", "asynchronous"])
@pytest.mark.parametrize("mesh", [[2], [3], [2, 2]], ids=["two", "three", "two instances"])
def test_what_any_number_of_ranks_reads_does_not_depend_on_the_overlaps(
    processes: Processes, tmp_path: Path, mesh: list[int], is_async: bool
) -> None:
    settings = {"options": {"is_async": is_async}, "mesh": mesh}
    read = {"on_checkpoint_load", "generation", "comparison", "on_command", "on_eval_end", "saved in checkpoint-8"}
    check_readings(processes, tmp_path, settings, read, ranks=math.prod(mesh))


def check_readings(
    processes: Processes, directory: Path, settings: dict[str, Any], moments: set[str], *, ranks: int
) -> None:
    for expected, seen in processes.results(JOBS, "readings", directory, settings, ranks=ranks):
        check_same([tuple(one) for one in seen], [tuple(one) for one in expected])
        assert moments <= {moment for moment, *_ in seen}


@pytest.mark.parametrize("events", [None, pytest.param([], marks=pytest.mark.slow)], ids=["all", "none"])
def test_what_is_read_in_mxfp8_does_not_depend_on_overlaps_and_shared_memory(
    processes: Processes, tmp_path: Path, events: list[str] | None
) -> None:
    options = {"is_async": True} | ({} if events is None else {"events": events})
    for expected, seen in processes.results(JOBS, "readings", tmp_path, {"options": options, "mxfp8": True}):
        check_same([tuple(one) for one in seen], [tuple(one) for one in expected])
        assert {"saved in checkpoint-6", "after the training"} <= {moment for moment, *_ in seen}


GOLDEN = Path(__file__).parents[1] / "golden" / "context_events_of_8_steps.txt"
PAUSED = ["off, gathered", "on"]


def of_bridges_run(processes: Processes, directory: Path, corpus: Path, cache: Path, **settings: Any) -> Any:
    paths = {"corpus": str(corpus), "cache": str(cache)}
    one, two = processes.results(JOBS, "bridge_run", directory, {**paths, "async": False, **settings})
    assert one["calls"] == two["calls"], "the ranks gather together"
    return one


@pytest.mark.parametrize(
    "is_async", [pytest.param(False, marks=pytest.mark.slow), True], ids=["synchronous", "asynchronous"]
)
def test_events_and_hooks_of_bridges_run_are_as_documented(
    processes: Processes, tmp_path: Path, corpus: Path, token_cache: Path, is_async: bool
) -> None:
    """Evaluations after steps 5 and 8, saves after 7 and at the end; hooks are on from the first update on."""
    found = of_bridges_run(processes, tmp_path, corpus, token_cache, **{"async": is_async})
    saving = ("on_checkpoint_save", "on_checkpoint_save_start", "on_decision")
    assert [one for one in found["events"] if one not in saving] == GOLDEN.read_text().split()
    assert found["events"].count("on_checkpoint_save") == 2
    assert found["calls"] == ["on", *PAUSED, *PAUSED, *PAUSED, "off, gathered"]
    assert states_at(found, "on_train_step_start") == [False] + [True] * 7
    assert states_at(found, "on_step_begin") == [False] + [True] * 7
    assert states_at(found, "on_step_end") == [True] * 8
    off = {"on_train_start", "on_checkpoint_save_start", "on_train_end"}
    off |= {one for one in found["events"] if one.startswith(("on_eval", "on_test"))} - {"on_evaluate"}
    assert [is_on for event, is_on in found["states"] if event in off] == [False] * sum(
        event in off for event in found["events"]
    )


@pytest.mark.parametrize(
    "is_async", [pytest.param(False, marks=pytest.mark.slow), True], ids=["synchronous", "asynchronous"]
)
def test_hooks_stay_off_while_no_update_has_succeeded(
    processes: Processes, tmp_path: Path, corpus: Path, token_cache: Path, is_async: bool
) -> None:
    """The first update is left out: the loss of one rank is not finite."""
    found = of_bridges_run(processes, tmp_path, corpus, token_cache, **{"async": is_async, "skips_first": True})
    assert found["calls"] == ["on", *PAUSED, *PAUSED, *PAUSED, "off, gathered"]
    assert states_at(found, "on_train_step_start") == [False, False] + [True] * 6
    assert states_at(found, "on_step_end") == [False] + [True] * 7


def states_at(found: Any, event: str) -> list[bool]:
    """Whether the hooks were on at each of these events."""
    return [is_on for name, is_on in found["states"] if name == event]


@pytest.mark.parametrize(
    "is_async", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["synchronous", "asynchronous"]
)
def test_masters_are_staged_after_each_clearing_of_the_gradients_and_before_each_gather_that_is_forced(
    processes: Processes, tmp_path: Path, corpus: Path, token_cache: Path, is_async: bool
) -> None:
    """Evaluations after steps 5 and 8, saves after 7 and at the end, in the order of Bridge's training loop."""
    keys = ["fp8_param_gather", "reuse_grad_buf_for_mxfp8_param_ag"]
    calls = of_bridges_run(processes, tmp_path, corpus, token_cache, keys=keys, **{"async": is_async})["calls"]
    update, forced = ["finish", "mark", "copy"], ["prepare", "copy", "off, gathered"]
    first, step = ["zero", "zero", "zero", *update, "on"], ["zero", "zero", "copy", *update]  # and when it is made
    paused = [*forced, "on"]
    assert calls == [*first, *step * 4, *paused, *step * 2, *paused, *step, *paused, *forced]


@pytest.mark.parametrize(
    ("event", "step", "calls"),
    [
        ("on_pre_optimizer_step", 0, []),
        pytest.param("on_eval_step_end", 5, ["on", *PAUSED], marks=pytest.mark.slow),
        pytest.param("on_step_end", 3, ["on"], marks=pytest.mark.slow),
    ],
)
def test_an_error_leaves_hooks_as_it_finds_them(
    processes: Processes, tmp_path: Path, corpus: Path, token_cache: Path, event: str, step: int, calls: list[str]
) -> None:
    """Before the first update, in an evaluation, and between steps."""
    found = of_bridges_run(processes, tmp_path, corpus, token_cache, fails_at=[event, step])
    assert found["calls"] == [*calls, "failed"]


def test_a_model_that_is_exported_while_it_is_trained_has_its_current_weights(
    processes: Processes, tmp_path: Path
) -> None:
    """By `Trainer.save_model` on all ranks, and by `state_dict` on rank 0 alone."""
    [[without, overlapped], *_] = processes.results(JOBS, "exports", tmp_path, {})
    assert len({*without}) == 4, "four steps and the end"
    assert overlapped == without
