"""What the processes of the tests of a Trainer's overridden methods run: `job_overrides(settings)`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from onstep import Trainer, TrainingArguments
from tests.support.small_models import causal_rows, qwen


class Overrides(Trainer):
    """Counts FLOPs, marks records, and writes a file beside each checkpoint on rank 0."""

    def floating_point_ops(self, inputs: Any) -> int:
        return 10 * int(inputs["input_ids"].numel())

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        super().log({**logs, "mark": 1.0}, start_time)

    def _save_checkpoint(self, model: Any, trial: Any, metrics: Any = None) -> None:
        if self.args.should_save:
            directory = os.path.join(self._get_output_dir(trial), f"checkpoint-{self.state.global_step}")
            os.makedirs(directory, exist_ok=True)
            Path(directory, "adapter.txt").write_text("mine")
        super()._save_checkpoint(model, trial)


def job_overrides(settings: dict[str, Any]) -> dict[str, Any]:
    args = TrainingArguments(
        "runs/run",
        per_device_train_batch_size=settings["batch"],
        max_steps=3,
        logging_steps=1,
        save_steps=3,
        use_cpu=True,
        train_sampling_strategy="sequential",
        include_num_input_tokens_seen="non_padding",
        config_overrides={"run.save_weights": False},
    )
    trainer = Overrides(qwen(), args, train_dataset=causal_rows(10), default_callbacks=False)
    metrics = trainer.train().metrics
    trainer.save_metrics("train", metrics)
    trainer.create_model_card()
    return {
        "tokens": [one["num_input_tokens_seen"] for one in trainer.state.log_history],
        "marks": [one["mark"] for one in trainer.state.log_history],
        "flos": trainer.state.total_flos,
        "root": trainer._get_output_dir(None),
    }
