"""Rows packed by the collator of `transformers` give the losses that they give there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import DataCollatorWithFlattening, LlamaConfig, LlamaForCausalLM

import onstep

SIZES: dict[str, Any] = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}


def losses(library: Any, directory: Path) -> list[float]:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, num_attention_heads=2, num_key_value_heads=2))
    generator = torch.Generator().manual_seed(1)
    rows = [{"input_ids": torch.randint(1, 64, (3 + index % 5,), generator=generator).tolist()} for index in range(12)]
    args = library.TrainingArguments(
        str(directory),
        max_steps=3,
        per_device_train_batch_size=4,
        train_sampling_strategy="sequential",
        learning_rate=0.01,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = library.Trainer(model, args, DataCollatorWithFlattening(), rows)
    trainer.train()
    return [record["loss"] for record in trainer.state.log_history if "loss" in record]


def test_packed_rows_give_the_losses_of_transformers(tmp_path: Path) -> None:
    assert losses(onstep, tmp_path / "ours") == pytest.approx(losses(transformers, tmp_path / "theirs"), rel=1e-5)
