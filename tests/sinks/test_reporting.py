"""From `report_to` to sinks with their options."""

from __future__ import annotations

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
from onstep.sinks import tracker_run
from onstep.sinks.reporting import check_reported, reporting_sinks

ALL = ["csv", "tensorboard", "wandb", "mlflow", "comet", "trackio"]


def names(config: ConfigContainer) -> list[str]:
    return [sink.name for sink in reporting_sinks(config)]


def config_with(**logger: Any) -> ConfigContainer:
    return from_dict({"logger": logger})


@pytest.mark.parametrize("report_to", [None, [], ["none"]])
def test_without_trackers_there_are_no_sinks(report_to: list[str] | None) -> None:
    assert names(config_with(report_to=report_to)) == []


def test_each_tracker_has_its_sink() -> None:
    assert names(config_with(report_to=ALL)) == ALL
    assert names(config_with(report_to=["comet_ml", "csv", "comet"])) == ["comet", "csv"]


def test_all_are_those_whose_package_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    assert names(config_with(report_to=["all"])) == ALL
    monkeypatch.setattr(tracker_run, "find_spec", lambda package: None if package == "comet_ml" else object())
    assert names(config_with(report_to=["all"])) == [name for name in ALL if name != "comet"]
    with pytest.raises(ConfigError, match=r"'comet' takes the package comet_ml: pip install 'onstep\[comet\]'"):
        reporting_sinks(config_with(report_to=["comet"]))


@pytest.mark.parametrize(("given", "meant"), [("csv", ["csv"]), ("[csv,wandb]", ["csv", "wandb"]), ("none", [])])
def test_on_the_command_line_one_tracker_takes_no_brackets(given: str, meant: list[str]) -> None:
    config = ConfigContainer()
    apply_overrides(config, [f"logger.report_to={given}"])
    assert names(config) == meant
    assert names(from_dict(parse_yaml(dump_yaml(config)))) == meant


def test_a_mistyped_tracker_without_brackets_is_told_the_nearest(tiny_config: ConfigContainer) -> None:
    apply_overrides(tiny_config, ["logger.report_to=tensorbord"])
    with pytest.raises(ConfigError, match=r"logger.report_to='tensorbord' is no tracker; .*Did you mean 'tensorboard'"):
        validate(tiny_config)


def test_an_unknown_tracker_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"logger.report_to='tensorbord' is no tracker; .*Did you mean 'tensorboard'"):
        reporting_sinks(config_with(report_to=["tensorbord"]))


def sink_of(config: ConfigContainer) -> Any:
    (sink,) = reporting_sinks(config)
    return sink


def test_the_keys_of_the_configuration_reach_the_sinks() -> None:
    wandb = sink_of(config_with(report_to=["wandb"], wandb_entity="me", wandb_save_dir="w", wandb_exp_name="n"))
    assert (wandb.entity, wandb.save_dir, wandb.run_name, wandb.project) == ("me", "w", "n", None)
    mlflow = sink_of(
        config_with(
            report_to=["mlflow"], mlflow_tracking_uri="http://x", mlflow_tags={"a": "b"}, mlflow_description="why"
        )
    )
    assert (mlflow.tracking_uri, mlflow.tags, mlflow.experiment) == ("http://x", {"a": "b"}, None)
    assert mlflow.description == "why"
    comet = sink_of(config_with(report_to=["comet"], comet_workspace="w", comet_tags=["t"], comet_project="p"))
    assert (comet.workspace, comet.tags, comet.project) == ("w", ("t",), "p")


def test_project_and_run_name_of_the_arguments_are_those_of_every_tracker() -> None:
    args = TrainingArguments(
        report_to=["wandb", "mlflow", "comet_ml", "trackio"],
        project="mine",
        run_name="first",
        trackio_space_id="me/space",
        trackio_bucket_id="me/bucket",
    )
    wandb, mlflow, comet, trackio = (cast(sink) for sink in reporting_sinks(args_to_config(args)))
    assert [wandb.project, mlflow.experiment, comet.project, trackio.project] == ["mine"] * 4
    assert [sink.run_name for sink in (wandb, mlflow, comet, trackio)] == ["first"] * 4
    assert (trackio.space_id, trackio.bucket_id) == ("me/space", "me/bucket")


def cast(sink: Any) -> Any:
    return sink


def test_hugging_faces_default_project_leaves_it_to_the_tracker() -> None:
    assert sink_of(args_to_config(TrainingArguments(report_to="trackio"))).project is None


def test_a_report_to_that_nobody_reads_is_refused_with_the_remedy() -> None:
    config = config_with(report_to=["csv"])
    with pytest.raises(ConfigError, match=r"callbacks=\[MetricSinks\(\['csv'\]\)\]"):
        check_reported(config, [object()])
    check_reported(config, [SimpleNamespace(sinks=[])])
    check_reported(ConfigContainer(), [])
