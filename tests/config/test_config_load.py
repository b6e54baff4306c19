"""YAML in and out, overrides, and the errors of mistyped keys."""

from __future__ import annotations

import dataclasses
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest

from onstep.config import (
    ConfigContainer,
    ModelConfig,
    apply_overrides,
    diff,
    dump_yaml,
    from_dict,
    load_yaml,
    merge,
    nearest_key,
    parse_yaml,
    save_yaml,
    to_flat,
)
from onstep.config.field_types import accepts_text
from onstep.config.keys import KEYS
from onstep.errors import ConfigError

TRICKY = """1e-3 0.1 yes null ~ 012 12:30 #x é 1_000 2024-01-01 = - true [a] {a} * &x !x % @ ` ??? a.b 1. .5 0x10"""
TRICKY_TEXTS = [*TRICKY.split(), "nan", ".inf", "a: b", "two\nlines", " x ", "", "'quoted\""]


def unlike(value: Any, annotation: Any, rng: random.Random) -> Any:
    """A value of the annotation that is not `value`."""
    kinds = [kind for kind in get_args(annotation) if kind is not type(None)]
    kind = kinds[0] if get_origin(annotation) not in (list, dict) and kinds else annotation
    if get_origin(kind) is list:
        return [unlike(None, item, rng) for item in get_args(kind) for _ in range(3)]
    if kind == dict[str, str]:
        return {"A_B": rng.choice(TRICKY_TEXTS), "C": "1"}
    if get_origin(kind) is dict:
        return {"label_names": ["labels", "1e-3"], "warmup_steps": 0.25, "disable_tqdm": True, "data_seed": None}
    if kind is bool:
        return not value
    if kind is int:
        return (value or 0) + 7
    if kind is float:
        return (value or 0.0) * 1.7 + rng.choice([1e-9, 0.25, 1e22])
    assert kind is str, f"no value for {annotation}"
    return rng.choice([text for text in TRICKY_TEXTS if text != value])


def config_unlike_default(seed: int = 0) -> ConfigContainer:
    rng = random.Random(seed)
    config, types = ConfigContainer(), {key: one.annotation for key, one in KEYS.items()}
    merge(config, {key: unlike(value, types[key], rng) for key, value in to_flat(config).items()})
    return config


@pytest.mark.parametrize("seed", range(20))
def test_every_field_survives_yaml(seed: int) -> None:
    config = config_unlike_default(seed)
    assert {key for key, _, _ in diff(ConfigContainer(), config)} == set(to_flat(config))
    again = from_dict(parse_yaml(dump_yaml(config)))
    assert diff(config, again) == []
    assert again == config
    assert {key: type(value) for key, value in to_flat(again).items()} == {
        key: type(value) for key, value in to_flat(config).items()
    }


def test_a_file_holds_what_was_saved(tmp_path: Any) -> None:
    config = config_unlike_default()
    save_yaml(config, tmp_path / "run.yaml")
    assert from_dict(load_yaml(tmp_path / "run.yaml")) == config


def test_the_defaults_survive_yaml() -> None:
    assert from_dict(parse_yaml(dump_yaml(ConfigContainer()))) == ConfigContainer()


def test_flat_keys_and_values_rebuild_the_configuration() -> None:
    config = config_unlike_default()
    assert from_dict(to_flat(config)) == config


def test_yaml_exponents_without_a_dot_are_numbers() -> None:
    config = from_dict(parse_yaml("optimizer: {lr: 1e-3}\ntrain: {train_iters: 1e3}"))
    assert config.optimizer.lr == 0.001
    assert config.train.train_iters == 1000
    assert isinstance(config.train.train_iters, int)


def test_overrides_are_typed_by_their_fields() -> None:
    config = ConfigContainer()
    apply_overrides(
        config,
        [
            "train.train_iters=100",
            "optimizer.lr=3e-4",
            "dataset.paths=[a,b]",
            "mixed_precision=null",
            "optimizer.clip_grad=2",
            "run.name=2024",
            "dataset.text_key=12:30",
            "dataset.split=80,10,10",
            "train.drop_last=false",
            "env_vars.THREADS=1",
            "tokenizer.tokenizer_model=a=b: c",
        ],
    )
    assert config.train.train_iters == 100
    assert config.optimizer.lr == 3e-4
    assert config.dataset.paths == ["a", "b"]
    assert config.mixed_precision is None
    assert isinstance(config.optimizer.clip_grad, float)
    assert config.run.name == "2024"
    assert config.dataset.text_key == "12:30"
    assert config.dataset.split == "80,10,10"
    assert config.train.drop_last is False
    assert config.env_vars == {"THREADS": "1"}
    assert config.tokenizer.tokenizer_model == "a=b: c"


def test_null_unsets_an_optional_text() -> None:
    config = ConfigContainer()
    config.run.name = "x"
    apply_overrides(config, ["run.name=null"])
    assert config.run.name is None


@pytest.mark.parametrize(
    ("override", "nearest"),
    [
        ("lr=3", "optimizer.lr"),
        ("optimizer.learning_rate=3", "optimizer.lr"),
        ("learning_rate=3", "optimizer.lr"),
        ("optimiser.lr=3", "optimizer.lr"),
        ("train.train_itres=3", "train.train_iters"),
        ("train_iters=3", "train.train_iters"),
        ("max_steps=3", "train.train_iters"),
        ("train.max_steps=3", "train.train_iters"),
        ("eval_steps=5", "validation.eval_interval"),
        ("learnin_rate=5", "optimizer.lr"),
        ("model.n_layer=5", "model.num_layers"),
        ("modle=5", "model"),
        ("model.seq_lenght=3", "model.seq_length"),
        ("mixed_precison=null", "mixed_precision"),
        ("train.train_iters.x=3", "train.train_iters"),
    ],
)
def test_an_unknown_key_names_the_nearest(override: str, nearest: str) -> None:
    key = override.partition("=")[0]
    with pytest.raises(ConfigError, match=rf"{key!r}\. Did you mean '{nearest}'\?"):
        apply_overrides(ConfigContainer(), [override])


@pytest.mark.parametrize(
    ("section", "name", "nearest"),
    [
        ("train", "max_steps", "train.train_iters"),
        ("optimizer", "learning_rate", "optimizer.lr"),
        ("train", "exit_intervall", "exit_interval"),
    ],
)
def test_an_unknown_attribute_names_the_field_of_any_section(section: str, name: str, nearest: str) -> None:
    with pytest.raises(ConfigError, match=rf"no field '{name}'\. Did you mean '{nearest}'\?"):
        setattr(getattr(ConfigContainer(), section), name, 5)


def test_a_section_of_another_kind_is_refused() -> None:
    with pytest.raises(ConfigError, match="train must be a TrainingConfig, got ModelConfig"):
        ConfigContainer().train = ModelConfig()  # type: ignore[assignment]


@pytest.mark.parametrize("indented", ["train:\n\ttrain_iters: 3\n", "train:\n  seed: 1\n\tseed: 2\n"])
def test_a_tab_is_named(indented: str) -> None:
    with pytest.raises(ConfigError, match="is indented with a tab; YAML requires spaces"):
        parse_yaml(indented)


def test_a_key_like_no_other_gets_no_suggestion() -> None:
    assert nearest_key("zzz", list(to_flat(ConfigContainer()))) is None
    with pytest.raises(ConfigError, match=r"unknown configuration key 'zzz'. The top-level keys are train, model"):
        from_dict({"zzz": 1})


def test_an_unknown_key_below_a_section_of_a_file_has_its_dotted_name() -> None:
    with pytest.raises(ConfigError, match=r"'optimizer.lrr'. Did you mean 'optimizer.lr'"):
        from_dict(parse_yaml("optimizer:\n  lrr: 1"))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"train": {"train_iters": "many"}}, r"train.train_iters='many' must be int or None, got str"),
        ({"train": {"train_iters": 1.5}}, r"train.train_iters=1.5 must be int or None"),
        ({"train": {"train_iters": True}}, r"train.train_iters=True must be int or None, got bool"),
        ({"train": {"drop_last": 1}}, r"train.drop_last=1 must be bool"),
        ({"train": {"drop_last": None}}, r"train.drop_last=None must be bool"),
        ({"optimizer": {"lr": "fast"}}, r"optimizer.lr='fast' must be float or None"),
        ({"dataset": {"paths": 3}}, r"dataset.paths=3 must be list of str"),
        ({"dataset": {"paths": ["a", 1]}}, r"dataset.paths\[1\]=1 must be str, got int; write it in quotes"),
        ({"env_vars": {"A": 1}}, r"env_vars.A=1 must be str, got int; write it in quotes"),
        ({"run": {"name": 7}}, r"run.name=7 must be str or None"),
        ({"train": 5}, r"train is a section, got 5; set its fields: micro_batch_size"),
        ({"train": None}, r"train is a section"),
    ],
)
def test_a_value_of_another_type_names_key_value_and_type(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_dict(values)


def test_a_failed_merge_changes_nothing() -> None:
    config = ConfigContainer()
    with pytest.raises(ConfigError):
        merge(config, {"train": {"train_iters": 5, "train_itres": 6}})
    assert config == ConfigContainer()


def test_an_override_without_a_value_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'train.train_iters' must have the form"):
        apply_overrides(ConfigContainer(), ["train.train_iters"])


def test_a_broken_override_names_its_key() -> None:
    with pytest.raises(ConfigError, match=r"dataset.paths='\[a' is not a YAML value"):
        apply_overrides(ConfigContainer(), ["dataset.paths=[a"])


@pytest.mark.parametrize(
    "text",
    [
        "run: {name: !!python/object/apply:os.system ['touch hacked']}",
        "run: {name: !!python/name:os.system }",
        "train: {train_iters: 1, train_iters: 2}",
        "train: [1",
        "- a",
        "run: {name: '${oc.env:HOME}'}",
        "run: {name: '${run.output_dir}'}",
    ],
)
def test_yaml_that_would_execute_repeat_or_interpolate_is_refused(
    text: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError):
        parse_yaml(text)
    assert list(tmp_path.iterdir()) == []


def test_an_interpolating_override_is_refused() -> None:
    with pytest.raises(ConfigError, match="interpolation"):
        apply_overrides(ConfigContainer(), ["run.name=${oc.env:HOME}"])


def test_a_missing_file_is_named(tmp_path: Any) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the configuration file .*absent.yaml"):
        load_yaml(tmp_path / "absent.yaml")


def test_an_empty_file_changes_nothing(tmp_path: Any) -> None:
    (tmp_path / "empty.yaml").write_text("# nothing\n")
    assert load_yaml(tmp_path / "empty.yaml") == {}


def test_a_mistyped_attribute_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"no field 'train_itres'. Did you mean 'train_iters'"):
        ConfigContainer().train.train_itres = 5  # type: ignore[attr-defined]


def test_flat_values_are_copies() -> None:
    config = ConfigContainer()
    to_flat(config)["dataset.paths"].append("x")
    assert config.dataset.paths == []


def test_diff_lists_old_and_new() -> None:
    new = dataclasses.replace(ConfigContainer(), mixed_precision="bf16_mixed")
    assert diff(ConfigContainer(), new) == [("mixed_precision", None, "bf16_mixed")]


def test_importing_the_configuration_imports_nothing_heavy() -> None:
    heavy = "{'torch', 'omegaconf', 'yaml', 'transformers', 'numpy'}"
    code = f"import sys, onstep.config, onstep.recipes; print(sorted({heavy} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


LISTS = [name for name, key in KEYS.items() if list[str] in (key.annotation, *get_args(key.annotation))]


@pytest.mark.parametrize("key", LISTS)
def test_a_text_is_a_list_of_one(key: str) -> None:
    section, _, name = key.partition(".")
    by_override = ConfigContainer()
    apply_overrides(by_override, [f"{key}=one.txt"])
    expected = "one.txt" if accepts_text(KEYS[key].annotation) else ["one.txt"]
    assert KEYS[key].get(by_override) == expected
    assert KEYS[key].get(from_dict(parse_yaml(f"{section}: {{{name}: one.txt}}"))) == expected
    assert KEYS[key].get(from_dict({key: "one.txt"})) == expected


def test_these_are_the_keys() -> None:
    assert {"dataset.paths", "train.exit_signals", "peft.target_modules"} <= set(LISTS)
    assert all(get_origin(KEYS[key].annotation) is not dict for key in LISTS)


def test_a_configuration_that_version_0_4_stored_is_read() -> None:
    """It is in every checkpoint and `run.json` of that version, with every key."""
    stored = json.loads((Path(__file__).parents[1] / "golden" / "configuration_of_0.4.json").read_text())
    config = ConfigContainer()
    config.dist.distributed_timeout_minutes = 10.0  # the defaults of that version
    config.train.exit_signals = ["SIGTERM", "SIGINT", "SIGUSR1"]
    assert from_dict(stored) == config
