"""Attributes of Hugging Face's Trainer that Onstep's does not have are refused by name, with a remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from onstep import Trainer
from onstep.trainer.computing.refused_attributes import TRAINER
from tests.support.small_models import Regression, arguments, quiet


class Broken(Trainer):
    @property
    def of_a_user(self) -> int:
        return len(self.args.no_such_field)


def test_a_missing_attribute_names_its_remedy(tmp_path: Path) -> None:
    trainer = quiet(Regression(), arguments(tmp_path))
    assert {name for name in TRAINER if hasattr(trainer, name)} == set()
    with pytest.raises(
        AttributeError, match=r"Onstep's Trainer has no '_memory_tracker': set skip_memory_metrics=False"
    ):
        _ = trainer._memory_tracker
    with pytest.raises(AttributeError, match="'Trainer' object has no attribute 'nothing'"):
        _ = trainer.nothing


def test_nothing_is_sharded(tmp_path: Path) -> None:
    trainer = quiet(Regression(), arguments(tmp_path))
    assert trainer.is_fsdp_xla_enabled is trainer.is_distributed_loading_by_transformers is False


def test_the_error_of_a_users_property_is_its_own(tmp_path: Path) -> None:
    with pytest.raises(AttributeError, match="'no_such_field'"):
        _ = Broken(Regression(), arguments(tmp_path)).of_a_user
