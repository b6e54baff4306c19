"""What libraries read from `TrainingArguments` and set on them, and what their own subclasses rely on."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import InitVar, dataclass, field
from enum import Enum
from typing import Any

import pytest
import torch
import transformers

from onstep.config import TrainingArguments
from onstep.errors import ConfigError


class Mode(Enum):
    FAST = "fast"


def of_a_library(base: type[Any]) -> type[Any]:
    """A library's arguments, as subclasses of transformers' are written."""

    @dataclass
    class LibraryArguments(base):
        _VALID_DICT_FIELDS = [*base._VALID_DICT_FIELDS, "model_init_kwargs"]  # noqa: RUF012

        model_init_kwargs: dict[str, Any] | str | None = field(default=None)
        mode: Mode = field(default=Mode.FAST)
        scale: InitVar[int] = 2

        def __post_init__(self, scale: int) -> None:
            super().__post_init__()
            self.total = scale * self.train_batch_size

    return LibraryArguments


Ours, Theirs = (of_a_library(base) for base in (TrainingArguments, transformers.TrainingArguments))


@pytest.mark.parametrize("text", ['{"a": "1", "b": {"c": "True", "d": "0.5", "e": "x"}}', "a/path.json"])
def test_texts_become_the_dictionaries_of_transformers(text: str) -> None:
    for name in ("model_init_kwargs", "lr_scheduler_kwargs"):
        if name == "lr_scheduler_kwargs" and not text.startswith("{"):
            continue
        ours, theirs = (cls("out", use_cpu=True, **{name: text}) for cls in (Ours, Theirs))
        assert getattr(ours, name) == getattr(theirs, name)
    assert TrainingArguments._VALID_DICT_FIELDS == transformers.TrainingArguments._VALID_DICT_FIELDS


def test_a_subclass_with_dtypes_and_members_is_json() -> None:
    given = {"dtype": torch.bfloat16, "nested": {"dtype": torch.float16}, "dtypes": None}
    ours, theirs = (cls("out", use_cpu=True, model_init_kwargs=dict(given)) for cls in (Ours, Theirs))
    expected = json.loads(theirs.to_json_string())
    found = json.loads(ours.to_json_string())
    for name in ("model_init_kwargs", "mode", "accelerator_config", "dataloader_pin_memory"):
        assert found[name] == expected[name] == ours.to_dict()[name]
        assert ours.to_sanitized_dict()[name] == theirs.to_sanitized_dict()[name]
    assert ours.model_init_kwargs == given, "the arguments are as they were"
    assert json.loads(Ours("out", model_init_kwargs={"other": torch.int8}).to_json_string())["model_init_kwargs"] == {
        "other": "int8"
    }


def test_a_subclass_keeps_members_of_its_own_and_its_own_parameters() -> None:
    args = Ours("out", scale=3, per_device_train_batch_size=4, config_overrides={"train.loss_weighting": "samples"})
    assert (args.mode, args.total) == (Mode.FAST, 12)
    assert args.config_overrides == {"train.loss_weighting": "samples"}
    assert dataclasses.replace(args, seed=1, scale=1).config_overrides == args.config_overrides

    class Initialized(TrainingArguments):
        def __init__(self, **kwargs: Any) -> None:
            super().__init__("out", **kwargs)

    assert Initialized(control=True).control


class Mixin:
    def __post_init__(self) -> None:
        super().__post_init__()  # type: ignore[misc]
        self.is_mixed = True


def test_a_mixin_may_come_first() -> None:
    @dataclass
    class Mixed(Mixin, TrainingArguments):
        pass

    args = Mixed("out", control=True)
    assert (args.is_mixed, args.control) == (True, True)


def test_use_cpu_switches_pinning_off() -> None:
    for cls in (TrainingArguments, transformers.TrainingArguments):
        assert not cls("out", use_cpu=True).dataloader_pin_memory
    assert TrainingArguments("out").dataloader_pin_memory


@pytest.mark.parametrize("name", ["save", "logging"])
def test_an_interval_may_be_none_where_it_is_not_used(name: str) -> None:
    options = {f"{name}_steps": None, f"{name}_strategy": "epoch", "use_cpu": True}
    for cls in (TrainingArguments, transformers.TrainingArguments):
        assert getattr(cls("out", **options), f"{name}_steps") is None
    with pytest.raises(ConfigError, match=f"{name}_steps=None must be > 0 with the strategy 'steps'; use 'no'"):
        TrainingArguments("out", **{f"{name}_steps": None})


def test_a_factor_without_workers_is_refused_as_in_transformers() -> None:
    for cls in (TrainingArguments, transformers.TrainingArguments):
        with pytest.raises(ValueError, match="dataloader_num_workers > 0"):
            cls("out", use_cpu=True, dataloader_prefetch_factor=2)


def test_accelerator_config_has_attributes_that_are_checked() -> None:
    ours, theirs = TrainingArguments("out", use_cpu=True), transformers.TrainingArguments("out", use_cpu=True)
    assert ours.accelerator_config.to_dict() == theirs.accelerator_config.to_dict()
    ours.accelerator_config.dispatch_batches = False
    ours.check()
    ours.accelerator_config.split_batches = True
    with pytest.raises(ConfigError, match=r"accelerator_config\['split_batches'\]=True is not supported"):
        ours.check()
