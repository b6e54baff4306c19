"""The JSON schema of configuration files accepts what `onstep train` accepts, as far as a schema can say it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from onstep.cli.main import main
from onstep.config import KEYS, dump_yaml, merge, parse_yaml, resolve
from onstep.config.bridge_outcomes import rules
from onstep.config.json_schema import json_schema
from onstep.recipes import RECIPES, get_recipe
from tests.support.contract import bridge_recipes

ROOT = Path(__file__).parents[2]
SCHEMA = json_schema()
YAML_BLOCK = re.compile(r"^```yaml[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def check() -> jsonschema.Draft202012Validator:
    """A validator of configuration files."""
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    return jsonschema.Draft202012Validator(SCHEMA)


@pytest.mark.parametrize("name", RECIPES)
def test_each_recipe_as_yaml_is_valid(name: str, check: jsonschema.Draft202012Validator) -> None:
    check.validate(parse_yaml(dump_yaml(get_recipe(name)())))
    if "_finetune" not in name and name != "any":  # which need weights
        check.validate(parse_yaml(dump_yaml(resolve(get_recipe(name)()))))


def test_each_configuration_file_in_the_pages_and_examples_is_valid(check: jsonschema.Draft202012Validator) -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    texts = [text for page in pages for text in YAML_BLOCK.findall(page.read_text(encoding="utf-8"))]
    texts += [file.read_text(encoding="utf-8") for file in (ROOT / "examples").rglob("*.yaml")]
    sections = {key.partition(".")[0] for key in KEYS}
    files = [file for file in map(parse_yaml, texts) if sections & {key.partition(".")[0] for key in file}]
    files = [file for file in files if "sites" not in file]  # a scenario of `onstep diloco simulate`
    assert files
    for file in files:
        check.validate(file)


@pytest.mark.parametrize(
    "text",
    [
        "optimizer: {lr: 1}",
        "optimizer: {lr: null}",
        "optimizer.lr: 0.1",
        "mixed_precision: bf16-mixed",
        "dataset: {paths: file.txt}",
        "logger: {report_to: [csv, tensorboard]}",
        "env_vars: {A: b}",
        "env_vars.A: b",
        "model: {moe_layer_freq: [0, 1]}",
        "model: {activation_func: {_target_: torch.nn.functional.silu, _call_: false}}",
        "model: {tensor_model_parallel_size: 1, _target_: megatron.Provider}",
        "optimizer: {optimizer: dist_muon}",
        "model: {activation_func: torch.nn.functional.silu}",
        "model.activation_func: megatron.core.activations.squared_relu",
        "optimizer: {params_dtype: torch.bfloat16}",
        "optimizer: {params_dtype: {_target_: torch.bfloat16, _call_: false}}",
        "{_target_: megatron.ConfigContainer, ft: null, optimizer: {main_params_dtype: torch.float32}}",
    ],
)
def test_what_is_accepted_is_valid(text: str, check: jsonschema.Draft202012Validator) -> None:
    values = parse_yaml(text)
    check.validate(values)
    merge(get_recipe("tiny_gpt")(), values)


@pytest.mark.parametrize("name", bridge_recipes.RECIPES)
def test_each_recipe_of_bridge_is_valid(name: str, check: jsonschema.Draft202012Validator) -> None:
    check.validate(bridge_recipes.of_recipe(name))


@pytest.mark.parametrize(
    "text",
    [
        "optimizer: {lrr: 0.1}",
        "optimiser: {lr: 0.1}",
        "optimizer.lrr: 0.1",
        "optimizer: {lr: high}",
        "optimizer: {lr: -1}",
        "optimizer: {adam_beta1: 1.0}",
        "optimizer: {optimizer: adamm}",
        "train: {train_iters: 1.5}",
        "train: {deterministic: 'yes'}",
        "train: null",
        "dataset: {paths: [1]}",
        "logger: {report_to: [csv, tensorbord]}",
        "profiling: {profile_ranks: [a]}",
        "mixed_precision: [bf16]",
        "model: {context_parallel_size: 2}",
        "callbacks: [a:B]",
        "model: {activation_func: torch.nn.functional.tanh}",
        "model: {activation_func: swish}",
        "ft: null",
    ],
)
def test_a_wrong_key_or_value_is_not_valid(text: str, check: jsonschema.Draft202012Validator) -> None:
    with pytest.raises(jsonschema.ValidationError):
        check.validate(parse_yaml(text))


def found(name: str) -> dict[str, Any]:
    """The schema of a dotted key."""
    section, _, last = name.rpartition(".")
    place: dict[str, Any] = SCHEMA["properties"][section]["properties"] if section else SCHEMA["properties"]
    return place[last]  # type: ignore[no-any-return]


def test_every_key_is_described_with_its_default_and_those_of_bridge_are_deprecated() -> None:
    for name, key in KEYS.items():
        assert (found(name)["description"], found(name)["default"]) == (key.option.help, key.default)
    assert all(found(name)["deprecated"] for name, _ in rules())


def test_the_limits_of_a_number_are_those_of_its_rule() -> None:
    for key in (key for key in KEYS.values() if key.option.bound is not None):
        schema = found(key.name)
        limits = [one for one in schema.get("anyOf", [schema]) if one.get("type") in ("integer", "number")]
        for one in limits:
            assert {"minimum", "exclusiveMinimum"} & set(one), key.name
            for kind, is_allowed in (("imum", True), ("exclusive", False)):
                for limit in (value for name, value in one.items() if kind in name and ("excl" in name) != is_allowed):
                    assert key.option.bound is not None
                    assert key.option.bound.holds(limit) is is_allowed, key.name


def test_the_command_prints_the_schema(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "schema"]) == 0
    assert json.loads(capsys.readouterr().out) == SCHEMA
