"""A signal to one of two ranks, at any moment: one checkpoint at one step, both leave with 75, the resume is exact."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from whole_runs import Ranks, check_same, forked

pytestmark = pytest.mark.distributed

PREEMPTED = 75


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory, corpus: Path, token_cache: Path) -> Iterator[Ranks]:
    with forked() as processes:
        yield Ranks(processes, tmp_path_factory.mktemp("ranks"), corpus=str(corpus), cache=str(token_cache))


@pytest.fixture(scope="module")
def whole(ranks: Ranks) -> dict[str, Any]:
    """The run that nobody touched."""
    return ranks.finish("whole")


def preempt(ranks: Ranks, name: str, strike: dict[str, Any], job: str = "pretrain", **settings: Any) -> list[int]:
    """Strike rank 1 once; the steps of the checkpoints that it led to."""
    before = ranks.steps(name)
    codes = ranks.start(name, job, strikes=[{"rank": 1, "signal": "SIGTERM", **strike}], **settings)
    assert codes == [PREEMPTED, PREEMPTED], (codes, ranks.output(name))
    assert ranks.status(name) == "preempted"
    return [step for step in ranks.steps(name) if step not in before]


@pytest.mark.parametrize(
    ("event", "number", "saved"),
    [
        ("on_forward_backward_start", 5, [3]),
        ("on_train_step_end", 4, [4]),
        ("on_step_end", 6, [6]),
        ("on_log", 1, [3]),
        ("on_eval_step_end", 1, [4]),
        ("on_eval_end", 1, [4]),
        ("on_epoch_end", 1, [6]),
        ("on_train_start", 1, []),
    ],
)
def test_a_signal_to_one_rank_makes_one_checkpoint_and_the_resume_is_exact(
    ranks: Ranks, whole: dict[str, Any], event: str, number: int, saved: list[int]
) -> None:
    name = f"{event}-{number}"
    assert preempt(ranks, name, {"event": event, "number": number}) == saved
    check_same(ranks.finish(name), whole)


def test_the_preempted_checkpoint_is_the_only_one_of_its_run_and_the_end_is_told(ranks: Ranks) -> None:
    preempt(ranks, "told", {"event": "on_step_end", "number": 2})
    for rank in range(2):
        lines = (ranks.folder / "told" / f"ends-{rank}.jsonl").read_text().splitlines()
        assert [json.loads(line)["reason"] for line in lines] == ["train end", "preempted"]
