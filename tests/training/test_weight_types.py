"""The types of trained and frozen weights in whole runs: resumed, exported, through both doors, on two ranks."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from onstep import Callback, Trainer, TrainingArguments, pretrain
from onstep.config import ConfigContainer, ModelConfig, apply_overrides
from onstep.errors import ConfigError
from onstep.models import build_transformer, load_hf, save_hf
from onstep.optim import LowPrecisionOptimizer
from onstep.training.setup.checkpoint_models import model_of_checkpoint
from tests.support.forked_processes import Processes
from tests.support.resuming import compare
from tests.support.small_runs import RaggedRows, TinyModel, stack
from tests.support.whole_runs import Ranks, check_same

MASTERS = "optimizer.params_dtype=bfloat16 mixed_precision=bf16_mixed"
STOCHASTIC = "optimizer.params_dtype=bfloat16 optimizer.main_params_dtype=bfloat16"
KAHAN = f"{STOCHASTIC} optimizer.rounding=kahan optimizer.optimizer=muon"
LORA = "mixed_precision=bf16_mixed peft.peft_scheme=lora"


@pytest.fixture
def make(tiny_config: ConfigContainer, corpus: Path, tmp_path: Path) -> Any:
    def made(name: str, words: str) -> ConfigContainer:
        config = copy.deepcopy(tiny_config)
        config.run.name, config.run.output_dir = name, str(tmp_path / "runs")
        config.dataset.paths = [str(corpus / "colorsys.py")]
        config.train.train_iters = 6
        config.model.num_layers, config.model.hidden_size = 1, 16
        config.validation.eval_iters = 0
        config.checkpoint.save_interval, config.checkpoint.certify = 2, True
        apply_overrides(config, re.split(r" (?=\w+[.=])", words))
        return config

    return made


class Types(Callback):
    """The types of trained and of frozen weights at the end."""

    def on_train_end(self, context: Any) -> None:
        params = list(context.model[0].parameters())
        self.trained = {one.dtype for one in params if one.requires_grad}
        self.frozen = {one.dtype for one in params if not one.requires_grad}


@pytest.mark.parametrize(
    "words",
    [MASTERS, pytest.param(STOCHASTIC, marks=pytest.mark.slow), pytest.param(KAHAN, marks=pytest.mark.slow)],
)
def test_a_run_that_dies_ends_as_the_one_that_nobody_touched(make: Any, words: str) -> None:
    compare(lambda name: make(name, words), [("on_step_end", 3)])


@pytest.mark.distributed
def test_two_ranks_round_alike_and_resume(
    processes: Processes, tmp_path: Path, corpus: Path, token_cache: Path
) -> None:
    words = [*STOCHASTIC.split(), "checkpoint.save_interval=4"]
    ranks = Ranks(processes, tmp_path, corpus=str(corpus), cache=str(token_cache), words=words)
    whole = ranks.finish("whole")  # `check_weights` compares the ranks at the end
    assert ranks.start("struck", strikes=[{"signal": "SIGKILL", "event": "on_step_end", "number": 6, "rank": 1}])[1]
    check_same(ranks.finish("struck"), whole)


def test_weights_are_saved_exported_and_read_in_their_type(make: Any, tmp_path: Path) -> None:
    config, types = make("low", STOCHASTIC), Types()
    pretrain(config, callbacks=[types])
    assert types.trained == {torch.bfloat16}
    run = tmp_path / "runs" / "low"
    exported = load_file(run / "model" / "model.safetensors")
    assert {one.dtype for one in exported.values()} == {torch.bfloat16}
    assert json.loads((run / "model" / "config.json").read_text())["dtype"] == "bfloat16"
    model = model_of_checkpoint(run)
    assert model.embedding.weight.dtype == torch.bfloat16
    assert torch.equal(model.embedding.weight, exported["model.embed_tokens.weight"])
    assert model(torch.zeros(1, 4, dtype=torch.int64)).isfinite().all()


def test_frozen_weights_are_bfloat16_once_and_trained_ones_float32(make: Any, tmp_path: Path) -> None:
    config = make("base", "train.train_iters=6")
    pretrain(config)
    base = f"checkpoint.pretrained_checkpoint={tmp_path / 'runs' / 'base'}"
    for name, words, frozen in (("low", LORA, torch.bfloat16), ("exact", "peft.peft_scheme=lora", torch.float32)):
        types = Types()
        pretrain(make(name, f"{words} {base}"), callbacks=[types])
        assert (types.trained, types.frozen) == ({torch.float32}, {frozen})
        assert model_of_checkpoint(tmp_path / "runs" / name).embedding.weight.dtype is frozen


def test_weights_that_a_hook_freezes_are_bfloat16_too(make: Any, tmp_path: Path) -> None:
    def freeze(chunks: list[nn.Module]) -> None:
        chunks[0].layers.requires_grad_(False)  # type: ignore[union-attr, operator]

    types, config = Types(), make("partly", "mixed_precision=bf16_mixed model.normalization=LayerNorm")
    pretrain(config, callbacks=[types], pre_wrap_hooks=[freeze])
    assert types.trained == {torch.float32}
    assert torch.bfloat16 in types.frozen
    model = model_of_checkpoint(tmp_path / "runs" / "partly")
    assert {param.dtype for param in model.parameters()} == {torch.float32}, "one type that holds all values"


class CopiesInFloat32(TorchDispatchMode):
    """Notes the sizes of the float32 tensors that are allocated on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        is_new = any(name in str(func) for name in ("empty", "_to_copy", "clone"))
        if is_new and isinstance(result, Tensor) and result.dtype is torch.float32 and result.device.type == "cpu":
            self.sizes.append(result.numel())
        return result


def test_files_are_read_in_the_type_of_the_weights_without_a_copy_in_float32(tmp_path: Path) -> None:
    config = ModelConfig(num_layers=1, hidden_size=32, num_attention_heads=2, vocab_size=512, seq_length=8)
    model = build_transformer(config, seed=0)
    save_hf(model.bfloat16(), tmp_path)
    with CopiesInFloat32() as copies:
        loaded = load_hf(tmp_path, dtype=torch.bfloat16)
    assert loaded.embedding.weight.dtype is torch.bfloat16
    assert torch.equal(loaded.embedding.weight, model.embedding.weight)
    assert max(copies.sizes, default=0) < 512, "the tables of the positions alone"


def test_the_trainer_converts_weights_when_asked(tmp_path: Path) -> None:
    rows = RaggedRows(12)

    def trained(model: nn.Module, **overrides: Any) -> Trainer:
        keys = {"run.save_weights": False, "optimizer.lr": 0.1, **overrides}
        arguments = TrainingArguments(
            tmp_path, max_steps=2, save_strategy="no", report_to="none", config_overrides=keys
        )
        trainer = Trainer(model=model, args=arguments, train_dataset=rows, data_collator=stack)
        trainer.train()
        return trainer

    theirs = trained(TinyModel().bfloat16())
    assert type(theirs.optimizer) is torch.optim.AdamW, "weights that the user has loaded are trained as they are"
    model = TinyModel()
    ours = trained(model, **{"optimizer.params_dtype": "bfloat16"})
    assert type(ours.optimizer) is LowPrecisionOptimizer
    assert {param.dtype for param in model.parameters()} == {torch.bfloat16}
    with pytest.raises(ConfigError, match="only with the configured optimizer, and this is SGD"):
        Trainer(
            model=(model := TinyModel()),
            args=TrainingArguments(
                tmp_path, max_steps=1, report_to="none", config_overrides={"optimizer.params_dtype": "bfloat16"}
            ),
            train_dataset=rows,
            data_collator=stack,
            optimizers=(torch.optim.SGD(model.parameters(), lr=0.1), None),
        ).train()
