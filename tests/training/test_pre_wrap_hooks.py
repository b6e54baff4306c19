"""Hooks change the model before it is wrapped; optimizer and checkpoints follow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from onstep import CallbackManager, pretrain
from onstep.config import ConfigContainer
from onstep.errors import ConfigError
from onstep.models import Transformer
from onstep.training import GlobalState


@pytest.fixture
def config(tiny_config: ConfigContainer, tmp_path: Path) -> ConfigContainer:
    tiny_config.run.name, tiny_config.run.output_dir = "run", str(tmp_path)
    tiny_config.checkpoint.save_interval = 4
    return tiny_config


def freeze_embedding(chunks: list[nn.Module]) -> None:
    chunks[0].get_submodule("embedding").requires_grad_(False)


def weights_at_end(config: ConfigContainer, hooks: list[Any]) -> tuple[GlobalState, nn.Module]:
    models: list[nn.Module] = []
    manager = CallbackManager()
    manager.register("on_train_end", lambda context: models.append(context.model[0]))
    return pretrain(config, callbacks=manager, pre_wrap_hooks=hooks), models[0]


def test_hooks_run_in_order_on_what_the_one_before_gave(config: ConfigContainer) -> None:
    seen: list[Any] = []

    class Larger(nn.Module):
        """Another module around the model."""

        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return self.inner(*args, **kwargs) * self.scale

    def first(chunks: list[nn.Module]) -> list[nn.Module]:
        seen.append([type(chunk) for chunk in chunks])
        return [Larger(chunks[0])]

    def second(chunks: list[nn.Module]) -> None:
        seen.append([type(chunk) for chunk in chunks])

    config.run.save_weights = False
    _, model = weights_at_end(config, [first, second])
    assert seen == [[Transformer], [Larger]]
    assert isinstance(model, Larger)
    assert model.scale.item() != 1.0


def test_what_a_hook_freezes_stays_and_is_not_optimized(config: ConfigContainer) -> None:
    before: list[torch.Tensor] = []

    def freeze(chunks: list[nn.Module]) -> None:
        freeze_embedding(chunks)
        before.append(chunks[0].get_parameter("embedding.weight").clone())

    _, model = weights_at_end(config, [freeze])
    assert torch.equal(model.get_parameter("embedding.weight"), before[0])
    assert model.get_parameter("embedding.weight").grad is None


def test_a_run_with_a_hook_resumes_exactly(config: ConfigContainer) -> None:
    _, whole = weights_at_end(config, [freeze_embedding])
    config.run.name, config.train.exit_interval = "second", 4
    weights_at_end(config, [freeze_embedding])
    config.train.exit_interval = None
    state, resumed = weights_at_end(config, [freeze_embedding])
    assert state.is_resumed
    for name, value in whole.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], value), name


def test_a_hook_that_raises_is_named(config: ConfigContainer) -> None:
    def broken(chunks: list[nn.Module]) -> None:
        raise LookupError("no such layer")

    with pytest.raises(LookupError, match="no such layer") as raised:
        pretrain(config, pre_wrap_hooks=[broken])
    assert any("raised by the pre-wrap hook" in note and "broken" in note for note in raised.value.__notes__)


@pytest.mark.parametrize("given", [nn.Linear(1, 1), [], ["a"], 3], ids=["module", "empty", "texts", "number"])
def test_a_hook_gives_a_list_of_modules_or_none(config: ConfigContainer, given: Any) -> None:
    def wrong(chunks: list[nn.Module]) -> Any:
        return given

    with pytest.raises(ConfigError, match=r"the pre-wrap hook .*wrong must return None or a list of modules"):
        pretrain(config, pre_wrap_hooks=[wrong])
