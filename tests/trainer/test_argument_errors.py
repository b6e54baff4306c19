"""Errors that leave a Trainer advise arguments, not keys of the configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from onstep.errors import AnomalyError, ConfigError, NonFiniteError, OnstepError
from tests.support.small_models import Regression, arguments, quiet, regression_rows

SKIPPED = r"config_overrides\['train\.on_nonfinite'\]"


@pytest.mark.parametrize(
    ("overrides", "kind", "message"),
    [
        ({}, NonFiniteError, rf"{SKIPPED}='raise': .*lower learning_rate, or skip .* with {SKIPPED}='skip'\.$"),
        (
            {"train.on_nonfinite": "rollback"},
            AnomalyError,
            rf"save more often with save_steps, or skip such steps with {SKIPPED}='skip'\.$",
        ),
        ({"optimizer.lr": 0.1}, NonFiniteError, r"lower config_overrides\['optimizer\.lr'\], or skip"),
        ({"train.on_nonfinite": "maybe"}, ConfigError, rf"^{SKIPPED}"),
    ],
)
def test_a_loss_that_is_not_a_number_advises_arguments(
    tmp_path: Path, overrides: dict[str, Any], kind: type[OnstepError], message: str
) -> None:
    rows = regression_rows(8)
    rows[2]["labels"] = torch.tensor(float("nan"))
    args = arguments(
        tmp_path, save_strategy="steps", save_steps=50, config_overrides={"run.save_weights": False, **overrides}
    )
    with pytest.raises(kind, match=message) as caught:
        quiet(Regression(), args, rows).train()
    assert type(caught.value) is kind
