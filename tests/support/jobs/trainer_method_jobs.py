"""What the processes of the tests of a Trainer's overridden methods run: `job_overrides(settings)`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from onstep import Trainer, TrainingArguments
from tests.support.small_models import Regression, causal_rows, qwen, regression_rows


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


def job_accelerates_state(settings: dict[str, Any]) -> dict[str, Any]:
    """What a script that reads accelerate's state sees of the ranks, before and after a training."""
    from accelerate import PartialState

    args = TrainingArguments("runs/run", use_cpu=True, max_steps=2, save_strategy="no")
    state = PartialState()
    with state.main_process_first():
        before = [state.num_processes, state.process_index, state.is_main_process, str(state.distributed_type)]
    trainer = Trainer(Regression(), args, train_dataset=regression_rows(16), default_callbacks=False)
    if args.process_index == 1:
        trainer.accelerator.set_trigger()
    triggered = trainer.accelerator.check_trigger()
    with trainer.accelerator.split_between_processes([1, 2, 3]) as share:
        shared = share
    trainer.train()
    state.wait_for_everyone()
    return {"before": before, "backend": trainer.accelerator.backend, "triggered": triggered, "share": shared}
