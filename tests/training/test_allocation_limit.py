"""A run in a SLURM job saves and exits so early that its own save fits into the allocation."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from onstep import Callback, pretrain
from onstep.config import apply_overrides
from onstep.errors import RunExistsError
from onstep.mirror.mirror import Mirror
from onstep.slurm.allocation import Allocation
from onstep.training.runs.allocation_limit import AllocationLimit
from onstep.training.runs.signals import Preempted
from tests.support.small_configs import small_pretrain_config


class SlowSaves(Callback):
    def on_checkpoint_save_start(self, context: Any) -> None:
        time.sleep(0.3)


class LongSteps(Callback):
    def on_step_end(self, context: Any) -> None:
        time.sleep(0.2)


@pytest.fixture
def ends_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets in how many seconds the allocation of this process ends; there is no squeue. The test runs in a directory
    of its own.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "gpu[01-02]")

    def set_end(seconds: float) -> None:
        monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time() + seconds)))

    return set_end


def start(corpus: Path, cache: Path, *words: str, callbacks: list[Any] | None = None) -> Any:
    config = small_pretrain_config(str(corpus / "colorsys.py"), str(cache))
    config.run.name, config.run.output_dir = "run", "runs"
    config.train.train_iters, config.checkpoint.save_interval = 6, 2
    apply_overrides(config, list(words))
    return pretrain(config, callbacks=callbacks or [])


def recorded() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path("runs/run/run.json").read_text())
    return found


def test_it_exits_with_75_and_the_next_job_continues_it(
    ends_in: Any, corpus: Path, token_cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ends_in(50)
    with pytest.raises(Preempted) as left:
        start(corpus, token_cache, callbacks=[LongSteps(), SlowSaves()])
    assert left.value.code == 75
    assert "SLURM job 4711 ends in" in caplog.text
    assert "it exits after one step" in caplog.text
    assert recorded()["status"] == "preempted"
    assert recorded()["step"] == 1
    assert recorded()["slurm"] == {"job": "4711", "nodes": "gpu[01-02]", "restarts": 0}
    assert recorded()["save_seconds"] >= 0.3
    decisions = [json.loads(line) for line in Path("runs/run/decisions.jsonl").read_text().splitlines()]
    assert any("before SLURM job 4711" in one["reason"] and one["author"] == "SLURM" for one in decisions)
    ends_in(3600)
    assert start(corpus, token_cache).train_state.step == 6


def test_a_run_without_the_key_or_without_a_known_end_is_not_ended(
    ends_in: Any, corpus: Path, token_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends_in(5)
    assert start(corpus, token_cache, "train.exit_margin_seconds=null").train_state.step == 6
    monkeypatch.delenv("SLURM_JOB_END_TIME")
    assert start(corpus, token_cache, "run.name=other").train_state.step == 6


def test_what_is_left_must_hold_the_margin_the_longest_step_and_the_longest_save(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = [1000.0]
    monkeypatch.setattr(time, "time", lambda: clock[0])
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    limit = AllocationLimit(Allocation("7", "n1", 0), ends_at=1100.0, margin_seconds=10.0, save_seconds=30.0)
    monkeypatch.setattr(Allocation, "ends_at", lambda allocation: None)
    asked = []
    while not limit.is_near():
        asked.append(clock[0])
        clock[0] += 7.0
    assert limit.seconds_needed == 47.0
    assert 0 <= 47.0 - limit.seconds_left < 7.0
    monkeypatch.setattr(Allocation, "ends_at", lambda allocation: 2000.0)
    assert not limit.is_near(), "the limit was raised"


def test_a_run_in_a_store_leaves_while_its_upload_still_fits(
    ends_in: Any, corpus: Path, token_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends_in(3600)
    words = [f"run.output_dir=file://{tmp_path}/store", f"run.scratch_dir={tmp_path}/scratch"]
    monkeypatch.setattr(Mirror, "seconds_to_upload", 4000.0)
    with pytest.raises(Preempted):
        start(corpus, token_cache, *words)
    monkeypatch.setattr(Mirror, "seconds_to_upload", 40.0)
    assert start(corpus, token_cache, *words).train_state.step == 6


class IsAskedBeforeTheFirstStep(Callback):
    def on_train_start(self, context: Any) -> None:
        os.kill(os.getpid(), signal.SIGUSR2)


def test_a_job_that_is_preempted_again_and_again_before_a_step_ends_with_a_word(
    ends_in: Any, corpus: Path, token_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def restart(number: int, **settings: Any) -> Any:
        monkeypatch.setenv("SLURM_RESTART_COUNT", str(number))
        return start(corpus, token_cache, **settings)

    def is_preempted(number: int) -> None:
        with pytest.raises(Preempted):
            restart(number, callbacks=[IsAskedBeforeTheFirstStep()])

    ends_in(50)
    with pytest.raises(Preempted):
        restart(0, callbacks=[LongSteps()])
    ends_in(3600)
    for number in range(1, 6):
        is_preempted(number)
    assert recorded()["step"] == 1
    for number in (6, 7):
        with pytest.raises(RunExistsError, match=r"preempted 5 times in a row at step 1, before"):
            restart(number)
    assert recorded()["status"] == "preempted"
    monkeypatch.setenv("SLURM_JOB_ID", "4712")
    is_preempted(0)
    assert restart(1).train_state.step == 6
