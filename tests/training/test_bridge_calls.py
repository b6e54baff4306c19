"""Megatron Bridge's calls by its module paths: `train`, `save_checkpoint`, `load_checkpoint`, `get_batch`."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn

from onstep import Callback, CallbackManager, pretrain
from onstep.checkpoint import checkpoints
from onstep.config import ConfigContainer, from_dict
from onstep.errors import CheckpointError, ConfigError
from onstep.optim import TrainingOptimizer
from onstep.training import GlobalState, checkpoint_and_decide_exit, save_checkpoint_and_time, train
from onstep.training.checkpointing import load_checkpoint, save_checkpoint
from onstep.training.gpt_step import GPTForwardStep, forward_step, get_batch
from tests.support.contract.bridge_recipes import of_recipe
from tests.support.recording_loggers import record_all
from tests.support.small_runs import TinyModel, eval_loader, loader, small_state, sum_step


class Ends(Callback):
    def __init__(self) -> None:
        self.count = 0

    def on_train_end(self, context: Any) -> None:
        self.count += 1


def parts() -> tuple[GlobalState, nn.Module, TrainingOptimizer]:
    state = small_state(train_iters=2)
    state.cfg.validation.eval_interval = 2
    record_all(state)
    torch.manual_seed(0)
    model = TinyModel()
    return state, model, TrainingOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))


# train


@pytest.mark.parametrize("hooks", [(), (None,), (None, None), (None, None, None)])
def test_train_accepts_the_positions_of_megatron_bridge(hooks: tuple[None, ...]) -> None:
    state, model, optimizer = parts()
    train(sum_step, [model], optimizer, None, loader(), eval_loader(), state, {}, Mock(spec=["tp", "dp"]), *hooks)
    assert state.train_state.step == 2


def test_all_twelve_arguments_of_train_by_position_and_by_keyword() -> None:
    for by_name in (False, True):
        state, model, optimizer = parts()
        seen: list[tuple[float, int]] = []
        callbacks, ends = CallbackManager(), Ends()
        callbacks.add(ends)
        values = {
            "checkpoint_manager": None,
            "pg_collection": Mock(spec=["tp", "dp"]),
            "process_non_loss_data_func": lambda collected, step, writer, seen=seen: seen.append((collected, step)),
            "non_loss_data_func": lambda model: 7.0,
            "callback_manager": callbacks,
        }
        given = (sum_step, [model], optimizer, None, loader(), eval_loader(), state)
        train(*given, **values) if by_name else train(*given, *values.values())
        assert (seen, ends.count) == ([(7.0, 2)], 1)


def test_a_call_of_the_older_page_passes_its_functions_by_position() -> None:
    state, model, optimizer = parts()
    seen: list[float] = []

    def process(collected: float, step: int, writer: object) -> None:
        seen.append(collected)

    train(sum_step, [model], optimizer, None, loader(), eval_loader(), state, {}, process, lambda model: 3.0)  # type: ignore[arg-type]
    assert seen == [3.0]


def test_a_checkpoint_manager_of_the_callers_own_is_named(caplog: pytest.LogCaptureFixture) -> None:
    state, model, optimizer = parts()
    train(sum_step, [model], optimizer, None, loader(), None, state, Mock(spec=["save"]))
    assert "checkpoint_manager, a Mock, is not called" in caplog.text


# Checkpoints


def trained(directory: Path, steps: int = 2) -> tuple[GlobalState, nn.Module, TrainingOptimizer]:
    state, model, optimizer = parts()
    state.cfg.checkpoint.save = state.cfg.checkpoint.load = str(directory)
    state.train_state.step, state.train_state.consumed_train_samples = steps, 4 * steps
    for value in (1.0, 2.0):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, value)
        optimizer.step()
    return state, model, optimizer


def test_what_save_checkpoint_wrote_is_what_load_checkpoint_gives(tmp_path: Path) -> None:
    state, model, optimizer = trained(tmp_path)
    torch.manual_seed(9)
    save_checkpoint(state, [model], optimizer, None, 1e6)
    assert state.checkpoints is not None
    state.checkpoints.close()
    expected = torch.rand(1)

    other, fresh, its_optimizer = parts()
    other.cfg.checkpoint.load = str(tmp_path)
    assert load_checkpoint(other, [fresh], its_optimizer, None) == (2, 1e6)
    assert other.train_state.consumed_train_samples == 8
    assert [one.tolist() for one in fresh.parameters()] == [one.tolist() for one in model.parameters()]
    assert str(its_optimizer.state_dict()) == str(optimizer.state_dict())
    assert torch.rand(1) == expected


def test_only_the_newest_checkpoint_that_is_not_persistent_is_kept(tmp_path: Path) -> None:
    state, model, optimizer = trained(tmp_path)
    for step, passes in ((2, False), (3, True), (4, True)):
        state.train_state.step = step
        save_checkpoint(state, [model], optimizer, None, 0, non_persistent_ckpt=passes)
    assert sorted(one.step for one in checkpoints(tmp_path)) == [2, 4]


@pytest.mark.parametrize("call", [save_checkpoint, save_checkpoint_and_time, checkpoint_and_decide_exit])
def test_saving_by_hand_accepts_bridges_newer_keywords_and_fires_to_its_callbacks(tmp_path: Path, call: Any) -> None:
    state, model, optimizer = trained(tmp_path)
    state.cfg.checkpoint.save_interval = 2
    manager, saved = CallbackManager(), []
    manager.register("on_checkpoint_save", lambda context: saved.append(context.checkpoint_step))
    newer = {} if call is save_checkpoint else {"checkpoint_manager": None, "module_name": "model"}
    call(state, [model], optimizer, None, 0.0, pg_collection=None, callback_manager=manager, **newer)
    assert saved == [2]


def test_finetune_loads_the_weights_alone_and_skipping_the_model_all_the_rest(tmp_path: Path) -> None:
    state, model, optimizer = trained(tmp_path)
    save_checkpoint(state, [model], optimizer, None, 0)
    other, fresh, its_optimizer = parts()
    before = [one.tolist() for one in fresh.parameters()]
    other.cfg.checkpoint.load = str(tmp_path)
    assert load_checkpoint(other, [fresh], its_optimizer, None, skip_load_to_model_and_opt=True) == (2, 0)
    assert [one.tolist() for one in fresh.parameters()] == before
    other, fresh, its_optimizer = parts()
    other.cfg.checkpoint.pretrained_checkpoint = str(tmp_path)
    assert load_checkpoint(other, [fresh], its_optimizer, None) == (0, 0)
    assert [one.tolist() for one in fresh.parameters()] == [one.tolist() for one in model.parameters()]
    assert other.train_state.step == 0


def test_an_empty_directory_is_a_start_unless_a_checkpoint_is_required(tmp_path: Path) -> None:
    state, model, optimizer = parts()
    with pytest.raises(ConfigError, match=r"nothing to load; set checkpoint\.load"):
        load_checkpoint(state, [model], optimizer, None)
    state.cfg.checkpoint.load = str(tmp_path)
    assert load_checkpoint(state, [model], optimizer, None) == (0, 0)
    state.cfg.checkpoint.exit_on_missing_checkpoint = True
    with pytest.raises(CheckpointError):
        load_checkpoint(state, [model], optimizer, None)
    with pytest.raises(ConfigError, match="strict=False is not supported"):
        load_checkpoint(state, [model], optimizer, None, strict=False)


def test_save_checkpoint_needs_a_place_and_saves_states_as_they_are(tmp_path: Path) -> None:
    state, model, optimizer = parts()
    with pytest.raises(CheckpointError, match=r"set checkpoint\.save"):
        save_checkpoint(state, [model], optimizer, None, 0)
    state.cfg.checkpoint.save = str(tmp_path)
    with pytest.raises(ConfigError, match="prebuilt_state_dict must be None"):
        save_checkpoint(state, [model], optimizer, None, 0, prebuilt_state_dict={})
    assert checkpoints(tmp_path) == []


# The forward step


def test_gpt_forward_step_trains_as_forward_step_does(tiny_config: ConfigContainer) -> None:
    def losses(step: Any) -> list[float]:
        history = pretrain(tiny_config, step).trainer_state.log_history
        return [record["loss"] for record in history if "loss" in record]

    class Mine(GPTForwardStep):
        def read(self, state: GlobalState, data_iterator: Any) -> dict[str, Tensor]:
            steps.append(state.train_state.step)
            return super().read(state, data_iterator)

    tiny_config.train.train_iters, tiny_config.logger.log_interval = 3, 1
    steps: list[int] = []
    assert losses(GPTForwardStep()) == losses(forward_step) == losses(Mine())
    assert set(steps) >= {0, 1, 2}


def test_get_batch_gives_bridges_ten_values() -> None:
    tokens = torch.arange(8).reshape(2, 4)
    labels = torch.tensor([[1, 2, -100, 4], [5, 6, 7, -100]])
    batch = get_batch(iter([{"tokens": tokens, "labels": labels}]), ConfigContainer(), pg_collection=None)
    assert len(batch) == 10
    assert batch[0] is tokens
    assert batch.loss_mask.tolist() == [[1, 1, 0, 1], [1, 1, 1, 0]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3]] * 2
    assert batch[5:] == (None,) * 5


def test_get_batch_says_where_the_documents_of_a_packed_sequence_begin() -> None:
    row = {"tokens": torch.zeros(1, 6), "labels": torch.zeros(1, 6), "document_ids": torch.tensor([[0, 0, 1, 1, 1, 2]])}
    batch = get_batch(iter([row]))
    assert batch.cu_seqlens is not None
    assert batch.max_seqlen is not None
    assert (batch.cu_seqlens.tolist(), batch.max_seqlen.item()) == ([0, 2, 5, 6], 3)
    with pytest.raises(ConfigError, match=r"set train\.micro_batch_size=1"):
        get_batch(iter([{**row, "document_ids": torch.zeros(2, 6)}]))


def test_a_recipe_of_bridge_trains_with_smaller_sizes() -> None:
    config = from_dict(of_recipe("qwen25_500m"))
    sizes = {
        "num_layers": 1,
        "hidden_size": 16,
        "ffn_hidden_size": 32,
        "num_attention_heads": 2,
        "num_query_groups": 1,
        "kv_channels": 8,
        "vocab_size": 512,
        "seq_length": 16,
    }
    for name, value in sizes.items():
        setattr(config.model, name, value)
    for name, value in {"train_iters": 4, "global_batch_size": 2, "micro_batch_size": 1}.items():
        setattr(config.train, name, value)
    bridge: Any = config
    bridge.train.eval_interval, bridge.train.eval_iters, bridge.dataset.sequence_length = 2, 1, 16
    bridge.model.tensor_model_parallel_size, bridge.ddp.overlap_grad_reduce = 1, True
    config.dataset.num_workers, config.scheduler.lr_warmup_iters = 0, 1
    config.dist.distributed_backend = config.checkpoint.save = config.checkpoint.load = None
    config.mixed_precision = config.logger.tensorboard_dir = None
    history = pretrain(config).trainer_state.log_history
    assert [record["step"] for record in history if "eval_loss" in record][:2] == [2, 4]
