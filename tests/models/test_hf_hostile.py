"""A directory of weights that somebody has damaged or made up is refused in words, before memory is allocated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3MoeConfig

from onstep.errors import OnstepError
from onstep.models import config_from_hf, load_hf
from onstep.models.hf.directory import load_hf_config
from onstep.models.hf.weight_files import check_room, least_parameters, read_shapes
from tests.support.small_weights import gpt2, llama

MOE = {
    "model_type": "qwen3_moe",
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    llama(tmp_path)
    return tmp_path


def edit(directory: Path, **values: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"model_type": ["llama"]}, r"model_type \['llama'\]; only llama"),
        ({"model_type": "__class__"}, "model_type '__class__'; only llama"),
        ({"hidden_act": ["silu"]}, r"hidden_act = \['silu'\], which must be a string"),
        ({"hidden_act": "__class__"}, "activation function '__class__', which"),
        ({"hidden_size": "32"}, "hidden_size = '32', which must be an integer from 1 to 2147483647"),
        ({"hidden_size": 0}, "hidden_size = 0, which must be an integer from 1"),
        ({"hidden_size": True}, "hidden_size = True, which must be"),
        ({"num_attention_heads": -2}, "num_attention_heads = -2, which must be"),
        ({"num_key_value_heads": 10**200}, r"num_key_value_heads = 10{70,}\.\.\., which must be"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers = 1000000000, which must be an integer from 1 to 10000"),
        ({"vocab_size": None}, "config.json has no vocab_size"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps = nan, which must be a finite number >= 0"),
        ({"initializer_range": []}, r"initializer_range = \[\], which must be"),
        ({"attention_dropout": None}, "attention_dropout must have a value, got null"),
        ({"attention_dropout": 2}, "attention_dropout = 2, which must be a number from 0 to 1"),
        ({"rope_theta": "big"}, "rope_theta = 'big', which must be a finite number > 0"),
        ({"rope_parameters": {"rope_theta": float("inf")}}, "rope_theta = inf, which must be a finite number > 0"),
        ({"rope_scaling": [1]}, r"rope_scaling = \[1\], which must be an object"),
        ({"rope_parameters": {"rope_type": ["yarn"]}}, r"rope_type = \"\['yarn'\]\""),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "__class__": 1}}, "__class__"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": "x"}}, "= 'x'"),
        ({"layer_types": 3}, "layer_types = 3, which must be a list of strings"),
        ({"layer_types": [["full_attention"]]}, "which must be a list of strings"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings = 'yes', which must be true or false"),
        ({"quantization_config": {"a": ["x" * 10_000]}}, "quantization_config = "),
    ],
)
def test_a_value_of_config_json_is_refused_with_its_rule(directory: Path, values: dict[str, Any], words: str) -> None:
    edit(directory, **values)
    with pytest.raises(OnstepError, match=words) as caught:
        load_hf(directory)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"mlp_only_layers": 5}, "mlp_only_layers = 5, which must be a list of the numbers of layers"),
        ({"mlp_only_layers": [[0]]}, "mlp_only_layers = "),
        ({"decoder_sparse_step": "x"}, "decoder_sparse_step = 'x', which must be an integer"),
        ({"num_hidden_layers": -1.5}, "num_hidden_layers = -1.5"),
        ({"num_experts": 2**63}, "num_experts = 9223372036854775808, which must be an integer from 0 to 65536"),
        ({"norm_topk_prob": "no"}, "norm_topk_prob = 'no'"),
    ],
)
def test_the_values_of_experts_are_refused_too(values: dict[str, Any], words: str) -> None:
    whole = Qwen3MoeConfig(**{name: value for name, value in MOE.items() if name != "model_type"}).to_dict()
    with pytest.raises(OnstepError, match=words):
        config_from_hf({**whole, **values})


def test_the_values_of_gpt2_are_refused_too(tmp_path: Path) -> None:
    gpt2(tmp_path)
    for values in ({"n_embd": {"a": 1}}, {"n_inner": "x"}, {"n_layer": 10**12}, {"embd_pdrop": "0.1"}):
        config = {**json.loads((tmp_path / "config.json").read_text()), **values}
        with pytest.raises(OnstepError, match=f"config.json has {next(iter(values))} = "):
            config_from_hf(config)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b'{"a": ' * 5000 + b"1" + b"}" * 5000, "nested more than 100 levels deep"),
        (b'{"vocab_size": ' + b"9" * 5000 + b"}", "an integer of 5000 digits"),
        (b"[]", "must contain a JSON object, got list"),
        (b"\xff\xfe", "can't decode byte 0xff"),
    ],
)
def test_a_config_json_that_is_no_object_is_refused(directory: Path, text: bytes, words: str) -> None:
    (directory / "config.json").write_bytes(text)
    with pytest.raises(OnstepError, match=rf"config\.json.*{words}"):
        load_hf(directory)


@pytest.mark.parametrize(
    "values",
    [
        {"vocab_size": 2**31 - 1},
        {"hidden_size": 2**31 - 2},
        {"intermediate_size": 10**9},
        {"num_hidden_layers": 10_000},
        {"head_dim": 10**9},
        {"num_attention_heads": 2**30, "num_key_value_heads": 2**30, "head_dim": 2**30},
    ],
)
def test_a_model_larger_than_its_weights_is_refused_with_the_estimate(directory: Path, values: dict[str, int]) -> None:
    edit(directory, **values)
    words = r"a model of at least [0-9,]+ parameters \([0-9,.]+ GB in float32\), but the weights in .* have [0-9,]+\."
    with pytest.raises(OnstepError, match=words):
        load_hf(directory)


def test_a_long_maximum_of_positions_needs_no_memory(directory: Path) -> None:
    edit(directory, max_position_embeddings=2**31 - 1)
    model = load_hf(directory)
    assert model.config.seq_length == 2**31 - 1
    assert model(torch.zeros(1, 4, dtype=torch.long)).shape == (1, 4, 260)


def test_a_model_larger_than_the_memory_is_refused_with_the_estimate(directory: Path) -> None:
    config, shapes = load_hf_config(directory), read_shapes([directory / "model.safetensors"])
    needed = 4 * least_parameters(config)
    check_room(config, shapes, directory, memory_bytes=needed)
    with pytest.raises(OnstepError, match=r"has [0-9,]+ parameters and requires 0\.0 GB in float32, but this machine"):
        check_room(config, shapes, directory, memory_bytes=needed - 1)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model.norm.weight": torch.ones(32, dtype=torch.int32)}, r"1 of a type other than a float .*norm\.weight"),
        ({"model.norm.weight": torch.ones(32).to(torch.float8_e4m3fn)}, "1 of a type other than a float"),
        ({"model.norm.weight": torch.ones(32, 0)}, r"tensor 'model\.norm\.weight' of shape \(32, 0\)"),
        ({"model.norm.weight": torch.tensor(1.0)}, r"norm\.weight is \(\), not \(32,\)"),
        ({"model.layers.0.mlp.experts.gate_up_proj": torch.ones(3)}, "1 unknown"),
        ({"model.layers.0.mlp.experts.down_proj": torch.ones(70_000, 1, 1)}, "1 unknown"),
        ({"model.layers.0.mlp.experts.x": torch.ones(3)}, "1 unknown"),
        ({"x" * 10_000: torch.ones(3)}, "1 unknown"),
    ],
)
def test_weights_that_do_not_fit_are_named(directory: Path, change: dict[str, torch.Tensor], words: str) -> None:
    path = directory / "model.safetensors"
    save_file({**load_file(path), **change}, path)
    with pytest.raises(OnstepError, match=words) as caught:
        load_hf(directory)
    assert len(str(caught.value)) < 1000


def test_a_tied_output_of_another_type_or_shape_is_refused(tmp_path: Path) -> None:
    llama(tmp_path, tie_word_embeddings=True)
    path = tmp_path / "model.safetensors"
    state = load_file(path)
    for output in (torch.ones(3), torch.ones(260, 32, dtype=torch.bfloat16), torch.ones(260, 32, dtype=torch.int8)):
        save_file({**state, "lm_head.weight": output}, path)
        with pytest.raises(OnstepError, match=r"differs from model\.embed_tokens\.weight"):
            load_hf(tmp_path)


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["../a.safetensors"], "lists '../a.safetensors', which is not in that directory"),
        (["a\0b"], r"lists 'a\\x00b', which"),
        (["x" * 5000], r"lists 'x+\.\.\., which"),
        ([["a"]], "which is not in that directory"),
        (["a.safetensors", "b.safetensors"], "which another file has too"),
        (["config.json"], "is not a complete safetensors file"),
    ],
)
def test_an_index_names_files_of_its_directory(directory: Path, names: list[Any], words: str) -> None:
    (directory / "model.safetensors").rename(directory / "a.safetensors")
    (directory / "b.safetensors").write_bytes((directory / "a.safetensors").read_bytes())
    weight_map = {str(number): name for number, name in enumerate(names)}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(OnstepError, match=words):
        load_hf(directory)
