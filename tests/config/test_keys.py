"""Every key of a configuration, by what its field declares; and that a new key is declared in one place."""

from __future__ import annotations

import functools
import json
import math
import re
import runpy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from onstep.config import (
    KEYS,
    ChangeClass,
    ConfigContainer,
    Key,
    TrainingArguments,
    TrainingConfig,
    apply_overrides,
    args_to_config,
    changes,
    classify,
    config_to_args,
    decide,
    diff,
    dump_yaml,
    explain,
    from_dict,
    keys_of,
    meaning,
    merge,
    option,
    parse_yaml,
    resolve,
    to_flat,
    validate,
)
from onstep.config.explanation import common_defaults
from onstep.config.field_types import field_types
from onstep.config.section import TRAJECTORY
from onstep.errors import ConfigError

DOCS = Path(__file__).parents[2] / "docs"
TRIED: tuple[Any, ...] = (7, 0.5, True, "another", "cpu", ["model"], [7], [0.5], {"a": "b"}, [{"match": "a"}])
"""Values to try for a key whose default does not show its type."""

FORBIDDEN: tuple[Any, ...] = (-7, -0.5, 1.5, 0, 1e6, 1_000_000, "none of them", "")
"""Values of which a bound forbids at least one that the type allows."""


def run_config(kind: type[ConfigContainer] = ConfigContainer) -> Any:
    """The configuration of a run, as written."""
    config = kind()
    merge(config, {"train.train_iters": 100, "train.micro_batch_size": 4, "optimizer.lr": 1e-3, "run.name": "a-run"})
    return config


def with_value(key: Key, value: Any) -> ConfigContainer:
    """The configuration of a run with one value set.

    Raises:
        ConfigError: for a value of another type.
    """
    config: ConfigContainer = run_config()
    merge(config, {key.name: value})
    return config


@functools.cache
def defaults() -> ConfigContainer:
    """The resolved configuration of a run, which nobody changes."""
    return resolve(run_config())


def another(key: Key) -> Any:
    """A value of the key's type and rules that differs from the resolved one."""
    return another_of(key.name)


@functools.cache
def another_of(name: str) -> Any:
    key = KEYS[name]
    value = key.get(defaults())
    if key.option.choices:
        return next(choice for choice in (*key.option.choices, None) if choice != value)
    likely: tuple[Any, ...] = ()
    if isinstance(value, bool):
        likely = (not value,)
    elif isinstance(value, str):
        likely = (f"{value}-other",)
    elif isinstance(value, int | float):
        likely = (value + 1, value * 0.5)
    elif isinstance(value, list):
        likely = ([*value, *value], [7], ["another"], [{"match": "a"}])
    elif isinstance(value, dict):
        likely = ({"ANOTHER": "1"},)
    if key.option.elements:
        likely = ([key.option.elements[0]],)
    for candidate in (*likely, *TRIED):
        try:
            with_value(key, candidate)
        except ConfigError:
            continue
        bound = key.option.bound
        if candidate != value and (bound is None or bound.holds(candidate)):
            return candidate
    raise AssertionError(key.name)


@pytest.mark.parametrize("key", KEYS.values(), ids=list(KEYS))
def test_a_key_is_what_its_field_declares(key: Key) -> None:
    """Each key is described, its rules refuse, `TrainingArguments` keep it, a change has its class and effect."""
    is_described(key)
    rules_refuse(key)
    arguments_keep_its_value(key)
    a_change_is_found_and_acted_on(key)
    the_argument_has_the_same_value(key)


def is_described(key: Key) -> None:
    assert re.fullmatch(r"[^\s].*[.)]", key.option.help), key.option.help
    text = explain(key.name)
    assert text.startswith(key.name)
    assert key.option.on_change.value in text
    assert " ".join(key.option.help.split()) in " ".join(text.split())
    for fact in (key.option.hf, key.option.bound and key.option.bound.text, *key.option.choices, *key.option.elements):
        assert fact is None or fact in " ".join(text.split())


def rules_refuse(key: Key) -> None:
    """A value outside of bound or choices, one that is not finite, and one that has no effect with the others."""
    if key.option.bound is not None:
        assert key.default is None or key.option.bound.holds(key.default)
        refused = 0
        for value in FORBIDDEN:
            try:
                config = with_value(key, value)
            except ConfigError:
                continue  # of another type
            if not key.option.bound.holds(key.get(config)):
                refused += 1
                with pytest.raises(ConfigError, match=re.escape(f"{key.name}={key.get(config)!r} must be ")):
                    validate(config)
        assert refused
    if key.option.choices:
        assert key.default is None or key.default in key.option.choices
        with pytest.raises(
            ConfigError, match=re.escape(f"{key.name}='such' must be {' | '.join(key.option.choices)}.")
        ):
            validate(with_value(key, "such"))
    if float in (key.annotation, *getattr(key.annotation, "__args__", ())) and not key.option.may_be_infinite:
        for value in (math.nan, math.inf):
            if isinstance(value, float) and key.annotation in (float, float | None):
                with pytest.raises(ConfigError, match=f"{key.name}={value} must be a finite number"):
                    validate(with_value(key, value))
    if key.option.only_with:
        other, _, allowed = key.option.only_with.partition("=")
        config = with_value(key, another(key))
        if KEYS[other].get(config) not in allowed.split(" or "):
            with pytest.raises(ConfigError, match=f"has no effect with {other}=.* set {other} to {allowed}, or leave"):
                validate(config)


def test_yaml_and_flat_keys_keep_every_value() -> None:
    config = run_config()
    merge(config, {name: another(key) for name, key in KEYS.items()})
    assert diff(from_dict(parse_yaml(dump_yaml(config))), config) == []
    assert diff(from_dict(to_flat(config)), config) == []


def arguments_keep_its_value(key: Key) -> None:
    config = with_value(key, another(key))
    if key.name != "trainer":  # has arguments as entries, see test_conversion
        assert args_to_config(config_to_args(config)) == config


def a_change_is_found_and_acted_on(key: Key) -> None:
    before, today = defaults(), resolve(run_config())
    merge(today, {key.name: another(key)})
    (change,) = changes(json.loads(json.dumps(before.to_dict())), today)
    assert change.key.startswith(key.name)
    assert change.kind is classify(change.key)
    assert (meaning(key.name) != "") is (key.option.on_change is TRAJECTORY)
    assert not key.option.effect or key.option.on_change is TRAJECTORY
    if change.kind is ChangeClass.SAFE:
        for policy in ("error", "keep", "apply"):
            assert decide([change], today, policy) == today
        return
    for policy in ("error", "keep", "apply") if change.kind is ChangeClass.INCOMPATIBLE else ("error",):
        with pytest.raises(ConfigError, match=f"{key.name} is .* there and .* here"):
            decide([change], today, policy)
    if change.kind is ChangeClass.TRAJECTORY:
        assert decide([change], today, "apply") == today
        assert decide([change], today, "keep") == before


def the_argument_has_the_same_value(key: Key) -> None:
    if key.option.hf is None:
        return
    assert key.option.hf in field_types(TrainingArguments)
    value = another(key)
    needed = {"dataloader_num_workers": 1} if key.name == "dataset.prefetch_factor" else {}
    config = args_to_config(TrainingArguments(**{key.option.hf: value, **needed}))
    assert key.get(config) == value
    assert getattr(config_to_args(config), key.option.hf) == value


def test_about_forty_keys_are_common_and_shown_first_as_yaml_that_loads() -> None:
    common = [name for name, key in KEYS.items() if key.option.common]
    assert 35 <= len(common) <= 50
    text = common_defaults()
    shown = parse_yaml(text)
    assert from_dict(shown) == ConfigContainer()
    assert [key for key in to_flat(from_dict(shown)) if key in _flat(shown)] == common
    assert "onstep config defaults --help-text" in text
    assert "  # Peak learning rate.\n  lr: null\n" in text


def _flat(values: dict[str, Any]) -> set[str]:
    found = set()
    for name, value in values.items():
        found |= {f"{name}.{inner}" for inner in value} if isinstance(value, dict) else {name}
    return found


def test_an_unknown_key_is_explained_by_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"unknown configuration key 'optimizer.lrr'. Did you mean 'optimizer.lr'\?"):
        explain("optimizer.lrr")


def test_names_of_hugging_face_lead_to_the_key() -> None:
    for name, key in (
        ("per_device_train_batch_size", "train.micro_batch_size"),
        ("max_grad_norm", "optimizer.clip_grad"),
    ):
        with pytest.raises(ConfigError, match=rf"{name!r}\. Did you mean {key!r}\?"):
            apply_overrides(ConfigContainer(), [f"{name}=1"])


@dataclass
class PatientTrainingConfig(TrainingConfig):
    """A section with one more key; nothing else in this file or in Onstep names it."""

    patience: int = option(
        3,
        TRAJECTORY,
        bound="> 0",
        effect="the count of steps without progress starts again",
        common=True,
        help="Steps without progress before the run stops.",
    )


@dataclass
class PatientConfig(ConfigContainer):
    """A configuration with that section."""

    train: PatientTrainingConfig = field(default_factory=PatientTrainingConfig)


def test_a_new_key_is_one_field_and_validated_classified_documented_and_shown() -> None:
    config = run_config(PatientConfig)
    validate(config)
    apply_overrides(config, ["train.patience=0"])
    with pytest.raises(ConfigError, match=r"train.patience=0 must be > 0"):
        validate(config)
    with pytest.raises(ConfigError, match=r"'train.patiens'. Did you mean 'train.patience'"):
        apply_overrides(config, ["train.patiens=1"])

    assert classify("train.patience", PatientConfig) is TRAJECTORY
    assert meaning("train.patience", PatientConfig) == "the count of steps without progress starts again"
    before, today = resolve(run_config(PatientConfig)), resolve(run_config(PatientConfig))
    today.train.patience = 5
    (change,) = changes(before.to_dict(), today)
    assert (change.key, change.old, change.new, change.kind) == ("train.patience", 3, 5, TRAJECTORY)
    assert decide([change], today, "keep") == before
    with pytest.raises(ConfigError, match=r"train.patience is 3 there and 5 here"):
        decide([change], today, "error")

    keys = keys_of(PatientConfig)
    tables = runpy.run_path(str(DOCS / "generate.py"), run_name="docs_generate")
    row = "| `train.patience` | `int` | `3` | Steps without progress before the run stops. Must be > 0. "
    assert row + "| changes the trajectory |  |" in tables["configuration_tables"](keys)
    assert "  patience: 3\n" in dump_yaml(config.__class__())
    assert "  # Steps without progress before the run stops.\n  patience: 3\n" in common_defaults(keys)
    assert "must be     > 0" in explain("train.patience", keys)


def test_a_key_without_help_cannot_be_declared() -> None:
    with pytest.raises(TypeError, match="help"):
        option(3, TRAJECTORY)  # type: ignore[call-arg]
