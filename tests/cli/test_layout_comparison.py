"""`onstep verify-resume --layouts` trains a job in two layouts and compares them step by step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from onstep.cli.layout_comparison import (
    Layout,
    bound_words,
    common_words,
    hint,
    layout_of,
    report_comparison,
    tolerance_of,
)
from onstep.cli.main import main
from onstep.cli.user_job import UserJob
from onstep.config import ConfigContainer
from onstep.errors import ConfigError

PAIR = (Layout("one"), Layout("ddp2", replicas=2))


@pytest.mark.parametrize(
    ("name", "sizes"), [("one", (1, 1)), ("ddp4", (4, 1)), ("fsdp2", (1, 2)), ("hsdp2x3", (2, 3)), ("hsdp1x4", (1, 4))]
)
def test_a_layout_is_known_by_its_name(name: str, sizes: tuple[int, int]) -> None:
    found = layout_of(name)
    assert (found.replicas, found.shards) == sizes
    assert found.ranks == sizes[0] * sizes[1]


@pytest.mark.parametrize("name", ["two", "ddp", "ddp0", "fsdp2x2", "hsdp4", "tp2", "fsdp-1", ""])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(
        ConfigError, match=r"must be two of one, ddpN, fsdpN and hsdpRxS \(R replicas of S shards\), got"
    ):
        layout_of(name)


def made(directory: Path, values: list[dict[str, float]]) -> UserJob:
    job = UserJob((), 1, directory)
    job.run.mkdir(parents=True)
    records = [{"global_step": step, **one} for step, one in enumerate(values, start=1)]
    (job.run / "trainer_logs.json").write_text(json.dumps([*records, {"global_step": 9, "eval_loss": 1.0}]))
    return job


def said(tmp_path: Path, capsys: pytest.CaptureFixture[str], theirs: list[dict[str, float]]) -> tuple[bool, list[str]]:
    ours = [{"loss": 4.0, "grad_norm": 1.0}, {"loss": 2.0, "grad_norm": 1.0}, {"loss": 1.0, "grad_norm": 1.0}]
    jobs = [made(tmp_path / "left", ours), made(tmp_path / "right", theirs)]
    is_equal = report_comparison(jobs, PAIR, 1e-3)
    return is_equal, capsys.readouterr().out.splitlines()[1:]


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, "Equal within the tolerance: loss and gradient norm of every step."),
        ({"grad_norm": 1.0009}, "Equal within the tolerance: loss and gradient norm of every step."),
        ({"grad_norm": 1.25}, "NOT equal: step 2: gradient norm differs by 2.0e-01, 1 in one and 1.25 in ddp2."),
        ({"loss": 1.5}, "NOT equal: step 2: loss differs by 2.5e-01, 2 in one and 1.5 in ddp2."),
        ({"loss": float("nan")}, "NOT equal: step 2: loss differs, 2 in one and nan in ddp2."),
    ],
)
def test_the_first_step_beyond_the_tolerance_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changed: dict[str, float], expected: str
) -> None:
    theirs = [
        {"loss": 4.0, "grad_norm": 1.0},
        {"loss": 2.0, "grad_norm": 1.0} | changed,
        {"loss": 1.0, "grad_norm": 1.0} | changed,
    ]
    is_equal, lines = said(tmp_path, capsys, [*theirs[:2], {"loss": 1.0, "grad_norm": 1.0}])
    assert is_equal is expected.startswith("Equal")
    assert lines[0] == "3 steps in one (1 rank) and ddp2 (2 ranks); relative tolerance 0.001."
    assert lines[-1] == expected
    if changed.get("grad_norm") == 1.25:
        assert lines[2] == "  largest difference of the gradient norm: 2.0e-01, at step 2"


def test_a_missing_step_is_a_difference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    is_equal, lines = said(tmp_path, capsys, [{"loss": 4.0, "grad_norm": 1.0}])
    assert not is_equal
    assert lines[-1] == "NOT equal: step 2: loss differs, 2 in one and nothing in ddp2."


def test_both_layouts_have_the_same_samples_in_a_step() -> None:
    config = ConfigContainer()
    config.train.micro_batch_size = 3
    layouts = [layout_of("ddp2"), layout_of("fsdp3")]
    assert "train.global_batch_size=18" in common_words(config, layouts)
    config.train.global_batch_size = 12
    assert common_words(config, layouts) == ("logger.log_interval=1",)


def test_the_tolerance_is_that_of_the_precision_and_dropout_is_hinted_at() -> None:
    config = ConfigContainer()
    assert tolerance_of(config) == 1e-5
    config.mixed_precision = "bf16_mixed"
    assert tolerance_of(config) == 2e-2
    config.model.hidden_dropout = 0.1
    assert "compare with model.hidden_dropout=0." in hint(config, PAIR)
    assert "dropout" not in hint(config, [layout_of("ddp2"), layout_of("fsdp2")])


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--layouts", "one", "tp2"], "--layouts must be two of one, ddpN, fsdpN and hsdpRxS"),
        (["--layouts", "one", "ddp2", "--ranks", "2"], "--ranks is not for --layouts"),
        (["--layouts", "one", "fsdp2", "fsdp.reshard_after_forward=3"], "fsdp.reshard_after_forward=3 must divide"),
    ],
)
def test_what_cannot_be_compared_is_refused_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], expected: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["verify-resume", "train.train_iters=2", *words]) == 1
    assert expected in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "planned", "bound"),
    [
        (["train.global_batch_size=4"], [5000, 2500], ("train.exit_interval=20",)),
        ([], [None, None], ("train.exit_interval=20",)),
        ([], [20, 10], ()),
        (["train.train_iters=5000"], [5000, 5000], ()),
        (["train.num_epochs=1"], [None, None], ()),
    ],
)
def test_a_long_job_is_compared_over_its_first_steps(
    words: list[str], planned: list[int | None], bound: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert bound_words(words, planned) == bound
    assert bool(bound) == ("Comparing the first 20 steps" in capsys.readouterr().out)


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.distributed
@pytest.mark.parametrize("layouts", [("one", "ddp2"), ("ddp2", "fsdp2"), ("one", "hsdp2x2")])
def test_layouts_train_alike(
    tmp_path: Path,
    corpus: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    layouts: tuple[str, str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    job: list[Any] = [f"dataset.paths=[{corpus / 'colorsys.py'}]", "dataset.cache_dir=cache", "dist.device=cpu"]
    job += ["dataset.seq_length=32", "model.seq_length=32", "model.num_layers=2", "model.hidden_size=16"]
    job += ["model.num_attention_heads=2", "train.global_batch_size=4", "train.train_iters=4"]
    assert main(["verify-resume", *job, "--layouts", *layouts]) == 0
    assert "Equal within the tolerance" in capsys.readouterr().out
