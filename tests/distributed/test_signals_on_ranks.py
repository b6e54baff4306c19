"""A signal to one of two ranks, at any moment: one checkpoint at one step, both leave with 75, the resume is exact."""

from __future__ import annotations

import json
import random
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.support import torchrun
from tests.support.forked_processes import Processes
from tests.support.waiting import PATIENCE, until
from tests.support.whole_runs import JOBS, Ranks, check_same, outcome

pytestmark = pytest.mark.distributed

PREEMPTED = 75


@pytest.fixture(scope="module")
def ranks(processes: Processes, tmp_path_factory: pytest.TempPathFactory, corpus: Path, token_cache: Path) -> Ranks:
    return Ranks(processes, tmp_path_factory.mktemp("ranks"), corpus=str(corpus), cache=str(token_cache))


@pytest.fixture(scope="module")
def whole(ranks: Ranks) -> dict[str, Any]:
    """The run that nobody touched."""
    whole = ranks.finish("whole")
    assert [len(chain) for chain in whole["certificates"]] == [11]
    assert [len(calls) > 11 for calls in whole["told"]] == [True, True]
    assert whole["weights"] is not None
    return whole


def preempt(ranks: Ranks, name: str, strike: dict[str, Any], job: str = "pretrain", **settings: Any) -> list[int]:
    """Strike rank 1 once; the steps of the checkpoints that it led to."""
    before = ranks.steps(name)
    codes = ranks.start(name, job, strikes=[{"rank": 1, "signal": "SIGTERM", **strike}], **settings)
    assert codes == [PREEMPTED, PREEMPTED], (codes, ranks.output(name))
    assert ranks.status(name) == "preempted"
    assert "first failure" not in ranks.output(name), "a rank that leaves by a decision is no fault"
    return [step for step in ranks.steps(name) if step not in before]


@pytest.mark.parametrize(
    ("event", "number", "saved"),
    [
        ("on_train_start", 1, []),
        ("on_forward_backward_start", 5, [3]),
        pytest.param("on_train_step_end", 4, [4], marks=pytest.mark.slow),
        pytest.param("on_step_end", 6, [6], marks=pytest.mark.slow),
        pytest.param("on_log", 1, [3], marks=pytest.mark.slow),
        pytest.param("on_eval_step_end", 1, [4], marks=pytest.mark.slow),
        pytest.param("on_eval_end", 1, [4], marks=pytest.mark.slow),
        ("on_epoch_end", 1, [6]),
    ],
)
def test_a_signal_to_one_rank_makes_one_checkpoint_and_the_resume_is_exact(
    ranks: Ranks, whole: dict[str, Any], event: str, number: int, saved: list[int]
) -> None:
    name = f"{event}-{number}"
    assert preempt(ranks, name, {"event": event, "number": number}) == saved
    check_same(ranks.finish(name), whole)


def test_the_end_is_fired_once_on_both_ranks(ranks: Ranks) -> None:
    preempt(ranks, "told", {"event": "on_step_end", "number": 2})
    for rank in range(2):
        lines = (ranks.directory / "told" / f"ends-{rank}.jsonl").read_text().splitlines()
        assert [json.loads(line)["reason"] for line in lines] == ["train end", "preempted"]


@pytest.mark.slow
def test_several_signals_in_one_run_each_make_one_checkpoint(ranks: Ranks, whole: dict[str, Any]) -> None:
    for number, step in ((2, 2), (3, 5), (1, 6), (3, 9)):
        assert preempt(ranks, "several", {"event": "on_step_end", "number": number}) == [step]
    assert ranks.steps("several") == [2, 5, 6, 9]
    check_same(ranks.finish("several"), whole)


@pytest.mark.parametrize(
    ("kind", "strike", "expected"),
    [
        ("blocking", {"operation": "fsync", "number": 2}, [4]),
        ("async", {"event": "on_train_step_end", "number": 5, "during_save": True}, [4, 5]),
    ],
)
@pytest.mark.slow
def test_a_signal_during_a_save_makes_a_second_checkpoint_only_of_a_later_step(
    ranks: Ranks, whole: dict[str, Any], kind: str, strike: dict[str, Any], expected: list[int]
) -> None:
    words = ["checkpoint.save_interval=4", f"checkpoint.async_save={str(kind == 'async').lower()}"]
    assert preempt(ranks, kind, strike, words=words, slow_save=0.02) == expected
    found = ranks.finish(kind, words=words)
    for part in ("files", "weights", "certificates", "journal", "told"):
        assert found[part] == whole[part], part


@pytest.mark.parametrize("words", [[], pytest.param(["checkpoint.async_save=true"], marks=pytest.mark.slow)])
def test_a_second_signal_leaves_at_once_and_corrupts_nothing(
    ranks: Ranks, whole: dict[str, Any], words: list[str]
) -> None:
    name = "twice" + "-async" * bool(words)
    first = {"rank": 1, "signal": "SIGTERM", "event": "on_step_end", "number": 3}
    preempt(ranks, name, first, words=words)
    second = {"rank": 1, "signal": "SIGTERM", "operation": "fsync", "number": 2}
    strikes = [{**first, "number": 2}, second]
    codes = ranks.start(name, strikes=strikes, repeat_window=0.0, slow_save=0.02, words=words)
    assert codes[1] == -15, (codes, ranks.output(name))
    assert ranks.steps(name) == [3], "the save was not finished"
    check_same(ranks.finish(name, words=words), whole)


IN_ORDER = {"train_sampling_strategy": "sequential"}
SLOW_ROW = {"slow_row": 14, "slow_seconds": 0.5}
"""Rank 1 reads row 14 for its second micro-batch of step 2."""


@pytest.fixture(scope="module")
def whole_in_order(ranks: Ranks) -> dict[str, Any]:
    """The Trainer's run in file order that nobody touched."""
    return ranks.finish("whole-in-order", "trainer", arguments=IN_ORDER)


@pytest.mark.parametrize("workers", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_a_signal_while_a_rank_waits_for_data_is_acted_on_when_the_data_has_come(
    ranks: Ranks, whole_in_order: dict[str, Any], workers: int
) -> None:
    arguments = {**IN_ORDER, "dataloader_num_workers": workers, "save_steps": 50}
    name = f"slow-{workers}"
    [saved] = preempt(ranks, name, {"file": "was-slow"}, "trainer", arguments=arguments, **SLOW_ROW)
    assert saved <= 2  # workers read ahead: what they are slow with, they may be slow with before step 2
    check_same(ranks.finish(name, "trainer", arguments=arguments), whole_in_order)


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=[pytest.mark.slow, pytest.mark.faults])])
def test_data_that_does_not_come_is_given_up_and_the_newest_checkpoint_stands(
    ranks: Ranks, whole_in_order: dict[str, Any], workers: int
) -> None:
    arguments = {**IN_ORDER, "dataloader_num_workers": workers, "save_steps": 1}
    overrides, name = {"train.data_timeout": 0.2}, f"stuck-{workers}"
    strikes = [{"rank": 1, "signal": "SIGTERM", "file": "was-slow"}]
    settings = {"arguments": arguments, "overrides": overrides}
    codes = ranks.start(name, "trainer", strikes=strikes, slow_row=14, slow_seconds=30.0, **settings)
    assert codes[1] == PREEMPTED, (codes, ranks.output(name))
    assert codes[0] != 0
    assert ranks.steps(name) == [1]
    check_same(ranks.finish(name, "trainer", **settings), whole_in_order)


@pytest.mark.process
@pytest.mark.slow
def test_torchrun_reports_75_of_the_ranks_and_itself_leaves_with_1(ranks: Ranks, whole: dict[str, Any]) -> None:
    strikes = [{"rank": 1, "signal": "SIGTERM", "event": "on_step_end", "number": 4}]
    words = torchrun.job(JOBS, "pretrain", {**ranks.common, "attempt": 1, "strikes": strikes})
    code, said = torchrun.finish(words, ranks.directory / "torchrun")
    assert code == 1
    assert "exitcode  : 75" in said
    assert ranks.steps("torchrun") == [4]
    assert ranks.status("torchrun") == "preempted"
    check_same(ranks.finish("torchrun"), whole)


@pytest.mark.process
@pytest.mark.slow
def test_a_signal_to_torchrun_reaches_both_ranks_and_makes_one_checkpoint(ranks: Ranks) -> None:
    directory = ranks.directory / "agent"
    settings = {**ranks.common, "attempt": 1, "words": ["train.train_iters=100000", "logger.log_interval=1"]}
    with torchrun.start(torchrun.job(JOBS, "pretrain", settings), directory) as process:
        until((directory / "taken-0.jsonl").exists, while_true=lambda: process.poll() is None)
        process.send_signal(signal.SIGTERM)
        said, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode != 0
    assert ranks.status("agent") == "preempted", said
    assert len(ranks.steps("agent")) == 1
    for rank in range(2):
        lines = (directory / f"ends-{rank}.jsonl").read_text().splitlines()
        assert json.loads(lines[-1])["reason"] == "preempted"


def sweep(ranks: Ranks, whole: dict[str, Any], seeds: range, words: list[str], longest: float) -> None:
    """Signal a random rank at a random time, again and again, until the run ends by itself.

    A signal that comes before a rank has its handlers, or after it gave them back, ends that rank as it always did.
    """
    for seed in seeds:
        generator, name = random.Random(seed), f"random-{seed}-{'-'.join(words)}"
        codes: list[int] = []
        for most in range(8, -1, -1):
            before = ranks.steps(name)
            strike = {"rank": generator.randrange(2), "signal": "SIGTERM", "after": generator.uniform(0.02, longest)}
            ranks.forget_output(name)
            strikes = [strike] * bool(most)
            codes = ranks.start(name, strikes=strikes, words=words, slow_save=generator.choice([0.0, 0.002]))
            is_handled = "saving and stopping after this step" in ranks.output(name)
            expected = {(0, 0), (PREEMPTED, PREEMPTED)}
            if not is_handled:
                expected = {(0, 0), (-15, -9), (-9, -15), (-15, 0), (0, -15)}
            assert tuple(codes) in expected, (seed, strike, codes, ranks.output(name))
            if not words:
                assert len([step for step in ranks.steps(name) if step not in before]) <= 1
            if ranks.status(name) == "completed":
                break
        found = outcome(ranks.directory / name)
        check_same(found, whole if codes == [0, 0] else {**whole, "told": found["told"]})


@pytest.mark.slow
@pytest.mark.faults
@pytest.mark.parametrize(
    "words",
    [
        [],
        ["dataset.num_workers=2"],
        ["checkpoint.save_interval=2"],
        ["checkpoint.save_interval=2", "checkpoint.async_save=true"],
    ],
)
def test_many_signals_at_random_times(ranks: Ranks, whole: dict[str, Any], words: list[str]) -> None:
    sweep(ranks, whole, range(100, 104), words, 0.45)
