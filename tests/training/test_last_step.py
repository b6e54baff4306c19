"""A run that a signal ends at its very last step: the next process does what is left, and nothing else."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from onstep import CallbackManager, JsonLogger, TrainerCallback, pretrain
from onstep.config import ConfigContainer
from onstep.training.runs.signals import Preempted
from tests.support.small_configs import small_pretrain_config
from tests.support.whole_runs import check_same, left_by

STEPS = 3
EVENTS = ("on_epoch_begin", "on_epoch_end", "on_step_begin", "on_step_end", "on_log", "on_evaluate")


class Sequence(TrainerCallback):
    """Records the events of all processes of a run, each with its step."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def state_dict(self) -> dict[str, Any]:
        return {"events": list(self.events)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.events = list(state_dict["events"])


def _recorder(event: str) -> Any:
    def record(self: Sequence, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.events.append(f"{event} {state.global_step}")

    return record


for _event in EVENTS:
    setattr(Sequence, _event, _recorder(_event))


@pytest.fixture
def config(corpus: Path, token_cache: Path, tmp_path: Path) -> ConfigContainer:
    made = small_pretrain_config(corpus / "colorsys.py", token_cache, length=64)
    made.run.output_dir, made.dataset.num_workers, made.checkpoint.certify = str(tmp_path / "runs"), 0, True
    made.train.global_batch_size, made.train.train_iters, made.scheduler.lr_warmup_iters = 8, STEPS, 0
    made.logger.log_interval, made.validation.eval_interval, made.validation.eval_iters = 2, STEPS, 1
    made.checkpoint.save_interval = None
    return made


def start(config: ConfigContainer, strike: str | None = None) -> list[str]:
    """Start or continue the run, with a signal at `strike` of the last step; the events of the whole run."""
    sequence, manager = Sequence(), CallbackManager()
    manager.add([JsonLogger(), sequence])
    if strike is None:
        pretrain(config, callbacks=manager)
        return sequence.events

    def send(context: Any) -> None:
        if context.state.train_state.step == STEPS:
            os.kill(os.getpid(), signal.SIGTERM)

    manager.register(strike, send)
    with pytest.raises(Preempted):
        pretrain(config, callbacks=manager)
    return sequence.events


@pytest.mark.parametrize("strike", ["on_step_end", "on_log", "on_eval_end", "on_epoch_end"])
@pytest.mark.parametrize(
    "settings",
    [{}, {"logger.log_on_each_epoch": True, "validation.eval_each_epoch": True}, {"checkpoint.save_at_end": False}],
    ids=["plain", "each epoch", "no save at the end"],
)
def test_the_events_of_both_processes_are_those_of_one(
    config: ConfigContainer, strike: str, settings: dict[str, Any]
) -> None:
    config.logger.log_interval = 3 if strike == "on_log" else 2
    for key, value in settings.items():
        section, _, name = key.partition(".")
        setattr(getattr(config, section), name, value)
    config.run.name = "whole"
    whole = start(config)
    assert whole.count(f"on_epoch_end {STEPS}") == 1
    config.run.name = "struck"
    start(config, strike)
    assert start(config) == whole
    if config.checkpoint.save_at_end:
        check_same(left_by(Path(config.run.output_dir) / "struck"), left_by(Path(config.run.output_dir) / "whole"))
