"""What the processes of the contract suite run: `job_*(settings)`, with the callbacks called `settings["names"]`."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

from onstep import CallbackManager, JsonLogger, Trainer, TrainingArguments, pretrain
from onstep.checkpoint import encode_state
from onstep.events import Dispatcher
from tests.support.contract.every_callback import make
from tests.support.jobs.resume_jobs import small_config

RANK = int(os.environ.get("RANK", "0"))
SAVE_INTERVAL = 4


def contract_config(settings: dict[str, Any]) -> Any:
    """11 steps with logs, evaluations and saves between."""
    config = small_config(settings)
    config.checkpoint.save_interval = SAVE_INTERVAL
    config.validation.metric_for_best_model = "loss"  # which EarlyStoppingCallback requires
    return config


def callbacks_of(settings: dict[str, Any]) -> list[Any]:
    """Those asked for, and a metrics log beside them."""
    made = [one for name in settings["names"] for one in make(name, Path(settings.get("own", "own")))]
    return made if any(isinstance(one, JsonLogger) for one in made) else [*made, JsonLogger()]


def job_run(settings: dict[str, Any]) -> None:
    """Train, or continue; a process dies by SIGKILL at the end of step `dies_at`."""
    manager = CallbackManager()
    manager.add(callbacks_of(settings))

    def die(context: Any) -> None:
        if context.state.train_state.step == settings["dies_at"]:
            os.kill(os.getpid(), signal.SIGKILL)

    if "dies_at" in settings:
        manager.register("on_step_end", die)
    pretrain(contract_config(settings), callbacks=manager)
    write_states(manager)


def write_states(manager: CallbackManager) -> None:
    """Leave the states of the callbacks in a file of this rank."""
    states = {
        type(one).__name__: [encode_state(one.state_dict())[1]]
        for one in manager.callbacks
        if callable(getattr(one, "state_dict", None))
    }
    Path(f"states-{RANK}.json").write_text(json.dumps(states, default=repr))


def job_twice(settings: dict[str, Any]) -> None:
    """The run `run` and another with the same callbacks, each of which hears of the end of each run twice."""
    manager = CallbackManager()
    manager.add(callbacks_of(settings))
    for name in ("run", "second"):
        config = contract_config(settings)
        config.run.name = name
        state = pretrain(config, callbacks=manager)
        if name == "run":
            write_states(manager)
        again = CallbackManager()
        again.add(manager.callbacks)
        _tell_the_end_again(again, state)


def job_trainer(settings: dict[str, Any]) -> None:
    """The other door: evaluate, train in the directory that this has left files in, and both once more.

    The second evaluation reopens what the end of training closed.
    """
    trainer = _trainer(settings)
    for _ in range(2):
        trainer.evaluate()
        trainer.train()


def _trainer(settings: dict[str, Any]) -> Trainer:
    import torch
    from torch import nn

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.out = nn.Embedding(16, 8), nn.Linear(8, 16)

        def forward(self, input_ids: Any, labels: Any) -> dict[str, Any]:
            logits = self.out(self.embed(input_ids))
            return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}

    torch.manual_seed(0)
    rows = [{"input_ids": torch.arange(6) % 5 + i % 3, "labels": torch.arange(6) % 5 + i % 4} for i in range(24)]
    args = TrainingArguments(
        output_dir="run",
        per_device_train_batch_size=2,
        max_steps=9,
        logging_steps=2,
        eval_strategy="steps",
        eval_steps=4,
        metric_for_best_model="loss",
        save_strategy="no",
        use_cpu=True,
        report_to="none",
    )
    callbacks = callbacks_of(settings)
    return Trainer(Model(), args, train_dataset=rows, eval_dataset=rows[:4], callbacks=callbacks)


def _tell_the_end_again(manager: CallbackManager, state: Any) -> None:
    notify = Dispatcher(manager, state)
    notify.on_train_end()
    notify.on_run_end(reason="completed", exception=None)
