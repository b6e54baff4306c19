"""What the processes of the tests of the Trainer's resume run: `job_train(settings)`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import EarlyStoppingCallback

from onstep import Trainer, TrainerCallback, TrainingArguments
from tests.support.jobs.resume_jobs import observed, report
from tests.support.small_models import Regression, arguments, causal_rows, quiet, qwen, regression_rows


class Saves(TrainerCallback):
    """Writes down which checkpoints became durable."""

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        with Path("saves.txt").open("a") as file:
            file.write(f"{state.global_step}\n")


def optimizers_of(kind: str, model: torch.nn.Module) -> Any:
    """A torch optimizer with a stateful scheduler, as objects or as factories; None is the configured ones."""
    if kind == "objects":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        return optimizer, torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=3)
    if kind == "factories":
        return (
            lambda parameters: torch.optim.RMSprop(parameters, lr=0.01, momentum=0.5),
            lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5),
        )
    return None, None


class OwnMethods(Trainer):
    """Two groups of different rates, and a schedule that follows the evaluations."""

    def create_optimizer(self) -> Any:
        if self.optimizer is None:
            vectors = [p for p in self.model.parameters() if p.ndim == 1]
            groups = [{"params": [p for p in self.model.parameters() if p.ndim > 1]}, {"params": vectors, "lr": 1e-3}]
            cls, keywords = self.get_optimizer_cls_and_kwargs(self.args)
            self.optimizer = cls(groups, **keywords)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any) -> Any:  # required, as in scripts for 4.x
        self.lr_scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode="max", factor=0.5, patience=0)
        return self.lr_scheduler


def halved(outputs: Any, labels: Any) -> Any:
    return torch.nn.functional.cross_entropy(outputs["logits"].flatten(0, 1), labels.flatten()) / 2


class Begins(TrainerCallback):
    """Notes the step that training begins at."""

    step = -1

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.step = state.global_step


def job_distributed_env(settings: dict[str, Any]) -> dict[str, Any]:
    """Trains without torchrun's variables, as the rank that the argument names."""
    names = ("rank", "world_size", "local_rank", "local_world_size", "master_addr", "master_port")
    found = {name: os.environ.pop(name.upper(), None) for name in names}
    env = SimpleNamespace(
        **{name: value if name == "master_addr" else int(value or 0) for name, value in found.items()}
    )
    trainer = quiet(Regression(), arguments(Path(), max_steps=2), regression_rows(), distributed_env=env)
    trainer.train()
    assert trainer.state is not None
    weights = [value.tolist() for value in trainer.model.state_dict().values()]
    return {"world": trainer.state.num_processes, "weights": weights}


def job_train(settings: dict[str, Any]) -> None:
    manager, counting = observed(settings)
    is_causal = settings.get("model", "qwen") == "qwen"
    seed = settings.get("model_seed", 0)
    model = qwen(seed, attention_dropout=0.1) if is_causal else Regression()
    rows = causal_rows(26) if is_causal else regression_rows(26)
    if settings.get("flips"):
        rows = [{**row, "labels": row["labels"][::-1]} for row in rows]
    begins = Begins()
    manager.add(Saves())
    manager.add(begins)
    if "patience" in settings:
        manager.add(EarlyStoppingCallback(settings["patience"]))
    values: dict[str, Any] = {
        "output_dir": "runs/run",
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 2,
        "learning_rate": 1e-2,
        "logging_steps": 3,
        "save_strategy": "steps",
        "save_steps": 3,
        "eval_strategy": "steps",
        "eval_steps": 4,
        "use_cpu": True,
        "seed": 3,
        **settings.get("arguments", {}),
    }
    values["config_overrides"] = {"checkpoint.certify": True, **settings.get("overrides", {})}
    trainer = (OwnMethods if settings.get("own_methods") else Trainer)(
        model,
        TrainingArguments(**values),
        train_dataset=rows,
        eval_dataset=rows[:5],
        callbacks=manager,
        default_callbacks=False,
        optimizers=optimizers_of(settings.get("optimizers", ""), model),
        compute_loss_func=halved if settings.get("loss") == "halved" else None,
    )
    trainer.train(resume_from_checkpoint=settings.get("resume"))
    first = trainer.state.global_step
    if settings.get("again"):
        trainer.train()
    weights = {name: value.tolist() for name, value in list(model.state_dict().items())[-1:]}
    best = [trainer.state.best_metric, trainer.state.best_global_step]
    further = {"weights": json.dumps(weights), "best": best, "begins": begins.step}
    report(settings, trainer.global_state, counting, first=first, **further)
