"""A mixture of experts that the caller built is reported by its own configuration, not by the run's defaults."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from onstep import Trainer
from onstep.config import ModelConfig
from onstep.models import build_transformer
from onstep.models.layers.routing_record import FIGURES
from tests.support.small_models import arguments, recorder

CONFIG = ModelConfig(
    num_layers=2,
    hidden_size=16,
    num_attention_heads=2,
    vocab_size=20,
    seq_length=8,
    num_moe_experts=4,
    moe_ffn_hidden_size=8,
    moe_router_load_balancing_type="seq_aux_loss",
    moe_aux_loss_coeff=0.5,
    moe_z_loss_coeff=0.1,
    moe_per_layer_logging=True,
    log_max_attention_logit=True,
    init_method_std=0.2,
)


def rows() -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    tokens = [torch.randint(0, 20, (9,), generator=generator) for _ in range(8)]
    return [{"tokens": one[:-1], "labels": one[1:]} for one in tokens]


def test_losses_and_the_largest_logit_are_those_of_the_models_own_configuration(tmp_path: Path) -> None:
    model = build_transformer(CONFIG, seed=0)
    logits: list[Any] = []
    manager = recorder("on_train_step_end", lambda context: logits.append(context.state.max_attention_logit))
    sums: list[Any] = []
    manager.register("on_train_step_end", lambda context: sums.append(context.state.experts.last.clone()))
    args = arguments(tmp_path, max_steps=2, per_device_train_batch_size=2, logging_steps=1)

    class ByTokens(Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
            return model(inputs["tokens"], inputs["labels"], reduction="sum") / inputs["labels"].numel()

    trainer = ByTokens(model, args, train_dataset=rows(), default_callbacks=False, callbacks=manager)
    trainer.train()

    assert trainer.state is not None
    first = next(record for record in trainer.state.log_history if "loss" in record)
    names = {name for name in first if "balancing" in name or "z_loss" in name}
    shown = ("seq_load_balancing_loss", "z_loss")
    assert names == {*shown, *(f"moe/{name}_layer_{index}" for name in shown for index in range(2))}
    size = 4 + len(FIGURES)
    for index in range(2):
        z_loss = sums[0][index * size + 4 + FIGURES.index("z_loss")].item()
        assert first[f"moe/z_loss_layer_{index}"] == pytest.approx(z_loss, rel=1e-6)
    assert len(logits) == 2
    assert all(logit is not None for logit in logits)
