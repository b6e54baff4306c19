"""Stages of models of transformers compute together what the whole model does, or are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, T5Config, T5ForConditionalGeneration

from onstep.config import ModelConfig
from onstep.distributed.pipeline.seats import Computed, Seat
from onstep.errors import ConfigError
from onstep.models.hf.stages import cut, num_layers_of, release
from onstep.models.hf.stages_probe import check_stages

SIZES = {"vocab_size": 67, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 32}


def model_of(kind: str, **changed: Any) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**SIZES, **HEADS, "bos_token_id": 0, "eos_token_id": 0, **changed})
    return AutoModelForCausalLM.from_config(config).eval()  # type: ignore[no-untyped-call]


def stages_of(model: Any) -> list[Any]:
    return cut(model, [Seat(stage, (range(1), range(1, 2), range(2, 3))) for stage in range(3)])


def through(stages: list[Any], **inputs: Tensor) -> Any:
    """What the last stage returns."""
    output: Any = None
    for stage in stages:
        stage.set_input_tensor(output)
        try:
            output = stage(**inputs)
        except Computed as computed:
            output = computed.output
    return output


@pytest.mark.parametrize(
    ("kind", "changed"), [("llama", {"tie_word_embeddings": True}), ("gpt2", {}), ("mixtral", {"num_local_experts": 2})]
)
def test_stages_compute_what_the_whole_model_does(kind: str, changed: dict[str, Any]) -> None:
    """Loss, logits and gradients with padding, and the names of all weights."""
    model = model_of(kind, **changed)
    tokens, mask = torch.randint(67, (2, 9)), torch.ones(2, 9, dtype=torch.int64)
    mask[0, :3] = 0
    inputs = {"input_ids": tokens, "attention_mask": mask, "labels": tokens}
    expected = model(**inputs)
    expected.loss.backward()
    gradients = {name: one.grad.clone() for name, one in model.named_parameters()}
    model.zero_grad()
    stages = stages_of(model)
    found = through(stages, **inputs)
    found.loss.backward()
    assert torch.equal(found.loss, expected.loss)
    assert torch.equal(found.logits, expected.logits)
    own = {name: one for stage in stages for name, one in stage.named_parameters()}
    assert all(torch.equal(own[name].grad, gradient) for name, gradient in gradients.items())
    assert {name for stage in stages for name in stage.state_dict()} == set(model.state_dict())


def test_what_is_on_other_ranks_is_freed() -> None:
    model = model_of("llama", tie_word_embeddings=True)
    stage = stages_of(model)[1]
    release(model, [stage])
    held = {name for name, one in model.named_parameters() if not one.is_meta}
    assert held == {name for name, _ in stage.named_parameters()}
    assert all(".layers.1." in name for name in held)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_a_stage_without_the_hidden_states_of_the_one_before_says_so() -> None:
    with pytest.raises(ConfigError, match=r"^stage 1 of a pipeline has no input"):
        stages_of(model_of("llama"))[1](input_ids=torch.zeros(1, 4, dtype=torch.int64))


def test_what_is_on_another_stage_is_named_with_it() -> None:
    first, middle, last = stages_of(model_of("llama"))
    for stage, read, said in [
        (
            last,
            lambda: last.get_input_embeddings().weight,
            "2 of a pipeline has no model.embed_tokens.weight, which is on stage 0",
        ),
        (
            middle,
            lambda: middle.model.layers[2].mlp,
            "1 of a pipeline has no model.layers.2.mlp, which is on stage 2: ",
        ),
        (first, lambda: first.lm_head.weight, "0 of a pipeline has no lm_head.weight, which is on stage 2: "),
    ]:
        with pytest.raises(ConfigError, match=f"^stage {said}"):
            read()
        assert stage.pipeline_seat.stage == int(said[0])


@pytest.mark.parametrize(
    ("kind", "changed", "said"),
    [
        ("mixtral", {"output_router_logits": True}, "config.output_router_logits returns what all of its layers comp"),
        ("t5", {}, "it must have one nn.ModuleList of its"),
    ],
)
def test_a_model_that_cannot_be_cut_is_refused(kind: str, changed: dict[str, Any], said: str) -> None:
    sizes: Any = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 2, "num_heads": 2}
    model = T5ForConditionalGeneration(T5Config(**sizes)) if kind == "t5" else model_of(kind, **changed)
    with pytest.raises(ConfigError, match="cannot be cut into the stages of a pipeline: " + said):
        num_layers_of(model)


def test_a_family_whose_stages_compute_something_else_is_refused() -> None:
    content = AutoConfig.for_model("bloom", vocab_size=67, hidden_size=16, n_layer=2, n_head=2).to_dict()
    with pytest.raises(ConfigError, match=r"^models of the type bloom cannot be cut into the stages of a pipeline"):
        check_stages(ModelConfig(hf_config=content))
    check_stages(ModelConfig(hf_config=model_of("qwen3").config.to_dict()))
