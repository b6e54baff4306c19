"""Searches of hyperparameters, with what strikes them: `job_search(settings)`."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import optuna

from onstep import Trainer, TrainerCallback
from tests.support.jobs.dropping import Dropping
from tests.support.small_models import arguments, regression_rows

STEPS = 8
"""Steps of a trial, with an evaluation after every second and a checkpoint after every fourth."""


class Noted(TrainerCallback):
    """Writes down each step of each trial, and kills the process after a number of steps."""

    def __init__(self, kill_after: int | None) -> None:
        self.left = kill_after

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not state.is_world_process_zero:
            return
        with Path("steps.txt").open("a") as file:
            file.write(f"{Path(args.output_dir).name} {state.global_step}\n")
        if self.left is not None:
            self.left -= 1
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGKILL)


class KilledAtTheEnd(Trainer):
    """Dies right after the run of a trial has ended, before the study knows."""

    dies_after: int | None = None

    def train(self, *args: Any, **kwargs: Any) -> Any:
        result = super().train(*args, **kwargs)
        if self.dies_after == kwargs["trial"].number and self.is_world_process_zero():
            os.kill(os.getpid(), signal.SIGKILL)
        return result


def space(trial: Any) -> dict[str, Any]:
    return {
        "learning_rate": trial.suggest_float("learning_rate", 1e-4, 1e-1, log=True),
        "seed": trial.suggest_int("seed", 1, 40),
        "per_device_train_batch_size": trial.suggest_categorical("per_device_train_batch_size", [2, 4]),
    }


def both(metrics: Any) -> list[float]:
    return [metrics["eval_loss"], -(metrics["eval_loss"] ** 0.5)]


def sampler(name: str) -> Any:
    if name == "multivariate":
        return optuna.samplers.TPESampler(
            seed=3, n_startup_trials=3, multivariate=True, warn_independent_sampling=False
        )
    return optuna.samplers.TPESampler(seed=3, n_startup_trials=3, multivariate=False)


def trainer_of(settings: dict[str, Any]) -> Trainer:
    """A Trainer that learns a line, in the directory `sweep`."""
    args = arguments(
        Path(),
        output_dir="sweep",
        max_steps=STEPS,
        train_sampling_strategy="random",
        logging_steps=4,
        save_strategy="steps",
        save_steps=4,
        **({"eval_strategy": "steps", "eval_steps": 2} if settings.get("evaluates", True) else {}),
    )
    rows = regression_rows(16)
    made = KilledAtTheEnd(
        None,
        args,
        train_dataset=rows,
        eval_dataset=rows[:4],
        model_init=Dropping,
        default_callbacks=False,
        callbacks=[Noted(settings.get("kill_after"))],
    )
    made.dies_after = settings.get("dies_after")
    return made


def job_search(settings: dict[str, Any]) -> dict[str, Any]:
    """Searches, and returns the best trials and what the study has of all of them."""
    several = settings.get("several", False)
    trainer = trainer_of(settings)
    best = trainer.hyperparameter_search(
        space,
        both if several else None,
        settings.get("n_trials", 3),
        ["minimize", "maximize"] if several else "minimize",
        "optuna",
        sampler=sampler(settings.get("sampler", "")),
        **({} if several else {"pruner": optuna.pruners.MedianPruner(n_startup_trials=3)}),
    )
    assert trainer.args.output_dir == "sweep"
    trainer.end()
    return {"best": best, "trials": trials("sweep")}


def trials(directory: str | Path) -> list[dict[str, Any]]:
    """What the study in a directory has of each trial, without the time."""
    study = optuna.load_study(study_name="search", storage=f"sqlite:///{Path(directory).absolute()}/optuna.db")
    return [
        {
            "number": one.number,
            "state": one.state.name,
            "values": one.values,
            "params": one.params,
            "evaluations": {str(step): value for step, value in one.intermediate_values.items()},
            "status": json.loads((Path(directory) / one.user_attrs["run"] / "run.json").read_text())["status"],
        }
        for one in study.get_trials(deepcopy=False)
    ]
