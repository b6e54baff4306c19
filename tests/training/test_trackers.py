"""The loggers behind `GlobalState`: who has them, what continues them, and what evaluations and restarts write."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from onstep import CallbackManager, pretrain
from onstep.config import ConfigContainer
from onstep.distributed import World
from onstep.errors import ConfigError
from onstep.record import read_records
from onstep.trackers import RunIdentity, make_tracker
from onstep.trackers.tracker_logger import TrackerLogger
from onstep.training import Clock, GlobalState, evaluate_and_print_results
from onstep.training.reporting.bridge_tags import write_tags
from onstep.training.reporting.bridge_trackers import BridgeTrackers
from tests.support.read_counter import ReadCounter
from tests.support.recording_loggers import RecordingLogger, record_all
from tests.support.small_runs import TinyModel, eval_loader, run, small_state, sum_step
from tests.support.tracker_files import scalars

FIELDS = {
    "tensorboard": "tensorboard_dir",
    "wandb": "wandb_project",
    "mlflow": "mlflow_experiment",
    "comet": "comet_project",
}


@dataclass
class MemoryTracker:
    """A tracker that keeps what it gets."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    keeps_names: bool = False
    opened: list[tuple[RunIdentity, dict[str, Any]]] = field(default_factory=list)
    points: list[tuple[str, float, int]] = field(default_factory=list)
    over_samples: list[tuple[str, float, int]] = field(default_factory=list)
    statuses: list[str] = field(default_factory=list)

    @property
    def takes_back(self) -> bool:
        return self.name == "tensorboard"

    def open(self, run: RunIdentity, state: Mapping[str, Any]) -> None:
        self.opened.append((run, dict(state)))
        if self.takes_back:
            del self.points[state.get("points", 0) :], self.over_samples[state.get("over_samples", 0) :]

    def log(self, metrics: Mapping[str, float], step: int, timestamp: float) -> None:
        self.points += [(tag, value, step) for tag, value in metrics.items()]

    def log_over_samples(self, metrics: Mapping[str, float], samples: int, timestamp: float) -> None:
        if self.name == "tensorboard":
            self.over_samples += [(tag, value, samples) for tag, value in metrics.items()]

    def text(self, tag: str, text: str, step: int) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        counts = {"points": len(self.points), "over_samples": len(self.over_samples)}
        return {"id": f"id of {self.name}", **(counts if self.takes_back else {})}

    def close(self, status: str) -> None:
        self.statuses.append(status)


@pytest.fixture
def trackers(monkeypatch: pytest.MonkeyPatch) -> list[MemoryTracker]:
    """All trackers that are made, in the place of real trackers."""
    made: list[MemoryTracker] = []

    def make_tracker(name: str, **options: Any) -> MemoryTracker:
        made.append(MemoryTracker(name, options))
        return made[-1]

    monkeypatch.setattr("onstep.training.reporting.bridge_trackers.make_tracker", make_tracker)
    return made


def configured(**train_fields: Any) -> GlobalState:
    state = small_state(**train_fields)
    for field_name in FIELDS.values():
        setattr(state.cfg.logger, field_name, "here")
    return state


@pytest.mark.parametrize("name", FIELDS)
def test_a_logger_is_there_where_it_is_configured_and_only_on_the_last_rank(
    name: str, trackers: list[MemoryTracker]
) -> None:
    state = small_state()
    assert getattr(state, f"{name}_logger") is None
    for rank, has_one in ((0, False), (1, True)):
        state = small_state()
        setattr(state.cfg.logger, FIELDS[name], "here")
        state.world = World(rank=rank, size=2)
        logger = getattr(state, f"{name}_logger")
        assert isinstance(logger, TrackerLogger) is has_one
        assert getattr(state, f"{name}_logger") is logger
        assert state.bridge_trackers.configured == (name,)


def test_options_reach_the_trackers(trackers: list[MemoryTracker]) -> None:
    """The trackers that were asked for are made here too, and have what was said."""
    state = configured(train_iters=1)
    options = state.cfg.logger
    options.wandb_entity, options.wandb_save_dir, options.wandb_exp_name = "us", "there", "w"
    options.mlflow_tracking_uri, options.mlflow_tags, options.mlflow_run_name = "file:x", {"a": "b"}, "m"
    options.mlflow_description = "why"
    options.comet_workspace, options.comet_tags = "space", ["t"]
    state.cfg.run.name, state.cfg.env_vars = "night", {"SECRET": "key"}
    run(state)
    names = [(tracker.name, tracker.opened[0][0].name) for tracker in trackers]
    assert names == [
        ("tensorboard", "night"),
        ("wandb", "w"),
        ("mlflow", "m"),
        ("comet", "night"),
    ]
    real: list[Any] = [make_tracker(tracker.name, **tracker.options) for tracker in trackers]
    board, wandb, mlflow, comet = real
    assert board.location == Path("here")
    assert (wandb.project, wandb.entity, wandb.save_dir, wandb.run_name) == ("here", "us", "there", "w")
    assert (mlflow.experiment, mlflow.tracking_uri, mlflow.tags) == ("here", "file:x", {"a": "b"})
    assert (mlflow.run_name, mlflow.description) == ("m", "why")
    assert (comet.project, comet.workspace, comet.tags, comet.run_name) == ("here", "space", ["t"], None)
    assert all(tracker.opened[0][0].run_id.endswith("-bridge") for tracker in trackers)
    assert trackers[0].opened[0][0].config["env_vars"] == ["SECRET"]
    assert trackers[0].opened[0][0].config["run"]["name"] == "night"


@pytest.mark.parametrize("field_name", ["wandb_exp_name", "mlflow_run_name", "comet_experiment_name"])
def test_an_empty_name_is_refused(field_name: str, trackers: list[MemoryTracker]) -> None:
    state = configured(train_iters=1)
    setattr(state.cfg.logger, field_name, "")
    with pytest.raises(ConfigError, match=f"{field_name} must not be empty"):
        run(state)


def test_a_tracker_that_is_not_installed_is_refused_before_anything_is_built(
    monkeypatch: pytest.MonkeyPatch, tiny_config: ConfigContainer, tmp_path: Path
) -> None:
    monkeypatch.setattr("onstep.trackers.tracker.find_spec", lambda name: None)
    tiny_config.logger.tensorboard_dir = "here"
    tiny_config.run.name, tiny_config.run.output_dir = "run", str(tmp_path)
    with pytest.raises(ConfigError, match=r"pip install 'onstep\[tensorboard\]'"):
        pretrain(tiny_config)
    assert list(tmp_path.iterdir()) == []


def test_a_point_without_a_step_goes_to_the_last_one(trackers: list[MemoryTracker]) -> None:
    state = configured()
    state.bridge_trackers.open(0, 0)
    state.wandb_logger.log({"mine": 1.0})
    state.wandb_logger.log({"lm loss": 2.0}, 7)
    state.wandb_logger.log({"mine": 3.0})
    state.bridge_trackers.close("completed")
    assert trackers[1].points == [("mine", 1.0, 0), ("lm loss", 2.0, 7), ("mine", 3.0, 7)]


def test_trackers_get_every_step_and_are_closed_as_the_run_ends(trackers: list[MemoryTracker]) -> None:
    state = configured(train_iters=3)
    run(state)
    for tracker in trackers:
        assert tracker.statuses == ["completed"]
        assert [step for name, _, step in tracker.points if name == "lm loss"] == [1, 2, 3]
        assert not any(tag.endswith("vs samples") for tag, _, _ in tracker.points)
    assert [at for name, _, at in trackers[0].over_samples if name == "lm loss vs samples"] == [4, 8, 12]


def test_a_run_that_fails_closes_them_as_failed(trackers: list[MemoryTracker]) -> None:
    state, manager = configured(train_iters=3), CallbackManager()
    manager.register("on_step_end", lambda context: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(state, manager)
    assert [tracker.statuses for tracker in trackers] == [["failed"]] * 4


def test_two_trainings_in_a_row_open_them_twice(trackers: list[MemoryTracker]) -> None:
    state = configured(train_iters=2)
    run(state)
    state.cfg.train.train_iters = 4
    run(state)
    for tracker in trackers:
        assert tracker.statuses == ["completed", "completed"]
    assert [step for tag, _, step in trackers[0].points if tag == "lm loss"] == [1, 2, 3, 4]
    assert [opened.start_step for opened, _ in trackers[0].opened] == [0, 2]
    assert trackers[1].opened[1][1] == {"id": "id of wandb"}
    assert len({opened.run_id for tracker in trackers for opened, _ in tracker.opened}) == 1


def test_device_tensors_are_handed_to_the_queue_unread(trackers: list[MemoryTracker]) -> None:
    bridge_trackers = BridgeTrackers(configured().cfg, World())
    bridge_trackers.open(0, 0)
    logger = bridge_trackers.get("tensorboard")
    assert isinstance(logger, TrackerLogger)
    values = {"lm loss": torch.tensor(2.5)}
    with ReadCounter() as counter:
        counter.step = 1
        logger.add_tags(values, {"lm loss vs samples": torch.tensor(2.5)}, 1, 4)
        logger.add_scalar("mine", torch.tensor(1.0), 1)
        logger.add_scalar("mine vs samples", torch.tensor(1.0), 4)
    bridge_trackers.close("completed")
    assert sum(counter.by_step().values()) == 0
    assert trackers[0].points == [("lm loss", 2.5, 1), ("mine", 1.0, 1)]
    assert trackers[0].over_samples == [("lm loss vs samples", 2.5, 4), ("mine vs samples", 1.0, 4)]


def test_no_tracker_of_ours_makes_the_training_wait_for_a_value(trackers: list[MemoryTracker]) -> None:
    bridge_trackers = BridgeTrackers(configured().cfg, World())
    bridge_trackers.open(0, 0)
    tags = {"lm loss": torch.tensor(2.5)}
    with ReadCounter() as counter:
        counter.step = 1
        write_tags(bridge_trackers.loggers, tags, 1, 4, over_samples=["lm loss"])
    bridge_trackers.close("completed")
    assert sum(counter.by_step().values()) == 0
    assert [tracker.points for tracker in trackers] == [[("lm loss", 2.5, 1)]] * 4
    assert trackers[0].over_samples == [("lm loss vs samples", 2.5, 4)]


def test_a_checkpoint_holds_ids_and_what_a_tracker_may_lack(trackers: list[MemoryTracker]) -> None:
    cfg = configured().cfg
    bridge_trackers = BridgeTrackers(cfg, World())
    bridge_trackers.open(0, 0)
    for name in ("tensorboard", "wandb"):
        bridge_trackers.get(name).log_metrics({"lm loss": torch.tensor(3.0)}, 1)
        bridge_trackers.get(name).log_metrics({"lm loss": torch.tensor(2.0)}, 2)
        bridge_trackers.get(name).log_metrics({"lm loss validation": 1.5}, 2)
    bridge_trackers.close("preempted")
    continued = BridgeTrackers(cfg, World())
    continued.load_state_dict(bridge_trackers.state_dict())
    continued.open(2, 8)
    continued.close("completed")
    opened, state = trackers[4].opened[0]
    assert opened.start_step == 2
    assert trackers[4].points == [("lm loss", 2.0, 2), ("lm loss validation", 1.5, 2)], "its last step is written again"
    assert trackers[5].points == [], "it is not"
    assert state["id"] == "id of tensorboard"
    assert opened.run_id == trackers[0].opened[0][0].run_id


def test_a_run_without_a_directory_is_continued_from_its_checkpoint(
    trackers: list[MemoryTracker], tmp_path: Path
) -> None:
    for exit_interval in (2, None):
        state = configured(train_iters=4, exit_interval=exit_interval)
        state.cfg.checkpoint.save = str(tmp_path)
        run(state)
    (before, _), (after, state_of_tracker) = trackers[1].opened[0], trackers[5].opened[0]
    assert after.run_id == before.run_id
    assert state_of_tracker == {"id": "id of wandb"}
    points = [*trackers[1].points, *trackers[5].points]
    assert {step for tag, _, step in points if tag == "lm loss"} == {1, 2, 3, 4}


def test_a_run_that_starts_from_the_checkpoint_of_another_has_an_id_of_its_own(trackers: list[MemoryTracker]) -> None:
    cfg = configured().cfg
    first = BridgeTrackers(cfg, World())
    first.open(0, 0)
    cfg.checkpoint.load, cfg.checkpoint.save = "there", "here"
    fork = BridgeTrackers(cfg, World())
    fork.load_state_dict(first.state_dict())
    fork.open(0, 0)
    first.close("completed")
    fork.close("completed")
    assert trackers[4].opened[0][0].run_id != trackers[0].opened[0][0].run_id


def stepped_clock(state: GlobalState, seconds: float, start: float = 0.0) -> Clock:
    """A clock that starts at any place and takes so many seconds a step."""
    first = state.train_state.step

    def now() -> float:
        return start + seconds * (state.train_state.step - first)

    return Clock(wall=now, elapsed=now)


def test_a_resumed_run_knows_what_remains_and_ends_the_interval_that_it_was_in(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def start(interval: int, seconds: float, began: float, **fields: Any) -> RecordingLogger:
        state = small_state(train_iters=20, **fields)
        state.cfg.checkpoint.save = str(tmp_path)
        state.cfg.logger.log_interval, state.cfg.logger.console = interval, "bridge"
        state.cfg.logger.log_runtime_to_tensorboard, state.cfg.logger.runtime_time_unit = True, "seconds"
        loggers = record_all(state)
        state.clock = stepped_clock(state, seconds, began)
        run(state)
        return loggers["wandb"]

    whole = tmp_path / "whole"
    straight = small_state(train_iters=20)
    straight.cfg.logger.log_interval, straight.cfg.logger.console = 8, "bridge"
    straight.clock = stepped_clock(straight, 2.0)
    straight.cfg.checkpoint.save = str(whole)
    run(straight)
    expected = [line for line in capsys.readouterr().out.splitlines() if " iteration " in line]
    start(8, 2.0, 1000.0, exit_interval=5)
    resumed = start(8, 2.0, 50_000.0)
    printed = [line for line in capsys.readouterr().out.splitlines() if " iteration " in line and line[0] == " "]
    without_time = [re.sub(r"^ \[.*?\]", "", line) for line in printed]
    assert without_time == [re.sub(r"^ \[.*?\]", "", line) for line in expected]
    remaining = resumed.curve("time/remaining_estimate")
    assert list(remaining) == list(range(6, 21))
    assert remaining == {step: pytest.approx(2.0 * (20 - step)) for step in range(6, 21)}
    assert resumed.curve("time/total")[20] == pytest.approx(30.0)


def evaluated(state: GlobalState, is_test: bool = False, **options: Any) -> None:
    evaluate_and_print_results(
        state,
        "iteration 5",
        sum_step,
        eval_loader(),
        [TinyModel()],
        state.cfg.model,
        is_test=is_test,
        **options,
    )


@pytest.mark.parametrize(("kind", "directory"), [("validation", "val"), ("test", "test")])
@pytest.mark.parametrize("ppl", [False, True])
def test_evaluations_have_tags_of_their_own(kind: str, directory: str, ppl: bool) -> None:
    state = small_state()
    state.train_state.step, state.train_state.consumed_train_samples = 5, 20
    state.cfg.logger.log_validation_ppl_to_tensorboard = ppl
    loggers = record_all(state)
    evaluated(state, is_test=kind == "test")
    loss = state.evaluated.last_metrics["eval_loss" if kind == "validation" else "test_loss"]
    tags = [f"lm loss {kind}", f"lm loss {kind} ppl"] if ppl else [f"lm loss {kind}"]
    values = [loss, 2.718281828459045**loss]
    for name in ("tensorboard", "wandb", "comet"):
        expected = [(tag, pytest.approx(value), 5) for tag, value in zip(tags, values, strict=False)]
        assert [point for point in loggers[name].points if "vs samples" not in point[0]] == expected
    over_samples = [(tag, step) for tag, _, step in loggers["tensorboard"].points if "vs samples" in tag]
    assert over_samples == [(f"{tag} vs samples", 20) for tag in tags]
    of_mlflow = [f"{directory}/lm loss", f"{directory}/lm loss ppl"] if ppl else [f"{directory}/lm loss"]
    assert loggers["mlflow"].tags == of_mlflow


def test_an_evaluation_that_is_made_again_at_the_same_step_adds_no_point() -> None:
    state = small_state()
    loggers = record_all(state)
    evaluated(state)
    evaluated(state)
    evaluated(state, is_test=True)
    state.train_state.step = 1
    evaluated(state)
    assert list(loggers["wandb"].curve("lm loss validation")) == [0, 1]
    assert list(loggers["wandb"].curve("lm loss test")) == [0]


def test_tensorboard_may_be_left_out() -> None:
    state = small_state()
    loggers = record_all(state)
    evaluated(state, write_to_tensorboard=False)
    assert loggers["tensorboard"].points == []
    assert loggers["comet"].tags == ["lm loss validation"]


def test_other_data_is_handed_to_its_function_with_step_and_writer() -> None:
    state = small_state()
    seen: list[tuple[Any, ...]] = []
    state.train_state.step = 3
    evaluated(state, process_non_loss_data_func=lambda *given: seen.append(given), non_loss_data_func=lambda model: "x")
    assert seen == []
    state.tensorboard_logger = writer = RecordingLogger()
    evaluated(state, process_non_loss_data_func=lambda *given: seen.append(given), non_loss_data_func=lambda model: "x")
    assert seen == [("x", 3, writer)]


def test_an_evaluation_by_itself_opens_and_closes_the_trackers(trackers: list[MemoryTracker]) -> None:
    state = configured()
    evaluated(state)
    assert [tracker.statuses for tracker in trackers] == [["completed"]] * 4
    assert all(opened.adds_only for tracker in trackers for opened, _ in tracker.opened)


def test_a_rollback_takes_points_back(trackers: list[MemoryTracker], tmp_path: Path) -> None:
    state = configured(train_iters=6)
    state.cfg.checkpoint.save, state.cfg.checkpoint.save_interval = str(tmp_path), 2
    state.cfg.anomaly.max_rollbacks = 1
    manager, seen = CallbackManager(), []

    def ask(context: Any) -> None:
        if context.state.train_state.step == 5 and not seen:
            seen.append(True)
            context.control.rollback("a test")

    manager.register("on_step_end", ask)
    run(state, manager)
    assert [opened.start_step for opened, _ in trackers[0].opened] == [0, 4]
    steps = [step for tag, _, step in trackers[0].points if tag == "lm loss"]
    assert steps == [1, 2, 3, 4, 5, 6]


def test_a_warning_does_not_promise_what_the_metrics_log_cannot_give(
    trackers: list[MemoryTracker], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MemoryTracker, "log", lambda *point: [][0])
    bridge_trackers = configured().bridge_trackers
    bridge_trackers.open(step=0, samples=0)
    for logger in bridge_trackers.loggers.values():
        logger.log_metrics({"lm loss": 1.0}, 1)
    bridge_trackers.loggers["tensorboard"].add_scalar("lm loss vs samples", 1.0, 8)
    bridge_trackers.close("completed")
    records = [record for record in caplog.records if record.name.startswith("onstep.trackers")]
    warnings = [record.getMessage() for record in records if "failed with IndexError" in record.getMessage()]
    assert len(warnings) == len(trackers) == 4
    assert all("are lost when the process ends" in warning for warning in warnings)


def test_without_logged_steps_tags_are_lines_of_the_record_and_do_not_pile_up(
    tiny_config: ConfigContainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onstep.training.reporting.bridge_trackers._MOST_UNLOGGED", 3)
    tiny_config.run.name, tiny_config.run.output_dir, tiny_config.run.save_weights = "run", str(tmp_path), False
    tiny_config.logger.log_interval = 0
    tiny_config.validation.eval_interval, tiny_config.validation.eval_on_start = None, False
    tiny_config.logger.tensorboard_dir, tiny_config.logger.tensorboard_log_interval = str(tmp_path / "board"), 1
    state = pretrain(tiny_config)
    lines = read_records(tmp_path / "run" / "record.jsonl")
    assert [len(line["bridge"]["step"]) for line in lines if "bridge" in line] == [3, 3, 2, 1]
    assert [step for step, _ in scalars(tmp_path / "board")["lm loss"]] == list(range(1, 9))
    assert len(state.bridge_trackers.record) == 0
