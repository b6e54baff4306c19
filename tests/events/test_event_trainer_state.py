"""The read-only view that Hugging Face-style callbacks get as `state`."""

from __future__ import annotations

import copy

import pytest

from onstep.events import RunInfo, TrainerState
from onstep.train_state import TrainState


def view(progress=None, **info):
    return TrainerState(progress or TrainState(), RunInfo(**info))


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
    "name", ["global_step", "max_steps", "best_metric", "best_model_checkpoint", "trial_name", "anything"]
)
def test_setting_is_refused_and_says_what_to_do(name):
    with pytest.raises(
        AttributeError, match=rf"state\.{name} is a read-only view of the run's progress; use `control`"
    ):
        setattr(view(), name, 1)


def test_a_field_that_does_not_exist_is_an_attribute_error():
    assert not hasattr(view(), "no_such_field")
    with pytest.raises(AttributeError, match="'no_such_field'"):
        _ = view().no_such_field


def test_log_history_is_the_runs_list_and_a_copy_of_the_view_still_works():
    info = RunInfo()
    state = TrainerState(TrainState(step=2), info)
    info.log_history.append({"loss": 1.0})

    assert state.log_history == [{"loss": 1.0}]
    assert copy.copy(state).global_step == copy.deepcopy(state).global_step == 2


def test_every_field_of_transformers_trainer_state_has_an_answer():
    trainer_callback = pytest.importorskip("transformers.trainer_callback")
    state = view()

    missing = [name for name in trainer_callback.TrainerState.__dataclass_fields__ if not hasattr(state, name)]

    assert missing == []
