"""Retention: the rules add up, and the last good checkpoint is never among what goes."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from onstep.checkpoint.catalog.discovery import CheckpointInfo, checkpoints
from onstep.checkpoint.catalog.retention import Retention, best, to_delete
from onstep.checkpoint.storage.store import FileStore
from onstep.errors import ConfigError
from tests.support.small_checkpoints import make_manifest, write_checkpoint


def info(step: int, **changes: Any) -> CheckpointInfo:
    return CheckpointInfo(Path(f"checkpoint-{step}"), step, make_manifest(step, **changes))


def deleted(infos: list[CheckpointInfo], retention: Retention, **more: Any) -> list[int]:
    return [info.step for info in to_delete(infos, retention, **more)]


def best_step(infos: Iterable[CheckpointInfo], retention: Retention) -> int:
    chosen = best(infos, retention)
    assert chosen is not None
    return chosen.step


def with_losses(losses: dict[int, float]) -> list[CheckpointInfo]:
    return [info(step, metrics={"loss": loss}) for step, loss in losses.items()]


FIVE = {10: 1.0, 20: 0.5, 30: 2.0, 40: 3.0, 50: 4.0}
"""The losses of steps."""


@pytest.mark.parametrize(
    ("losses", "rules", "gone"),
    [
        (dict.fromkeys((100, 9, 30, 20), 1.0), {"most_recent_k": 2}, [9, 20]),  # in order of steps
        (dict.fromkeys((100, 9, 30, 20), 1.0), {"most_recent_k": 1}, [9, 20, 30]),
        (FIVE, {}, []),
        ({10: 1.0, 20: 1.0}, {"most_recent_k": 0}, [10]),  # the newest stays even where none are asked for
        ({10: 1.0}, {"most_recent_k": 0}, []),
        ({}, {"most_recent_k": 0}, []),
        (FIVE, {"most_recent_k": 2, "keep_best_n": 2}, [30]),  # beyond the last k
        (FIVE, {"most_recent_k": 2, "keep_best_n": 1}, [10, 30]),
        ({10: 1.0, 20: 3.0, 30: 2.0, 40: 9.0}, {"most_recent_k": 1, "keep_best_n": 2}, [20]),  # 30 takes its place
        (FIVE, {"most_recent_k": 1, "keep_every_n": 20}, [10, 30]),
        ({10: 0.0, 20: 0.5, 30: math.nan, 40: 1.0}, {"most_recent_k": 1, "keep_best_n": 1}, [20, 30]),
    ],
)
def test_the_newest_the_best_and_multiples_are_kept(
    losses: dict[int, float], rules: dict[str, Any], gone: list[int]
) -> None:
    assert deleted(with_losses(losses), Retention(**rules)) == gone


def test_without_a_number_nothing_is_the_best() -> None:
    assert best(with_losses({10: math.nan}), Retention()) is None
    assert best([info(10)], Retention()) is None


@pytest.mark.parametrize(
    ("metric", "greater", "expected"),
    [
        ("loss", None, 10),
        ("eval_loss", None, 10),
        ("perplexity", None, 10),
        ("accuracy", None, 20),
        ("eval_accuracy", None, 20),
        ("accuracy", False, 10),
        ("loss", True, 20),
    ],
)
def test_the_direction_follows_the_name_unless_it_is_said(metric: str, greater: bool | None, expected: int) -> None:
    key = metric if metric.startswith("eval_") else f"eval_{metric}"
    infos = [info(10, metrics={key: 1.0}), info(20, metrics={key: 2.0})]
    assert best_step(infos, Retention(metric=metric, greater_is_better=greater)) == expected


def test_the_value_of_an_evaluation_counts_before_that_of_training() -> None:
    infos = [info(10, metrics={"loss": 1.0, "eval_loss": 3.0}), info(20, metrics={"loss": 2.0, "eval_loss": 2.0})]
    for metric in ("loss", "eval_loss"):
        assert best_step(infos, Retention(metric=metric)) == 20


def test_of_equal_values_the_oldest_is_the_best() -> None:
    assert best_step(reversed(with_losses({10: 1.0, 20: 1.0})), Retention()) == 10


def test_of_temporary_ones_only_the_newest_is_kept_and_they_take_no_place() -> None:
    infos = [info(10), info(20), info(30, persistent=False), info(40, persistent=False), info(50)]
    assert deleted(infos, Retention()) == [30]
    assert deleted(infos, Retention(most_recent_k=2, keep_every_n=30)) == [10, 30]


def test_refused_newer_ones_neither_count_nor_go() -> None:
    infos = [info(step) for step in (10, 20, 30, 40)]
    assert deleted(infos, Retention(most_recent_k=1), newest=20) == [10]
    assert deleted(infos, Retention(most_recent_k=2), newest=20) == []


def test_the_newest_up_to_each_step_that_the_run_goes_back_to_stays() -> None:
    infos = [info(10), info(20), info(30, persistent=False), info(40), info(50, persistent=False)]
    for steps, gone in [
        ([], [10, 20, 30]),
        ([10], [20, 30]),
        ([9], [10, 20, 30]),
        ([29, 30], [10]),
        ([60], [10, 20, 30]),
    ]:
        assert deleted(infos, Retention(most_recent_k=1, steps_to_keep=lambda steps=steps: steps)) == gone


def test_other_runs_stay() -> None:
    infos = [info(10), info(20), info(30, run_id="other"), info(1000, run_id="other")]
    assert deleted(infos, Retention(most_recent_k=1), run_id="run") == [10]


@pytest.mark.parametrize("wrong", [{"most_recent_k": -2}, {"keep_every_n": 0}, {"keep_best_n": -1}])
def test_a_number_without_a_meaning_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Retention(**wrong)


def kept_by_oracle(infos: list[CheckpointInfo], retention: Retention) -> set[int]:
    """Each rule by itself, by counting: slow and plain."""
    kept = {max(info.step for info in infos)}
    for one in infos:
        peers = [other for other in infos if other.manifest.persistent == one.manifest.persistent]
        newer = sum(other.step > one.step for other in peers)
        if not one.manifest.persistent:
            kept |= {one.step} if newer == 0 else set()
            continue
        if retention.most_recent_k == -1 or newer < retention.most_recent_k:
            kept.add(one.step)
        if retention.keep_every_n and one.step % retention.keep_every_n == 0:
            kept.add(one.step)
        value = one.manifest.metrics.get("loss")
        if value is None or math.isnan(value):
            continue
        sign = -1 if retention.greater_is_better else 1
        better = 0
        for other in peers:
            theirs = other.manifest.metrics.get("loss", math.nan)
            better += sign * theirs < sign * value or (theirs == value and other.step < one.step)
        if better < retention.keep_best_n:
            kept.add(one.step)
    return kept


def test_random_rules_keep_what_a_simple_oracle_keeps() -> None:
    chance = random.Random(7)
    for _ in range(3000):
        steps = chance.sample(range(40), chance.randrange(1, 12))
        infos = []
        for step in steps:
            loss = chance.choice([None, math.nan, 0.0, 1.0, 2.0, chance.random()])
            metrics = {} if loss is None else {"loss": loss}
            infos.append(info(step, metrics=metrics, persistent=chance.random() < 0.7))
        retention = Retention(
            most_recent_k=chance.choice([-1, 0, 1, 2, 3]),
            keep_every_n=chance.choice([None, 1, 3, 5]),
            keep_best_n=chance.choice([0, 1, 2, 3]),
            greater_is_better=chance.choice([None, False, True]),
        )
        going = deleted(infos, retention)
        assert going == sorted(going)
        assert set(steps) - set(going) == kept_by_oracle(infos, retention), (retention, infos)


def test_a_reused_directory_keeps_what_is_not_ours(tmp_path: Path) -> None:
    for step in (1000, 2000):
        write_checkpoint(tmp_path, step, run_id="old")
    foreign = tmp_path / "checkpoint-5"
    foreign.mkdir()
    (foreign / "pytorch_model.bin").write_bytes(b"mine")
    for step in (10, 20, 30):
        write_checkpoint(tmp_path, step, run_id="new")
        for gone in to_delete(checkpoints(tmp_path), Retention(most_recent_k=2), newest=step, run_id="new"):
            FileStore().remove_tree(gone.path)
    assert [each.step for each in checkpoints(tmp_path)] == [2000, 1000, 30, 20]
    assert (foreign / "pytorch_model.bin").read_bytes() == b"mine"
