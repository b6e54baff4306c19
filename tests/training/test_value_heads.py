"""A value head through the training loop: what it learns, its checkpoints, and the example."""

from __future__ import annotations

import importlib.util
import logging
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from onstep import pretrain
from onstep.config import ConfigContainer, apply_overrides
from onstep.events.context import unwrap
from onstep.training import CallbackManager, LinearForLastLayer, create_value_head_hook

EXAMPLE = Path(__file__).parents[2] / "examples" / "value_head.py"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("value_head_example", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def config_of(example: ModuleType, corpus: Path, token_cache: Path, steps: int, *overrides: str) -> ConfigContainer:
    config: ConfigContainer = example.small_config(steps)
    config.dataset.paths, config.dataset.cache_dir = [str(corpus)], str(token_cache)
    small = ["model.num_layers=2", "model.hidden_size=64", "validation.eval_iters=4", "dist.device=cpu"]
    apply_overrides(config, [*small, *overrides])
    return config


def run(config: ConfigContainer, example: ModuleType, **options: Any) -> tuple[list[float], Any]:
    """Train with a head of the size of the model; the losses, and the model at the end."""
    losses: list[float] = []
    models: list[Any] = []
    callbacks = CallbackManager()
    callbacks.register("on_train_step_end", lambda context: losses.append(context.loss_dict["squared error"].item()))
    callbacks.register("on_train_end", lambda context: models.append(unwrap(context.model[0])))
    hook = create_value_head_hook(config.model.hidden_size, False)
    torch.seed()  # a run owes nothing to what was drawn before it
    pretrain(config, example.value_step, callbacks, pre_wrap_hooks=[hook], **options)
    return losses, models[0] if models else None


def test_bytes_up_to_the_next_line_break_are_counted(example: ModuleType) -> None:
    tokens = torch.tensor([[97, 98, 10, 10, 99, 10, 100], [97, 98, 99, 97, 98, 99, 97]])

    assert example.bytes_left(tokens).tolist() == [[1, 0, 0, 0, 0, 0, -1], [-1] * 7]


def test_the_example_predicts_far_better_than_a_constant(
    example: ModuleType, corpus: Path, token_cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    head, constant = example.train_value_head(config_of(example, corpus, token_cache, 60))

    assert 0 < head < 0.9 * constant
    assert constant == pytest.approx(1.0, abs=0.5)


def test_a_resumed_run_with_a_value_head_goes_on_bit_for_bit(
    example: ModuleType, corpus: Path, token_cache: Path, tmp_path: Path
) -> None:
    def config(directory: str, *more: str) -> ConfigContainer:
        overrides = [
            f"checkpoint.save={tmp_path / directory}",
            f"checkpoint.load={tmp_path / directory}",
            "checkpoint.save_interval=2",
            *more,
        ]
        return config_of(example, corpus, token_cache, 4, *overrides)

    whole, model = run(config("whole"), example)
    first, _ = run(config("parts", "train.exit_interval=2"), example)
    second, resumed = run(config("parts"), example)

    assert first + second == whole
    assert isinstance(model.output, LinearForLastLayer)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), resumed.parameters(), strict=True))


def test_a_named_run_says_why_its_value_model_is_not_written_for_transformers(
    example: ModuleType, corpus: Path, token_cache: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_of(example, corpus, token_cache, 2, "run.name=values", f"run.output_dir={tmp_path}")

    with caplog.at_level(logging.WARNING, logger="onstep"):
        run(config, example)

    assert "the final weights are only in the checkpoints" in caplog.text
    assert "value head (LinearForLastLayer)" in caplog.text
    assert not (tmp_path / "values" / "model").exists()
    assert any((tmp_path / "values").rglob("*.safetensors"))
