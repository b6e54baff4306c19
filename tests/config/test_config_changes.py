"""What changed since a run started: each key has one class, and the policy decides what the run goes on with."""

from __future__ import annotations

import json
import math
import pickle
from typing import Any

import pytest

from onstep.config import (
    ABSENT,
    Change,
    ChangeClass,
    ConfigContainer,
    changes,
    classify,
    decide,
    describe,
    from_dict,
    meaning,
    resolve,
)
from onstep.config.lengths import warmup_and_decay
from onstep.errors import ConfigError


def started(**values: Any) -> ConfigContainer:
    """The resolved configuration of a run."""
    plain = {"train.train_iters": 100, "train.micro_batch_size": 4, "optimizer.lr": 1e-3, "run.name": "a-run"}
    return resolve(from_dict({**plain, **{key.replace("__", "."): value for key, value in values.items()}}))


def stored(config: ConfigContainer) -> dict[str, Any]:
    """The configuration as it comes back from a file."""
    return json.loads(json.dumps(config.to_dict()))


def test_an_unknown_key_has_no_class() -> None:
    with pytest.raises(ConfigError, match=r"'optimizer.lrr' is not a configuration key"):
        classify("optimizer.lrr")


def test_nothing_changed_is_no_change() -> None:
    config = started()
    assert changes(stored(config), config) == changes(config, config) == []
    assert describe([]) == ""
    assert decide([], config, "error") == config


def test_keep_takes_todays_safe_values_and_the_stored_trajectory() -> None:
    before = started()
    today = started(optimizer__lr=2e-3, train__train_iters=200, logger__log_interval=7, train__micro_batch_size=2)
    today.train.global_batch_size = 4
    config = decide(changes(stored(before), today), today, "keep")
    assert (config.optimizer.lr, config.train.train_iters) == (1e-3, 100)
    assert (config.logger.log_interval, config.train.micro_batch_size, config.train.global_batch_size) == (7, 2, 4)


def test_stored_and_todays_values_that_do_not_go_together_are_refused() -> None:
    before, today = started(), started(train__micro_batch_size=3)
    with pytest.raises(ConfigError, match="global_batch_size=4 must be a multiple of micro_batch_size"):
        decide(changes(stored(before), today), today, "keep")


def test_the_caller_keeps_its_configuration() -> None:
    today = started(optimizer__lr=2e-3)
    decide(changes(stored(started()), today), today, "keep").run.name = "changed"
    assert (today.optimizer.lr, today.run.name) == (2e-3, "a-run")


def test_the_error_names_the_first_key_the_others_and_the_ways_out() -> None:
    today = started(optimizer__lr=2e-3, rng__seed=5, logger__log_interval=3)
    with pytest.raises(ConfigError) as error:
        decide(changes(stored(started()), today), today, "error")
    text = str(error.value)
    assert text.startswith("optimizer.lr is 0.001 there and 0.002 here (and 2 more: rng.seed, rng.data_seed)")
    assert "--on-config-change apply" in text
    assert "--on-config-change keep" in text
    assert "log_interval" not in text


def test_all_incompatible_keys_are_named_at_once() -> None:
    today = started(model__num_layers=2, optimizer__optimizer="sgd", optimizer__lr=0.1)
    with pytest.raises(ConfigError, match=r"num_layers is 4 there and 2 here, optimizer.optimizer is 'adam'") as error:
        decide(changes(stored(started()), today), today, "apply")
    assert "optimizer.lr" not in str(error.value)


def test_a_policy_is_one_of_three() -> None:
    with pytest.raises(ConfigError, match=r"'aply' must be error \| keep \| apply. Did you mean 'apply'"):
        decide([], started(), "aply")


def test_keys_of_an_older_and_a_newer_version_are_tolerated_and_listed() -> None:
    config = started()
    old = stored(config)
    del old["checkpoint"], old["optimizer"]["hysteresis"]
    old["optimizer"]["gone"] = 3
    old["vanished"] = {"a": 1}
    found = changes(old, config)
    assert {one.kind for one in found} == {ChangeClass.SAFE}
    assert Change("optimizer.hysteresis", ABSENT, 2, ChangeClass.SAFE) in found
    assert Change("optimizer.gone", 3, ABSENT, ChangeClass.SAFE) in found
    assert Change("vanished", {"a": 1}, ABSENT, ChangeClass.SAFE) in found
    assert decide(found, config, "error") == config
    text = describe(found)
    assert "new in this version, at their defaults: optimizer.hysteresis, checkpoint.save, " in text
    assert "not known to this version, without effect: optimizer.gone, vanished" in text


def test_a_key_that_the_stored_one_lacks_counts_as_its_default() -> None:
    today = started(optimizer__hysteresis=5)
    old = stored(started())
    del old["optimizer"]["hysteresis"]
    assert changes(old, today) == [Change("optimizer.hysteresis", 2, 5, ChangeClass.TRAJECTORY)]


def test_a_value_derived_today_is_no_change_for_a_stored_one_that_lacks_it() -> None:
    today = started()
    old = stored(today)
    del old["model"]["kv_channels"], old["rng"]["data_seed"]
    assert [one for one in changes(old, today) if one.old is not ABSENT] == []


def test_entries_of_trainer_have_their_own_class() -> None:
    today = started(trainer={"label_names": ["y"], "disable_tqdm": True})
    found = changes(stored(started()), today)
    assert [(one.key, one.old, one.kind) for one in found] == [
        ("trainer.label_names", ABSENT, ChangeClass.TRAJECTORY),
        ("trainer.disable_tqdm", ABSENT, ChangeClass.SAFE),
    ]
    assert decide(found, today, "keep").trainer == {"disable_tqdm": True}
    assert "new in this version" not in describe(found)


def test_a_stored_value_that_no_field_can_hold_is_refused() -> None:
    old = stored(started())
    old["optimizer"]["lr"] = "fast"
    with pytest.raises(ConfigError, match=r"optimizer.lr='fast' must be float"):
        changes(old, started())


def test_the_table_shows_the_serious_first_with_old_new_and_meaning() -> None:
    today = started(optimizer__lr=2e-3, model__num_layers=2, logger__log_interval=7, dataset__paths=["x" * 99])
    lines = describe(changes(stored(started()), today)).splitlines()
    assert [line.split()[0] for line in lines] == [
        "key",
        "model.num_layers",
        "optimizer.lr",
        "dataset.paths",
        "logger.log_interval",
    ]
    assert lines[2].split()[:3] == ["optimizer.lr", "0.001", "0.002"]
    assert "changes the trajectory" in lines[2]
    assert meaning("optimizer.lr") in lines[2]
    assert lines[3].split()[2].endswith("...")
    assert lines[0].index("class") == lines[4].index("safe")


def test_the_policy_of_this_command_is_not_shown_as_a_change_of_the_run() -> None:
    today = started(checkpoint__on_config_change="apply")
    assert describe(changes(stored(started()), today)) == ""


def test_changes_survive_the_way_to_other_ranks() -> None:
    change = Change("optimizer.gone", 3, ABSENT, ChangeClass.SAFE)
    assert pickle.loads(pickle.dumps(change)).new is ABSENT


def test_more_steps_stretch_a_schedule_that_ends_with_the_run_and_no_other() -> None:
    """The meaning of `train_iters` under apply: the decay follows the run unless it has an end of its own."""
    for values, expected in (({}, 200), ({"scheduler__lr_decay_iters": 90}, 90)):
        before = started(**values)
        today = started(train__train_iters=200, **values)
        config = decide(changes(stored(before), today), today, "apply")
        assert warmup_and_decay(config, math.ceil(config.train.train_iters or 0))[1] == expected
