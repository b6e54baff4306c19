"""The names that are found in Onstep's and transformers' sources are those of real objects."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import transformers

from onstep.explain.answers import here, there
from onstep.trainer.overrides import METHODS
from onstep.trainer.seq2seq import Seq2SeqTrainer
from tests.support.small_models import Regression, regression_rows

HERE, THERE = here(), there()


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    args = transformers.Seq2SeqTrainingArguments(str(tmp_path_factory.mktemp("out")), max_steps=1, use_cpu=True)
    return Seq2SeqTrainer(Regression(), args, train_dataset=regression_rows(8))


def objects(trainer: Any) -> Iterator[tuple[str, Any]]:
    """What belongs to a Trainer, by kind."""
    yield "trainer", trainer
    for kind in ("args", "state", "control", "callback_handler", "accelerator"):
        yield kind, getattr(trainer, kind)
    yield "accelerator.state", trainer.accelerator.state


def test_what_is_found_for_onstep_is_what_its_objects_have(trainer: Any) -> None:
    for kind, one in objects(trainer):
        known, names = HERE.of(kind), THERE.of(kind)
        assert known is not None
        assert names is not None
        of_object = {name for name in names.members if hasattr(one, name)}
        of_both = names.members.keys() & known.members.keys()
        assert {name for name in of_object ^ of_both if not name.startswith("__")} == set(), kind


def test_all_names_of_transformers_are_found(tmp_path: Path) -> None:
    args = transformers.Seq2SeqTrainingArguments(str(tmp_path), use_cpu=True)
    theirs = transformers.Seq2SeqTrainer(Regression(), args, train_dataset=regression_rows(8))
    for kind in ("trainer", "args", "state", "control", "callback_handler"):
        one = theirs if kind == "trainer" else getattr(theirs, kind)
        found = THERE.of(kind)
        assert found is not None
        missing = {name for name in dir(one) if not name.startswith("__")} - found.members.keys()
        assert missing == set(), kind


def test_every_method_of_transformers_has_an_outcome() -> None:
    found = THERE.of("trainer")
    assert found is not None
    methods = {name for name, one in found.members.items() if one.is_method and not name.startswith("__")}
    of_seq2seq = {"load_generation_config", "_pad_tensors_to_max_len"}
    assert methods - METHODS.keys() == of_seq2seq
