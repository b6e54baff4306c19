"""Pipelines of models of transformers train, save and continue as one process does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.test_pipelines import TWO, check, furthest, pretrained, results, row
from tests.support.forked_processes import Processes

pytestmark = pytest.mark.distributed

TIED: dict[str, Any] = {"changed": {"tie_word_embeddings": True}}
GPT2: dict[str, Any] = {"family": "gpt2", "changed": {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}}


def test_stages_of_a_family_train_as_the_whole_model(processes: Processes, tmp_path: Path) -> None:
    """Ragged labels with an empty micro-batch, accumulation, clipping, tied embeddings; one has no wrapper of ours."""
    wanted = [
        row("Interleaved1F1B", TWO, **GPT2, dtype="float64", step="mean"),
        row("ZBVZeroBubble", family="qwen3", **TIED, dtype="float64", bare=True),
    ]
    check(processes, tmp_path, wanted, 2)


@pytest.mark.slow
def test_a_family_continues_in_one_process_and_back_and_transformers_reads_it(
    processes: Processes, tmp_path: Path
) -> None:
    """With packed documents; its final weights give transformers the logits of one process."""
    from transformers import AutoModelForCausalLM

    keys = ["dataset.reset_attention_mask=true", "dataset.reset_position_ids=true"]
    one = pretrained(processes, tmp_path, "one", 1, *keys, family="llama")
    pieces = [
        pretrained(processes, tmp_path, "there", 2, *row("1F1B")[0], *keys, "train.exit_interval=2", family="llama"),
        pretrained(processes, tmp_path, "there", 1, *keys, "train.exit_interval=4", family="llama"),
        pretrained(processes, tmp_path, "there", 2, *row("ZBVZeroBubble")[0], *keys, family="llama"),
    ]
    for name in ("losses", "norms", "evaluated"):
        there = [value for piece in pieces for value in piece[name]]
        assert furthest(there, one[name]) <= 1e-5
    tokens = torch.arange(24).view(2, 12)
    ours, alone = (
        AutoModelForCausalLM.from_pretrained(tmp_path / "runs" / name / "model")(tokens).logits.detach()
        for name in ("there", "one")
    )
    assert float((ours - alone).abs().max()) < 1e-4


SCHEDULES: list[tuple[str, list[str]]] = [("1F1B", []), ("Interleaved1F1B", [TWO]), ("ZBVZeroBubble", [])]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_schedules_train_families_20_steps_as_one_process(processes: Processes, tmp_path: Path, dtype: str) -> None:
    kinds: list[dict[str, Any]] = [{"family": "llama", **TIED}, {"family": "qwen3", **TIED}, GPT2, {"family": "qwen2"}]
    if dtype == "float32":
        kinds.append({"family": "mixtral"})  # the experts of transformers have no other type
    wanted = [row(name, *keys, **kind, dtype=dtype) for name, keys in SCHEDULES for kind in kinds]
    check(processes, tmp_path, wanted, 20)


@pytest.mark.slow
def test_three_runs_of_families_are_equal_to_the_bit(processes: Processes, tmp_path: Path) -> None:
    kinds: list[dict[str, Any]] = [{"family": "mixtral"}, {"family": "gpt2"}, {"family": "qwen3", **TIED}]
    wanted = [row(name, *keys, **kind) for (name, keys), kind in zip(SCHEDULES, kinds, strict=True)]
    first, second, third = (results(processes, tmp_path, wanted, 20) for _ in range(3))
    assert first == second == third
    assert all(len(set(ranks[0]["losses"])) == 20 for ranks in first)


@pytest.mark.slow
def test_four_ranks_and_replicas_train_a_family_as_one_process(processes: Processes, tmp_path: Path) -> None:
    small = "train.micro_batch_size=1"
    four = [
        row("1F1B", small, family="llama", **TIED, ranks=4, size=4, dtype="float64"),
        row("1F1B", small, family="qwen3", **TIED, ranks=4, dtype="float64"),
        row("ZBVZeroBubble", small, family="llama", **TIED, ranks=4, dtype="float64"),
    ]
    check(processes, tmp_path, four, 5)
