"""A Trainer whose rank 1 is killed at step 5 of its first attempt; weights are initialized without a seed."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch

from onstep import Trainer, TrainerCallback, TrainingArguments
from tests.support.small_models import Regression, regression_rows


class Killed(TrainerCallback):
    """Ends rank 1 at step 5 of the first attempt, and notes where each attempt begins."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        with Path(f"begins-{os.environ['RANK']}.txt").open("a") as file:
            file.write(f"{state.global_step}\n")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        is_first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
        if is_first and "kill" in sys.argv and state.global_step == 5 and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)


model = Regression()
torch.seed()
torch.nn.init.normal_(model.layer.weight)
rows = regression_rows(32)
if "flips" in sys.argv:
    rows = [{**row, "labels": -row["labels"]} for row in rows]
args = TrainingArguments(
    "run",
    use_cpu=True,
    max_steps=8,
    per_device_train_batch_size=2,
    save_steps=2,
    overwrite_output_dir="new" in sys.argv,
)
Trainer(model, args, train_dataset=rows, callbacks=[Killed()], default_callbacks=False).train()
