"""Both tables of names over one record: one run or file a tracker, in both doors, continued, and replayed."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from onstep import CallbackManager, JsonLogger, pretrain
from onstep.callbacks import TrackersCallback
from onstep.config import ConfigContainer
from onstep.record import read_records
from onstep.trackers import make_tracker, replay
from onstep.trackers.tag_record import TagRecord, rows_of
from tests.support.resuming import Interrupted
from tests.support.small_runs import small_state

BOTH = ["hf", "bridge"]


@pytest.fixture
def config(tiny_config: ConfigContainer, tmp_path: Path) -> ConfigContainer:
    """8 steps, logged at every third, evaluated after step 5, saved after step 4."""
    tiny_config.run.name, tiny_config.run.output_dir, tiny_config.run.save_weights = "run", str(tmp_path), False
    tiny_config.logger.log_interval, tiny_config.checkpoint.save_interval = 3, 4
    return tiny_config


def rows(table: Path) -> list[dict[str, str]]:
    with table.open() as file:
        return list(csv.DictReader(file))


def column(table: Path, name: str) -> dict[int, float]:
    found = [(int(row["step"]), float(row[name])) for row in rows(table) if row.get(name)]
    assert len(dict(found)) == len(found)
    return dict(found)


def curve(directory: Path, tag: str) -> list[tuple[int, float]]:
    reader = EventAccumulator(str(directory), size_guidance={"scalars": 0})
    reader.Reload()
    return [(point.step, point.value) for point in reader.Scalars(tag)] if tag in reader.Tags()["scalars"] else []


def test_a_table_and_a_directory_have_both_names(config: ConfigContainer, tmp_path: Path) -> None:
    config.logger.report_to, config.logger.report_names = ["csv", "tensorboard"], BOTH
    pretrain(config, callbacks=[JsonLogger()])
    run = tmp_path / "run"
    assert sorted(path.name for path in run.glob("metrics*")) == ["metrics.csv"]
    assert list(column(run / "metrics.csv", "loss")) == [3, 6]
    per_step = column(run / "metrics.csv", "lm loss")
    assert list(per_step) == list(range(1, 9))
    assert column(run / "metrics.csv", "loss")[3] == pytest.approx(sum(per_step[step] for step in (1, 2, 3)) / 3)
    assert list(column(run / "metrics.csv", "lm loss validation")) == [5, 8]
    assert [step for step, _ in curve(run / "tensorboard", "train/loss")] == [3, 6]
    assert [step for step, _ in curve(run / "tensorboard", "lm loss")] == list(range(1, 9))
    assert [x for x, _ in curve(run / "tensorboard" / "vs_samples", "lm loss vs samples")] == list(range(4, 36, 4))


def test_a_loggers_owner_writes_to_the_same_run(config: ConfigContainer, tmp_path: Path) -> None:
    config.logger.report_to, config.logger.report_names = ["tensorboard"], BOTH
    manager = CallbackManager()
    manager.register("on_step_end", lambda context: context.state.tensorboard_logger.add_scalar("mine", 1.0, 2))
    state = pretrain(config, callbacks=manager)
    assert [step for step, _ in curve(tmp_path / "run" / "tensorboard", "mine")] == [2] * 8
    assert state.wandb_logger is None


def test_a_replay_restores_every_tag(config: ConfigContainer, tmp_path: Path) -> None:
    config.logger.report_to, config.logger.report_names = ["csv", "tensorboard"], BOTH
    config.logger.log_timers_to_tensorboard = config.logger.log_validation_ppl_to_tensorboard = True
    pretrain(config, callbacks=[JsonLogger()])
    run, again = tmp_path / "run", tmp_path / "again"
    for name in ("csv", "tensorboard"):
        replay(run / "trainer_logs.json", make_tracker(name), output=again)
    kept = [{k: v for k, v in row.items() if k != "timestamp"} for row in rows(run / "metrics.csv")]
    columns = [name for name in kept[0] if name != "epoch"]
    filled = [{name: row.get(name, "") for name in columns} for row in rows(again / "metrics.csv")]
    assert filled == [{name: row[name] for name in columns} for row in kept]
    for tag in ("lm loss", "grad-norm", "learning-rate", "iteration-time", "lm loss validation ppl", "lm loss test"):
        assert curve(again / "tensorboard", tag) == curve(run / "tensorboard", tag) != [], tag
    for tag in ("lm loss vs samples", "lm loss validation vs samples"):
        directory = Path("tensorboard", "vs_samples")
        assert curve(again / directory, tag) == curve(run / directory, tag) != [], tag


@pytest.mark.parametrize(("names", "has_hf", "has_tags"), [(("hf",), True, False), (("bridge",), False, True)])
def test_a_replay_shows_the_names_that_are_asked_for(
    config: ConfigContainer, tmp_path: Path, names: tuple[str, ...], has_hf: bool, has_tags: bool
) -> None:
    config.logger.tensorboard_dir = str(tmp_path / "tb")
    pretrain(config, callbacks=[JsonLogger()])
    replay(tmp_path / "run" / "trainer_logs.json", make_tracker("csv"), output=tmp_path / "again", names=names)
    table = tmp_path / "again" / "metrics.csv"
    assert bool(column(table, "loss")) is has_hf
    assert bool(column(table, "lm loss")) is has_tags


def tag_steps(run: Path) -> list[int]:
    records = read_records(run / "trainer_logs.json")
    return [row.step for record in records for row in rows_of(record.get("bridge", {})) if "lm loss" in row.tags]


def test_the_metrics_log_of_a_continued_run_has_the_tags_of_each_step_once(
    config: ConfigContainer, tmp_path: Path
) -> None:
    """The checkpoint is between two records, so it holds the tags of its interval."""
    config.logger.tensorboard_dir = str(tmp_path / "tb")
    manager = CallbackManager()

    def die(context: Any) -> None:
        if context.trainer_state.global_step == 7:
            raise Interrupted

    manager.add(JsonLogger())
    manager.register("on_step_end", die)
    with pytest.raises(Interrupted):
        pretrain(config, callbacks=manager)
    pretrain(config, callbacks=[JsonLogger()])
    assert tag_steps(tmp_path / "run") == list(range(1, 9))
    assert [step for step, _ in curve(tmp_path / "tb", "lm loss")] == list(range(1, 9))


def test_a_continued_run_shows_both_names_of_each_step_once(config: ConfigContainer, tmp_path: Path) -> None:
    config.logger.report_to, config.logger.report_names = ["csv", "tensorboard"], BOTH
    manager = CallbackManager()

    def die(context: Any) -> None:
        if context.trainer_state.global_step == 7:
            raise Interrupted

    manager.register("on_step_end", die)
    with pytest.raises(Interrupted):
        pretrain(config, callbacks=manager)
    pretrain(config)
    run = tmp_path / "run"
    assert list(column(run / "metrics.csv", "lm loss")) == list(range(1, 9))
    assert list(column(run / "metrics.csv", "loss")) == [3, 6]
    assert [step for step, _ in curve(run / "tensorboard", "lm loss")] == list(range(1, 9))
    assert [step for step, _ in curve(run / "tensorboard", "train/loss")] == [3, 6]
    over_samples = curve(run / "tensorboard" / "vs_samples", "lm loss vs samples")
    assert [samples for samples, _ in over_samples] == list(range(4, 36, 4))


def test_a_rollback_takes_both_names_back(config: ConfigContainer, tmp_path: Path) -> None:
    config.logger.report_to, config.logger.report_names, config.logger.log_interval = ["csv", "tensorboard"], BOTH, 1
    config.anomaly.max_rollbacks = 1
    manager, asked = CallbackManager(), []

    def ask(context: Any) -> None:
        if context.trainer_state.global_step == 6 and not asked:
            asked.append(True)
            context.control.rollback("a test")

    manager.add(JsonLogger())
    manager.register("on_step_end", ask)
    pretrain(config, callbacks=manager)
    run = tmp_path / "run"
    assert asked
    for directory, tag in ((".", "train/loss"), (".", "lm loss"), ("vs_samples", "lm loss vs samples")):
        places = [place for place, _ in curve(run / "tensorboard" / directory, tag)]
        assert len(places) == len(set(places)), tag
        assert places == sorted(places)
    assert list(column(run / "metrics.csv", "lm loss")) == list(column(run / "metrics.csv", "loss"))
    assert tag_steps(run) == [step for step, _ in curve(run / "tensorboard", "lm loss")]


def test_values_of_environment_variables_reach_no_tracker(config: ConfigContainer, tmp_path: Path) -> None:
    config.logger.report_to, config.env_vars = ["tensorboard"], {"ONSTEP_TEST_KEY": "sesame"}
    pretrain(config)
    [events] = (tmp_path / "run" / "tensorboard").glob("events*")
    assert b"ONSTEP_TEST_KEY" in events.read_bytes()
    assert b"sesame" not in events.read_bytes()


def test_tags_that_no_metrics_log_takes_do_not_pile_up(config: ConfigContainer, tmp_path: Path) -> None:
    config.logger.tensorboard_dir = str(tmp_path / "tb")
    waiting: list[int] = []
    manager = CallbackManager()
    manager.register(
        "on_step_end",
        lambda context: waiting.append(len(context.state.bridge_trackers.record.state_dict().get("step", []))),
    )
    pretrain(config, callbacks=manager)
    assert waiting == [0, 1, 2, 0, 1, 2, 0, 1]


def test_tags_are_taken_once() -> None:
    record = TagRecord()
    record.add_tags({"lm loss": 1.0}, {}, 1, 4)
    assert record.take()["tags"] == {"lm loss": 1.0}
    assert record.take() == {}


def test_without_the_tags_a_record_has_none(config: ConfigContainer, tmp_path: Path) -> None:
    pretrain(config, callbacks=[JsonLogger(), TrackersCallback("csv")])
    assert not any("bridge" in record for record in read_records(tmp_path / "run" / "trainer_logs.json"))
    assert small_state().info.bridge_tags is None
