"""An asynchronous save whose copies run beside the next step has the values of its own step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from onstep import Callback, CallbackManager, pretrain
from onstep.checkpoint import checkpoint_manager
from onstep.checkpoint.storage.memory_copies import WarmBuffers
from onstep.config import ConfigContainer
from onstep.errors import CheckpointError
from onstep.training.gpt_step import forward_step
from tests.support.emulated_lanes import CountingLock, LateLane

CALLS: list[str] = []
"""What the emulated device was asked for, by all runs of a test."""


@pytest.fixture
def lanes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The CPU copies as a GPU does, and as late as it is allowed to."""
    CALLS.clear()
    lane = LateLane(torch.device("cpu"))
    lane.calls = CALLS
    monkeypatch.setattr(checkpoint_manager, "WarmBuffers", lambda: WarmBuffers(lambda device: lane, CountingLock()))
    return CALLS


def run(
    config: ConfigContainer,
    directory: Path,
    name: str,
    callbacks: Any = None,
    *,
    step: Any = forward_step,
    **fields: Any,
) -> Path:
    config.run.output_dir, config.run.name = str(directory), name
    config.train.train_iters, config.validation.eval_interval = 6, None
    for key, value in {"save_interval": 2, **fields}.items():
        setattr(config.checkpoint, key, value)
    manager = CallbackManager()
    manager.register("on_pre_optimizer_step", lambda context: CALLS.append("update"))
    manager.add(callbacks or [])
    pretrain(config, step, callbacks=manager)
    return directory / name


def weights(path: Path) -> dict[str, bytes]:
    """What the checkpoints hold of weights and optimizer, by file."""
    files = [one for one in path.rglob("*.safetensors") if "model" in str(one) or "optimizer" in str(one)]
    return {str(one.relative_to(path)): one.read_bytes() for one in files if "checkpoint-" in str(one)}


def test_the_copies_are_those_of_a_run_that_waits(
    tiny_config: ConfigContainer, tmp_path: Path, lanes: list[str]
) -> None:
    waiting = weights(run(tiny_config, tmp_path, "waiting"))
    assert "beside" not in "".join(lanes)
    lanes.clear()
    beside = weights(run(tiny_config, tmp_path, "beside", async_save=True))
    assert len(waiting) >= 6
    assert beside == waiting
    kinds = [call.split(":")[0] for call in lanes]
    save = ["in order", "beside", "hold back"]
    assert kinds == ["update"] * 2 + [*save, "update", "update"] * 2 + ["in order"]  # the last one before callbacks


class Listening(Callback):
    """Might change weights before the next update."""

    def on_step_begin(self, context: Any) -> None:
        CALLS.append("listener")


class Careful(Listening):
    changes_weights = False


@pytest.mark.parametrize(("callback", "is_beside"), [(Listening, False), (Careful, True)])
def test_a_callback_before_the_update_is_not_overtaken(
    tiny_config: ConfigContainer, tmp_path: Path, lanes: list[str], callback: type[Callback], is_beside: bool
) -> None:
    run(tiny_config, tmp_path, "run", callback(), async_save=True)
    assert any("beside" in call for call in lanes) == is_beside


def test_the_copies_may_be_switched_back(tiny_config: ConfigContainer, tmp_path: Path, lanes: list[str]) -> None:
    run(tiny_config, tmp_path, "run", async_save=True, copy_beside_step=False)
    assert not any("beside" in call or "hold" in call for call in lanes)


class Evaluating(Careful):
    """Stands for what is done between two steps, and may change weights."""

    def on_step_begin(self, context: Any) -> None:
        with context.state.features.pause("evaluate"):
            CALLS.append("evaluation")


def test_an_evaluation_waits_for_the_copies(tiny_config: ConfigContainer, tmp_path: Path, lanes: list[str]) -> None:
    run(tiny_config, tmp_path, "run", Evaluating(), async_save=True)
    kinds = [call.split(":")[0] for call in lanes]
    after_a_save = kinds[kinds.index("beside") :]
    assert after_a_save[:3] == ["beside", "hold back", "evaluation"]


def test_a_save_that_no_update_follows_is_in_order(
    tiny_config: ConfigContainer, tmp_path: Path, lanes: list[str]
) -> None:
    run(tiny_config, tmp_path, "run", async_save=True, save_interval=None, save_at_end=True)
    assert [call.split(":")[0] for call in lanes if call != "update"] == ["in order"]


def test_a_forward_pass_that_changes_weights_fails_the_save(
    tiny_config: ConfigContainer, tmp_path: Path, lanes: list[str]
) -> None:
    def clamping(data_iterator: Any, model: nn.Module) -> Any:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.clamp_(-1, 1)
        return forward_step(data_iterator, model)

    with pytest.raises(CheckpointError, match=r"embedding\.weight was changed .* checkpoint\.copy_beside_step=false"):
        run(tiny_config, tmp_path, "run", step=clamping, async_save=True)
    run(tiny_config, tmp_path, "other", step=clamping, async_save=True, copy_beside_step=False)
