"""A Trainer whose model has its outputs in static buffers, as with CUDA graphs, logs and predicts the same numbers."""

from __future__ import annotations

from functools import wraps
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from tests.support.small_models import CountingTokenModel, TokenModel, arguments, quiet, ragged_rows
from tests.support.static_buffers import Replay


def static(model: TokenModel) -> TokenModel:
    """The model as a CUDA graph would compute it."""
    replay, forward = Replay(), model.forward

    @wraps(forward)
    def replayed(*args: Any, **kwargs: Any) -> dict[str, Tensor]:
        replay.begin()
        return {name: replay.output(value) for name, value in forward(*args, **kwargs).items()}

    model.forward = replayed  # type: ignore[method-assign]
    return model


def numbers(model: TokenModel, directory: Path, accumulation: int) -> list[dict[str, float]]:
    args = arguments(
        directory,
        max_steps=6,
        logging_steps=3,
        eval_strategy="steps",
        eval_steps=3,
        gradient_accumulation_steps=accumulation,
        per_device_train_batch_size=2,
        per_device_eval_batch_size=2,
    )
    trainer = quiet(model, args, ragged_rows(), eval_dataset=ragged_rows(10))
    output = trainer.train()
    logged = [{key: value for key, value in one.items() if "loss" in key} for one in trainer.state.log_history]
    assert output is not None
    return [*logged, {"training_loss": output.training_loss}]


@pytest.mark.parametrize("kind", [TokenModel, CountingTokenModel])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_trainers_static_losses_are_logged_right(kind: type[TokenModel], accumulation: int, tmp_path: Path) -> None:
    plain = numbers(kind(), tmp_path / "plain", accumulation)
    assert numbers(static(kind()), tmp_path / "static", accumulation) == plain
    assert sum(map(len, plain)) > 5
