"""`onstep verify-resume --layouts` trains a job in two layouts and compares them step by step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from onstep.cli.layout_comparison import (
    bound_words,
    common_words,
    hint,
    layout_of,
    report_comparison,
    tolerance_of,
)
from onstep.cli.main import main
from onstep.cli.user_job import UserJob
from onstep.config import ConfigContainer, apply_overrides
from onstep.config.parallel_sizes import ParallelSizes
from onstep.config.pipelines import schedule_of
from onstep.config.sections.parallel import ParallelConfig
from onstep.errors import ConfigError

PAIR = (layout_of("one"), layout_of("ddp2"))


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("one", {}),
        ("ddp4", {"dp_replicate": 4}),
        ("fsdp2", {"dp_shard": 2}),
        ("hsdp2x3", {"dp_replicate": 2, "dp_shard": 3}),
        ("hsdp1x4", {"dp_shard": 4}),
        ("distopt2 x tp2", {"dp_replicate": 2, "tp": 2}),
        ("hsdp2x2 x tp2 sp x pp2 interleaved", {"dp_replicate": 2, "dp_shard": 2, "tp": 2, "pp": 2}),
        ("pp4 x ddp2", {"dp_replicate": 2, "pp": 4}),
    ],
)
def test_a_layout_is_known_by_its_name(name: str, sizes: dict[str, int]) -> None:
    assert layout_of(name).sizes == ParallelSizes(**sizes)


def test_a_name_sets_every_key_of_a_layout() -> None:
    """And a layout of the job's own is gone, so that it can be compared with another."""
    config = ConfigContainer()
    apply_overrides(config, layout_of("distopt2 x tp2 sp x pp2 interleaved").words)
    parallel = config.parallel
    assert config.parallel_sizes(8) == ParallelSizes(dp_shard=2, tp=2, pp=2), "updates are divided as shards are"
    assert parallel.sequence_parallel
    assert config.ddp.use_distributed_optimizer
    assert (schedule_of(parallel).name, parallel.virtual_pipeline_model_parallel_size) == ("Interleaved1F1B", 2)
    apply_overrides(config, layout_of("pp2 zbv").words)
    assert schedule_of(parallel).name == "ZBVZeroBubble"
    parallel.pipeline_model_parallel_layout = [3, 1]
    config.ddp.overlap_param_gather = True
    apply_overrides(config, layout_of("one").words)
    assert parallel == ParallelConfig(data_parallel_replicate_size=1)
    assert not config.ddp.use_distributed_optimizer
    assert not config.ddp.overlap_param_gather


@pytest.mark.parametrize(
    ("name", "said"),
    [
        *((name, "each of --layouts must be one, ddpN, fsdpN, hsdpRxS") for name in ["two", "ddp", "ddp0", "fsdp2x2"]),
        *((name, f"got '{name}'") for name in ["hsdp4", "fsdp-1", "", "tp2 x", "tp2 sq", "one x tp2", "fsdp2 sp"]),
        ("ddp2 x fsdp2", "has two parts of one axis in 'ddp2 x fsdp2'; drop 'fsdp2'"),
        ("tp2 x pp2 x tp2", "drop 'tp2'"),
        ("pp2 ZBW", "a schedule in --layouts must be one of GPipe, 1F1B, .*, got 'ZBW'"),
    ],
)
def test_other_names_are_refused(name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
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
    assert "train.global_batch_size=36" in common_words(config, [layouts[1], layout_of("pp4"), layout_of("tp3")])
    assert "train.global_batch_size=24" in common_words(config, [layout_of("ddp2 x pp2 DualPipeV"), layout_of("one")])
    config.train.global_batch_size = 12
    assert common_words(config, layouts) == ("logger.log_interval=1",)
    config.train.micro_batch_size = None
    assert common_words(config, layouts) == ("logger.log_interval=1",)
    assert "train.micro_batch_size=1" in common_words(config, [*layouts, layout_of("pp2")])


def test_the_tolerance_is_that_of_the_precision_and_dropout_is_hinted_at() -> None:
    config = ConfigContainer()
    assert tolerance_of(config) == 1e-5
    config.mixed_precision = "bf16_mixed"
    assert tolerance_of(config) == 2e-2
    config.model.hidden_dropout = 0.1
    assert "compare with model.hidden_dropout=0." in hint(config, PAIR)
    assert "dropout" not in hint(config, [layout_of("ddp2"), layout_of("fsdp2")])
    assert "dropout" not in hint(config, [layout_of("one"), layout_of("tp2 sp x pp2")])


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--layouts", "one", "cp2"], "each of --layouts must be one, ddpN, fsdpN, hsdpRxS"),
        (["--layouts", "one", "pp3", "model.num_layers=4"], "model.num_layers=4 cannot be divided into 3 equal stages"),
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


OF_MODELS = [("one", "tp2 sp"), ("pp2 interleaved", "tp2 x pp2 ZBV"), ("distopt2 x tp2", "fsdp2 x tp2 sp x pp2")]


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.distributed
@pytest.mark.parametrize("layouts", [("one", "ddp2"), ("ddp2", "fsdp2"), ("one", "hsdp2x2"), *OF_MODELS])
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
    job += ["dataset.seq_length=32", "model.seq_length=32", "model.num_layers=4", "model.hidden_size=16"]
    job += ["model.num_attention_heads=2", "train.global_batch_size=4", "train.train_iters=4"]
    assert main(["verify-resume", *job, "--layouts", *layouts]) == 0
    assert "Equal within the tolerance" in capsys.readouterr().out
