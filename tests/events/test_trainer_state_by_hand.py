"""A `TrainerState`, a `TrainerControl` and an `ExportableState` made by hand, beside those of `transformers`."""

from __future__ import annotations

import dataclasses

import pytest

from onstep import ExportableState, TrainerCallback, TrainerControl, TrainerState
from onstep.errors import DataError

theirs = pytest.importorskip("transformers.trainer_callback")


def callback_of(*bases):
    class Counts(*bases):
        def __init__(self, limit=3):
            self.limit, self.count = limit, 0

        def state(self):
            return {"args": {"limit": self.limit}, "attributes": {"count": self.count}}

    return Counts


def test_the_fields_and_defaults_are_those_of_transformers():
    assert [(one.name, one.default) for one in dataclasses.fields(TrainerState)] == [
        (one.name, one.default) for one in dataclasses.fields(theirs.TrainerState)
    ]
    assert dataclasses.asdict(TrainerState()) == dataclasses.asdict(theirs.TrainerState())


def test_the_saved_file_is_the_same_and_either_reads_the_others(tmp_path):
    values = {"global_step": 3, "best_metric": 0.5, "log_history": [{"loss": 1.0, "step": 3}], "trial_params": {"a": 1}}
    TrainerState(**values).save_to_json(str(tmp_path / "ours.json"))
    theirs.TrainerState(**values).save_to_json(str(tmp_path / "theirs.json"))

    assert (tmp_path / "ours.json").read_bytes() == (tmp_path / "theirs.json").read_bytes()
    ours = TrainerState.load_from_json(str(tmp_path / "theirs.json"))
    assert dataclasses.asdict(ours) == dataclasses.asdict(
        theirs.TrainerState.load_from_json(str(tmp_path / "ours.json"))
    )


def test_a_file_that_is_no_saved_state_is_refused(tmp_path):
    (tmp_path / "other.json").write_text('{"steps": 3}')

    with pytest.raises(DataError, match=r"other\.json is not a saved TrainerState: it has no field steps"):
        TrainerState.load_from_json(str(tmp_path / "other.json"))


def test_shares_of_a_run_become_steps():
    class Args:
        logging_steps, eval_steps, save_steps = 0.1, None, 7

    ours, reference = TrainerState(), theirs.TrainerState()
    ours.compute_steps(Args, 95)
    reference.compute_steps(Args, 95)

    assert (ours.logging_steps, ours.eval_steps, ours.save_steps) == (10, 500, 7)
    assert dataclasses.asdict(ours) == dataclasses.asdict(reference)


def test_the_states_of_callbacks_are_kept_by_class():
    ours, reference = (
        callback_of(TrainerCallback, ExportableState),
        callback_of(theirs.TrainerCallback, theirs.ExportableState),
    )

    def states(cls, state_cls, control):
        return state_cls(stateful_callbacks=[cls(1), cls(2), control()]).stateful_callbacks

    assert states(ours, TrainerState, TrainerControl) == states(reference, theirs.TrainerState, theirs.TrainerControl)
    with pytest.raises(TypeError, match="must be ExportableState objects, got TrainerCallback"):
        TrainerState(stateful_callbacks=[TrainerCallback()])


def test_an_exportable_state_is_made_again_from_its_state():
    cls = callback_of(TrainerCallback, ExportableState)
    one = cls(5)
    one.count = 2

    again = cls.from_state(one.state())

    assert (again.limit, again.count) == (5, 2)
    assert cls.from_state({}).limit == 3
    with pytest.raises(NotImplementedError, match="must define state"):
        ExportableState().state()


def test_a_control_has_the_constructor_and_the_resets_of_transformers():
    ours, reference = TrainerControl(True, True, True, True, True), theirs.TrainerControl(True, True, True, True, True)
    assert ours.state() == reference.state()
    for reset in ("_new_step", "_new_epoch", "_new_training"):
        getattr(ours, reset)()
        getattr(reference, reset)()
        assert ours.state() == reference.state()
    ours.should_foo = True
    assert ours.should_foo
    assert TrainerControl.from_state(reference.state()) == TrainerControl()
