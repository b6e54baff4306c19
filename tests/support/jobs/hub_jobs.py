"""Trains and uploads in a process of its own."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

from onstep import Trainer, TrainingArguments
from tests.support.small_models import causal_rows, qwen


def job_push(settings: dict[str, Any]) -> dict[str, Any]:
    """Train a model with these arguments; what its weights are, and who has uploads."""
    values: dict[str, Any] = {
        "output_dir": "run",
        "use_cpu": True,
        "per_device_train_batch_size": 2,
        "max_steps": 4,
        "learning_rate": 0.05,
        "save_steps": 2,
        "push_to_hub": True,
        "hub_model_id": "me/model",
        "hub_always_push": True,
        "disable_tqdm": True,
    }
    trainer = Trainer(qwen(), TrainingArguments(**{**values, **settings}), train_dataset=causal_rows())
    trainer.train()
    weights = Path("run", "model.safetensors").read_bytes()
    print("trained", flush=True)
    return {
        "weights": hashlib.sha256(weights).hexdigest(),
        "uploads": trainer.push_in_progress is not None,
        "rank": int(os.environ.get("RANK", "0")),
    }
