"""A command that ends a run is named, and the run continues without it; what could not be sent is not repeated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import pytest

from onstep import CallbackManager, JsonLogger, TrainerCallback, pretrain
from onstep.cli.config import configuration
from onstep.config import ConfigContainer
from onstep.errors import CheckpointError, NonFiniteError
from onstep.events import Setting
from tests.support.resuming import Interrupted
from tests.support.whole_runs import left_by
from tests.training.test_steering import PLAN, Has, Make, Steers, decisions, entry, make, trained

__all__ = ["make"]  # the fixture


class Poisons(TrainerCallback):
    """Makes the weights NaN two steps after its dose was set."""

    settable: ClassVar = {"dose": Setting(int, 0, "Deadly from 1 on", 3)}

    def __init__(self) -> None:
        self.dose, self.steps = 0, 0

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.steps += self.dose > 0
        if self.steps > 2:
            next(model.parameters()).data.fill_(float("nan"))


def test_a_run_that_a_command_has_ended_says_so_and_continues_without_it(make: Make) -> None:
    config, directory = make("poisoned"), Path(str(make("poisoned").run.output_dir)) / "poisoned"

    def start(plan: dict[int, Any], dies_at: int | None = None) -> None:
        manager, steps = CallbackManager(), iter(range(1, 1000))
        manager.add([JsonLogger(), Has(), Poisons(), Steers(plan)])
        manager.register("on_step_begin", lambda context: next(steps) == dies_at and interrupt())
        pretrain(config, callbacks=manager)

    def interrupt() -> None:
        raise Interrupted

    good = {5: PLAN[5], 6: PLAN[6]}
    with pytest.raises(NonFiniteError) as first:
        start({**good, 9: ("set", {"key": "Poisons.dose", "value": 1})})
    with pytest.raises(NonFiniteError) as second:
        start({})
    for raised in (first, second):
        assert "step 12" in str(raised.value)
        (note,) = raised.value.__notes__
        assert "after step 9: asked to set Poisons.dose to 1 by 'someone'" in note
        assert f"onstep train {directory} --without-commands-from 9" in note
    assert decisions(directory)[-1]["flag"] == "failed_after"

    config.run.without_commands_from = 9
    with pytest.raises(Interrupted):
        start({10: ("set", {"key": "lr_factor", "value": 2.0})}, dies_at=6)
    start({})  # the restart with the same options repeats what was sent since
    withdrawn = [one for one in decisions(directory) if one["flag"] == "withdrawn"]
    assert [one["details"] for one in withdrawn] == [{"from_step": 9, "command_ids": ["9"]}]
    config = make("whole")
    start({**good, 10: ("set", {"key": "lr_factor", "value": 2.0})})
    assert left_by(directory)["weights"] == left_by(directory.parent / "whole")["weights"]


def test_a_command_that_the_newest_checkpoint_contains_is_withdrawn_with_it(
    make: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = trained(make("whole"), {5: PLAN[5]})
    config, plan = make("withdrawn"), {5: PLAN[5], 6: PLAN[6], 9: ("rollback", {"to_step": None, "lr_factor": 3.0})}
    trained(config, plan, 13)
    config.run.without_commands_from = 6
    assert trained(config, {})["weights"] == expected["weights"]
    pretrain(config)
    assert "run.without_commands_from=6 had no effect: a finished run continues" in capsys.readouterr().out
    config = make("too-early")
    trained(config, {2: ("set", {"key": "lr_factor", "value": 3.0}), 5: PLAN[5]}, 7)
    config.run.without_commands_from = 1
    with pytest.raises(CheckpointError, match=r"contains a command .*run\.fresh=true"):
        pretrain(config)


@pytest.mark.parametrize(
    ("flag", "details"),
    [
        ("set", {"key": "lr_factor", "value": 9e15}),
        ("set", {"key": "Has.patience", "value": -1}),
        ("set", {"value": 1}),
        ("rollback", {"to_step": None, "lr_factor": 1e308}),
        ("skip_batch", {"count": "many"}),
    ],
)
def test_a_recorded_command_that_could_not_be_sent_is_not_repeated(make: Make, flag: str, details: Any) -> None:
    config = make("recorded")
    trained(config, {5: PLAN[5]}, 7)
    path = Path(str(config.run.output_dir)) / "recorded" / "decisions.jsonl"
    with path.open("a") as file:
        file.write(json.dumps(entry(6, flag, command_id="bad", **details)) + "\n")
    trained(config, {})
    refused = [one for one in decisions(path.parent) if one["flag"] == "refused"]
    assert [one["details"]["refused"] for one in refused] == [flag]


def test_commands_are_left_out_by_one_start_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = ConfigContainer()
    stored.run.name, stored.run.without_commands_from = "steered", 9
    (tmp_path / "runs" / "steered").mkdir(parents=True)
    (tmp_path / "runs" / "steered" / "run.json").write_text(json.dumps({"config": stored.to_dict()}))
    monkeypatch.chdir(tmp_path)
    config, _ = configuration(["steered"], None)
    assert (config.run.name, config.run.without_commands_from) == ("steered", None)
