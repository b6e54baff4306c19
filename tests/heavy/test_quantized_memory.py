"""The estimate of training over a quantized base is what bitsandbytes holds."""

from __future__ import annotations

import pytest

from onstep.cli.memory_measurement import measure
from onstep.config import ConfigContainer, ModelConfig, PeftConfig, resolve

EXACT = ("weights, trained", "weights, frozen", "gradients", "optimizer state", "logits and loss")


@pytest.mark.parametrize("recomputed", [None, "full"])
@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_every_kind_is_estimated_to_the_byte(kind: str, recomputed: str | None) -> None:
    model = ModelConfig(
        num_layers=2, hidden_size=128, ffn_hidden_size=384, num_attention_heads=4, vocab_size=500, seq_length=32
    )
    model.recompute_granularity = recomputed
    peft = PeftConfig(peft_scheme="lora", base_quantization=kind)
    config = ConfigContainer(model=model, peft=peft, mixed_precision="bf16_mixed")
    config.checkpoint.pretrained_checkpoint, config.dist.device = "none", "cpu"
    config.dataset.seq_length, config.train.micro_batch_size, config.train.global_batch_size = 32, 2, 2
    config.optimizer.lr, config.train.train_iters = 1e-3, 2
    measured = measure(resolve(config, 1))
    estimate = measured.estimate.kinds
    assert {name: measured.kinds[name] for name in EXACT} == {name: estimate[name] for name in EXACT}
    assert measured.kinds["activations"] == pytest.approx(estimate["activations"], abs=100)
    assert measured.total == pytest.approx(measured.estimate.total, rel=0.1)
