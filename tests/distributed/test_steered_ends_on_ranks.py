"""Two ranks that were sent a stop or a rollback and are killed repeat it alike, and are extended alike."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.support.forked_processes import Processes
from tests.support.whole_runs import Ranks

pytestmark = pytest.mark.distributed

STOP = {"7": [["set", {"key": "lr_factor", "value": 0.5}]], "9": [["should_training_stop", {}]]}
BACK = {"9": [["rollback", {"to_step": 4, "lr_factor": 0.5}]]}
SAVE = {"6": [["should_save", {}]]}
LONGER = ["train.train_iters=20", "checkpoint.on_config_change=apply"]


@pytest.fixture
def ranks(processes: Processes, tmp_path: Path, corpus: Path, token_cache: Path) -> Ranks:
    return Ranks(processes, tmp_path, "tests.support.jobs.steered_jobs", corpus=str(corpus), cache=str(token_cache))


def end(ranks: Ranks, name: str, **settings: Any) -> tuple[str, int, dict[str, Any]]:
    """How the run ends on both ranks, which must agree, at which step, and what is in force then."""
    assert ranks.start(name, "sent", **settings) == [0, 0], ranks.output(name)
    first, second = (json.loads((ranks.directory / name / f"result-{rank}.json").read_text()) for rank in (0, 1))
    assert first == second
    return first["ended"], first["step"], first["in_force"]


def kill(ranks: Ranks, name: str, event: str, number: int, **settings: Any) -> None:
    codes = ranks.start(name, "sent", dies={event: number}, **settings)
    assert codes == [-signal.SIGKILL] * 2, ranks.output(name)


def weights(ranks: Ranks, name: str) -> bytes:
    return (ranks.directory / name / "runs" / "run" / "model" / "model.safetensors").read_bytes()


def test_a_stop_is_repeated_at_its_step_and_lifted_by_an_extension(ranks: Ranks) -> None:
    expected = end(ranks, "whole", plan=STOP)
    assert expected == ("stopped", 9, {"lr_factor": 0.5})
    kill(ranks, "killed", "on_final_metrics", 1, plan=STOP)
    assert end(ranks, "killed") == expected
    assert weights(ranks, "killed") == weights(ranks, "whole")
    kill(ranks, "killed", "on_step_begin", 2, words=LONGER)
    assert end(ranks, "killed", words=LONGER) == ("completed", 20, {"lr_factor": 0.5})


def test_an_abort_is_repeated_without_saving(ranks: Ranks) -> None:
    abort = [["should_abort_without_save", {}], ["should_training_stop", {}]]
    kill(ranks, "killed", "on_train_end", 1, plan={"7": abort})
    assert end(ranks, "killed") == ("stopped", 7, {})
    assert ranks.steps("killed") == [4]


def test_a_rollback_finds_the_checkpoint_to_which_it_went(ranks: Ranks) -> None:
    assert end(ranks, "whole", plan=BACK) == ("completed", 14, {"lr_factor": 0.5})
    kill(ranks, "killed", "on_step_begin", 10, plan=BACK)
    assert end(ranks, "killed", plan=SAVE) == ("completed", 14, {"lr_factor": 0.5})
    assert weights(ranks, "killed") == weights(ranks, "whole")
