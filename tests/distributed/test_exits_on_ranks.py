"""`checkpoint_and_decide_exit` called by hand on two real ranks: what one of them learns makes both leave."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.forked_processes import Processes, output_of

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_to_one_rank_makes_both_leave_after_one_checkpoint(
    processes: Processes, tmp_path: Path, rank: int
) -> None:
    settings = {"save": str(tmp_path / "saved"), "rank": rank}
    codes = processes.run("tests.support.jobs.exit_jobs", "by_hand", tmp_path, settings, ranks=2)
    assert codes == [0, 0], output_of(tmp_path)
    answers = [json.loads((tmp_path / f"rank-{number}.json").read_text()) for number in range(2)]
    assert answers == [{"left_at": 3, "decided": "signal"}] * 2
    assert [path.name for path in (tmp_path / "saved").glob("checkpoint-*")] == ["checkpoint-3"]
