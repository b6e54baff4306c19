"""The best value so far, and where the weights that reached it are."""

from __future__ import annotations

from pathlib import Path

from onstep.checkpoint import decode_state, encode_state
from onstep.train_state import TrainState
from onstep.training import GlobalState
from onstep.training.stages.best_metric import note_best_checkpoint, note_best_metric
from tests.support.small_runs import small_state


def evaluated(state: GlobalState, step: int, loss: float) -> None:
    state.train_state.step = step
    note_best_metric(state, {"eval_loss": loss})


def watching_state() -> GlobalState:
    state = small_state()
    state.cfg.validation.metric_for_best_model = "loss"
    return state


def test_the_best_checkpoint_is_that_of_the_best_step_also_when_it_is_durable_late() -> None:
    state = watching_state()
    evaluated(state, 2, 1.0)
    assert state.trainer_state.best_model_checkpoint is None
    state.train_state.step = 3  # an asynchronous save is durable some steps later
    note_best_checkpoint(state, 2, Path("run") / "checkpoint-2")
    assert state.trainer_state.best_model_checkpoint == str(Path("run") / "checkpoint-2")
    evaluated(state, 4, 2.0)
    note_best_checkpoint(state, 4, "run/checkpoint-4")
    assert state.trainer_state.best_model_checkpoint == str(Path("run") / "checkpoint-2")


def test_an_earlier_best_stays_until_the_best_step_has_a_checkpoint() -> None:
    state = watching_state()
    evaluated(state, 2, 1.0)
    note_best_checkpoint(state, 2, "run/checkpoint-2")
    evaluated(state, 3, 0.5)
    assert state.trainer_state.best_model_checkpoint == "run/checkpoint-2"
    note_best_checkpoint(state, 3, "run/checkpoint-3")
    assert state.trainer_state.best_model_checkpoint == "run/checkpoint-3"


def test_a_run_without_a_best_step_has_no_best_checkpoint() -> None:
    state = small_state()
    note_best_checkpoint(state, 0, "run/checkpoint-0")
    assert state.trainer_state.best_model_checkpoint is None


def test_a_resumed_run_knows_it_from_the_checkpoint_itself_and_from_later_ones() -> None:
    state = watching_state()
    evaluated(state, 2, 1.0)
    of_the_best = decode_state(*encode_state(state.train_state.state_dict()))
    note_best_checkpoint(state, 2, "run/checkpoint-2")
    of_a_later_one = decode_state(*encode_state(state.train_state.state_dict()))

    resumed = watching_state()
    resumed.train_state.load_state_dict(of_the_best)
    note_best_checkpoint(resumed, 2, "run/checkpoint-2")
    assert resumed.trainer_state.best_model_checkpoint == "run/checkpoint-2"
    later = TrainState()
    later.load_state_dict(of_a_later_one)
    assert later.best_model_checkpoint == "run/checkpoint-2"
    without = {key: value for key, value in of_a_later_one.items() if key != "best_model_checkpoint"}
    older = TrainState()
    older.load_state_dict(without)  # of a version that did not know the field
    assert older.best_model_checkpoint is None
