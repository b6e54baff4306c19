"""From `report_to` to trackers with their options."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from onstep.config import (
    ConfigContainer,
    TrainingArguments,
    apply_overrides,
    args_to_config,
    dump_yaml,
    from_dict,
    parse_yaml,
    validate,
)
from onstep.errors import ConfigError
from onstep.events import CallbackManager
from onstep.trackers import TRACKERS
from onstep.trackers import tracker as metric_tracker
from onstep.trackers.report_to import asked_names, attach_trackers, reporting_trackers
from onstep.trackers.trackers_callback import TrackersCallback

ALL = list(TRACKERS)


def names(config: ConfigContainer) -> list[str]:
    return [tracker.name for tracker in reporting_trackers(config)]


def config_with(**logger: Any) -> ConfigContainer:
    return from_dict({"logger": logger})


@pytest.mark.parametrize("report_to", [None, [], ["none"]])
def test_without_trackers_there_are_no_trackers(report_to: list[str] | None) -> None:
    assert names(config_with(report_to=report_to)) == []


def test_each_tracker_has_its_tracker() -> None:
    assert names(config_with(report_to=ALL)) == ALL
    assert names(config_with(report_to=["comet_ml", "csv", "comet"])) == ["comet", "csv"]


def test_all_are_those_whose_package_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    assert names(config_with(report_to=["all"])) == ALL
    monkeypatch.setattr(metric_tracker, "find_spec", lambda package: None if package == "comet_ml" else object())
    assert names(config_with(report_to=["all"])) == [name for name in ALL if name != "comet"]
    with pytest.raises(ConfigError, match=r"'comet' requires the package comet_ml: pip install 'onstep\[comet\]'"):
        reporting_trackers(config_with(report_to=["comet"]))


@pytest.mark.parametrize(("given", "meant"), [("csv", ["csv"]), ("[csv,wandb]", ["csv", "wandb"]), ("none", [])])
def test_on_the_command_line_one_tracker_takes_no_brackets(given: str, meant: list[str]) -> None:
    config = ConfigContainer()
    apply_overrides(config, [f"logger.report_to={given}"])
    assert names(config) == meant
    assert names(from_dict(parse_yaml(dump_yaml(config)))) == meant


def test_a_mistyped_tracker_without_brackets_is_reported_with_the_nearest(tiny_config: ConfigContainer) -> None:
    apply_overrides(tiny_config, ["logger.report_to=tensorbord"])
    with pytest.raises(ConfigError, match=r"report_to='tensorbord' is not a tracker; .*Did you mean 'tensorboard'"):
        validate(tiny_config)


def test_an_unknown_tracker_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"report_to='tensorbord' is not a tracker; .*Did you mean 'tensorboard'"):
        reporting_trackers(config_with(report_to=["tensorbord"]))


def tracker_of(config: ConfigContainer) -> Any:
    (tracker,) = reporting_trackers(config)
    return tracker


def test_the_keys_of_the_configuration_reach_the_trackers() -> None:
    wandb = tracker_of(config_with(report_to=["wandb"], wandb_entity="me", wandb_save_dir="w", wandb_exp_name="n"))
    assert (wandb.entity, wandb.save_dir, wandb.run_name, wandb.project) == ("me", "w", "n", None)
    mlflow = tracker_of(
        config_with(
            report_to=["mlflow"], mlflow_tracking_uri="http://x", mlflow_tags={"a": "b"}, mlflow_description="why"
        )
    )
    assert (mlflow.tracking_uri, mlflow.tags, mlflow.experiment) == ("http://x", {"a": "b"}, None)
    assert mlflow.description == "why"
    comet = tracker_of(config_with(report_to=["comet"], comet_workspace="w", comet_tags=["t"], comet_project="p"))
    assert (comet.workspace, comet.tags, comet.project) == ("w", ["t"], "p")


@pytest.mark.parametrize(
    ("tracker", "project", "keys"),
    [
        ("wandb", "project", ("wandb_project", "wandb_exp_name")),
        ("mlflow", "experiment", ("mlflow_experiment", "mlflow_run_name")),
        ("comet", "project", ("comet_project", "comet_experiment_name")),
    ],
)
def test_project_and_run_name_of_the_arguments_win_over_the_keys_of_a_tracker(
    tracker: str, project: str, keys: tuple[str, str]
) -> None:
    config = config_with(report_to=[tracker], **dict.fromkeys(keys, "of the key"))
    config.trainer |= {"project": "mine", "run_name": "first"}
    made = tracker_of(config)
    assert (getattr(made, project), made.run_name) == ("mine", "first")


def test_project_and_run_name_of_the_arguments_are_those_of_every_tracker() -> None:
    args = TrainingArguments(
        report_to=["wandb", "mlflow", "comet_ml", "trackio"],
        project="mine",
        run_name="first",
        trackio_space_id="me/space",
        trackio_bucket_id="me/bucket",
    )
    wandb, mlflow, comet, trackio = (cast(tracker) for tracker in reporting_trackers(args_to_config(args)))
    assert [wandb.project, mlflow.experiment, comet.project, trackio.project] == ["mine"] * 4
    assert [tracker.run_name for tracker in (wandb, mlflow, comet, trackio)] == ["first"] * 4
    assert (trackio.space_id, trackio.bucket_id) == ("me/space", "me/bucket")


def cast(tracker: Any) -> Any:
    return tracker


def test_hugging_faces_default_project_leaves_it_to_the_tracker() -> None:
    assert tracker_of(args_to_config(TrainingArguments(report_to="trackio"))).project is None


HF, BRIDGE, BOTH = ("hf",), ("bridge",), ("hf", "bridge")


@pytest.mark.parametrize(
    ("logger", "asked", "filled_by_the_callback"),
    [
        ({"wandb_project": "p"}, {"wandb": BRIDGE}, []),
        ({"report_to": ["wandb"], "wandb_project": "p"}, {"wandb": HF}, ["wandb"]),
        ({"report_to": "wandb", "report_names": BOTH, "wandb_project": "p"}, {"wandb": BOTH}, ["wandb"]),
        ({"report_names": BOTH, "wandb_project": "p"}, {"wandb": BOTH}, ["wandb"]),
        ({"report_to": ["csv"], "report_names": "bridge"}, {"csv": BRIDGE}, ["csv"]),
        ({"report_to": ["csv"], "tensorboard_dir": "tb"}, {"csv": HF, "tensorboard": BRIDGE}, ["csv"]),
    ],
)
def test_a_tracker_is_asked_for_once_with_its_names(
    logger: dict[str, Any], asked: dict[str, Any], filled_by_the_callback: list[str]
) -> None:
    config = config_with(**logger)
    assert asked_names(config.logger) == asked
    assert names(config) == filled_by_the_callback


def test_tensorboard_has_one_directory() -> None:
    assert tracker_of(config_with(report_to=["tensorboard"], tensorboard_dir="tb")).location == Path("tb")


@pytest.mark.parametrize("chosen", [["hugging_face"], [], ["hf", "nemo"]])
def test_unknown_names_are_refused(tiny_config: ConfigContainer, chosen: list[str]) -> None:
    tiny_config.logger.report_names = chosen
    with pytest.raises(ConfigError, match=r"logger.report_names=.* must be some of hf, bridge"):
        validate(tiny_config)


def test_trackers_are_attached_where_nobody_fills_them() -> None:
    config = config_with(report_to=["csv"])
    manager = attach_trackers(None, config)
    assert manager is not None
    assert attach_trackers(manager, config) is manager
    assert [type(one).__name__ for one in manager.callbacks] == ["TrackersCallback"]
    own = CallbackManager()
    own.add(TrackersCallback("csv"))
    attach_trackers(own, config)
    assert len(own.callbacks) == 1
    assert attach_trackers(None, ConfigContainer()) is None


def test_trackers_that_the_users_callback_lacks_are_named(caplog: pytest.LogCaptureFixture) -> None:
    own = CallbackManager()
    own.add(TrackersCallback("csv"))
    attach_trackers(own, config_with(report_to=["csv"]))
    assert caplog.text == ""
    attach_trackers(own, config_with(report_to=["tensorboard"]))
    assert "logger.report_to: tensorboard gets no points, since a TrackersCallback with csv is" in caplog.text


def test_a_callback_that_has_trackers_for_itself_does_not_replace_those_of_the_configuration() -> None:
    manager = CallbackManager()
    manager.add(SimpleNamespace(trackers=[], on_log=print))
    attach_trackers(manager, config_with(report_to=["csv"]))
    assert type(manager.callbacks[-1]) is TrackersCallback
