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
from tests.support.forked_processes import Processes
from tests.support.small_configs import small_pretrain_config
from tests.support.whole_runs import Ranks, check_same, left_by

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


@pytest.mark.parametrize(
    ("log_interval", "strikes"), [(2, ["on_step_end", "on_eval_end", "on_epoch_end"]), (STEPS, ["on_log"])]
)
@pytest.mark.parametrize(
    "settings",
    [{}, {"logger.log_on_each_epoch": True, "validation.eval_each_epoch": True}, {"checkpoint.save_at_end": False}],
    ids=["plain", "each epoch", "no save at the end"],
)
def test_the_events_of_both_processes_are_those_of_one(
    config: ConfigContainer, log_interval: int, strikes: list[str], settings: dict[str, Any]
) -> None:
    config.logger.log_interval = log_interval
    for key, value in settings.items():
        section, _, name = key.partition(".")
        setattr(getattr(config, section), name, value)
    config.run.name = "whole"
    whole = start(config)
    assert whole.count(f"on_epoch_end {STEPS}") == 1
    for strike in strikes:
        config.run.name = f"struck-{strike}"
        start(config, strike)
        assert start(config) == whole, strike
        if config.checkpoint.save_at_end:
            runs = Path(config.run.output_dir)
            check_same(left_by(runs / config.run.name), left_by(runs / "whole"))


@pytest.mark.distributed
def test_two_ranks_do_what_is_left_too(processes: Processes, tmp_path: Path, corpus: Path, token_cache: Path) -> None:
    ranks = Ranks(
        processes, tmp_path, corpus=str(corpus), cache=str(token_cache), words=["validation.eval_interval=11"]
    )
    whole = ranks.finish("whole")
    assert any(call.startswith("evaluate 11") for call in whole["told"][0])
    strikes = [{"signal": "SIGTERM", "event": "on_step_end", "number": 11, "rank": 1}]
    assert ranks.start("struck", strikes=strikes) == [75, 75], ranks.output("struck")
    check_same(ranks.finish("struck"), whole)
