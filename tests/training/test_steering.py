"""What a run is asked for while it runs: applied at one step, recorded, and repeated if the run is interrupted."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest

from onstep import Callback, CallbackManager, JsonLogger, TrainerCallback, pretrain
from onstep.config import ConfigContainer
from onstep.errors import ConfigError
from onstep.events import Control, Request, Setting
from onstep.training.runs.run_dir import RunDir
from onstep.training.runs.sent_commands import decisions_after, left_behind
from tests.support.resuming import Interrupted
from tests.support.small_runs import eval_loader, run, small_state
from tests.support.whole_runs import left_by


def decisions(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "decisions.jsonl").read_text().splitlines()]


class Steers(Callback):
    """Sends requests from outside, each after its step."""

    def __init__(self, plan: dict[int, tuple[str, dict[str, Any]]]) -> None:
        self.plan = dict(plan)

    def on_step_end(self, context: Any) -> None:
        if context.step in self.plan:
            flag, details = self.plan.pop(context.step)
            context.control.add_request(
                Request(flag, "someone", context.event, "by hand", 0, {"command_id": str(context.step), **details})
            )


class Has(TrainerCallback):
    """A callback with a value that can be set, and a command."""

    settable: ClassVar = {"patience": Setting(int, 1, "How long it waits")}
    commands: ClassVar = {"greet": "Say hello"}

    def __init__(self) -> None:
        self.patience, self.greeted = 3, []

    def on_command(self, args: Any, state: Any, control: Any, request: Any = None, **kwargs: Any) -> None:
        if request.details["command"] == "greet":
            self.greeted.append((state.global_step, request.details["data"]["name"]))
            request.details["result"] = f"hello {request.details['data']['name']}"


def test_a_paused_run_waits_until_it_is_resumed_and_does_what_it_is_asked_for_meanwhile(tmp_path: Path) -> None:
    state, manager, calls = small_state(train_iters=4), CallbackManager(), []
    state.run_dir = RunDir(tmp_path)
    manager.register("on_step_end", lambda context: context.step == 2 and context.control.pause("lunch"))
    manager.register("on_eval_end", lambda context: calls.append(f"evaluated {context.step}"))

    def meanwhile(context: Any) -> None:
        calls.append(f"paused {context.step}")
        asks = {1: context.control.evaluate, 2: lambda: context.control.set("lr_factor", 0.5)}
        asks.get(len([one for one in calls if one.startswith("paused")]), context.control.resume)()

    manager.register("on_paused", meanwhile)
    run(state, manager, valid=eval_loader())
    assert calls == ["paused 2", "evaluated 2", "paused 2", "paused 2"]
    assert state.train_state.step == 4
    assert state.train_state.overrides == {"lr_factor": 0.5}
    assert [one["flag"] for one in decisions(tmp_path)] == ["pause", "should_evaluate", "set", "resume"]


@pytest.mark.parametrize("ask", ["stop", "abort"])
def test_a_paused_run_can_be_ended(ask: str) -> None:
    state, manager = small_state(train_iters=4), CallbackManager()
    manager.register("on_step_end", lambda context: context.control.pause())
    manager.register("on_paused", lambda context: getattr(context.control, ask)())
    run(state, manager)
    assert state.train_state.step == 1


def test_a_batch_that_is_to_be_skipped_is_read_but_not_trained_on() -> None:
    state, manager, trained = small_state(train_iters=5), CallbackManager(), []
    manager.register("on_step_end", lambda context: context.step == 2 and context.control.skip_batch(2))
    manager.register("on_train_step_end", lambda context: trained.append(context.step + 1))
    run(state, manager)
    assert trained == [1, 2, 5]
    assert state.train_state.skipped_train_samples == 8
    assert state.train_state.step == 5


@pytest.mark.parametrize("ends", ["steps", "stop"])
def test_batches_to_skip_after_the_last_step_are_refused(tmp_path: Path, ends: str) -> None:
    state, manager = small_state(train_iters=3 if ends == "steps" else 9), CallbackManager()
    state.run_dir = RunDir(tmp_path)
    manager.add(Steers({3: ("skip_batch", {"count": 2})}))
    manager.register("on_step_end", lambda context: context.step == 3 and ends == "stop" and context.control.stop())
    run(state, manager)
    refused = [one for one in decisions(tmp_path) if one["flag"] == "refused"]
    assert [one["details"]["command_id"] for one in refused] == ["3"]
    assert "no batch to skip" in refused[0]["details"]["why"]
    assert not [one for one in decisions(tmp_path) if one["flag"] == "skip_batch"]
    assert state.train_state.overrides == {}


def test_a_decision_names_the_old_and_the_new_value(tmp_path: Path) -> None:
    state, manager, seen = small_state(train_iters=4), CallbackManager(), []
    state.run_dir, state.cfg.logger.log_interval = RunDir(tmp_path), 100
    plan = {1: 0.5, 2: 0.25, 3: None}
    manager.register(
        "on_step_end", lambda context: context.step in plan and context.control.set("lr_factor", plan[context.step])
    )
    manager.register("on_decision", lambda context: seen.append((context.step, context.request.flag)))
    run(state, manager)
    found = [(one["step"], one["details"]["old"], one["details"]["value"]) for one in decisions(tmp_path)]
    assert found == [(1, 1.0, 0.5), (2, 0.5, 0.25), (3, 0.25, None)]
    assert seen == [(1, "set"), (2, "set"), (3, "set")]


def test_a_callbacks_own_value_is_set_and_restored() -> None:
    state, manager, has, seen = small_state(train_iters=4), CallbackManager(), Has(), []
    manager.add(has)
    plan = {1: 7, 3: None}
    manager.register(
        "on_step_end", lambda context: context.step in plan and context.control.set("Has.patience", plan[context.step])
    )
    manager.register("on_train_step_start", lambda context: seen.append(has.patience))
    run(state, manager)
    assert seen == [3, 7, 7, 3]
    with pytest.raises(ConfigError, match=r"Has\.patience must be an integer >= 1"):
        state.control.set("Has.patience", 0)
    with pytest.raises(ConfigError, match=r"Did you mean 'Has\.patience'"):
        state.control.set("Has.patienc", 2)


def test_a_callback_carries_out_its_own_command_and_its_result_is_recorded(tmp_path: Path) -> None:
    state, manager, has = small_state(train_iters=3), CallbackManager(), Has()
    state.run_dir = RunDir(tmp_path)
    manager.add(has)
    manager.register(
        "on_step_end", lambda context: context.step == 2 and context.control.command("greet", {"name": "Ada"})
    )
    run(state, manager)
    assert state.control.commands == {"greet": "Say hello"}
    assert has.greeted == [(2, "Ada")]
    (entry,) = decisions(tmp_path)
    assert (entry["flag"], entry["details"]["result"]) == ("command", "hello Ada")


def test_a_rollback_from_outside_without_a_checkpoint_is_refused_and_training_continues(tmp_path: Path) -> None:
    state, manager = small_state(train_iters=3), CallbackManager()
    state.run_dir = RunDir(tmp_path)
    manager.add(Steers({1: ("rollback", {"to_step": None, "lr_factor": 1.0})}))
    run(state, manager)
    assert state.train_state.step == 3
    assert [one["flag"] for one in decisions(tmp_path)] == ["rollback", "refused"]
    assert "no verified checkpoint of step 0 or earlier" in decisions(tmp_path)[1]["details"]["why"]


def test_a_refused_rollback_takes_nothing_else_that_is_due_with_it() -> None:
    state, manager, evaluated = small_state(train_iters=3), CallbackManager(), []
    manager.add(Steers({2: ("rollback", {"to_step": None, "lr_factor": 1.0})}))
    manager.register("on_step_end", lambda context: context.step == 2 and context.control.evaluate())
    manager.register("on_eval_end", lambda context: evaluated.append(context.step))
    run(state, manager, valid=eval_loader())
    assert evaluated == [2]


Make = Callable[[str], ConfigContainer]


@pytest.fixture
def make(tiny_config: ConfigContainer, corpus: Path, tmp_path: Path) -> Make:
    def made(name: str) -> ConfigContainer:
        config = copy.deepcopy(tiny_config)
        config.run.name, config.run.output_dir = name, str(tmp_path / "runs")
        config.dataset.paths = [str(corpus / "colorsys.py")]
        config.dataset.seq_length = config.model.seq_length = 32
        config.train.global_batch_size, config.train.micro_batch_size, config.train.train_iters = 4, 4, 14
        config.model.num_layers, config.model.hidden_size, config.model.hidden_dropout = 1, 16, 0.1
        config.logger.log_interval, config.validation.eval_interval = 1000, None
        config.checkpoint.save_interval, config.checkpoint.most_recent_k = 4, -1
        return config

    return made


def trained(config: ConfigContainer, plan: dict[int, Any], dies_at: int | None = None) -> dict[str, Any]:
    """What a run leaves that is steered by `plan`, and dies after a step of this process."""
    manager, has, steps = CallbackManager(), Has(), iter(range(1, 1000))
    manager.add([JsonLogger(), has, Steers(plan)])

    def die(context: Any) -> None:
        if next(steps) == dies_at:
            raise Interrupted

    manager.register("on_step_begin", die)
    if dies_at is None:
        pretrain(config, callbacks=manager)
        assert has.patience == 9
        return left_by(Path(str(config.run.output_dir)) / str(config.run.name))
    with pytest.raises(Interrupted):
        pretrain(config, callbacks=manager)
    return {}


PLAN: dict[int, tuple[str, dict[str, Any]]] = {
    4: ("set", {"key": "lr_factor", "value": 0.5}),
    5: ("set", {"key": "Has.patience", "value": 9}),
    6: ("skip_batch", {"count": 2}),
    9: ("set", {"key": "lr_factor", "value": 2.0}),
}


@pytest.mark.parametrize("deaths", [[8], [10, 3], [6, 2, 3]])
def test_an_interrupted_run_repeats_what_it_was_asked_for_after_its_checkpoint(make: Make, deaths: list[int]) -> None:
    """Each process dies at the n-th step that it begins; what was sent before it died is not sent again."""
    expected = trained(make("whole"), PLAN)
    config, plan = make("killed"), dict(PLAN)
    for death in deaths:
        trained(config, plan, death)
        sent = {one["step"] for one in decisions(Path(str(config.run.output_dir)) / "killed") if one["flag"] != "saved"}
        plan = {step: one for step, one in plan.items() if step not in sent}
    found = trained(config, plan)
    assert expected["weights"] is not None
    assert found["weights"] == expected["weights"]


def test_a_rollback_from_outside_is_repeated_too(make: Make) -> None:
    plan = {**PLAN, 11: ("rollback", {"to_step": 4, "lr_factor": 0.5})}
    expected = trained(make("whole"), plan)
    config = make("killed")
    trained(config, plan, 11)  # two steps after the rollback; no checkpoint since
    found = trained(config, {})
    assert expected["weights"] is not None
    assert found["weights"] == expected["weights"]


ROLLBACK = ("rollback", {"to_step": None, "lr_factor": 1.0})


@pytest.mark.parametrize("is_steered", [True, False])
@pytest.mark.parametrize("stops_first", [True, False])
@pytest.mark.parametrize("ends", ["should_training_stop", "should_epoch_stop"])
def test_a_stop_in_the_step_of_a_rollback_ends_the_run_after_it(
    make: Make, stops_first: bool, is_steered: bool, ends: str
) -> None:
    config, manager, epochs = make("both"), CallbackManager(), []
    config.checkpoint.save_at_end = False
    wanted = [(ends, {}), ("should_save", {}), ROLLBACK]

    def ask(context: Any) -> None:
        for number, (flag, details) in enumerate(wanted if stops_first else reversed(wanted)):
            sent = {"command_id": str(number)} if is_steered else {}
            context.control.add_request(Request(flag, "someone", context.event, "", 0, {**sent, **details}))
        wanted.clear()

    manager.register("on_step_end", lambda context: context.step == 6 and wanted and ask(context))
    manager.register("on_epoch_end", lambda context: epochs.append(context.step))
    state = pretrain(config, callbacks=manager)
    found = [(one["step"], one["flag"]) for one in decisions(Path(str(config.run.output_dir)) / "both")]
    stops = ends == "should_training_stop"
    assert epochs[0] == 4
    assert state.train_state.step == (4 if stops else 14)
    assert state.ending.ended == ("stopped" if stops else "completed")
    assert found[-2:] == ([(4, "rolled_back"), (4, "saved")] if stops else [(8, "saved"), (12, "saved")])
    assert (state.ending.stopped_by is not None) is stops


def test_a_checkpoint_before_a_repeated_request_does_not_lose_it(make: Make) -> None:
    expected = trained(make("whole"), PLAN)
    config = make("killed")
    trained(config, PLAN, 8)  # dies at step 8; the newest checkpoint is of step 4
    trained(config, {5: ("should_save", {})}, 2)  # saves after step 5, dies at step 6
    found = trained(config, {9: PLAN[9]})
    assert expected["weights"] is not None
    assert found["weights"] == expected["weights"]


def test_a_run_that_died_before_its_first_checkpoint_repeats_what_it_was_sent(make: Make) -> None:
    expected = trained(make("whole"), PLAN)
    config = make("killed")
    config.checkpoint.save_interval = 7
    trained(config, PLAN, 7)
    assert not (Path(str(config.run.output_dir)) / "killed" / "checkpoints" / "step_7").exists()
    found = trained(config, {9: PLAN[9]})
    assert expected["weights"] is not None
    assert found["weights"] == expected["weights"]


@pytest.mark.parametrize(
    "value", [9e15, 1000.5, float("inf"), float("nan"), -1e-9, pytest.param(10**400, id="huge"), "1", True]
)
def test_a_learning_rate_factor_that_no_run_survives_is_refused(value: Any) -> None:
    control = Control()
    for ask in (lambda: control.set("lr_factor", value), lambda: control.rollback(lr_factor=value)):
        with pytest.raises(ConfigError, match=r"lr_factor must be a number >= 0 and at most 1000"):
            ask()
    assert not control.requests


def test_rollbacks_whose_factors_multiply_too_far_are_refused(make: Make) -> None:
    config = make("multiplied")
    fast = ("rollback", {"to_step": None, "lr_factor": 900.0})
    trained(config, {5: PLAN[5], 6: fast, 7: fast})
    flags = [one for one in decisions(Path(str(config.run.output_dir)) / "multiplied") if one["flag"] == "refused"]
    assert "810000, above the limit of 1000" in flags[0]["details"]["why"]


def entry(step: int, flag: str, **details: Any) -> dict[str, Any]:
    return {"step": step, "flag": flag, "author": "a", "reason": "", "details": details}


@pytest.mark.parametrize(
    ("entries", "step", "leaves", "expected"),
    [
        ([entry(5, "set", command_id="a")], 4, False, [5]),
        ([entry(5, "set")], 4, False, []),  # asked for by a callback, which will ask again
        ([entry(3, "set", command_id="a"), entry(4, "saved", checkpoint_step=4)], 4, False, []),
        ([entry(5, "set", command_id="a"), entry(6, "saved", checkpoint_step=4)], 4, False, [5]),  # saved in background
        ([entry(4, "saved", checkpoint_step=4), entry(4, "set", command_id="a")], 4, False, [4]),
        ([entry(4, "saved", checkpoint_step=4), entry(5, "set", command_id="a", repeated=True)], 4, False, []),
        (
            [
                entry(4, "saved", checkpoint_step=4),
                entry(5, "set", command_id="a"),
                entry(8, "saved", checkpoint_step=8),
            ],
            4,
            True,
            [5],
        ),
        ([entry(4, "saved", checkpoint_step=4), entry(5, "set", command_id="a")], 4, False, [5]),
        ([entry(4, "saved", checkpoint_step=4), entry(5, "stop", command_id="a")], 4, False, []),
        (
            [entry(4, "saved", checkpoint_step=4), entry(9, "set", command_id="a"), entry(6, "set", command_id="b")],
            4,
            False,
            [6, 9],
        ),
        (
            [
                entry(4, "saved", checkpoint_step=4),
                entry(9, "rollback", command_id="a"),
                entry(6, "set", command_id="b") | {"branch": 1},
            ],
            4,
            False,
            [9, 6],
        ),
        ([entry(4, "saved", checkpoint_step=4), entry(5, "set", command_id=["a"])], 4, False, []),
    ],
)
def test_which_decisions_are_repeated(
    tmp_path: Path, entries: list[dict[str, Any]], step: int, leaves: bool, expected: list[int]
) -> None:
    path = tmp_path / "decisions.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in entries) + '{"step": 9, "fl')
    assert [one.step for one in decisions_after(path, step)] == expected
    assert [one.step for one in left_behind(path, step)] == (expected if leaves else [])
    assert not decisions_after(tmp_path / "missing.jsonl", step)
