"""`onstep config`: the common keys, all keys, and everything about one."""

from __future__ import annotations

import pytest

from onstep.cli.main import main
from onstep.config import KEYS, ConfigContainer, from_dict, meaning, parse_yaml


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["config", *words]) == 0
    return capsys.readouterr().out


def test_the_defaults_are_the_common_keys_with_help_as_yaml_that_is_read_back(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = printed(capsys, "defaults")
    assert text.startswith(f"# The 46 keys that most runs set, of {len(KEYS)}; all of them: onstep config ")
    assert "  # Peak learning rate.\n  lr: null\n" in text
    assert "adam_beta2" not in text
    assert from_dict(parse_yaml(text)) == ConfigContainer()


def test_every_key_has_a_line_of_help(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "defaults", "--help-text")
    comments = [line for line in text.splitlines()[1:] if line.lstrip().startswith("# ")]
    assert len(comments) == len(KEYS)
    assert all(len(comment.strip(" #")) > 5 for comment in comments)
    assert "  # Peak learning rate.\n  lr: null\n" in text
    assert from_dict(parse_yaml(text)) == ConfigContainer()


def test_all_defaults_are_yaml_with_every_key(capsys: pytest.CaptureFixture[str]) -> None:
    values = parse_yaml(printed(capsys, "defaults", "--all"))
    assert from_dict(values) == ConfigContainer()
    assert {f"{name}.{key}" if dot else name for name, dot, key in _split(values)} == set(KEYS)


def _split(values: dict[str, object]) -> list[tuple[str, str, str]]:
    found = []
    for name, value in values.items():
        inner = value if isinstance(value, dict) and name not in KEYS else {"": None}
        found += [(name, "." if key else "", key) for key in inner]
    return found


def test_a_key_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, "explain", "optimizer.lr").splitlines() == [
        "optimizer.lr",
        "  Peak learning rate.",
        "  type               float or None",
        "  default            null",
        "  must be            >= 0",
        f"  if changed         changes the trajectory: {meaning('optimizer.lr')}",
        "  TrainingArguments  learning_rate",
    ]
    several = printed(capsys, "explain", "dataset.packing", "optimizer.optimizer")
    assert "only with   dataset.kind=chat" in several
    assert "choices     adam | sgd | muon" in several
    assert "if changed  incompatible" in several


def test_a_section_is_explained_by_its_keys(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(capsys, "explain", "optimizer").splitlines()
    assert lines[0].startswith("optimizer: a section of ")
    assert "  optimizer.lr: Peak learning rate." in lines
    assert all(line.startswith("  optimizer.") and len(line) <= 120 for line in lines[1:])
    assert {line.split(":")[0].strip() for line in lines[1:]} == {key for key in KEYS if key.startswith("optimizer.")}


def test_a_mistyped_key_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "explain", "optimizer.lrr"]) == 1
    assert "unknown configuration key 'optimizer.lrr'. Did you mean 'optimizer.lr'?" in capsys.readouterr().err
