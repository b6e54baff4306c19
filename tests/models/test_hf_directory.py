import json

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from onstep.config import ModelConfig
from onstep.errors import OnstepError
from onstep.models import build_transformer, load_hf, save_hf, to_hf_state_dict

TOKENS = torch.randint(0, 40, (2, 30), generator=torch.Generator().manual_seed(0))


def model_of(**changes):
    sizes = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_query_groups": 2, "vocab_size": 40}
    model = build_transformer(ModelConfig(**(sizes | {"init_method_std": 0.3} | changes)), seed=0).eval()
    with torch.no_grad():  # biases and norms start at 0 and 1, where a mistake in them would not show
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.linspace(-0.4, 0.4, parameter.numel()))
    return model


@pytest.mark.parametrize("add_qkv_bias", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kv_channels", [None, 16])
def test_transformers_opens_a_saved_model_with_the_same_logits(tmp_path, add_qkv_bias, tied, kv_channels):
    model = model_of(
        add_qkv_bias=add_qkv_bias, share_embeddings_and_output_weights=tied, kv_channels=kv_channels, rotary_base=500.0
    )

    save_hf(model, tmp_path / "model")
    theirs, loading = AutoModelForCausalLM.from_pretrained(tmp_path / "model", output_loading_info=True)

    assert {name: found for name, found in loading.items() if found} == {}
    with torch.no_grad():
        torch.testing.assert_close(theirs(TOKENS).logits, model(TOKENS), rtol=0, atol=1e-5)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("shard_size", ["5GB", "20KB"])
def test_a_model_saved_by_transformers_is_loaded_with_the_same_logits(tmp_path, tied, shard_size):
    save_hf(model_of(add_qkv_bias=True, share_embeddings_and_output_weights=tied), tmp_path / "ours")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size=shard_size)
    assert (tmp_path / "theirs" / "model.safetensors.index.json").exists() == (shard_size == "20KB")

    model = load_hf(tmp_path / "theirs")

    with torch.no_grad():
        torch.testing.assert_close(model(TOKENS), theirs(TOKENS).logits, rtol=0, atol=1e-5)


def test_a_saved_model_is_loaded_as_it_was(tmp_path):
    model = model_of()
    save_hf(model, tmp_path)
    loaded = load_hf(tmp_path)

    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), loaded.parameters(), strict=True))
    assert loaded.config.seq_length == model.config.seq_length


def test_the_file_is_marked_for_torch_and_holds_tied_weights_once(tmp_path):
    save_hf(model_of(share_embeddings_and_output_weights=True), tmp_path)

    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118


def test_saving_again_replaces_the_files_and_leaves_no_others(tmp_path):
    save_hf(model_of(), tmp_path)
    save_hf(model_of(num_layers=1), tmp_path)

    assert load_hf(tmp_path).config.num_layers == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


def test_weights_beyond_the_largest_size_are_split_into_files_that_transformers_opens(tmp_path):
    model = model_of()
    save_hf(model, tmp_path)
    total = sum(weight.nbytes for weight in to_hf_state_dict(model).values())
    for largest in (20_000, 40_000, 5_000_000_000):
        save_hf(model, tmp_path, max_shard_bytes=largest)

        files = sorted(tmp_path.glob("*.safetensors"))
        assert max(file.stat().st_size for file in files) < largest + 2_000  # a file has a header
        if largest < total:
            index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
            assert index["metadata"]["total_size"] == total
            assert sorted(set(index["weight_map"].values())) == [file.name for file in files]
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
        for name, weight in to_hf_state_dict(model).items():
            assert torch.equal(weight, theirs[name]), name
        assert torch.equal(load_hf(tmp_path)(TOKENS), model(TOKENS))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


def test_tokenizer_files_and_the_end_token_go_along(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")

    save_hf(model_of(), tmp_path / "model", tokenizer_files=[tmp_path / "tokenizer.json"], eos_id=39)

    assert (tmp_path / "model" / "tokenizer.json").read_text() == "{}"
    assert json.loads((tmp_path / "model" / "config.json").read_text())["eos_token_id"] == 39


def test_low_precision_weights_are_saved_as_they_are(tmp_path):
    save_hf(model_of().bfloat16(), tmp_path)

    assert AutoModelForCausalLM.from_pretrained(tmp_path).dtype == torch.bfloat16


def test_a_pickle_is_refused_with_the_way_to_convert_it(tmp_path):
    save_hf(model_of(), tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")

    with pytest.raises(OnstepError, match=r"pytorch_model.bin, a pickle.*save_pretrained"):
        load_hf(tmp_path)


def test_a_directory_without_config_or_weights_is_refused(tmp_path):
    with pytest.raises(OnstepError, match=r"config.json does not exist"):
        load_hf(tmp_path)

    save_hf(model_of(), tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(OnstepError, match=r"no model.safetensors or"):
        load_hf(tmp_path)


@pytest.mark.parametrize("shard", ["gone.safetensors", "../outside.safetensors"])
def test_an_index_that_names_a_file_outside_the_directory_or_none_is_refused(tmp_path, shard):
    directory = tmp_path / "model"
    save_hf(model_of(), directory)
    (directory / "model.safetensors").rename(tmp_path / "outside.safetensors")
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"lm_head.weight": shard}}))

    with pytest.raises(OnstepError, match=f"lists '{shard}'"):
        load_hf(directory)


@pytest.mark.parametrize("content", ["{", "[]"])
def test_a_broken_config_file_is_named(tmp_path, content):
    save_hf(model_of(), tmp_path)
    (tmp_path / "config.json").write_text(content)

    with pytest.raises(OnstepError, match=r"config.json (is not valid JSON|must contain a JSON object)"):
        load_hf(tmp_path)


def test_a_cut_weights_file_is_named(tmp_path):
    save_hf(model_of(), tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])

    with pytest.raises(OnstepError, match=r"model.safetensors is not a complete safetensors file"):
        load_hf(tmp_path)
