"""A module that loads its weights its own way does so when a run continues."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from onstep.errors import CheckpointError
from tests.support.small_models import VOCABULARY, TokenModel, arguments, losses_of, quiet, ragged_rows

SAVING: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4, "logging_steps": 1}


class Later(TokenModel):
    """A later version of the model, with another name for its embedding."""

    def __init__(self) -> None:
        super().__init__(seed=3)
        head = self.head
        del self.embedding, self.head
        self.words, self.head = nn.Embedding(VOCABULARY, 8), head

    def logits(self, input_ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.words(input_ids)))


def renamed(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    return {name.replace("embedding.", "words."): value for name, value in state_dict.items()}


class Overrides(Later):
    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        return super().load_state_dict(renamed(state_dict), *args, **kwargs)


class Hooked(Later):
    def __init__(self) -> None:
        super().__init__()
        self.register_load_state_dict_pre_hook(self.rename)

    @staticmethod
    def rename(module: nn.Module, state_dict: dict[str, Any], *_: Any) -> None:
        values = renamed(state_dict)
        state_dict.clear()
        state_dict.update(values)


@pytest.fixture
def saved(tmp_path: Path) -> tuple[list[float], Path]:
    trainer = quiet(TokenModel(), arguments(tmp_path, **SAVING), ragged_rows(16))
    trainer.train()
    [start] = [one.parent for one in (tmp_path / "run").rglob("manifest.json") if one.parent.name == "checkpoint-2"]
    return losses_of(trainer), start


@pytest.mark.parametrize("kind", [Overrides, Hooked])
def test_a_later_model_loads_the_weights_of_an_earlier_one(
    tmp_path: Path, saved: tuple[list[float], Path], kind: type[Later]
) -> None:
    losses, start = saved
    trainer = quiet(kind(), arguments(tmp_path / "later", **SAVING), ragged_rows(16))
    trainer.train(resume_from_checkpoint=str(start))
    assert losses_of(trainer)[-2:] == losses[-2:]


def test_what_such_a_model_cannot_load_is_named(tmp_path: Path, saved: tuple[list[float], Path]) -> None:
    class Wider(Overrides):
        def __init__(self) -> None:
            super().__init__()
            self.further = nn.Linear(2, 2)

    trainer = quiet(Wider(), arguments(tmp_path / "wider", **SAVING), ragged_rows(16))
    with pytest.raises(CheckpointError, match=r"Wider cannot load the weights.*further\.weight"):
        trainer.train(resume_from_checkpoint=str(saved[1]))


def test_a_model_without_a_way_of_its_own_is_checked_first(tmp_path: Path, saved: tuple[list[float], Path]) -> None:
    trainer = quiet(Later(), arguments(tmp_path / "plain", **SAVING), ragged_rows(16))
    with pytest.raises(CheckpointError, match=r"weights do not match this model: missing words\.weight"):
        trainer.train(resume_from_checkpoint=str(saved[1]))
