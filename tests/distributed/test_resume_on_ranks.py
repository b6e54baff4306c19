"""A run goes on with another number of ranks and workers: every sample of an epoch is still used exactly once."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.support.forked_processes import Processes
from tests.support.whole_runs import Ranks, check_same, samples_of_epochs, taken

pytestmark = pytest.mark.distributed

NUM_ROWS = 44
"""What `resume_jobs.Rows` has: 5 steps of 8 samples an epoch, and a tail of 4 as one more step."""
CALM = {"without_dropout": True, "overrides": {"checkpoint.certify": False}}
"""Dropout draws from a rank's own generator, so losses on other numbers of ranks can only agree without it."""


@pytest.fixture(scope="module")
def ranks(processes: Processes, tmp_path_factory: pytest.TempPathFactory, corpus: Path, token_cache: Path) -> Ranks:
    return Ranks(processes, tmp_path_factory.mktemp("ranks"), corpus=str(corpus), cache=str(token_cache))


@pytest.fixture(scope="module")
def calm(ranks: Ranks) -> dict[int, dict[str, Any]]:
    """What an uninterrupted run on one rank took and lost, by step."""
    ranks.finish("calm", "trainer", ranks=1, **CALM)
    return taken(ranks.directory / "calm")


def check_epochs(directory: Path) -> None:
    """No step twice, and every sample of both epochs exactly once, the tail of 4 included."""
    assert sorted(taken(directory)) == list(range(1, 13))
    assert samples_of_epochs(directory) == {epoch: Counter(range(NUM_ROWS)) for epoch in (0, 1)}


def check_like(directory: Path, expected: dict[int, dict[str, Any]]) -> None:
    """The same samples in each step, and the same losses up to the order of their sums."""
    steps = taken(directory)
    for step, record in expected.items():
        assert Counter(steps[step]["ids"]) == Counter(record["ids"]), step
        assert steps[step]["loss"] == pytest.approx(record["loss"], rel=1e-5), step


KILLED, ASKED = {"signal": "SIGKILL"}, {"signal": "SIGTERM"}


@pytest.mark.parametrize(
    ("layouts", "dies"),
    [
        pytest.param([(1, 0), (2, 2)], {**KILLED, "event": "on_step_end", "number": 3}, marks=pytest.mark.slow),
        pytest.param([(2, 2), (1, 0)], {**ASKED, "event": "on_train_step_end", "number": 8}, marks=pytest.mark.slow),
        ([(2, 0), (4, 0), (1, 2)], {**KILLED, "event": "on_forward_backward_start", "number": 7}),
        pytest.param([(4, 2), (1, 2), (2, 0)], {**ASKED, "event": "on_step_end", "number": 4}, marks=pytest.mark.slow),
    ],
)
def test_the_run_goes_on_with_another_number_of_ranks_and_workers(
    ranks: Ranks, calm: dict[int, dict[str, Any]], layouts: list[tuple[int, int]], dies: dict[str, Any]
) -> None:
    name = "-".join(f"{size}x{workers}" for size, workers in layouts)
    for size, workers in layouts[:-1]:
        arguments = {"dataloader_num_workers": workers}
        strikes = [{"rank": size - 1, **dies}]
        codes = ranks.start(name, "trainer", ranks=size, strikes=strikes, arguments=arguments, **CALM)
        assert 0 not in codes, ranks.output(name)
    size, workers = layouts[-1]
    ranks.finish(name, "trainer", ranks=size, arguments={"dataloader_num_workers": workers}, **CALM)
    check_epochs(ranks.directory / name)
    check_like(ranks.directory / name, calm)


BEYOND_A_BUCKET = {
    "pretrain": {
        "words": [
            "model.num_layers=2",
            "model.hidden_size=128",
            "dataset.seq_length=16",
            "model.seq_length=16",
            "train.global_batch_size=12",
            "train.micro_batch_size=1",
            "train.train_iters=6",
            "checkpoint.save_interval=2",
            "validation.eval_interval=null",
            "ddp.bucket_cap_mb=1",
        ]
    },
    "trainer": {
        "width": 4096,
        "arguments": {"gradient_accumulation_steps": 2, "max_steps": 6, "eval_strategy": "no"},
        "overrides": {"ddp.bucket_cap_mb": 0.25},
    },
}
"""Settings by door under which the gradients fill several buckets, so that the order of a sum depends on the bucket."""


@pytest.mark.parametrize(
    ("door", "size"),
    [pytest.param("pretrain", 3, marks=pytest.mark.process), pytest.param("trainer", 4, marks=pytest.mark.slow)],
)
def test_on_more_than_two_ranks_a_killed_run_ends_with_the_same_bits(ranks: Ranks, door: str, size: int) -> None:
    whole = ranks.finish(f"{door}-buckets", door, ranks=size, **BEYOND_A_BUCKET[door])
    dies = {"rank": size - 1, "signal": "SIGKILL", "event": "on_step_end", "number": 3}
    settings = {**BEYOND_A_BUCKET[door], "strikes": [dies]}
    assert 0 not in ranks.start(f"{door}-killed", door, ranks=size, **settings)
    assert ranks.steps(f"{door}-killed") == [2]
    check_same(ranks.finish(f"{door}-killed", door, ranks=size, **BEYOND_A_BUCKET[door]), whole)


def test_a_change_that_was_accepted_holds_though_the_process_dies_before_a_save(ranks: Ranks) -> None:
    words = ["train.train_iters=4", "scheduler.lr_warmup_iters=0", "checkpoint.certify=false"]
    changed = [*words, "train.train_iters=6", "optimizer.adam_beta1=0.5"]
    accepted = [*changed, "checkpoint.on_config_change=apply"]
    for name in ("change", "change-whole"):
        ranks.finish(name, words=words)
    expected = ranks.finish("change-whole", words=accepted)
    dies = {"rank": 1, "signal": "SIGKILL", "event": "on_step_end", "number": 1}
    for again in (accepted, changed):
        assert 0 not in ranks.start("change", words=again, strikes=[dies])
    check_same(ranks.finish("change", words=changed), expected)


@pytest.mark.parametrize("data", ["stream", "stateful"])
def test_iterable_data_goes_on_where_it_stood(ranks: Ranks, data: str) -> None:
    expected = ranks.finish(f"whole-{data}", "trainer", ranks=1, data=data)
    dies = {"signal": "SIGKILL", "event": "on_step_end", "number": 9}
    assert ranks.start(data, "trainer", ranks=1, data=data, strikes=[dies]) == [-9]
    read_before = len((ranks.directory / data / "read-0.jsonl").read_text().splitlines())
    check_same(ranks.finish(data, "trainer", ranks=1, data=data), expected)
    lines = (ranks.directory / data / "read-0.jsonl").read_text().splitlines()[read_before:]
    # The checkpoint is of step 8, in the middle of the second epoch: the plain one is read again from its start.
    assert json.loads(lines[0])["index"] == (0 if data == "stream" else 16)


@pytest.mark.parametrize(
    ("first", "second", "data"),
    [
        (1, 2, "stream"),
        (2, 1, "stateful"),
        pytest.param(2, 1, "stream", marks=pytest.mark.slow),
        pytest.param(1, 2, "stateful", marks=pytest.mark.slow),
    ],
)
def test_iterable_data_goes_on_with_another_number_of_ranks(ranks: Ranks, data: str, first: int, second: int) -> None:
    name = f"{data}-{first}-{second}"
    ranks.finish(f"calm-{data}-{first}", "trainer", ranks=1, data=data, **CALM)
    dies = {"rank": first - 1, "signal": "SIGKILL", "event": "on_step_end", "number": 7}
    assert 0 not in ranks.start(name, "trainer", ranks=first, data=data, strikes=[dies], **CALM)
    ranks.finish(name, "trainer", ranks=second, data=data, **CALM)
    steps = taken(ranks.directory / name)
    assert sorted(steps) == list(range(1, 13))
    for step, record in taken(ranks.directory / f"calm-{data}-{first}").items():
        assert steps[step]["loss"] == pytest.approx(record["loss"], rel=1e-5), step


@pytest.mark.slow
def test_the_functional_door_does_the_same_and_keeps_the_random_order(ranks: Ranks) -> None:
    words = ["model.hidden_dropout=0", "model.attention_dropout=0", "checkpoint.save_interval=2"]
    words += ["checkpoint.certify=false"]
    ranks.finish("gpt-calm", ranks=1, words=words)
    dies = {"rank": 1, "signal": "SIGKILL", "event": "on_step_end", "number": 5}
    assert 0 not in ranks.start("gpt", ranks=2, words=[*words, "dataset.num_workers=2"], strikes=[dies])
    ranks.finish("gpt", ranks=1, words=words)
    check_like(ranks.directory / "gpt", taken(ranks.directory / "gpt-calm"))


def test_a_tail_that_is_dropped_is_the_same_on_other_numbers_of_ranks(ranks: Ranks) -> None:
    settings = {**CALM, "arguments": {"dataloader_drop_last": True}}
    ranks.finish("dropping-calm", "trainer", ranks=1, **settings)
    dies = {"rank": 0, "signal": "SIGKILL", "event": "on_step_end", "number": 5}
    assert 0 not in ranks.start("dropping", "trainer", ranks=2, strikes=[dies], **settings)
    ranks.finish("dropping", "trainer", ranks=1, **settings)
    check_like(ranks.directory / "dropping", taken(ranks.directory / "dropping-calm"))
    epochs = samples_of_epochs(ranks.directory / "dropping")
    assert [(of_one.total(), set(of_one.values())) for of_one in epochs.values()] == [(40, {1}), (40, {1}), (16, {1})]


def kill_again_and_again(ranks: Ranks, name: str, seed: int) -> None:
    """Each start has another number of ranks and workers, and is killed at a random time."""
    generator = random.Random(seed)
    for number in range(6):
        size, workers = generator.choice([1, 2, 4]), generator.choice([0, 2])
        strike = {"rank": generator.randrange(size), "signal": "SIGKILL", "after": generator.uniform(0.1, 0.5)}
        settings = {"arguments": {"dataloader_num_workers": workers}, **CALM}
        if number == 5:
            ranks.finish(name, "trainer", ranks=size, **settings)
        elif 0 in ranks.start(name, "trainer", ranks=size, strikes=[strike], **settings):
            return


@pytest.mark.slow
@pytest.mark.faults
@pytest.mark.parametrize("seed", range(12))
def test_kills_anywhere_with_ever_other_ranks_and_workers(
    ranks: Ranks, calm: dict[int, dict[str, Any]], seed: int
) -> None:
    name = f"storm-{seed}"
    kill_again_and_again(ranks, name, seed)
    if ranks.status(name) == "completed":
        check_epochs(ranks.directory / name)
        check_like(ranks.directory / name, calm)
