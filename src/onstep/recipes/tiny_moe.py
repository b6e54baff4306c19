"""A mixture of experts small enough for a laptop's CPU."""

from __future__ import annotations

from onstep.config import ConfigContainer, ModelConfig
from onstep.recipes.finetuning import finetuned
from onstep.recipes.tiny_gpt import SEQ_LENGTH, tiny_run


def tiny_moe_pretrain_config() -> ConfigContainer:
    """tiny_gpt with 8 experts in each layer, of which a token takes 2: as many multiplications for each token.

    The experts share the work evenly by the auxiliary loss of each micro-batch. Queries and keys are normalized, as in
    Qwen3-MoE, which `transformers` opens its weights as.
    """
    model = ModelConfig(
        num_layers=4,
        hidden_size=128,
        num_attention_heads=4,
        seq_length=SEQ_LENGTH,
        qk_layernorm=True,
        num_moe_experts=8,
        moe_ffn_hidden_size=192,
        moe_router_topk=2,
        moe_router_load_balancing_type="aux_loss",
        moe_aux_loss_coeff=0.01,
    )
    return tiny_run("tiny_moe", model)


def tiny_moe_finetune_config(peft: str | None = None) -> ConfigContainer:
    """A trained tiny_moe, taught to answer.

    `peft`: None trains all of its weights, "lora" a few added ones.
    Set `checkpoint.pretrained_checkpoint` (such as runs/tiny_moe) and `dataset.paths` (JSONL with conversations).
    """
    return finetuned(tiny_moe_pretrain_config(), peft, full_lr=3e-4)
