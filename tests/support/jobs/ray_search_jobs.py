"""Searches with Ray Tune, which their trials can kill: python -m tests.support.jobs.ray_search_jobs SETTINGS."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import ray
from optuna.samplers import TPESampler
from ray import tune
from ray.tune.schedulers import ASHAScheduler
from ray.tune.search.optuna import OptunaSearch

from onstep import Trainer, TrainerCallback
from tests.support.jobs.dropping import Dropping
from tests.support.small_models import arguments, regression_rows

STEPS = 8
"""Steps of a trial, with an evaluation after every second and a checkpoint after every fourth."""


class Noted(TrainerCallback):
    """Writes down each step of each trial, and kills the search after a number of them."""

    def __init__(self, kill_after: int | None) -> None:
        self.kill_after, self.driver = kill_after, os.getpid()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        with Path("steps.txt").open("a") as file:
            file.write(f"{Path(args.output_dir).name} {state.global_step}\n")
        if self.kill_after is not None and len(Path("steps.txt").read_text().splitlines()) == self.kill_after:
            os.kill(self.driver, signal.SIGKILL)
            time.sleep(600)  # until Ray ends this process


class Fails(TrainerCallback):
    """Fails in one trial."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if args.output_dir.endswith("run-1"):
            raise RuntimeError("out of luck")


def space(trial: Any) -> dict[str, Any]:
    return {
        "learning_rate": tune.loguniform(1e-4, 1e-1),
        "seed": tune.randint(1, 40),
        "per_device_train_batch_size": tune.choice([2, 4]),
    }


def search(settings: dict[str, Any]) -> dict[str, Any]:
    """Make a search in the directory `sweep`, and return what it finds."""
    evaluates = {"eval_strategy": "steps", "eval_steps": 2} if settings.get("evaluates", True) else {}
    args = arguments(
        Path(),
        output_dir="sweep",
        max_steps=STEPS,
        train_sampling_strategy="random",
        logging_steps=4,
        save_strategy="steps",
        save_steps=4,
        **evaluates,
    )
    rows = regression_rows(16)
    callbacks = [Noted(settings.get("kill_after")), *([Fails()] if settings.get("fails") else [])]
    trainer = Trainer(
        None,
        args,
        train_dataset=rows,
        eval_dataset=rows[:4],
        model_init=Dropping,
        default_callbacks=False,
        callbacks=callbacks,
    )
    chosen = (
        {"search_alg": OptunaSearch(sampler=TPESampler(seed=3, n_startup_trials=1))} if settings.get("learns") else {}
    )
    scheduler = ASHAScheduler(time_attr="step", max_t=STEPS, grace_period=2, reduction_factor=2)
    best = trainer.hyperparameter_search(
        space,
        None,
        settings.get("n_trials", 3),
        "minimize",
        "ray",
        verbose=0,
        max_concurrent_trials=settings.get("at_once", 1),
        **({"scheduler": scheduler} if settings.get("stops") else {}),
        **chosen,
    )
    assert trainer.args.output_dir == "sweep"
    trials = [
        {
            "id": one.trial_id,
            "parameters": one.config,
            "objective": one.last_result["objective"],
            "step": one.last_result["step"],
        }
        for one in sorted(best.run_summary.trials, key=lambda one: int(one.trial_id))
    ]
    return {"best": best[:3], "trials": trials}


def main() -> None:
    """Search with the settings of the command line, and write what is found to `result.json`."""
    settings = json.loads(sys.argv[1])
    ray.init(address=settings.get("address"), logging_level="error", **settings.get("init", {}))
    found = search(settings)
    Path("result.json").write_text(json.dumps(found))
    ray.shutdown()


if __name__ == "__main__":
    from tests.support.jobs import ray_search_jobs

    ray_search_jobs.main()
