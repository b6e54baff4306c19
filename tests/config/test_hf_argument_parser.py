"""transformers' HfArgumentParser parses our TrainingArguments, and a script's own subclass of them."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import pytest

from onstep import Trainer, TrainingArguments
from onstep.errors import ConfigError
from tests.support.small_models import Regression, arguments, regression_rows

parser_module = pytest.importorskip("transformers.hf_argparser")


@dataclass
class ScriptArguments(TrainingArguments):
    """As in Alpaca's train.py."""

    cache_dir: str | None = field(default=None, metadata={"help": "where downloads are kept"})
    model_max_length: int = 512


def parsed(cls: type[Any], *words: str) -> Any:
    (args,) = parser_module.HfArgumentParser(cls).parse_args_into_dataclasses(["--output_dir", "runs/x", *words])
    return args


@pytest.mark.parametrize("cls", [TrainingArguments, ScriptArguments])
def test_words_become_arguments(cls: type[Any]) -> None:
    words = ("--learning_rate", "1e-4", "--warmup_steps", "0.1", "--save_steps", "10", "--bf16", "--report_to", "none")
    overrides = '{"optimizer.sgd_momentum": 0.5}'
    args = parsed(
        cls, *words, "--max_eval_steps", "3", "--config_overrides", overrides, "--resume_from_checkpoint", "runs/y"
    )
    assert (args.learning_rate, args.warmup_steps, args.save_steps, args.bf16) == (1e-4, 0.1, 10, True)
    assert type(args.save_steps) is int
    assert (args.report_to, args.max_eval_steps, args.resume_from_checkpoint) == ([], 3, "runs/y")
    assert args.config_overrides == {"optimizer.sgd_momentum": 0.5}


def test_without_words_every_argument_has_its_default() -> None:
    args, default = parsed(TrainingArguments), TrainingArguments("runs/x")
    assert {f.name: getattr(args, f.name) for f in fields(args) if f.init} == {
        f.name: getattr(default, f.name) for f in fields(default) if f.init
    }


def test_a_subclass_with_fields_of_its_own_trains(tmp_path: Path) -> None:
    own = ScriptArguments(**{**arguments(tmp_path).to_dict(), "max_steps": 2, "cache_dir": "here"})
    trainer = Trainer(Regression(), own, train_dataset=regression_rows(8), default_callbacks=False)
    assert trainer.train().global_step == 2
    assert trainer.args.cache_dir == "here"


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
