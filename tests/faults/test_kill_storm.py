"""A run that is killed with SIGKILL at random instants ends, to the byte, as the one that nobody touched."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.faults.kill_marks import Phase
from tests.support.faults.kill_outcome import compare
from tests.support.faults.kill_server import Server
from tests.support.faults.kill_storm import Job, Kill, Storm, histogram

pytestmark = [
    pytest.mark.faults,
    pytest.mark.distributed,
    pytest.mark.process,
    pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="waits for processes by Linux' pidfd"),
]

Count = Callable[[str, object], None]
"""pytest's `record_property`: a count for the page of promises."""
WORDS = (
    "dataset.split=80,10,10",
    "dataset.seq_length=64",
    "model.seq_length=64",
    "model.num_layers=1",
    "model.hidden_size=16",
    "model.num_attention_heads=2",
    "model.hidden_dropout=0.1",
    "model.attention_dropout=0.1",
    "train.global_batch_size=8",
    "train.micro_batch_size=2",
    "scheduler.lr_warmup_iters=10",
    "validation.eval_on_start=false",
    "validation.eval_interval=14",
    "validation.eval_iters=6",
    "logger.log_interval=7",
    "checkpoint.save_interval=9",
    "checkpoint.most_recent_k=3",
    "checkpoint.certify=true",
    "dist.device=cpu",
)
"""A small model with dropout, two or four micro-batches a step, 30 steps an epoch."""
BEYOND_A_BUCKET = (
    "model.num_layers=2",
    "model.hidden_size=128",
    "model.seq_length=16",
    "dataset.seq_length=16",
    "train.global_batch_size=12",
    "train.micro_batch_size=1",
    "ddp.bucket_cap_mb=1",
)
"""Gradients in several buckets, and batches for three and four ranks."""
SHORT = 45
"""Steps of the short storms."""


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


@pytest.fixture(scope="module")
def words(corpus: Path, token_cache: Path) -> tuple[str, ...]:
    return (*WORDS, f"dataset.paths=[{corpus / 'textwrap.py'}]", f"dataset.cache_dir={token_cache}")


@pytest.fixture(scope="module")
def whole(server: Server, words: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A short run on one rank, in a process started as a user starts it, that nobody kills."""
    job = Job(tmp_path_factory.mktemp("whole"), words, SHORT)
    job.complete(server)
    return job


@pytest.mark.slow
def test_killed_in_each_phase_on_one_rank(server: Server, whole: Job, tmp_path: Path, record_property: Count) -> None:
    aims = [Phase.START_UP, Phase.SAVE, Phase.STEP, Phase.EVALUATION, Phase.SAVE]
    storm = Storm(replace(whole, directory=tmp_path), server, 6, 11, aims, fresh_share=0, end_kills=1)
    kills = storm.rage()
    print(f"\n{histogram(kills)}")
    compare(whole.run, storm.job.run)
    record_property("kills", len(kills))
    assert {Phase.SAVE, Phase.EVALUATION} <= {kill.phase for kill in kills}


@pytest.mark.parametrize(
    ("ranks", "more"),
    [
        (2, ()),
        pytest.param(3, BEYOND_A_BUCKET, marks=pytest.mark.slow),
        pytest.param(4, BEYOND_A_BUCKET, marks=pytest.mark.slow),
    ],
    ids=["2", "3", "4"],
)
def test_killed_in_each_phase_on_several_ranks(
    server: Server, words: tuple[str, ...], tmp_path: Path, record_property: Count, ranks: int, more: tuple[str, ...]
) -> None:
    whole = Job(tmp_path / "whole", (*words, *more), SHORT, ranks)
    whole.complete(server, is_fresh=False)
    aims = [Phase.START_UP, Phase.SAVE, Phase.EVALUATION]
    storm = Storm(replace(whole, directory=tmp_path / "killed"), server, 3, 12, aims, fresh_share=0, end_kills=0)
    kills = storm.rage()
    print(f"\n{histogram(kills)}")
    compare(whole.run, storm.job.run)
    record_property("kills", len(kills))
    assert {Phase.SAVE, Phase.EVALUATION} <= {kill.phase for kill in kills}


@pytest.mark.slow
def test_the_comparison_is_red_where_the_random_state_is_left_out(server: Server, whole: Job, tmp_path: Path) -> None:
    job = replace(whole, directory=tmp_path, words=(*whole.words, "checkpoint.save_rng=false"))
    kills = Storm(job, server, 1, 13, [Phase.EVALUATION], fresh_share=0, end_kills=0).rage()
    assert all(kill.step > 9 for kill in kills), "after the first save"
    assert kills
    with pytest.raises(AssertionError, match="certificate"):
        compare(whole.run, job.run)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_hundred_kills_in_runs_of_200_steps_change_nothing(
    server: Server, words: tuple[str, ...], tmp_path: Path, record_property: Count
) -> None:
    with_workers = ("dataset.num_workers=2", "checkpoint.async_save=true")
    kills: list[Kill] = []
    calls = []
    storms = [(1, (), 36), (1, with_workers, 34), (2, (), 34), (2, with_workers, 24)]
    for number, (ranks, more, num_kills) in enumerate(itertools.cycle(storms)):
        if number >= len(storms) and len(kills) >= 100:  # a run may reach its end between two kills
            break
        whole = Job(tmp_path / f"whole-{number}", (*words, *more), 200, ranks)
        whole.complete(server)
        storm = Storm(replace(whole, directory=tmp_path / f"killed-{number}"), server, num_kills, seed=number)
        kills += storm.rage()
        fields = compare(whole.run, storm.job.run)
        calls.append(f"{ranks} rank(s) {' '.join(more)}: equal but for {', '.join(sorted(fields))}\n")
        calls.append(f"{histogram(storm.kills)}\nexit codes {Counter(storm.codes)}\n")
        print("".join(("\n", *calls[-2:])), flush=True)
    print(f"\nall storms:\n{histogram(kills)}")
    counts = Counter(kill.phase for kill in kills)
    record_property("runs that equal the uninterrupted one", len(calls) // 2)
    record_property("kills", len(kills))
    for phase, number in sorted(counts.items()):
        record_property(f"kills during {phase.name.lower().replace('_', ' ')}", number)
    assert counts[Phase.SAVE] >= 20
    assert counts[Phase.START_UP] >= 10
    assert counts[Phase.EVALUATION] >= 10
    assert any(kill.is_fresh for kill in kills)
