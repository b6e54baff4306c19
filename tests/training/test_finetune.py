"""Fine-tuning starts from trained weights and nothing else of them, and continues its own run exactly."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from onstep import CallbackManager, Trainer, TrainingArguments, finetune, pretrain
from onstep.checkpoint import checkpoints
from onstep.config import ConfigContainer, TokenizerConfig
from onstep.errors import CheckpointError, ConfigError, MissingWeightsError, RunExistsError
from onstep.training import GlobalState
from tests.support.forked_processes import Processes
from tests.support.jobs.finetune_jobs import small_finetune
from tests.support.small_weights import gpt2, llama, tokens
from tests.support.whole_runs import Ranks, check_same

JOBS = "tests.support.jobs.finetune_jobs"


@pytest.fixture(scope="module", autouse=True)
def imported(processes: Processes) -> None:
    processes.load("transformers.models.llama.modeling_llama", "tokenizers", "accelerate", "peft")


class Caught(Exception):
    """Nothing after the model was built is of interest."""


@pytest.fixture
def config(tmp_path: Path, corpus: Path, token_cache: Path, monkeypatch: pytest.MonkeyPatch) -> ConfigContainer:
    """Two steps from a small Llama, in runs/run."""
    monkeypatch.chdir(tmp_path)
    llama(tmp_path / "weights")
    config = small_finetune({"weights": "weights", "corpus": str(corpus), "cache": str(token_cache)})
    config.train.train_iters, config.checkpoint.save_interval, config.logger.log_interval = 2, 1, 1
    return config


@torch.no_grad()
def logits_at_start(config: ConfigContainer) -> torch.Tensor:
    """What the model that a run begins with makes of `tokens()`; the run ends there."""
    found: list[torch.Tensor] = []

    def look(chunks: list[nn.Module]) -> None:
        found.append(chunks[0].eval()(tokens()))
        raise Caught

    with pytest.raises(Caught):
        finetune(config, pre_wrap_hooks=[look])
    return found[0]


@torch.no_grad()
def logits_of(directory: Path | str) -> torch.Tensor:
    logits: torch.Tensor = AutoModelForCausalLM.from_pretrained(directory).eval()(tokens()).logits
    return logits


def losses(state: GlobalState) -> list[float]:
    return [record["loss"] for record in state.info.log_history if "loss" in record]


def one_step_of(config: ConfigContainer, name: str, weights: str) -> GlobalState:
    config.run.name, config.checkpoint.pretrained_checkpoint = name, weights
    return finetune(config)


def test_a_hugging_face_directory_gives_weights_and_sizes(config: ConfigContainer) -> None:
    torch.testing.assert_close(logits_at_start(config), logits_of("weights"), rtol=1e-4, atol=1e-5)


def test_the_users_configuration_stays_as_it_was(config: ConfigContainer) -> None:
    before = config.to_dict()
    state = finetune(config)
    assert config.to_dict() == before
    model = state.cfg.model
    assert (model.num_layers, model.hidden_size, model.vocab_size, model.rotary_base) == (2, 32, 260, 5000.0)
    assert model.seq_length == 32


def test_the_result_is_a_hugging_face_directory_that_has_learned(config: ConfigContainer) -> None:
    config.train.train_iters = 30
    state = finetune(config)
    assert state.train_state.step == 30
    assert sum(losses(state)[-5:]) < sum(losses(state)[:5]) - 5
    assert (logits_of("runs/run/model") - logits_of("weights")).abs().max() > 1e-2


def test_a_size_that_is_not_the_weights_is_named(config: ConfigContainer) -> None:
    config.model.hidden_size = 48
    with pytest.raises(ConfigError, match=r"model.hidden_size=48 does not match the weights in weights, which have 32"):
        finetune(config)
    assert not Path("runs").exists()


def test_sizes_that_agree_may_stand_there(config: ConfigContainer) -> None:
    config.model.num_layers, config.model.ffn_hidden_size, config.model.kv_channels = 2, 48, 16
    torch.testing.assert_close(logits_at_start(config), logits_of("weights"), rtol=1e-4, atol=1e-5)


def test_learned_positions_have_one_length(config: ConfigContainer) -> None:
    gpt2(Path("gpt2"))
    config.checkpoint.pretrained_checkpoint = "gpt2"
    torch.testing.assert_close(logits_at_start(config), logits_of("gpt2"), rtol=1e-4, atol=1e-5)
    config.dataset.seq_length = config.model.seq_length = 16
    with pytest.raises(ConfigError, match=r"model.seq_length=16 must be 32: .* set model.seq_length and dataset.seq"):
        finetune(config)


def test_a_run_a_checkpoint_and_its_export_start_alike(config: ConfigContainer) -> None:
    finetune(config)
    newest = max(Path("runs/run/checkpoints").glob("checkpoint-*"))
    expected = losses(one_step_of(config, "of-run", "runs/run"))
    assert losses(one_step_of(config, "of-checkpoint", str(newest))) == expected
    assert losses(one_step_of(config, "of-checkpoints", "runs/run/checkpoints")) == expected
    assert losses(one_step_of(config, "of-export", "runs/run/model")) == expected
    shutil.rmtree("runs/run/model")
    assert losses(one_step_of(config, "of-run-without-export", "runs/run")) == expected


def test_nothing_but_weights_is_taken_from_a_checkpoint(config: ConfigContainer) -> None:
    config.optimizer.adam_beta1 = 0.99  # so that moments of the first run would show
    finetune(config)
    config.run.name = "second"
    config.checkpoint.pretrained_checkpoint, config.checkpoint.load = None, "runs/run/checkpoints"
    seen: list[tuple[int, float, int]] = []
    manager = CallbackManager()

    def look(context: Any) -> None:
        progress, optimizer = context.state.train_state, context.optimizer
        moments = len(optimizer.state_dict()["state"])
        seen.append((progress.step, progress.consumed_train_samples, moments))

    manager.register("on_train_start", look)
    state = finetune(config, callbacks=manager)
    assert seen == [(0, 0, 0)]
    assert state.train_state.step == 2
    assert [info.step for info in checkpoints(Path("runs/second/checkpoints"))] == [2, 1]


def test_a_step_of_the_source_can_be_chosen(config: ConfigContainer) -> None:
    config.train.train_iters = 3
    finetune(config)
    config.run.name, config.checkpoint.pretrained_checkpoint = "second", None
    config.checkpoint.load, config.checkpoint.ckpt_step = "runs/run", 1
    chosen = logits_at_start(config)
    config.checkpoint.ckpt_step, config.checkpoint.load = None, "runs/run/checkpoints/checkpoint-1"
    assert torch.equal(logits_at_start(config), chosen)
    config.checkpoint.load = "runs/run/checkpoints/checkpoint-3"
    assert not torch.equal(logits_at_start(config), chosen)
    config.checkpoint.load, config.checkpoint.ckpt_step = "runs/run", 7
    with pytest.raises(MissingWeightsError, match=r"checkpoint.load=runs/run holds neither .* checkpoint of step 7"):
        finetune(config)


def test_it_takes_weights(config: ConfigContainer) -> None:
    config.checkpoint.pretrained_checkpoint = None
    with pytest.raises(ConfigError, match=r"finetune requires weights to start from; set checkpoint.pretrained"):
        finetune(config)


@pytest.mark.parametrize("kind", ["absent", "empty"])
def test_weights_that_are_not_there_are_a_file_not_found(config: ConfigContainer, kind: str) -> None:
    if kind == "empty":
        Path("empty").mkdir()
    config.checkpoint.pretrained_checkpoint = kind
    with pytest.raises(FileNotFoundError, match=rf"checkpoint.pretrained_checkpoint={kind} (does not|holds neither)"):
        finetune(config)
    assert not Path("runs").exists()


def test_an_own_directory_without_checkpoints_is_nothing_to_fine_tune(config: ConfigContainer) -> None:
    config.checkpoint.pretrained_checkpoint, config.checkpoint.load = None, "runs/run/checkpoints"
    with pytest.raises(MissingWeightsError, match=r"checkpoint.load=runs/run/checkpoints has no checkpoint yet"):
        finetune(config)


def test_a_damaged_checkpoint_is_not_fine_tuned(config: ConfigContainer) -> None:
    finetune(config)
    newest = max(Path("runs/run/checkpoints").glob("checkpoint-*"))
    file = newest / "model" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(bytes(content))
    with pytest.raises(CheckpointError, match=r"model.safetensors"):
        one_step_of(config, "second", str(newest))


def test_pretrain_starts_from_trained_weights_too(config: ConfigContainer) -> None:
    expected = losses(finetune(config))
    config.run.name, config.checkpoint.finetune = "second", False
    assert losses(pretrain(config)) == expected


def test_other_weights_are_another_run(config: ConfigContainer, capsys: pytest.CaptureFixture[str]) -> None:
    finetune(config)
    capsys.readouterr()
    finetune(config)
    assert "is finished" in capsys.readouterr().out
    llama(Path("others"), seed=1)
    config.checkpoint.pretrained_checkpoint = "others"
    with pytest.raises(RunExistsError, match=r"checkpoint.pretrained_checkpoint"):
        finetune(config)


def test_a_run_goes_on_where_its_first_weights_are_gone(config: ConfigContainer) -> None:
    config.train.train_iters = 4
    expected = losses(finetune(config))
    config.run.name, config.train.exit_interval = "second", 2
    finetune(config)
    shutil.rmtree("weights")
    config.train.exit_interval = None
    assert losses(finetune(config)) == expected


@pytest.mark.parametrize("peft", [None, "lora"])
def test_a_killed_run_continues_exactly(
    processes: Processes, tmp_path: Path, corpus: Path, token_cache: Path, peft: str | None
) -> None:
    llama(tmp_path / "weights")
    common = {"weights": str(tmp_path / "weights"), "corpus": str(corpus), "cache": str(token_cache), "peft": peft}
    ranks = Ranks(processes, tmp_path, JOBS, **common)
    expected = ranks.finish("whole", "finetune", ranks=1)
    assert expected["step"] == 9
    assert ranks.start("killed", "finetune", ranks=1, dies_at=6) == [-9]
    assert ranks.steps("killed") == [2, 4]
    check_same(ranks.finish("killed", "finetune", ranks=1), expected)


@pytest.mark.distributed
def test_two_ranks_fine_tune_the_same_weights(
    processes: Processes, tmp_path: Path, corpus: Path, token_cache: Path
) -> None:
    llama(tmp_path / "weights")
    words = ["checkpoint.validate_replication=true", "train.check_weight_hash_across_dp_replicas_interval=1"]
    common = {"weights": str(tmp_path / "weights"), "corpus": str(corpus), "cache": str(token_cache), "peft": "lora"}
    ranks = Ranks(processes, tmp_path, JOBS, **common, words=words)
    two = ranks.finish("two", "finetune", ranks=2)
    one = ranks.finish("one", "finetune", ranks=1, words=["peft.dropout=0.0"])
    assert two["step"] == one["step"] == 9
    assert ranks.output("two").count("PEFT statistics:") == 1


def test_a_trainer_is_given_its_model_as_it_is_to_be_trained(tmp_path: Path) -> None:
    for key, value in (("checkpoint.pretrained_checkpoint", "weights"), ("peft.peft_scheme", "lora")):
        overrides = {key: value, "checkpoint.pretrained_checkpoint": "weights"}
        args = TrainingArguments(output_dir=str(tmp_path), max_steps=1, config_overrides=overrides)
        with pytest.raises(ConfigError, match=r"='?weights'? is only for onstep.finetune; a Trainer trains the model"):
            Trainer(model=nn.Linear(2, 2), args=args, train_dataset=[{"x": torch.zeros(2)}]).train()


def test_what_was_filled_in_is_reported(config: ConfigContainer, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="onstep"):
        logits_at_start(config)
    captured = [record.message for record in caplog.records if "model taken from" in record.message]
    assert len(captured) == 1
    assert "model taken from weights: num_layers=2, hidden_size=32" in captured[0]
    assert "tokenizer: bytes, as configured; the weights in weights come without one" in caplog.text


def test_the_tokenizer_that_is_taken_is_reported(config: ConfigContainer, caplog: pytest.LogCaptureFixture) -> None:
    config.tokenizer.tokenizer_type, config.tokenizer.vocab_size, config.train.train_iters = "bpe", 259, 2
    one_step_of(config, "first", "weights")
    config.tokenizer = TokenizerConfig()
    shutil.copytree("runs/first/model", "copied")
    with caplog.at_level(logging.INFO, logger="onstep"):
        one_step_of(config, "second", "copied")
    assert "tokenizer: tokenizers copied/tokenizer.json, that of the weights in copied" in caplog.text
    caplog.clear()
    config.tokenizer = TokenizerConfig(tokenizer_type="tokenizers", tokenizer_model="copied/tokenizer.json")
    with caplog.at_level(logging.INFO, logger="onstep"):
        one_step_of(config, "third", "copied")
    assert "tokenizer: tokenizers copied/tokenizer.json, that of the weights in copied" in caplog.text
