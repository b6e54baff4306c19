"""What `train` and `save_model` leave on disk can be read back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_model
from torch import nn

from onstep.config import ModelConfig, resolve
from onstep.errors import ConfigError
from onstep.models import Transformer, make_value_model
from tests.support.small_models import Regression, arguments, causal_rows, quiet, qwen, regression_rows


class Tokens:
    """A processing class as far as saving goes."""

    def save_pretrained(self, directory: Path) -> None:
        (Path(directory) / "tokens.json").write_text("{}")


def test_a_plain_module_is_written_as_safetensors(tmp_path: Path) -> None:
    trainer = quiet(Regression(), arguments(tmp_path), regression_rows())
    trainer.train()
    trainer.save_model(str(tmp_path / "out"))
    again = Regression(seed=5)
    load_model(again, str(tmp_path / "out" / "model.safetensors"))
    torch.testing.assert_close(again.state_dict(), trainer.model.state_dict(), rtol=0, atol=0)


def test_shared_parameters_are_written_once_and_read_back(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
            self.second.weight = self.first.weight

    model = Tied()
    quiet(model, arguments(tmp_path)).save_model(str(tmp_path / "out"))
    again = Tied()
    load_model(again, str(tmp_path / "out" / "model.safetensors"))
    torch.testing.assert_close(again.state_dict(), model.state_dict(), rtol=0, atol=0)


def test_a_transformers_model_is_read_by_from_pretrained(tmp_path: Path) -> None:
    import transformers

    args = arguments(tmp_path, max_steps=1, config_overrides=None)
    trainer = quiet(qwen(), args, causal_rows(4), processing_class=Tokens())
    trainer.train()
    trainer.save_model(str(tmp_path / "out"))
    for directory in (tmp_path / "run", tmp_path / "out"):
        again = transformers.AutoModelForCausalLM.from_pretrained(directory)
        torch.testing.assert_close(again.state_dict(), trainer.model.state_dict(), rtol=0, atol=0)
        assert (directory / "tokens.json").exists()


def test_our_own_transformer_is_written_as_a_directory_that_transformers_reads(tmp_path: Path) -> None:
    import transformers

    model = Transformer(_small_config())
    quiet(model, arguments(tmp_path)).save_model(str(tmp_path / "out"))
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    ids = torch.arange(8).unsqueeze(0)
    with torch.no_grad():
        torch.testing.assert_close(again(ids).logits, model.eval()(ids), rtol=1e-5, atol=1e-5)


def test_a_transformer_that_transformers_has_no_name_for_is_written_as_safetensors(tmp_path: Path) -> None:
    def valued() -> Transformer:
        config = _small_config()
        model = Transformer(config)
        make_value_model(config.hidden_size, False)([model])
        return model

    model = valued()
    quiet(model, arguments(tmp_path)).save_model(str(tmp_path / "out"))
    again = valued()
    load_model(again, str(tmp_path / "out" / "model.safetensors"))
    torch.testing.assert_close(again.state_dict(), model.state_dict(), rtol=0, atol=0)


def test_a_run_keeps_its_record_and_its_final_weights(tmp_path: Path) -> None:
    trainer = quiet(Regression(), arguments(tmp_path, config_overrides=None), regression_rows())
    trainer.train()
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (record["status"], record["step"]) == ("completed", 3)
    again = Regression(seed=5)
    load_model(again, str(tmp_path / "run" / "model.safetensors"))
    torch.testing.assert_close(again.state_dict(), trainer.model.state_dict(), rtol=0, atol=0)


def test_a_run_that_failed_says_so(tmp_path: Path) -> None:
    rows = [*regression_rows(8), {"x": torch.ones(7), "labels": torch.ones(())}]
    with pytest.raises(RuntimeError):
        quiet(Regression(), arguments(tmp_path, per_device_train_batch_size=1), rows).train()
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (record["status"], record["step"]) == ("failed", 8)


def test_the_arguments_are_written_beside_the_weights(tmp_path: Path) -> None:
    trainer = quiet(Regression(), arguments(tmp_path, learning_rate=0.25), regression_rows())
    trainer.save_model(str(tmp_path / "before"))
    trainer.train()
    trainer.save_model(str(tmp_path / "after"))
    for name in ("before", "after"):
        assert json.loads((tmp_path / name / "training_args.json").read_text()) == json.loads(
            json.dumps(trainer.args.to_dict(), default=str)
        )


def test_there_is_nothing_to_save_before_model_init_has_run(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no model to save yet"):
        quiet(None, arguments(tmp_path), model_init=Regression).save_model()


def test_a_file_is_no_directory_to_save_a_model_in(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for name in ("file", "file/below"):
        with pytest.raises(ConfigError, match=rf"cannot be saved in .*{name}: .*; name a directory, not a file"):
            quiet(Regression(), arguments(tmp_path)).save_model(str(tmp_path / name))
    assert (tmp_path / "file").read_text() == "mine"


def _small_config() -> ModelConfig:
    from onstep.recipes import tiny_gpt_pretrain_config

    config: Any = tiny_gpt_pretrain_config()
    config.model.num_layers, config.model.hidden_size, config.model.num_attention_heads = 1, 16, 2
    config.model.vocab_size = 32
    return resolve(config).model
