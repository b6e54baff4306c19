"""The blocks of a model that is divided between ranks, and the refusals of those that have none."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from torch import nn
from transformers import AutoModelForCausalLM, BertConfig, BertForMaskedLM, GPT2Config

from onstep.config import ConfigContainer, ModelConfig, dump_yaml, from_dict, merge, parse_yaml
from onstep.config.keys import own_copy
from onstep.distributed.fully_sharded import blocks_of, check_shared
from onstep.errors import ConfigError
from onstep.models.transformer import build_transformer


class Block(nn.Module):
    def __init__(self, wide: int = 4) -> None:
        super().__init__()
        self.inner = nn.Linear(wide, wide)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.encoder = nn.Module()
        self.encoder.layers = nn.ModuleList([Block(), Block(), nn.Identity()])


def names_of(model: nn.Module, classes: list[str] | None = None) -> list[str]:
    named = {id(module): name for name, module in model.named_modules()}
    return [named[id(block)] for block in blocks_of(model, classes)]


def test_blocks_are_what_is_named_or_what_the_model_names_or_what_is_in_its_lists() -> None:
    assert names_of(Model()) == ["encoder.layers.0", "encoder.layers.1"]
    assert names_of(Model(), ["Linear", "Block"])[:2] == ["encoder.layers.0.inner", "encoder.layers.0"]
    ours = build_transformer(ModelConfig(vocab_size=8, num_layers=2, hidden_size=8, num_attention_heads=2), seed=0)
    assert names_of(ours) == ["layers.0", "layers.1"]
    gpt2 = AutoModelForCausalLM.from_config(GPT2Config(vocab_size=8, n_embd=8, n_layer=2, n_head=2))
    assert names_of(gpt2) == ["transformer.h.0", "transformer.h.1"]


def test_a_block_that_a_model_names_stays_with_the_rest_if_it_shares_a_weight_with_it() -> None:
    sizes = {"vocab_size": 8, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    bert = BertForMaskedLM(BertConfig(intermediate_size=8, **sizes))  # which names its embeddings, tied to the head
    assert "BertEmbeddings" in bert._no_split_modules
    assert names_of(bert) == ["bert.encoder.layer.0", "bert.encoder.layer.1"]


def test_classes_and_models_without_blocks_are_refused_with_a_remedy() -> None:
    with pytest.raises(
        ConfigError, match=r"fsdp.wrap names 'Blok', a class of no module in Model. Did you mean 'Block'"
    ):
        blocks_of(Model(), ["Blok"])
    with pytest.raises(
        ConfigError,
        match=r"^fsdp.wrap names no module .* inside Model; .* from Block, Embedding, Identity, Linear, Module\.",
    ):
        blocks_of(Model(), ["Model"])
    with pytest.raises(ConfigError, match=r"Sequential has no blocks .* set fsdp.wrap to the classes .*, from Linear"):
        blocks_of(nn.Sequential(nn.Linear(1, 1)))


def inner_modules(model: Any) -> list[nn.Module]:
    return [model.encoder.layers[1], model.encoder.layers[0].inner, model.encoder.layers[0]]


def test_a_function_finds_blocks_and_its_name_is_in_yaml() -> None:
    config, found = ConfigContainer(), ["encoder.layers.0.inner", "encoder.layers.0", "encoder.layers.1"]
    config.fsdp.wrap = inner_modules  # type: ignore[assignment]
    assert names_of(Model(), config.fsdp.wrap) == found
    again = from_dict(parse_yaml(dump_yaml(config)))
    assert again.fsdp.wrap == config.fsdp.wrap == [f"{__name__}:inner_modules"]
    assert names_of(Model(), again.fsdp.wrap) == found
    merge(config, {"fsdp.wrap": lambda model: model.encoder.layers[:2]})
    assert names_of(Model(), own_copy(config).fsdp.wrap) == ["encoder.layers.0", "encoder.layers.1"]
    from_other_rank = pickle.loads(pickle.dumps(config)).fsdp.wrap
    assert names_of(Model(), from_other_rank) == ["encoder.layers.0", "encoder.layers.1"]
    merge(config, {"fsdp": {"wrap": [Block, "Other"]}})
    assert config.fsdp.wrap == ["Block", "Other"]


@pytest.mark.parametrize(
    ("wrap", "said"),
    [
        (lambda model: [nn.Linear(1, 1)], r"returned .*Linear.* must be modules in it; return them as a list"),
        (lambda model: [], "returned no blocks of Model; return modules in it"),
        ("torch.hub:load", "which a configuration cannot import; set fsdp.wrap to the function in the script"),
    ],
)
def test_a_function_that_finds_no_blocks_is_refused_by_its_name(wrap: Any, said: str) -> None:
    config = ConfigContainer()
    config.fsdp.wrap = wrap
    with pytest.raises(ConfigError, match=said):
        blocks_of(Model(), own_copy(config).fsdp.wrap)


def test_a_weight_that_two_blocks_share_is_refused_by_its_names() -> None:
    model = Model()
    check_shared(model, blocks_of(model))
    model.encoder.layers[1].inner.bias = model.encoder.layers[0].inner.bias
    said = (
        "layers.0.inner.bias and encoder.layers.1.inner.bias are one parameter, in block encoder.layers.0 and block "
        "encoder.layers.1, .* set fsdp.wrap"
    )
    with pytest.raises(ConfigError, match=said):
        check_shared(model, blocks_of(model))
