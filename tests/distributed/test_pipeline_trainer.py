"""`Trainer` with a model of transformers whose layers are on the ranks of a pipeline."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.forked_processes import Processes

pytestmark = pytest.mark.distributed

JOBS = "tests.support.jobs.pipeline_trainer_jobs"


def trained(processes: Processes, place: Path, *trainers: dict[str, Any], ranks: int) -> list[dict[str, Any]]:
    place.mkdir(exist_ok=True)
    settings = {"trainers": [{**one, "ranks": ranks, "directory": str(place / one["directory"])} for one in trainers]}
    first, *others = processes.results(JOBS, "trainers", place, settings, ranks=ranks)
    assert all(other == first for other in others)
    found: list[dict[str, Any]] = first
    return found


FIGURES = ("losses", "norms", "evaluated", "predicted")


def figures(found: dict[str, Any]) -> dict[str, Any]:
    """Without what a part of a run does not have: the events and texts of another."""
    return {name: found[name] for name in FIGURES}


def are_close(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for name, values in expected.items():
        assert found[name] == (pytest.approx(values, rel=1e-5) if name in FIGURES else values), name


def logits_of(directory: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(directory)
    with torch.no_grad():
        logits: torch.Tensor = model(torch.arange(24).view(2, 12)).logits
    return logits


def test_a_trainer_on_a_pipeline_is_one_in_one_process_and_continues_to_the_bit(
    processes: Processes, tmp_path: Path
) -> None:
    """Ragged labels with an empty micro-batch, tied embeddings, clipping, metrics, texts with an end, on all ranks."""
    ends = {"best": True, "changed": {"eos_token_id": 35}, "predicts": True}
    whole, _, rest, own, held, asking, *others = trained(
        processes,
        tmp_path,
        {"directory": "whole", **ends},
        {"directory": "part", "steps": 2, **ends},
        {"directory": "part", "resumes": True, "best": True},
        {"directory": "own", "overrides": True},
        {"directory": "held", "object": True},
        {"directory": "asking", "asks_again": True},
        {"directory": "compiled", "arguments": {"torch_compile": True}},
        {"directory": "generating", "arguments": {"predict_with_generate": True}},
        ranks=2,
    )
    assert "refused" not in whole, whole
    assert figures(rest) == figures(whole)
    assert whole["texts"][-1].endswith("C [START] C"), "the text ends with the end token, which the model would repeat"
    assert "WithOwnLoss overrides compute_loss, which has a whole model" in own["refused"]
    assert held["refused"].startswith("the AdamW in optimizers has the whole parameters of LlamaForCausalLM")
    assert asking["refused"].startswith("LBFGS requires a closure")
    for one, name in zip(others, ("torch_compile", "predict_with_generate"), strict=True):
        assert one["refused"].startswith(f"{name} requires a whole model, which parallelism_config['pp_size']=2 ")
    assert [one["lost"] for one in (own, held, asking, *others)] == [[]] * 5, "a refusal leaves the user's model whole"
    shutil.copytree(tmp_path / "part" / "checkpoint-2", tmp_path / "continued" / "checkpoint-2")
    one, continued = trained(
        processes,
        tmp_path,
        {"directory": "one", **ends},
        {"directory": "continued", "resumes": True, "best": True},
        ranks=1,
    )
    are_close(one, whole)
    are_close(continued, figures(whole))
    assert float((logits_of(tmp_path / "whole" / "final") - logits_of(tmp_path / "one" / "final")).abs().max()) < 1e-4


INTERLEAVED = {"virtual_pipeline_model_parallel_size": 2}
V = {"pipeline_schedule": "ZBVZeroBubble"}


@pytest.mark.slow
def test_every_kind_of_schedule_trains_20_steps_and_reads_a_checkpoint_of_one_process(
    processes: Processes, tmp_path: Path
) -> None:
    """Interleaved, with an optimizer of a factory, and in a V, with the best model loaded at the end."""
    rows: list[dict[str, Any]] = [
        {"directory": "interleaved", "kind": "gpt2", "parallel": INTERLEAVED, "factory": True, "steps": 20},
        {"directory": "v", "kind": "qwen3", "parallel": V, "best": True, "steps": 20},
        {"directory": "mixtral", "kind": "mixtral", "steps": 20},
    ]
    expected = trained(processes, tmp_path / "alone", *rows, ranks=1)
    for found, one in zip(trained(processes, tmp_path, *rows, ranks=2), expected, strict=True):
        are_close(found, one)
    shutil.copytree(tmp_path / "alone" / "v" / "checkpoint-10", tmp_path / "continued" / "checkpoint-10")
    [continued] = trained(
        processes, tmp_path, {**rows[1], "directory": "continued", "parallel": INTERLEAVED, "resumes": True}, ranks=2
    )
    are_close(continued, figures(expected[1]))


UNTIED = {"tie_word_embeddings": False}
FEATURES: list[dict[str, Any]] = [
    {"directory": "recomputed", "arguments": {"gradient_checkpointing": True}},
    {"directory": "frozen-first", "frozen": ["embed_tokens", "layers.0.", "layers.1."], "changed": UNTIED},
    {"directory": "frozen-last", "frozen": ["layers.2.", "layers.3.", "norm", "lm_head"], "changed": UNTIED},
    {"directory": "frozen-tied", "frozen": ["embed_tokens"]},
    {"directory": "resized", "vocabulary": 72},
    {"directory": "smoothed", "arguments": {"label_smoothing_factor": 0.1}},
    {"directory": "lengths", "varied": True, "arguments": {"train_sampling_strategy": "sequential"}},
    {"directory": "tail", "samples": 26, "arguments": {"num_train_epochs": 1.0}},
]
"""The last step of an epoch has one micro-batch."""


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [INTERLEAVED, V], ids=["interleaved", "v"])
def test_what_models_and_runs_have_is_trained_as_in_one_process(
    processes: Processes, tmp_path: Path, parallel: dict[str, Any]
) -> None:
    whole = trained(processes, tmp_path / "alone", *FEATURES, ranks=1)
    rows = [{**one, "parallel": parallel} for one in FEATURES]
    for row, found, one in zip(rows, trained(processes, tmp_path, *rows, ranks=2), whole, strict=True):
        assert one.get("losses"), (row, one)
        are_close(found, one)


@pytest.mark.slow
def test_three_trainers_on_a_pipeline_are_equal_to_the_bit(processes: Processes, tmp_path: Path) -> None:
    kinds: list[dict[str, Any]] = [
        {"kind": "gpt2", "parallel": INTERLEAVED, "factory": True},
        {"kind": "qwen3", "parallel": V},
        {"kind": "mixtral"},
    ]
    rows = [{**kind, "directory": f"{kind['kind']}-{number}"} for number in range(3) for kind in kinds]
    found = trained(processes, tmp_path, *rows, ranks=2)
    assert found[:3] == found[3:6] == found[6:]
    assert all(len(set(one["losses"])) == 4 for one in found)


@pytest.mark.slow
def test_replicas_and_four_stages_train_as_one_process(processes: Processes, tmp_path: Path) -> None:
    [replicas] = trained(processes, tmp_path, {"directory": "replicas", "rows": 1}, ranks=4)
    [four] = trained(processes, tmp_path, {"directory": "four", "axes": {"pp_size": 4}}, ranks=4)
    [one] = trained(processes, tmp_path, {"directory": "one"}, ranks=1)
    are_close(replicas, figures(one))
    are_close(four, one)
