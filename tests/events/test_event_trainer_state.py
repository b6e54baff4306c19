"""The view of a run that Hugging Face-style callbacks get as `state`."""

from __future__ import annotations

import copy
import dataclasses
import json

import pytest

from onstep.distributed import World
from onstep.events import Control, RunInfo, RunState, TrainerState
from onstep.train_state import TrainState
from onstep.training.run import Run


def view(progress=None, **info):
    return RunState(progress or TrainState(), RunInfo(**info))


def test_progress_is_seen_as_it_moves():
    progress = TrainState(step=3)
    state = view(progress)

    progress.step = 4
    assert state.best_model_checkpoint is None
    progress.best_metric, progress.best_step, progress.best_model_checkpoint = 1.5, 2, "checkpoints/checkpoint-2"
    progress.consumed_tokens, progress.floating_point_operations_so_far = 640, 1e9

    assert state.global_step == 4
    assert (state.best_metric, state.best_global_step) == (1.5, 2)
    assert state.best_model_checkpoint == "checkpoints/checkpoint-2"
    assert (state.num_input_tokens_seen, state.total_flos) == (640, 1e9)


def test_facts_of_the_run_are_seen():
    state = view(max_steps=100, num_train_epochs=2, logging_steps=5, eval_steps=10, save_steps=20, train_batch_size=8)

    assert (state.max_steps, state.num_train_epochs, state.train_batch_size) == (100, 2, 8)
    assert (state.logging_steps, state.eval_steps, state.save_steps) == (5, 10, 20)


def test_epoch_counts_optimizer_steps_so_that_accumulation_does_not_slow_it():
    state = view(TrainState(step=25, epoch=2, steps_in_epoch=5), steps_per_epoch=10)

    assert state.epoch == 2.5
    assert (state.raw_epoch, state.epoch_start_step, state.epoch_train_steps) == (2, 20, 10)


def test_epoch_of_data_without_length_is_whole():
    assert view(TrainState(epoch=1, steps_in_epoch=7)).epoch == 1.0


@pytest.mark.parametrize(("rank", "local_rank", "world", "local"), [(0, 0, True, True), (8, 0, False, True)])
def test_process_zero_is_told_from_ranks(rank, local_rank, world, local):
    state = view(rank=rank, local_rank=local_rank)

    assert (state.is_world_process_zero, state.is_local_process_zero) == (world, local)


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        (
            "global_step",
            "the loop counts it; keep a count of your own under another name, such as state.my_global_step",
        ),
        ("epoch", "the loop counts it"),
        ("num_train_epochs", "set it in TrainingArguments before training, or set state.max_steps"),
        ("train_batch_size", "set it in TrainingArguments before training"),
        ("is_world_process_zero", "it follows from the rank"),
        ("num_processes", "set it in TrainingArguments before training"),
    ],
)
def test_what_the_loop_owns_is_refused_by_name_and_says_what_to_do(name, remedy):
    with pytest.raises(AttributeError, match=rf"state\.{name} cannot be set during a run: {remedy}"):
        setattr(view(), name, 1)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("max_steps", "train_iters"),
        ("logging_steps", "log_interval"),
        ("eval_steps", "eval_interval"),
        ("save_steps", "save_interval"),
    ],
)
def test_a_number_of_steps_that_is_set_shows_at_once_and_is_one_request(name, key):
    control, progress = Control(), TrainState()
    state = RunState(progress, RunInfo(max_steps=9, logging_steps=9, eval_steps=9, save_steps=9), lambda: control)

    setattr(state, name, 5)
    setattr(state, name, 5)

    assert getattr(state, name) == 5
    assert [request.details for request in control.pop_requests()] == [{"key": key, "value": 5}]
    assert getattr(state, name) == 9  # not decided yet
    progress.overrides[key] = 5
    assert getattr(state, name) == 5


def test_an_interval_without_a_strategy_has_no_effect_as_in_hugging_face():
    control = Control()
    state = RunState(TrainState(), RunInfo(eval_steps=0), lambda: control)

    state.eval_steps = 3

    assert (state.eval_steps, control.requests) == (3, [])


def test_the_best_metric_can_be_set():
    progress = TrainState()
    state = view(progress)

    state.best_metric, state.best_global_step, state.best_model_checkpoint = 0.5, 3, "checkpoint-3"

    assert (progress.best_metric, progress.best_step, progress.best_model_checkpoint) == (0.5, 3, "checkpoint-3")


def test_attributes_of_the_user_live_and_are_saved(caplog):
    progress = TrainState()
    state = view(progress)
    state.my_best, state.seen, state.module = 3, [1, {"a": None}], object()
    state.trial_name = "third"

    saved = progress.state_dict()
    assert "checkpoints do not include state.module:" in caplog.text
    caplog.clear()
    progress.state_dict()
    later = TrainState()
    later.load_state_dict(saved)

    assert (state.my_best, hasattr(state, "module"), caplog.text) == (3, True, "")
    assert (view(later).my_best, view(later).seen, view(later).trial_name) == (3, [1, {"a": None}], "third")
    assert not hasattr(view(later), "module")
    del state.my_best
    assert not hasattr(state, "my_best")
    assert "user_attributes" not in TrainState().state_dict()


def test_a_view_is_a_trainer_state_and_its_copy_stands_still():
    progress = TrainState(step=2, epoch=1)
    state = view(progress, steps_per_epoch=4)
    state.log_history.append({"loss": 1.0})
    state.mine = [1]

    shallow, deep = copy.copy(state), copy.deepcopy(state)
    progress.step = 3
    state.mine.append(2)

    assert isinstance(state, TrainerState)
    assert type(shallow) is type(deep) is TrainerState
    assert (state.global_step, shallow.global_step, deep.global_step) == (3, 2, 2)
    assert (shallow.mine, deep.mine, deep.log_history) == ([1, 2], [1], [{"loss": 1.0}])
    assert (deep.raw_epoch, deep.epoch_train_steps) == (1, 4)
    assert dataclasses.asdict(state) | {"global_step": 2} == dataclasses.asdict(deep)
    assert json.loads(json.dumps(dataclasses.asdict(state)))["epoch"] == 1.0


def test_epochs_are_a_whole_number():
    assert view(num_train_epochs=2.5).num_train_epochs == 3
    assert isinstance(view(num_train_epochs=2.0).num_train_epochs, int)


def test_a_field_that_does_not_exist_is_an_attribute_error():
    assert not hasattr(view(), "no_such_field")
    with pytest.raises(AttributeError, match="'no_such_field'"):
        _ = view().no_such_field


def test_log_history_is_the_runs_list_and_a_copy_of_the_view_still_works():
    info = RunInfo()
    state = RunState(TrainState(step=2), info)
    info.log_history.append({"loss": 1.0})

    assert state.log_history == [{"loss": 1.0}]
    assert copy.copy(state).global_step == copy.deepcopy(state).global_step == 2


def test_every_field_of_transformers_trainer_state_has_an_answer():
    trainer_callback = pytest.importorskip("transformers.trainer_callback")
    state = view()

    missing = [name for name in trainer_callback.TrainerState.__dataclass_fields__ if not hasattr(state, name)]

    assert missing == []


def test_a_run_that_nobody_has_set_up_knows_its_rank():
    state = Run(world=World(1, 2, 1))
    assert not RunState(state.train_state, state.control, state.info).is_world_process_zero
    assert (state.info.rank, state.info.local_rank, state.info.num_processes) == (1, 1, 2)
