"""What trackers get of a run, in both doors, continued, rolled back and evaluated; and that they never harm it."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from onstep import Callback, JsonLogger, Trainer, TrainingArguments, pretrain
from onstep.callbacks import TrackersCallback
from onstep.checkpoint import checkpoints
from onstep.config import ConfigContainer
from onstep.errors import ConfigError
from onstep.events import CallbackContext
from onstep.record import read_records, without_wall_clock
from tests.support.hostile_trackers import Hanging, Raising, Remembering
from tests.support.tracker_files import metrics_log_values, scalars, table


class KeepsNames(Remembering):
    name = "keeper"
    keeps_names = True
    takes_back = True


class Slow(Remembering):
    def log(self, *point: Any) -> None:
        super().log(*point)
        time.sleep(10.0)


class Line(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 1)

    def forward(self, x: Any, labels: Any) -> dict[str, Any]:
        logits = self.layer(x).squeeze(-1)
        return {"loss": (logits - labels).square().mean(), "logits": logits}


ROWS = [{"x": torch.tensor([1.0, 2.0, float(number)]), "labels": torch.tensor(float(number))} for number in range(12)]


def trainer(directory: Path, *callbacks: Any, **arguments: Any) -> Trainer:
    values: dict[str, Any] = {
        "output_dir": str(directory / "run"),
        "use_cpu": True,
        "per_device_train_batch_size": 4,
        "num_train_epochs": 2,
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 3,
        "save_strategy": "no",
        "disable_tqdm": True,
        "config_overrides": {"run.save_weights": False},
    }
    args = TrainingArguments(**{**values, **arguments})
    return Trainer(Line(), args, train_dataset=ROWS, eval_dataset=ROWS, callbacks=list(callbacks))


def logged(tracker: Remembering, name: str) -> list[tuple[int, float]]:
    return [(call[2], call[1][name]) for call in tracker.calls if call[0] == "log" and name in call[1]]


@pytest.fixture
def named_config(tiny_config: ConfigContainer, tmp_path: Path) -> ConfigContainer:
    """8 steps, each logged, in a directory of the test."""
    tiny_config.run.name, tiny_config.run.output_dir = "run", str(tmp_path / "runs")
    tiny_config.run.save_weights, tiny_config.logger.log_interval = False, 1
    tiny_config.checkpoint.save_interval = 4
    return tiny_config


def test_a_tracker_gets_hugging_faces_names_and_a_keeper_the_metrics_logs(tmp_path: Path) -> None:
    tracker, keeper = Remembering(), KeepsNames()
    trainer(tmp_path, TrackersCallback([tracker, keeper]), JsonLogger()).train()
    metrics_log = tmp_path / "run" / "trainer_logs.json"
    for name, shown in (("loss", "train/loss"), ("eval_loss", "eval/loss"), ("learning_rate", "train/learning_rate")):
        assert logged(tracker, shown) == logged(keeper, name) == metrics_log_values(metrics_log, name)
        assert metrics_log_values(metrics_log, name)
    assert logged(keeper, "train_runtime")
    names = {name for call in tracker.calls if call[0] == "log" for name in call[1]}
    assert {name.partition("/")[0] for name in names} == {"train", "eval"}
    assert "train/step" not in names


def test_no_metric_is_sent_twice_for_a_step(tmp_path: Path) -> None:
    """Evaluations and final metrics repeat `epoch` and the totals of the step's own record."""
    tracker = Remembering()
    trainer(tmp_path, TrackersCallback(tracker)).train()
    assert [step for step, _ in logged(tracker, "train/epoch")] == [1, 2, 3, 4, 5, 6]


def test_the_identity_is_the_run_directories(named_config: ConfigContainer, tmp_path: Path) -> None:
    tracker = Remembering()
    state = pretrain(named_config, callbacks=[TrackersCallback(tracker)])
    opening = tracker.calls[0]
    run = opening[1]
    assert (opening[0], opening[2]) == ("open", {})
    assert (run.name, run.run_id, run.start_step) == ("run", state.run_dir.run_id, 0)
    assert run.directory == tmp_path / "runs" / "run"
    assert run.config["train"]["train_iters"] == 8
    assert tracker.calls[-1] == ("close", "completed")


def test_a_run_without_a_directory_has_the_same_id_at_each_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    identities = []
    for directory in ("a", "a", "b"):
        tracker = Remembering()
        context = _context(tmp_path / directory)
        callback = TrackersCallback(tracker)
        callback.on_train_start(context)
        callback.on_run_end(context)
        identities.append(tracker.calls[0][1].run_id)
    assert identities[0] == identities[1] != identities[2]


def _context(directory: Path, step: int = 0, **fields: Any) -> CallbackContext:
    args = SimpleNamespace(output_dir=str(directory), logging_dir=None)
    state = SimpleNamespace(args=args, trainer_state=SimpleNamespace(global_step=step))
    return CallbackContext(state=state, model=[], **fields)


def test_of_lists_the_largest_is_sent_and_what_is_no_number_is_left_out(tmp_path: Path) -> None:
    tracker = Remembering()
    callback = TrackersCallback(tracker)
    callback.on_train_start(_context(tmp_path))
    logs = {"peak_mem": [3, 7, 5], "loss": torch.tensor(0.5), "note": "x", "none": None, "is_best": True, "empty": []}
    callback.on_log(_context(tmp_path, 1, logs={**logs, "matrix": torch.ones(2), "nested": {"a": 1}}))
    callback.on_run_end(_context(tmp_path, 1))
    assert tracker.calls[1][1] == {"train/peak_mem": 7, "train/loss": 0.5, "train/is_best": 1}


@pytest.mark.parametrize(
    "hostile",
    [
        lambda: Slow(),
        lambda: Hanging("open"),
        lambda: Hanging("log"),
        lambda: Hanging("close"),
        lambda: Raising("open"),
        lambda: Raising("log"),
        lambda: Raising("close"),
        lambda: Raising("log", error=SystemExit(1)),
    ],
    ids=["slow", "hangs in open", "hangs in log", "hangs in close", "no open", "no log", "no close", "ends its thread"],
)
def test_a_hostile_tracker_costs_one_warning_and_nothing_of_the_run(
    hostile: Any, named_config: ConfigContainer, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    tracker = hostile()
    hostile_one = TrackersCallback(tracker, close_timeout=0.2)
    state = pretrain(named_config, callbacks=[hostile_one, TrackersCallback("csv"), JsonLogger()])
    if isinstance(tracker, Hanging):
        tracker.released.set()
    assert state.ending.ended == "completed"
    directory = tmp_path / "runs" / "run"
    assert [step for step, _ in metrics_log_values(directory / "trainer_logs.json", "loss")] == list(range(1, 9))
    assert [info.step for info in checkpoints(directory / "checkpoints")][:1] == [8]
    warnings = [one for one in caplog.records if one.levelname == "WARNING" and one.name.startswith("onstep.trackers")]
    assert len(warnings) == 1
    assert "what the tracker lacks is sent when the run continues" in warnings[0].getMessage()
    assert list(table(directory / "metrics.csv").loss.dropna()) == [
        loss for _, loss in metrics_log_values(directory / "trainer_logs.json", "loss")
    ]


def test_the_metrics_log_is_the_one_of_a_run_without_trackers(named_config: ConfigContainer, tmp_path: Path) -> None:
    metrics_logs = []
    for name, extra in (("without", []), ("with", [TrackersCallback(Remembering())])):
        named_config.run.name = name
        pretrain(named_config, callbacks=[JsonLogger(), *extra])
        records = read_records(tmp_path / "runs" / name / "trainer_logs.json")
        metrics_logs.append([without_wall_clock(record) for record in records])
    assert metrics_logs[0] == metrics_logs[1]
    assert len(metrics_logs[0]) > 8


def test_a_run_that_goes_on_hands_each_tracker_its_state(named_config: ConfigContainer) -> None:
    class Dies(Callback):
        def on_step_end(self, context: CallbackContext) -> None:
            if context.trainer_state.global_step == 6:
                raise RuntimeError("killed")

    class WithId(Remembering):
        def state_dict(self) -> dict[str, Any]:
            return {"id": "w1"}

    first, second = WithId(), WithId()
    with pytest.raises(RuntimeError, match="killed"):
        pretrain(named_config, callbacks=[TrackersCallback(first), Dies()])
    assert first.calls[-1] == ("close", "failed")
    pretrain(named_config, callbacks=[TrackersCallback(second)])
    _, run, state = second.calls[0]
    assert state == {"id": "w1"}
    assert (run.start_step, run.run_id) == (4, first.calls[0][1].run_id)
    assert [step for step, _ in logged(second, "train/loss")] == [6, 7, 8], "it has step 5 of the first process"


def test_another_runs_trackers_are_not_written_to(tmp_path: Path) -> None:
    state = {"run_id": "other", "step": 4, "sinks": {"remembering": {"sink": {"id": "theirs"}}}}
    tracker = Remembering()
    callback = TrackersCallback(tracker)
    callback.load_state_dict(state)
    callback.on_train_start(_context(tmp_path, 4))
    callback.on_run_end(_context(tmp_path, 4))
    assert tracker.calls[0][2] == {}


def test_a_rollback_takes_points_back_at_once(tmp_path: Path) -> None:
    callback = TrackersCallback(["csv", "tensorboard"])
    callback.on_train_start(_context(tmp_path))
    for step in range(1, 4):
        callback.on_log(_context(tmp_path, step, logs={"loss": float(step)}))
        if step == 2:
            callback._memory["state"].global_step = 2  # the loop's own view moves with it
            saved = callback.state_dict()
    callback.load_state_dict(saved)
    callback.on_log(_context(tmp_path, 3, logs={"loss": 30.0}))
    callback.on_run_end(_context(tmp_path, 3))
    assert list(table(tmp_path / "metrics.csv").loss) == [1.0, 2.0, 30.0]
    assert scalars(tmp_path / "tensorboard")["train/loss"] == [(1, 1.0), (2, 2.0), (3, 30.0)]


def test_a_later_evaluation_adds_to_the_trackers(tmp_path: Path) -> None:
    trackers = TrackersCallback(["csv", "tensorboard"])
    one = trainer(tmp_path, trackers, eval_strategy="no")
    one.train()
    one.evaluate()
    rows = table(tmp_path / "run" / "metrics.csv")
    assert list(rows.step) == [1, 2, 3, 4, 5, 6, 6]
    assert list(rows.kind)[-1] == "eval"
    shown = scalars(tmp_path / "run" / "tensorboard")
    assert [step for step, _ in shown["train/loss"]] == [1, 2, 3, 4, 5, 6]
    assert [step for step, _ in shown["eval/loss"]] == [6]


def test_an_evaluation_before_training_stays(tmp_path: Path) -> None:
    directory = tmp_path / "logs"
    one = trainer(tmp_path, TrackersCallback(["csv", "tensorboard"]), eval_strategy="no", logging_dir=str(directory))
    one.evaluate()
    one.train()
    assert list(table(directory / "metrics.csv").kind) == ["eval", *["train"] * 6]
    assert [step for step, _ in scalars(directory / "tensorboard")["eval/loss"]] == [0]


def test_a_second_run_of_one_instance_begins_anew(tmp_path: Path) -> None:
    trackers = TrackersCallback("csv")
    one = trainer(tmp_path, trackers, eval_strategy="no")
    one.train()
    one.train()
    directory = tmp_path / "run"
    for name in ("metrics.1.csv", "metrics.csv"):
        assert list(table(directory / name).step) == [1, 2, 3, 4, 5, 6]


def test_two_trackers_of_a_name_are_told_apart(tmp_path: Path) -> None:
    callback = TrackersCallback([Remembering(), Remembering()])
    assert list(callback.state_dict()["sinks"]) == ["remembering", "remembering-2"]


class Bare:
    """A user's tracker that says nothing of names and of taking back."""

    name = "bare"

    def __init__(self) -> None:
        self.steps: list[int] = []

    def open(self, run: Any, state: Any) -> None: ...

    def log(self, metrics: Any, step: int, timestamp: float) -> None:
        if "train/loss" in metrics:
            self.steps.append(step)

    def text(self, tag: str, text: str, step: int) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return {}

    def close(self, status: str) -> None: ...


def test_a_tracker_need_not_say_what_it_keeps_and_takes_back(tmp_path: Path) -> None:
    tracker = Bare()
    trainer(tmp_path, TrackersCallback([tracker, "csv"]), eval_strategy="no").train()  # type: ignore[list-item]
    assert tracker.steps == [1, 2, 3, 4, 5, 6]


def test_without_a_record_what_a_tracker_lacks_is_in_checkpoints(tmp_path: Path) -> None:
    """Processes that are killed while a tracker still opens."""
    saved, hanging = None, []
    for process in range(4):
        tracker = Hanging("open")
        hanging.append(tracker)
        callback = TrackersCallback([tracker, KeepsNames()])
        if saved is not None:
            callback.load_state_dict(saved)
        start = 10 * process
        callback.on_train_start(_context(tmp_path, start))
        for step in range(start + 1, start + 11):
            callback.on_log(_context(tmp_path, step, logs={"loss": float(step)}))
        callback._memory["state"] = SimpleNamespace(global_step=start + 10)
        saved = callback.state_dict()
    assert [line["global_step"] for line in saved["sinks"]["remembering"]["lines"]] == list(range(1, 41))
    for tracker in hanging:
        tracker.released.set()
    callback.on_run_end(_context(tmp_path, 40))
    assert [step for step, _ in logged(hanging[-1], "train/loss")] == list(range(1, 41))


def test_data_loader_workers_and_trackers_go_together(tmp_path: Path) -> None:
    tracker = Remembering()
    trainer(tmp_path, TrackersCallback(tracker), dataloader_num_workers=2, eval_strategy="no").train()
    assert [step for step, _ in logged(tracker, "train/loss")] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"trackers": "tensorbord"}, "Did you mean 'tensorboard'"),
        ({"trackers": ["csv", Remembering]}, r"Remembering is a class.*Remembering\(\.\.\.\)"),
        ({"trackers": SimpleNamespace(name="half", open=print, log=print, close=print)}, "it lacks text, state_dict"),
        ({"trackers": SimpleNamespace()}, "has no `name`"),
        ({"trackers": "csv", "close_timeout": -1.0}, ">= 0 seconds"),
        ({"trackers": "csv", "names": ["brdge"]}, "names=.*must be some of hf, bridge"),
    ],
)
def test_what_cannot_work_is_refused_at_once(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TrackersCallback(**arguments)
