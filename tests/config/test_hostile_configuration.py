"""Configuration files, words of the command line and dictionaries that somebody made to do harm: each is refused."""

from __future__ import annotations

import math
import os
import re
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest

from onstep import Trainer, TrainingArguments, finetune, pretrain
from onstep.cli.main import main
from onstep.config import KEYS, ConfigContainer, apply_overrides, from_dict, load_yaml, merge, parse_yaml, validate
from onstep.config.checks.single_values import check_values
from onstep.config.yaml_bounds import MAX_YAML_BYTES
from onstep.errors import ConfigError
from onstep.recipes import get_recipe
from tests.support.small_models import Regression, regression_rows
from tests.support.waiting import until

LAUGHS = "\n".join(["a: &a [x,x,x,x,x,x,x,x,x]"] + [f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]" for a, b in zip("abcdefgh", "bcdefghi", strict=True)])  # fmt: skip  # noqa: E501
HOSTILE_YAML = {
    "an alias bomb": (LAUGHS, "at most 10,000"),
    "a cycle": ("a: &a [*a]", "contains itself"),
    "deep lists": ("dataset: {paths: " + "[" * 50_000 + "]" * 50_000 + "}", "at most 32 levels"),
    "deep mappings": ("{a: " * 40 + "1" + "}" * 40, "at most 32 levels"),
    "a long integer": ("train: {train_iters: " + "9" * 5_000 + "}", "5,000 characters in line 1; at most 300"),
    "a long hexadecimal integer": ("train: {train_iters: 0x" + "f" * 5_000 + "}", "at most 300"),
    "a long sexagesimal integer": ("train: {train_iters: 1" + ":1" * 500 + "}", "at most 300"),
    "a long tagged integer": ("train: {train_iters: !!int '" + "9" * 5_000 + "'}", "at most 300"),
    "a wrong tagged integer": (
        "train: {train_iters: !!int 'abc'}",
        "has 'abc' in line 1, which is not of its tag !!int",
    ),
    "a wrong tagged float": ("optimizer: {lr: !!float 'abc'}", "not of its tag !!float; correct it"),
    "a wrong tagged truth value": ("\nvalidation: {eval_on_start: !!bool maybe}", "'maybe' in line 2"),
    "a date": ("run: {name: !!timestamp '2020-99-99'}", "the tag"),
    "bytes": ("trainer: {label_names: !!binary aGVsbG8=}", "the tag"),
    "a set": ("trainer: {label_names: !!set {a}}", "the tag"),
    "an object": ("run: {name: !!python/object/apply:os.mkdir [hacked]}", "the tag"),
    "many interpolations": ("run: {name: '" + "${" * 20_000 + "'}", "interpolation"),
    "an interpolated key": ("'${oc.env:HOME}': 1", "interpolation"),
    "an unhashable key": ("? [a]\n: 1", "not a YAML configuration"),
    "many keys": ("\n".join(f"key{number}: 1" for number in range(10_001)), "at most 10,000"),
    "a control character": ("run: {name: \x00}", "not a YAML configuration"),
    "a number": ("42", "must hold a mapping of sections"),
    "a text": ("just text", "must hold a mapping of sections"),
    "an empty key": ("train: {null: 1}", "a key must be text"),
    "a repeated key": ("train: {train_iters: 1}\ntrain: {train_iters: 2}", "duplicate key train"),
    "a dotted and a nested key": ("train.train_iters: 5\ntrain: {train_iters: 6}", "'train.train_iters' is set twice"),
    "an entry and its dictionary": ("env_vars: {A: b}\nenv_vars.C: d", "'env_vars.C' is set twice"),
    "a tab": ("run:\n\tname: 1", "line 2 is indented with a tab"),
    "a long key": ("? " + "k" * 100_000 + "\n: 1", "unknown configuration key"),
    "a key that is a number": ("1: {2: 3}", "unknown configuration key '1'"),
    "an escaped NUL": ('run: {name: "a\\0b"}', "run.name"),
    "a list as the recipe": ("run: {recipe: [a]}", "a recipe is named by text such as tiny_gpt, got ['a']"),
    "an unpaired surrogate": ('run: {name: "\\ud800"}', "config"),
}


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What a command says that must fail, on one or two short lines."""
    assert main(list(words)) == 1
    text = capsys.readouterr().err
    assert text.startswith("error: ")
    assert len(text) < 2_000
    return text


@pytest.mark.parametrize(("text", "message"), HOSTILE_YAML.values(), ids=HOSTILE_YAML)
def test_a_hostile_file_is_refused_with_the_limit(
    text: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("config.yaml").write_text(text, encoding="utf-8")
    assert message in refusal(capsys, "config", "show", "config.yaml")
    assert message in refusal(capsys, "train", "config.yaml")
    with pytest.raises(ConfigError):
        from_dict(load_yaml("config.yaml"))
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("trainer: {learning_rate: 3}", "has its value: optimizer.lr=0.003; set that, and drop learning_rate from"),
        ("trainer: {mixed_precision: bf16}", "has its value: mixed_precision=None; set that"),
        ("trainer: {max_steps: 3}", "has its value: train.train_iters=1500; set that"),
        ("run.recipe: nope", "unknown recipe 'nope'"),
        ("run.recipe: " + "x " * 3_000, "characters)"),
    ],
)
def test_what_would_be_ignored_is_refused(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.yaml").write_text(text, encoding="utf-8")
    assert message in refusal(capsys, "config", "show", str(tmp_path / "config.yaml"))


def test_a_huge_file_is_refused_unread(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (tmp_path / "config.yaml").open("wb") as file:
        file.truncate(8 << 30)
    assert f"at most {MAX_YAML_BYTES:,}" in refusal(capsys, "config", "show", str(tmp_path / "config.yaml"))


def test_bytes_that_are_not_utf_8_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.yaml").write_bytes(b"run: {name: \xff}")
    assert "UTF-8" in refusal(capsys, "config", "show", str(tmp_path / "config.yaml"))


def test_what_is_no_file_is_named_and_a_pipe_is_read(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("directory.yaml").mkdir()
    Path("link.yaml").symlink_to("nowhere")
    assert "is a directory without a run.json" in refusal(capsys, "train", "directory.yaml")
    assert "cannot read the configuration file 'link.yaml'" in refusal(capsys, "train", "link.yaml")
    assert "does not exist" in refusal(capsys, "train", f"{'x' * 300}.yaml")
    assert "nor a run" in refusal(capsys, "train", "~nobody-of-this-name/run")
    os.mkfifo("pipe.yaml")
    waits = "waiting for what another process writes to pipe.yaml"

    def write() -> None:
        until(lambda: waits in caplog.text)
        Path("pipe.yaml").write_text("train: {train_iters: 7}")

    writer = threading.Thread(target=write)
    writer.start()
    assert main(["config", "show", "pipe.yaml"]) == 0
    writer.join()
    assert "train_iters: 7" in capsys.readouterr().out


def test_an_empty_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "empty.yaml"
    path.write_text("# nothing yet\n", encoding="utf-8")
    assert main(["config", "show", str(path)]) == 0
    assert f"{path} is empty; this is the recipe tiny_gpt" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("run: {name: " + "x" * 400 + "}", "run.name='xxx"),
        ("run: {name: ' '}", "run.name=' ' must be the name of a directory"),
        ('run: {name: "CON\\n"}', "characters that cannot be printed"),
        ("validation: {metric_for_best_model: ''}", "must be the name of a metric, or null"),
    ],
)
def test_a_name_that_names_nothing_is_refused(text: str, message: str) -> None:
    config = get_recipe("tiny_gpt")()
    merge(config, parse_yaml(text))
    with pytest.raises(ConfigError, match=re.escape(message)):
        validate(config)


def test_a_long_value_is_shortened_in_every_error() -> None:
    error = ConfigError(f"train.x={list(range(3_000))} must be one of {['a', 'b']}; set it to 'c'.")
    assert len(str(error)) < 400
    assert str(error).endswith("must be one of ['a', 'b']; set it to 'c'.")
    assert len(str(ConfigError(f"x={[[n, n] for n in range(3_000)]} is {'y' * 5_000}."))) < 600


HOSTILE_VALUES: list[Any] = [10**400, -(10**400), 10**5_000, 2**63, -(2**63) - 1, 1e300, [10**400], [[10**5_000]]]


ODD_VALUES: list[Any] = ["\x1b[31m", "x" * 5_000, -1, 10**12, math.nan, {"a=b": "c"}]


def test_every_key_accepts_odd_values_or_refuses_them_by_name() -> None:
    """Set as attributes, which no type guards."""
    for key, one in KEYS.items():
        for value in ODD_VALUES:
            config = get_recipe("tiny_gpt")()
            one.set(config, value)
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    validate(config)
            except ConfigError as refused:
                message = str(refused)
                assert len(message) < 1_500, key
                assert "\x1b" not in message, key
                assert key.rpartition(".")[2] in message or key == "trainer", message


def test_an_attribute_of_another_type_is_refused_by_every_door() -> None:
    for key, one in KEYS.items():
        config = get_recipe("tiny_gpt")()
        one.set(config, threading.Lock())  # which cannot be copied either
        for start in (pretrain, finetune, validate, check_values):
            with pytest.raises(ConfigError, match=rf"{re.escape(key)}=<unlocked .* must be .*, got lock"):
                start(config)


FLOATS = (2**63, -(2**63) - 1, 1e300)
"""These are floats, not integers of 64 bits."""


@pytest.mark.parametrize("value", HOSTILE_VALUES, ids=lambda value: f"{type(value).__name__}")
def test_a_number_that_no_field_can_hold_is_refused_for_every_key(value: Any) -> None:
    for key, one in KEYS.items():
        if "Any" in str(one.annotation) or (value in FLOATS and "float" in str(one.annotation)):
            continue
        with pytest.raises(ConfigError) as caught:
            merge(ConfigContainer(), {key: value})
        assert key in str(caught.value)
        assert len(str(caught.value)) < 1_000


PATHS = ("run.name", "run.output_dir", "checkpoint.save", "checkpoint.load", "checkpoint.pretrained_checkpoint", "dataset.paths", "dataset.cache_dir", "tokenizer.tokenizer_model", "logger.logging_dir", "logger.tensorboard_dir", "logger.wandb_save_dir", "profiling.memory_snapshot_path")  # fmt: skip  # noqa: E501


@pytest.mark.parametrize("key", PATHS)
def test_a_path_that_no_file_system_holds_is_refused_before_anything_starts(
    key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in ("x" * 256, "x/" * 2_500, "''", "~nobody-of-this-name/x"):
        said = refusal(capsys, "train", f"{key}={path}")
        assert f"{key}=" in said
        assert "must be a path of at most 3,000 bytes, with names of at most 255" in said


def test_the_range_of_integers_is_in_the_message(capsys: pytest.CaptureFixture[str]) -> None:
    rule = "integers from -2**63 to 2**63 - 1"
    assert rule in refusal(capsys, "config", "show", f"train.train_iters={10**200}")
    assert rule in refusal(capsys, "config", "show", "train.train_iters=1e30")
    with pytest.raises(ConfigError, match=r"run.name=.* must be text .* without NUL and unpaired surrogates"):
        from_dict({"run": {"name": "\ud800"}})
    with pytest.raises(ConfigError, match=r"optimizer\.lr=.* must be float or None"):
        from_dict({"optimizer": {"lr": 10**400}})


OVERRIDES = ["[" * 10_000, "9" * 5_000, "0x" + "f" * 5_000, "1" + ":1" * 5_000, "!!int abc", "!!timestamp 2020-99-99", "&a [*a]", "a\0b", "!!python/name:os.system"]  # fmt: skip  # noqa: E501


@pytest.mark.parametrize("raw", OVERRIDES, ids=lambda raw: raw[:20])
def test_a_hostile_word_is_refused(raw: str, capsys: pytest.CaptureFixture[str]) -> None:
    for key in ("train.train_iters", "dataset.paths", "optimizer.lr", "env_vars", "rng.seed", "trainer"):
        assert key in refusal(capsys, "config", "show", f"{key}={raw}")


def test_a_value_of_a_dictionary_is_refused_by_both_doors(tmp_path: Path) -> None:
    config = ConfigContainer()
    config.train.train_iters = 10**400
    config.run.output_dir = str(tmp_path)
    with pytest.raises(ConfigError, match=r"train\.train_iters.*integers from"):
        pretrain(config)
    arguments = TrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, report_to=[], config_overrides={"train.train_iters": 10**5_000}
    )
    with pytest.raises(ConfigError, match=r"train\.train_iters.*integers from"):
        Trainer(Regression(), arguments, train_dataset=regression_rows(4), default_callbacks=False)
    assert list(tmp_path.iterdir()) == []


def test_a_ramp_of_a_billion_sizes_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train.rampup_batch_size=[1,1,1000000000000]", "train.global_batch_size=1000000000"]
    assert "at most 100,000 are allowed" in refusal(capsys, "config", "show", "train.micro_batch_size=1", *words)


def test_what_is_just_within_the_limits_is_read() -> None:
    assert parse_yaml("dataset: {paths: " + "[" * 30 + "]" * 30 + "}")
    paths = [f"/data/part-{number}" for number in range(9_000)]
    values = parse_yaml("dataset:\n  paths:\n" + "".join(f"  - {path}\n" for path in paths))
    assert from_dict(values).dataset.paths == paths
    assert parse_yaml("a: &a [1, 2]\nb: [*a, *a]")["b"] == [[1, 2], [1, 2]]
    config = ConfigContainer()
    apply_overrides(config, [f"rng.seed={2**63 - 1}", "run.name='a: b'", "dataset.text_key=&a [*a]"])
    assert config.rng.seed == 2**63 - 1
    assert config.dataset.text_key == "&a [*a]"
