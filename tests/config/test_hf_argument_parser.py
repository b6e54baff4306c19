"""transformers' HfArgumentParser parses our TrainingArguments, and a script's own subclass of them."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Optional

import pytest

from onstep import Trainer, TrainingArguments
from onstep.errors import ConfigError
from tests.support.small_models import Regression, regression_rows

parser_module = pytest.importorskip("transformers.hf_argparser")


@dataclass
class ScriptArguments(TrainingArguments):
    """A script's own, as public ones write them."""

    cache_dir: Optional[str] = field(default=None)  # noqa: UP045
    layers: list[int] = field(default_factory=lambda: [1, 2])
    remove_unused_columns: bool = field(default=False)
    learning_rate: float = field(default=1e-3, metadata={"help": "another default"})

    def __post_init__(self) -> None:
        super().__post_init__()
        self.width = len(self.layers)

    @property
    def total(self) -> int:
        """The sum of the layers."""
        return sum(self.layers)


def parsed(cls: type[Any], *words: str) -> Any:
    (args,) = parser_module.HfArgumentParser(cls).parse_args_into_dataclasses(["--output_dir", "runs/x", *words])
    return args


@pytest.mark.parametrize("cls", [TrainingArguments, ScriptArguments])
def test_words_become_arguments(cls: type[Any]) -> None:
    words = ("--learning_rate", "1e-4", "--warmup_steps", "0.1", "--save_steps", "10", "--bf16", "--report_to", "none")
    args = parsed(cls, *words, "--max_eval_steps", "3", "--resume_from_checkpoint", "runs/y")
    assert (args.learning_rate, args.warmup_steps, args.save_steps, args.bf16) == (1e-4, 0.1, 10, True)
    assert type(args.save_steps) is int
    assert (args.report_to, args.max_eval_steps, args.resume_from_checkpoint) == ([], 3, "runs/y")


@dataclass
class OwnModelArguments:
    """What transformers' examples declare beside the arguments of a training."""

    config_overrides: Optional[str] = field(default=None)  # noqa: UP045
    control: bool = field(default=False)


@pytest.mark.parametrize("cls", [TrainingArguments, ScriptArguments])
def test_a_parser_has_no_argument_that_is_onsteps_own(cls: type[Any]) -> None:
    parser = parser_module.HfArgumentParser((OwnModelArguments, cls))
    words = ["--output_dir", "runs/x", "--config_overrides", "n_embd=10", "--control"]
    own, args = parser.parse_args_into_dataclasses(words)
    assert (own.config_overrides, own.control) == ("n_embd=10", True)
    assert (args.config_overrides, args.control) == (None, False)
    given = cls("runs/x", config_overrides={"optimizer.sgd_momentum": 0.5}, control=True)
    assert (given.config_overrides, given.control) == ({"optimizer.sgd_momentum": 0.5}, True)


def test_without_words_every_argument_has_its_default() -> None:
    args, default = parsed(TrainingArguments), TrainingArguments("runs/x")
    assert {f.name: getattr(args, f.name) for f in fields(args) if f.init} == {
        f.name: getattr(default, f.name) for f in fields(default) if f.init
    }


@pytest.mark.parametrize("kind", ["words", "dict", "json", "yaml"])
@pytest.mark.parametrize("cls", [TrainingArguments, ScriptArguments])
def test_the_argument_parser_of_transformers_makes_them(tmp_path: Path, cls: Any, kind: str) -> None:
    parser = parser_module.HfArgumentParser(cls)
    values = {"output_dir": str(tmp_path / "run"), "max_steps": 2, "per_device_train_batch_size": 4, "use_cpu": True}
    if kind == "words":
        words = [word for name, value in values.items() for word in (f"--{name}", str(value))]
        (args,) = parser.parse_args_into_dataclasses(words)
    elif kind == "dict":
        (args,) = parser.parse_dict(values)
    else:
        (tmp_path / f"args.{kind}").write_text(json.dumps(values))  # JSON is YAML too
        (args,) = getattr(parser, f"parse_{kind}_file")(str(tmp_path / f"args.{kind}"))

    assert type(args) is cls
    assert (args.max_steps, args.per_device_train_batch_size) == (2, 4)
    if cls is ScriptArguments:
        assert (args.layers, args.width, args.total, args.learning_rate) == ([1, 2], 2, 3, 1e-3)
        assert ScriptArguments("other").layers is not args.layers
        trainer = Trainer(Regression(), args, train_dataset=regression_rows(8), default_callbacks=False)
        assert trainer.train().global_step == 2
        assert trainer.args.total == 3


@pytest.mark.parametrize("name", ["config_overrides", "lr_scheduler_kwargs"])
@pytest.mark.parametrize("text", ["optimizer.lr=1", "[1]", "null", '"x"', ""])
def test_text_that_is_no_dictionary_is_refused(name: str, text: str) -> None:
    with pytest.raises(ConfigError, match=f"TrainingArguments.{name} must be a dictionary, or one as JSON, got '"):
        TrainingArguments("runs/x", **{name: text})


def test_a_dictionary_may_have_blanks_around_it() -> None:
    args = TrainingArguments("runs/x", config_overrides=' {"optimizer.sgd_momentum": 0.5} ')  # type: ignore[arg-type]
    assert args.config_overrides == {"optimizer.sgd_momentum": 0.5}


@pytest.mark.parametrize(("word", "meaning"), [("True", True), ("false", False), ("none-such", "none-such")])
def test_words_for_switches_are_switches(word: str, meaning: bool | str) -> None:
    words = ("--resume_from_checkpoint", word, "--include_num_input_tokens_seen", "False")
    assert parsed(TrainingArguments, *words).resume_from_checkpoint == meaning


def test_a_checkpoint_that_is_named_as_a_switch_is_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "True").mkdir()
    assert TrainingArguments("runs/x", resume_from_checkpoint="True").resume_from_checkpoint == "True"
