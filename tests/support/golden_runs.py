"""The run behind the golden files of the training log: its every number can be worked out by hand.

One weight of 20 is multiplied with ones, so its gradient is 1 at each step and SGD with a rate of 0.5 takes 0.5 off it:
the loss of step k is 20 - (k - 1) / 2.
"""

from __future__ import annotations

import calendar
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from onstep.config import ModelConfig
from tests.support.small_runs import LENGTH

GOLDEN = Path(__file__).parents[1] / "golden"
START = calendar.timegm((2026, 1, 1, 0, 0, 0))
SECONDS_A_STEP = 2.0


class Rows(torch.utils.data.Dataset[Any]):
    """Eight labels a row, so that no division is rounded."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.ones(8), "labels": torch.ones(8, dtype=torch.int64)}


class OneWeight(nn.Module):
    """Carries a configuration, so that its FLOPs are known: 2.2076 TFLOP a step of 4 rows."""

    config = ModelConfig(
        num_layers=12,
        hidden_size=8192,
        ffn_hidden_size=19840,
        num_attention_heads=64,
        num_query_groups=8,
        kv_channels=128,
        vocab_size=128,
        seq_length=LENGTH,
    )

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([20.0]))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).sum()


def forward_step(data_iterator: Any, model: nn.Module) -> Any:
    batch = next(data_iterator)
    return model(batch["x"]), lambda loss: (loss, batch["labels"].numel(), {})


def golden_lines(name: str) -> list[str]:
    lines = (GOLDEN / name).read_text().splitlines()
    return [line for line in lines if not line.startswith("#")]
