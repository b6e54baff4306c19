"""`onstep checkpoint export mine out.gguf`, read back by `transformers` and by the `gguf` package."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from onstep import Trainer, TrainingArguments, pretrain
from onstep.cli.main import main
from onstep.config import ConfigContainer, ModelConfig, apply_overrides
from onstep.models import Transformer, from_hf_state_dict, load_hf
from tests.support.small_configs import small_pretrain_config

gguf = pytest.importorskip("gguf")
transformers = pytest.importorskip("transformers")

Capture = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch

LLAMA = ("model.num_attention_heads=4", "model.num_query_groups=2", "model.rotary_base=500.0")
WIDE = (*LLAMA, "model.hidden_size=64", "model.ffn_hidden_size=96")
"""Rows that are whole blocks of 32 weights."""
QWEN3 = (*LLAMA, "model.qk_layernorm=true", "model.kv_channels=128")
GPT2 = (
    "model.normalization=LayerNorm",
    "model.position_embedding_type=learned_absolute",
    "model.gated_linear_unit=false",
    "model.add_qkv_bias=true",
    "model.add_bias_linear=true",
    "model.activation_func=gelu_tanh",
    "model.seq_length=1024",
    "dataset.seq_length=1024",
)
MOE = ("model.num_moe_experts=4", "model.moe_router_topk=2", "model.moe_router_pre_softmax=false")
MODELS = {
    "llama": LLAMA,
    "llama, tied, wide heads": (*LLAMA, "model.kv_channels=32", "model.share_embeddings_and_output_weights=true"),
    "qwen2": (*LLAMA, "model.add_qkv_bias=true"),
    "qwen3": QWEN3,
    "qwen3moe": (*QWEN3, *MOE, "model.moe_ffn_hidden_size=768"),
    "gpt2": (*GPT2, "model.share_embeddings_and_output_weights=false"),
    "gpt2, tied": (*GPT2, "model.share_embeddings_and_output_weights=true"),
}
"""Sizes that `transformers` does not read from the file have its defaults: 1,024 positions of GPT-2; for Qwen3, heads
of width 128 and experts of width 768."""
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.chdir(tmp_path)


def run(corpus: Path, cache: Path, *words: str) -> Path:
    """A run of one step below runs/mine; returns the directory of its final weights."""
    config: ConfigContainer = small_pretrain_config(corpus, cache)
    config.run.name, config.run.output_dir = "mine", "runs"
    config.train.train_iters = config.train.global_batch_size = config.train.micro_batch_size = 1
    config.validation.eval_interval = None
    apply_overrides(config, ["model.rope_scaling=null", "scheduler.lr_warmup_iters=0", "optimizer.lr=0.05", *words])
    pretrain(config)
    return Path("runs/mine/model")


def export(*words: str) -> int:
    return main(["checkpoint", "export", "runs/mine", *words])


def check_logits(ours: Transformer, file: str) -> None:
    theirs = transformers.AutoModelForCausalLM.from_pretrained(".", gguf_file=file).eval()
    tokens = torch.randint(0, 256, (2, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens).logits, ours.eval()(tokens), rtol=1e-5, atol=1e-5)


def fields(file: str) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """The entries and the tensors of a file, as the `gguf` package reads them."""
    reader = gguf.GGUFReader(file)
    entries = {name: field.contents() for name, field in reader.fields.items()}
    return entries, {tensor.name: tensor for tensor in reader.tensors}


@pytest.mark.parametrize("name", MODELS)
def test_transformers_opens_it_and_gives_the_logits_of_our_model(name: str, corpus: Path, token_cache: Path) -> None:
    model = run(corpus, token_cache, *MODELS[name])
    assert export("out.gguf") == 0
    check_logits(load_hf(model), "out.gguf")
    entries, tensors = fields("out.gguf")
    assert entries["general.architecture"] == name.partition(",")[0]
    assert ("output.weight" in tensors) is ("tied" not in name)
    assert len(entries["tokenizer.ggml.tokens"]) == tensors["token_embd.weight"].shape[1]
    assert entries["tokenizer.ggml.eos_token_id"] == 256


@pytest.mark.parametrize(("dtype", "kind"), [("float16", "F16"), ("bfloat16", "BF16"), ("float32", "F32")])
def test_matrices_have_the_dtype_asked_for_and_vectors_are_float32(
    dtype: str, kind: str, corpus: Path, token_cache: Path
) -> None:
    model = load_hf(run(corpus, token_cache))
    assert export("out.gguf", "--dtype", dtype) == 0
    _, tensors = fields("out.gguf")
    for name, tensor in tensors.items():
        assert tensor.tensor_type.name == ("F32" if len(tensor.shape) == 1 else kind), name
    embedding = tensors["token_embd.weight"]
    found = torch.from_numpy(gguf.quants.dequantize(embedding.data, embedding.tensor_type).copy())
    assert torch.equal(found, model.embedding.weight.to(getattr(torch, dtype)).float())


def read_back(file: str, config: ModelConfig) -> Transformer:
    """The model in a file, with weights as `transformers` reads them."""
    theirs = transformers.AutoModelForCausalLM.from_pretrained(".", gguf_file=file)
    return from_hf_state_dict(config, theirs.state_dict())


def test_quantized_files_give_the_logits_of_the_model_within_the_error_of_their_type(
    corpus: Path, token_cache: Path, capsys: Capture
) -> None:
    model = load_hf(run(corpus, token_cache, *WIDE)).eval()
    tokens = torch.randint(0, 256, (2, 20), generator=torch.Generator().manual_seed(0))
    errors = []
    for kind, steps in (("Q8_0", 254), ("q5_0", 16), ("Q4_0", 8)):
        assert export(f"{kind}.gguf", "--quantization", kind) == 0
        back = read_back(f"{kind}.gguf", model.config).eval()
        for name, weight in model.state_dict().items():
            blocks, found = weight.reshape(-1, 32), back.state_dict()[name].reshape(-1, 32)
            width = 254 if name in ("embedding.weight", "output.weight") else steps
            largest = blocks.abs().amax(1, keepdim=True)  # at most a step, and the scale is a float16
            bound = largest * (1 / width + 2**-9) if weight.dim() == 2 else 0.0
            assert bool(((blocks - found).abs() <= bound).all()), (kind, name)
        with torch.no_grad():
            logits = model(tokens)
            errors.append(float((back(tokens) - logits).norm() / logits.norm()))
    assert errors[0] < 0.02
    assert errors == sorted(errors)
    capsys.readouterr()
    assert main(["checkpoint", "verify", "Q4_0.gguf"]) == 0
    assert "2 tensors in Q8_0, 3 tensors in F32, 7 tensors in Q4_0" in capsys.readouterr().out


def test_a_matrix_whose_rows_are_not_whole_blocks_is_float16(corpus: Path, token_cache: Path, capsys: Capture) -> None:
    run(corpus, token_cache, *WIDE, "model.ffn_hidden_size=72")
    assert export("out.gguf", "--quantization", "Q8_0") == 0
    kinds = {name: tensor.tensor_type.name for name, tensor in fields("out.gguf")[1].items()}
    assert kinds["blk.0.ffn_down.weight"] == "F16"
    assert kinds["blk.0.ffn_up.weight"] == kinds["token_embd.weight"] == "Q8_0"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--quantization", "q4_k_m"), "llama-quantize out-BF16.gguf out.gguf Q4_K_M"),
        (("--quantization", "IQ4_XS"), "write out-BF16.gguf with --quantization BF16"),
        (("--quantization", "Q8_1000"), "there is no GGUF type 'Q8_1000'; choose one of F32, F16, Q4_0"),
        (("--quantization", "Q8_0", "--dtype", "float16"), "drop --dtype"),
        (("--quantization", "Q8_0", "--format", "hf"), "name a .gguf file"),
    ],
)
def test_a_type_that_cannot_be_written_is_refused_with_the_remedy(
    words: tuple[str, ...], said: str, corpus: Path, token_cache: Path, capsys: Capture
) -> None:
    run(corpus, token_cache)
    assert export("out.gguf", *words) == 1
    assert said in capsys.readouterr().err
    assert not Path("out.gguf").exists()


def test_a_damaged_file_is_named_with_the_remedy(corpus: Path, token_cache: Path, capsys: Capture) -> None:
    run(corpus, token_cache)
    assert export("out.gguf") == 0
    whole = Path("out.gguf").read_bytes()
    huge = whole[:16] + b"\xff" * 8 + whole[24:]  # the number of entries
    for content in (b"", b"GGUF", whole[:100], whole[: len(whole) // 2], whole[:-1000], b"PK" + whole[2:], huge):
        Path("bad.gguf").write_bytes(content)
        capsys.readouterr()
        assert main(["checkpoint", "verify", "bad.gguf"]) == 1
        [line] = capsys.readouterr().err.splitlines()
        assert "bad.gguf is not a complete GGUF file" in line
        assert "GGUF" in (reason := line.partition("(")[2]) or reason.startswith("its header is damaged, or it ends")
        assert "export or copy it again" in line


def test_a_learned_bpe_gives_the_same_ids_from_the_file(corpus: Path, token_cache: Path) -> None:
    model = run(corpus, token_cache, "tokenizer.tokenizer_type=bpe", "tokenizer.vocab_size=300")
    assert export("out.gguf") == 0
    check_logits(load_hf(model), "out.gguf")
    theirs = transformers.AutoTokenizer.from_pretrained(".", gguf_file="out.gguf")
    ours = transformers.AutoTokenizer.from_pretrained(model)
    text = "def import(self):  return 12345,\n\n\tcaf\u00e9 \u4f60\u597d don't<|endoftext|>"
    assert theirs(text, add_special_tokens=False).input_ids == ours(text, add_special_tokens=False).input_ids
    assert theirs.eos_token_id == ours.eos_token_id == 0


def test_positions_are_scaled_as_llama_cpp_reads_it(corpus: Path, token_cache: Path) -> None:
    model = load_hf(run(corpus, token_cache, f"model.rope_scaling={json.dumps(LLAMA3)}"))
    assert export("llama3.gguf") == 0
    factors = torch.from_numpy(fields("llama3.gguf")[1]["rope_freqs.weight"].data.copy())
    width = 2 * len(factors)
    plain = model.config.rotary_base ** -(torch.arange(0, width, 2) / width)
    assert factors.min() == 1
    assert factors.max() == 8
    torch.testing.assert_close(plain / factors, model.rotary.frequencies)


def test_a_trainers_model_of_transformers_comes_with_its_tokenizer(
    corpus: Path, token_cache: Path, capsys: Capture
) -> None:
    source = run(corpus, token_cache, "tokenizer.tokenizer_type=bpe", "tokenizer.vocab_size=300", *LLAMA)
    model = transformers.AutoModelForCausalLM.from_pretrained(source)
    rows = [{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}] * 4
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.chat_template = "{% for one in messages %}{{ one['content'] }}{% endfor %}"
    for name, processing_class in (("without", None), ("with", tokenizer)):
        arguments = TrainingArguments(output_dir=f"runs/{name}", max_steps=1, save_steps=1, use_cpu=True)
        Trainer(model=model, args=arguments, train_dataset=rows, processing_class=processing_class).train()
    assert main(["checkpoint", "export", "runs/with", "out.gguf"]) == 0
    theirs = transformers.AutoModelForCausalLM.from_pretrained(".", gguf_file="out.gguf")
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, theirs.state_dict()[name]), name
    assert fields("out.gguf")[0]["tokenizer.chat_template"] == tokenizer.chat_template
    capsys.readouterr()
    assert main(["checkpoint", "export", "runs/without", "none.gguf"]) == 1
    assert "pass processing_class to the Trainer" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("model.activation_func=gelu_tanh",), "activation_func='gelu_tanh' (only 'silu')"),
        (("model.add_bias_linear=true", "model.add_qkv_bias=true"), "add_bias_linear=True"),
        (("model.rope_scaling={rope_type: dynamic, factor: 2.0}",), "rope_scaling of type 'dynamic'"),
        ((*QWEN3, *MOE, "model.num_layers=2", "model.moe_layer_freq=[0,1]"), "moe_layer_freq"),
        ((*LLAMA, *MOE[:2], "model.moe_router_pre_softmax=true", "model.qk_layernorm=true"), "moe_router_pre_softmax"),
        ((*LLAMA, *MOE), "qk_layernorm=False"),
        (("model.normalization=LayerNorm",), "normalization='LayerNorm'"),
    ],
)
def test_a_model_that_llama_cpp_does_not_compute_is_refused(
    words: tuple[str, ...], why: str, corpus: Path, token_cache: Path, capsys: Capture
) -> None:
    run(corpus, token_cache, *words)
    assert export("out.gguf") == 1
    assert why in capsys.readouterr().err
    assert not Path("out.gguf").exists()


def test_a_tokenizer_that_the_file_cannot_hold_is_refused(corpus: Path, token_cache: Path, capsys: Capture) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"</s>": 0, "[UNK]": 1, "def": 2}, unk_token="[UNK]"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.save("words.json")
    run(corpus, token_cache, "tokenizer.tokenizer_type=tokenizers", "tokenizer.tokenizer_model=words.json")
    assert export("out.gguf") == 1
    said = capsys.readouterr().err
    assert "not a byte-level BPE with merges but WordLevel" in said
    assert "--format hf" in said
    assert not Path("out.gguf").exists()


def test_an_existing_file_is_replaced_only_with_force(corpus: Path, token_cache: Path, capsys: Capture) -> None:
    run(corpus, token_cache)
    Path("out.gguf").write_bytes(b"mine")
    assert export("out.gguf") == 1
    assert "pass --force" in capsys.readouterr().err
    assert Path("out.gguf").read_bytes() == b"mine"
    assert export("out.gguf", "--force") == export("OUT.GGUF") == 0
    assert Path("OUT.GGUF").read_bytes()[:4] == Path("out.gguf").read_bytes()[:4] == b"GGUF"
    assert [path.name for path in Path().iterdir() if "out" in path.name] == ["out.gguf"]


def test_without_the_library_it_says_what_to_install(
    corpus: Path, token_cache: Path, capsys: Capture, monkeypatch: Patch
) -> None:
    run(corpus, token_cache)
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert export("out.gguf") == 1
    assert "pip install 'onstep[gguf]'" in capsys.readouterr().err
