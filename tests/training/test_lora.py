"""LoRA trains what it adds and nothing else, and leaves files that `peft` and `transformers` open."""

from __future__ import annotations

import copy
import json
import logging
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    MistralConfig,
    MistralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from onstep import CallbackManager, finetune, pretrain
from onstep.cli.main import main
from onstep.config import ConfigContainer, PeftConfig, TokenizerConfig, apply_overrides, validate
from onstep.errors import ConfigError, MissingExtraError
from onstep.models import Transformer, load_hf
from onstep.recipes import get_recipe
from onstep.training.setup.lora import add_lora, merged_model, target_names
from tests.support.jobs.finetune_jobs import small_finetune
from tests.support.lora_reference import base, by_their_trainer, largest_difference, observed_run
from tests.support.small_weights import gpt2, llama, tokens

RUN = Path("runs/run")

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft's use of it


@pytest.fixture
def config(tmp_path: Path, corpus: Path, token_cache: Path, monkeypatch: pytest.MonkeyPatch) -> ConfigContainer:
    """Six steps of LoRA on a small Llama, in runs/run."""
    monkeypatch.chdir(tmp_path)
    llama(tmp_path / "weights")
    settings = {"weights": "weights", "corpus": str(corpus), "cache": str(token_cache), "peft": "lora"}
    config = small_finetune(settings)
    config.train.train_iters = 6
    return config


@torch.no_grad()
def logits(model: Any, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """In float64, so that the order in which a kernel sums does not matter."""
    found = copy.deepcopy(model).to(dtype).eval()(tokens())
    result: torch.Tensor = getattr(found, "logits", found)
    return result


def close(one: torch.Tensor, other: torch.Tensor) -> bool:
    # stored weights are rounded to float32, and transformers computes norms in it; an adapter moves logits by 1e-2
    return torch.allclose(one, other, rtol=1e-4, atol=1e-4)


def test_what_was_there_stays_and_what_was_added_moves(config: ConfigContainer) -> None:
    before: dict[str, torch.Tensor] = {}
    after: dict[str, torch.Tensor] = {}
    groups: list[int] = []
    manager = CallbackManager()

    def copy(into: dict[str, torch.Tensor], context: Any) -> None:
        into.update({name: value.clone() for name, value in context.model[0].state_dict().items()})

    manager.register("on_train_start", lambda context: copy(before, context))
    manager.register("on_train_end", lambda context: copy(after, context))
    manager.register(
        "on_train_start",
        lambda context: groups.append(sum(p.numel() for g in context.optimizer.param_groups for p in g["params"])),
    )
    finetune(config, callbacks=manager)
    added = [name for name in before if ".lora_" in name]
    moved = [name for name in before if not torch.equal(before[name], after[name])]
    assert len(added) == 2 * 7 * 2
    assert moved == added
    assert groups == [sum(before[name].numel() for name in added)]


def test_the_adapter_on_the_base_is_the_merged_model(config: ConfigContainer) -> None:
    finetune(config)
    base = AutoModelForCausalLM.from_pretrained("weights")
    unadapted = logits(base)
    adapted = logits(PeftModel.from_pretrained(base, RUN / "adapter"))
    merged = logits(AutoModelForCausalLM.from_pretrained(RUN / "model"))
    assert close(adapted, merged)
    assert (adapted - unadapted).abs().max() > 1e-2
    assert close(logits(load_hf(RUN / "model")), merged)
    described = json.loads((RUN / "adapter" / "adapter_config.json").read_text())
    assert described["base_model_name_or_path"] == str(Path("weights").resolve())
    assert (described["r"], described["lora_alpha"]) == (4, 32)
    assert sorted(described["target_modules"]) == [
        "down_proj",
        "gate_proj",
        "k_proj",
        "o_proj",
        "q_proj",
        "up_proj",
        "v_proj",
    ]


def test_the_adapter_of_one_layer_goes_to_that_layer_only(config: ConfigContainer) -> None:
    config.peft.target_modules = ["layers.1.attention.query", "mlp.down_proj"]
    finetune(config)
    adapter = load_file(RUN / "adapter" / "adapter_model.safetensors")
    modules = {name.removeprefix("base_model.model.model.layers.").partition(".lora_")[0] for name in adapter}
    assert modules == {"1.self_attn.q_proj", "0.mlp.down_proj", "1.mlp.down_proj"}
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("weights"), RUN / "adapter")
    assert close(logits(adapted), logits(AutoModelForCausalLM.from_pretrained(RUN / "model")))


def test_the_exported_checkpoint_is_merged_as_well(config: ConfigContainer) -> None:
    finetune(config)
    assert main(["checkpoint", "export", str(RUN), "out"]) == 0
    assert close(logits(load_hf("out")), logits(load_hf(RUN / "model")))


def test_a_run_with_lora_is_fine_tuned_further_with_its_adapter_merged(config: ConfigContainer) -> None:
    finetune(config)
    newest = max((RUN / "checkpoints").glob("checkpoint-*"))
    config.run.name, config.checkpoint.pretrained_checkpoint = "second", str(newest)
    config.train.train_iters, config.optimizer.lr, config.optimizer.min_lr = 1, 1e-9, 0.0
    config.scheduler.lr_warmup_fraction = None
    finetune(config)
    assert close(logits(load_hf("runs/second/model")), logits(load_hf(RUN / "model")))
    assert base_of("runs/second") is None  # a checkpoint is nothing that peft could open


def base_of(run: str) -> str | None:
    base: str | None = json.loads((Path(run) / "adapter" / "adapter_config.json").read_text())[
        "base_model_name_or_path"
    ]
    return base


def test_the_adapter_names_the_weights_of_a_run_and_has_the_tokenizer(config: ConfigContainer) -> None:
    config.tokenizer.tokenizer_type, config.tokenizer.vocab_size, config.train.train_iters = "bpe", 259, 2
    config.run.name = "first"
    finetune(config)
    config.run.name, config.checkpoint.pretrained_checkpoint = "second", "runs/first"
    config.tokenizer = TokenizerConfig()
    finetune(config)
    base = base_of("runs/second")
    assert base == str(Path("runs/first/model").resolve())
    PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), "runs/second/adapter")
    assert len(AutoTokenizer.from_pretrained("runs/second/adapter")) == 259


def test_the_adapter_is_kept_where_transformers_has_no_such_model(
    config: ConfigContainer, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    config.run.name, config.checkpoint.pretrained_checkpoint, config.checkpoint.finetune = "base", None, False
    config.peft.peft_scheme, config.train.train_iters = None, 2
    config.model.num_layers, config.model.hidden_size, config.model.num_attention_heads = 2, 32, 2
    config.model.position_embedding_type = "none"
    pretrain(config)
    config.run.name, config.checkpoint.pretrained_checkpoint, config.peft.peft_scheme = "tuned", "runs/base", "lora"
    with caplog.at_level(logging.WARNING, logger="onstep"):
        finetune(config)
    assert "the final weights are only in the checkpoints" in caplog.text
    assert (Path("runs/tuned/adapter/adapter_model.safetensors")).is_file()
    capsys.readouterr()
    assert main(["generate", "runs/tuned", "def ", "--max-new-tokens=4", "--seed=1"]) == 0
    assert capsys.readouterr().out.startswith("def ")


def test_the_statistics_are_printed(config: ConfigContainer, capsys: pytest.CaptureFixture[str]) -> None:
    finetune(config)
    model = load_hf("weights")
    total = model.num_parameters()
    matrices = [(32, 32), (32, 16), (32, 16), (32, 32), (32, 48), (32, 48), (48, 32)]
    added = 2 * sum(4 * (inputs + outputs) for inputs, outputs in matrices)
    assert (
        f"PEFT statistics:\n  Total parameters: {total + added:,}\n  Trainable parameters: {added:,}\n"
        f"  Trainable percentage: {100 * added / (total + added):.2f}%\n"
    ) in capsys.readouterr().out


def test_gpt2_leaves_its_merged_weights_and_says_why_no_adapter(
    config: ConfigContainer, caplog: pytest.LogCaptureFixture
) -> None:
    gpt2(Path("gpt2"))
    config.checkpoint.pretrained_checkpoint = "gpt2"
    with caplog.at_level(logging.WARNING, logger="onstep"):
        finetune(config)
    assert "stores several projections of this model in one matrix" in caplog.text
    assert not (RUN / "adapter").exists()
    merged = logits(AutoModelForCausalLM.from_pretrained(RUN / "model"))
    assert close(merged, logits(load_hf(RUN / "model")))
    assert not close(merged, logits(AutoModelForCausalLM.from_pretrained("gpt2")))


def test_of_a_mixture_of_experts_the_attention_is_adapted(config: ConfigContainer) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}
    theirs = Qwen3MoeConfig(**sizes, **experts, vocab_size=260, head_dim=16, max_position_embeddings=64)
    Qwen3MoeForCausalLM(theirs).save_pretrained("moe")
    config.checkpoint.pretrained_checkpoint = "moe"
    finetune(config)
    adapter = load_file(RUN / "adapter" / "adapter_model.safetensors")
    assert {name.split(".")[6] for name in adapter} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("moe"), RUN / "adapter")
    merged = AutoModelForCausalLM.from_pretrained(RUN / "model")
    # experts' grouped products have no float64 in torch, and float32 is summed in another order by each kernel
    found, expected = logits(adapted, torch.float32), logits(merged, torch.float32)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


def test_the_added_matrices_follow_from_the_seed_alone_and_change_nothing_at_first(tmp_path: Path) -> None:
    llama(tmp_path)
    models = [load_hf(tmp_path) for _ in range(3)]
    plain = logits(models[0])
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    for model, seed in zip(models, (1, 1, 2), strict=True):
        add_lora(model, PeftConfig("lora", dim=4), seed)
    assert torch.equal(torch.rand(3), expected)
    one, same, other = ({n: p for n, p in m.named_parameters() if "lora_A" in n} for m in models)
    assert all(torch.equal(one[name], same[name]) and not torch.equal(one[name], other[name]) for name in one)
    assert torch.equal(logits(models[0]), plain)


def test_merging_is_what_peft_computes(tmp_path: Path) -> None:
    llama(tmp_path)
    model = load_hf(tmp_path)
    peft = PeftConfig("lora", dim=4, alpha=6.0)
    add_lora(model, peft, 0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    merged = merged_model(model, peft)
    assert isinstance(merged, Transformer)
    assert close(logits(merged), logits(model))
    delta = model.get_submodule("layers.0.attention.key").get_delta_weight("default")  # type: ignore[operator]
    plain = load_hf(tmp_path).layers[0].attention.key.weight  # type: ignore[union-attr]
    torch.testing.assert_close(merged.state_dict()["layers.0.attention.key.weight"], plain + delta)


def test_the_output_matrix_is_no_projection_of_a_layer(tmp_path: Path) -> None:
    llama(tmp_path)
    names = target_names(load_hf(tmp_path), ["output"])
    assert names == ["layers.0.attention.output", "layers.1.attention.output"]


def test_a_target_that_is_nowhere_names_the_nearest(config: ConfigContainer) -> None:
    config.peft.target_modules = ["query", "vlue"]
    with pytest.raises(ConfigError, match=r"has 'vlue', which no projection .* Did you mean 'value'"):
        finetune(config)
    assert not Path("runs").exists()  # nothing was made, and no weights read


@pytest.mark.parametrize(
    ("words", "end"),
    [
        ("", "gate_proj"),
        ("model.gated_linear_unit=false model.activation_func=gelu", "feed_forward.gate"),
        ("model.num_moe_experts=4 model.moe_ffn_hidden_size=32", "down"),
        ("model.num_moe_experts=4 model.moe_ffn_hidden_size=32 model.moe_layer_freq=2", "layers.0.feed_forward.up"),
    ],
)
def test_targets_are_judged_by_the_models_shape(words: str, end: str) -> None:
    config = get_recipe("tiny_gpt_finetune_lora")()
    apply_overrides(config, ["checkpoint.pretrained_checkpoint=x", "dataset.paths=[c.jsonl]", *words.split()])
    config.peft.target_modules = ["query", "q_proj", "layers.1.attention.key"]
    validate(config)
    config.peft.target_modules = [end]
    if not words:
        validate(config)
        return
    with pytest.raises(ConfigError, match=rf"peft.target_modules has '{end}', which no projection"):
        validate(config)


@pytest.mark.parametrize(("precision", "family"), [("float32", "own"), ("bfloat16", "own"), ("bfloat16", "mistral")])
def test_losses_and_adapter_are_those_of_their_trainer(
    config: ConfigContainer, precision: str, family: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if family == "mistral":
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
        torch.manual_seed(0)
        theirs = MistralConfig(**sizes, num_key_value_heads=1, vocab_size=260, max_position_embeddings=64)
        MistralForCausalLM(theirs).save_pretrained("weights")
    if precision == "bfloat16":
        config.mixed_precision = "bf16_mixed"
    ours = observed_run(config)
    model = base(dtype=getattr(torch, precision))
    expected = by_their_trainer(model, ours, 4, weight_decay=0.0, bf16=precision == "bfloat16")
    losses, adapter = largest_difference(ours, expected)
    with capsys.disabled():
        print(
            f"\n{family} {precision}: losses within {losses:.1e}, adapter within {adapter:.1e} of peft by their Trainer"
        )
    assert len(ours.losses) == 6
    assert losses < 1e-5
    assert adapter < 1e-5
    assert {one.dtype for one in ours.adapter.values()} == {torch.float32}


def test_without_bitsandbytes_the_install_line_is_given(config: ConfigContainer) -> None:
    config.peft.base_quantization = "nf4"
    with pytest.raises(MissingExtraError, match=r"base_quantization=nf4 .* pip install 'onstep\[quantization\]'"):
        finetune(config)
    config.peft.base_quantization, config.optimizer.optimizer = None, "adamw_8bit"
    with pytest.raises(ConfigError, match=r"optimizer='adamw_8bit' .* not installed: pip install bitsandbytes"):
        finetune(config)
    config.peft.peft_scheme, config.peft.base_quantization = None, "nf4"
    with pytest.raises(ConfigError, match=r"base_quantization=nf4 freezes .* set peft.peft_scheme=lora"):
        finetune(config)
    assert not Path("runs").exists()


def test_without_peft_the_install_line_is_given(config: ConfigContainer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'onstep\[peft\]'"):
        finetune(config)
