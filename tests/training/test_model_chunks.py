"""A model of several chunks, which only a pipeline could train, is refused before anything happens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from onstep import CallbackManager
from onstep.checkpoint import checkpoints
from onstep.config import ConfigContainer
from onstep.errors import ConfigError, DataError
from onstep.metrics import calc_params_l2_norm
from onstep.optim import TrainingOptimizer
from onstep.training import GlobalState, evaluate, pretrain, save_checkpoint_and_time, train, train_step
from tests.support.small_runs import RaggedRows, TinyModel, eval_loader, loader, small_state, split, sum_step

CHUNKS = "model has 2 chunks, and only a model of 1 can be trained or evaluated"


@pytest.fixture
def chunks() -> list[nn.Module]:
    return [TinyModel(0), TinyModel(1)]


def optimizer_of(chunks: list[nn.Module]) -> TrainingOptimizer:
    return TrainingOptimizer(torch.optim.SGD([one for chunk in chunks for one in chunk.parameters()], lr=0.1))


def silent() -> CallbackManager:
    """Callbacks that must not be called."""
    manager = CallbackManager()
    for event in ("on_train_start", "on_eval_start", "on_data_init_start"):
        manager.register(event, lambda context: pytest.fail("nothing starts"))
    return manager


def test_training_several_chunks_is_refused(chunks: list[nn.Module]) -> None:
    state = small_state(train_iters=2)
    with pytest.raises(ConfigError, match=CHUNKS):
        train(sum_step, chunks, optimizer_of(chunks), None, loader(), None, state, callback_manager=silent())
    assert state.train_state.step == 0


def test_one_step_of_several_chunks_is_refused_before_data_is_read(chunks: list[nn.Module]) -> None:
    data = iter(split(RaggedRows(4), [2, 2]).micro_batches)
    with pytest.raises(ConfigError, match=CHUNKS):
        train_step(sum_step, data, chunks, optimizer_of(chunks), None, small_state())
    assert len(list(data)) == 2


@pytest.mark.parametrize("is_test", [False, True])
def test_evaluating_several_chunks_is_refused(chunks: list[nn.Module], is_test: bool) -> None:
    with pytest.raises(ConfigError, match=CHUNKS):
        evaluate(small_state(), sum_step, eval_loader(), chunks, None, None, callback_manager=silent(), is_test=is_test)


def test_hooks_that_return_several_chunks_are_refused_before_the_data_is_opened(tiny_config: ConfigContainer) -> None:
    def doubled(chunks: list[nn.Module]) -> list[nn.Module]:
        return [*chunks, nn.Linear(2, 2)]

    with pytest.raises(ConfigError, match=CHUNKS):
        pretrain(tiny_config, callbacks=silent(), pre_wrap_hooks=[doubled])


@pytest.mark.parametrize("model", [nn.Sequential(TinyModel(0), TinyModel(1)), TinyModel()])
def test_a_module_without_a_list_is_refused(model: Any) -> None:
    with pytest.raises(ConfigError, match=r"model must be a list with one module, got \w+; pass \[model\]"):
        train(sum_step, model, optimizer_of([model]), None, loader(), None, small_state(train_iters=2))


def test_a_list_of_no_chunks_is_refused() -> None:
    with pytest.raises(ConfigError, match="model has 0 chunks"):
        train(sum_step, [], optimizer_of([TinyModel()]), None, loader(), None, small_state(train_iters=2))


def test_several_iterators_are_refused_like_the_chunks_they_belong_to(chunks: list[nn.Module]) -> None:
    def data() -> list[Any]:
        return [iter(split(RaggedRows(4), [2, 2]).micro_batches) for _ in range(2)]

    model, state = chunks[:1], small_state(train_iters=1)
    state.cfg.validation.eval_iters = 1
    with pytest.raises(DataError, match="list of 2 iterators"):
        train_step(sum_step, data(), model, optimizer_of(model), None, state)
    with pytest.raises(DataError, match="list of 2 iterators"):
        train(sum_step, model, optimizer_of(model), None, data(), None, state)
    with pytest.raises(DataError, match="list of 2 iterators"):
        evaluate(state, sum_step, data(), model, None, None)


def test_what_only_looks_at_a_model_covers_all_of_its_chunks(chunks: list[nn.Module], tmp_path: Path) -> None:
    squares = sum(float(one.detach().double().square().sum()) for chunk in chunks for one in chunk.parameters())
    assert calc_params_l2_norm(chunks, None) == pytest.approx(squares**0.5)
    state = GlobalState(ConfigContainer())
    state.cfg.checkpoint.save = str(tmp_path)
    from onstep.events import Dispatcher
    from onstep.training.checkpointing.writing import RunCheckpoints

    state.checkpoints = RunCheckpoints(state, Dispatcher(None, state), tmp_path)
    save_checkpoint_and_time(state, chunks, optimizer_of(chunks), None, 0.0, None, train_data_iterator=loader())
    state.checkpoints.finish()
    [saved] = checkpoints(tmp_path)
    assert saved.manifest.components["model"].size_bytes >= 2 * 4 * sum(p.numel() for p in chunks[0].parameters())
