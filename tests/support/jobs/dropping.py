"""A model of searches, whose training depends on random numbers."""

from __future__ import annotations

import torch

from tests.support.small_models import Regression


class Dropping(Regression):
    """Random numbers decide what it learns."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        return super().forward(torch.nn.functional.dropout(x, 0.2, self.training), labels)
