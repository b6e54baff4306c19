"""Callbacks ask, the loop decides."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from unittest import mock

import pytest

from onstep.events import Control, Request, TrainerControl
from onstep.events.control import FLAGS

ASKS = {
    "should_training_stop": Control.stop,
    "should_epoch_stop": Control.end_epoch,
    "should_save": Control.save,
    "should_evaluate": Control.evaluate,
    "should_log": Control.log,
    "should_abort_without_save": Control.abort,
}


def flags(control):
    return {flag for flag in FLAGS if getattr(control, flag)}


def test_the_flags_are_those_of_the_documented_control_and_start_unset():
    assert set(FLAGS) == set(ASKS) == set(vars(TrainerControl()))
    assert flags(TrainerControl()) == flags(Control()) == set()


@pytest.mark.parametrize("flag", FLAGS)
def test_asking_by_method_and_by_flag_leave_the_same_request(flag):
    by_method = Control(rank=3, author="Guard", event="on_log")
    by_flag = Control(rank=3, author="Guard", event="on_log")

    ASKS[flag](by_method)
    setattr(by_flag, flag, True)

    assert by_method.requests == by_flag.requests == [Request(flag, "Guard", "on_log", "", 3)]
    assert getattr(by_method, flag) is getattr(by_flag, flag) is True


def test_a_request_says_who_asked_for_what_when_and_why():
    control = Control(rank=2, author="Divergence", event="on_log")

    control.stop("loss is 4 times its best")

    assert (
        str(control.requests[0]) == "asked to stop by 'Divergence' during 'on_log' on rank 2: loss is 4 times its best"
    )


def test_an_abort_also_stops_and_is_one_request():
    control = Control()

    control.abort("broken")

    assert flags(control) == {"should_training_stop", "should_abort_without_save"}
    assert [request.flag for request in control.requests] == ["should_abort_without_save"]


def test_the_first_who_asks_is_the_one_on_record():
    control = Control()
    for author in ("first", "second"):
        control.author = author
        control.stop("my reason")
        control.should_training_stop = True

    assert [request.author for request in control.requests] == ["first"]


def test_a_request_withdrawn_by_a_later_callback_is_off_the_record():
    control = Control(author="hasty")
    control.stop("too early")
    control.save("keep this")

    control.author = "calm"
    control.should_training_stop = False
    control.author = "sure"
    control.should_training_stop = True

    assert [(request.flag, request.author) for request in control.requests] == [
        ("should_save", "hasty"),
        ("should_training_stop", "sure"),
    ]


def test_what_is_due_is_no_request_and_can_be_vetoed():
    control = Control()

    control.set_due(log=True, evaluate=True, save=False)
    assert control.requests == []
    control.should_evaluate = False

    assert flags(control) == {"should_log"}
    assert control.vector()[-1] == 0


def test_filling_keeps_what_was_asked_for_earlier_in_the_step():
    control = Control()
    control.log()
    control.evaluate()
    control.save("now")

    control.set_due(log=False, evaluate=False, save=False)

    assert flags(control) == {"should_log", "should_evaluate", "should_save"}


def test_flags_are_plain_booleans_whatever_was_assigned():
    control = Control()

    control.should_save, control.should_log = 1, None

    assert control.should_save is True
    assert control.should_log is False


def test_an_unknown_flag_is_kept_and_seen_later():
    control = Control()

    control.should_foo, control.note = True, "mine"
    returned = copy.copy(control)
    returned.should_bar = 1
    control.merge(returned)

    assert (returned.should_foo, returned.note) == (True, "mine")
    assert control.user_attributes() == {"should_foo": True, "note": "mine", "should_bar": 1}
    assert control.requests == []


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("should_stop", "'should_epoch_stop' or 'should_training_stop'"),
        ("should_eval", "'should_evaluate'"),
        ("should_train_stop", "'should_training_stop'"),
        ("should_stop_training", "'should_training_stop'"),
        ("stop_training", "'should_training_stop'"),
        ("should_save_model", "'should_save'"),
    ],
)
def test_an_attribute_that_is_almost_a_flag_is_named_once(name, meant):
    control = Control()

    with pytest.warns(UserWarning, match=f"no flag '{name}', so setting it does nothing.*did you mean {meant}"):
        setattr(control, name, True)
    setattr(control, name, False)

    assert getattr(control, name) is False


def test_the_vector_of_every_set_of_flags_comes_back_through_set_agreed():
    for bits in range(2 ** len(FLAGS)):
        wanted = {flag for index, flag in enumerate(FLAGS) if bits >> index & 1}
        sender, receiver = Control(**dict.fromkeys(wanted, True)), Control(should_log=True)

        asked = receiver.set_agreed(sender.vector())

        assert flags(receiver) == wanted
        assert asked is False


def test_over_ranks_set_wins_and_everybody_learns_that_something_was_asked():
    ranks = [Control(rank=0), Control(rank=1)]
    ranks[0].set_due(log=True, evaluate=False, save=False)
    ranks[1].stop("only here")

    agreed = [max(column) for column in zip(*(control.vector() for control in ranks), strict=True)]

    assert [control.set_agreed(agreed) for control in ranks] == [True, True]
    assert flags(ranks[0]) == flags(ranks[1]) == {"should_log", "should_training_stop"}
    assert [request.rank for control in ranks for request in control.pop_requests()] == [1]


def test_adopting_adds_no_request():
    control = Control()

    control.set_agreed([1, 1, 1, 1, 1, 1, 1])

    assert control.requests == []


def test_a_vector_of_another_length_is_refused():
    with pytest.raises(ValueError, match="zip"):
        Control().set_agreed([1, 0, 0])


def test_requests_are_handed_over_once():
    control = Control()
    control.stop()

    assert len(control.pop_requests()) == 1
    assert control.pop_requests() == []
    assert control.should_training_stop is True


def test_honoured_flags_can_be_asked_for_again():
    control = Control()
    control.save()
    control.pop_requests()

    control.clear("should_save")
    assert control.should_save is False
    control.save()

    assert [request.flag for request in control.requests] == ["should_save"]


def test_a_new_run_forgets_the_stop_of_the_last_one():
    control = Control()
    control.abort()

    control.clear_stops()

    assert flags(control) == set()
    assert control.vector() == [0] * 7


def test_a_returned_control_replaces_the_flags_but_takes_back_no_stop():
    control = Control(should_save=True, should_epoch_stop=True, should_training_stop=True)

    control.merge(TrainerControl(should_log=True))

    assert flags(control) == {"should_log", "should_training_stop"}


def test_a_returned_control_asks_in_the_name_of_its_callback():
    control = Control(author="Returns", event="on_step_end")

    control.merge(TrainerControl(should_evaluate=True))

    assert [(request.flag, request.author) for request in control.requests] == [("should_evaluate", "Returns")]


def test_a_changed_copy_that_is_returned_is_one_request():
    control = Control(author="Copies")
    for copied in (copy.copy(control), copy.deepcopy(control)):
        copied.should_save = True
        assert control.should_save is False
        assert control.requests == []

        control.merge(copied)

        assert [request.author for request in control.pop_requests()] == ["Copies"]
        control.clear("should_save")


def test_a_returned_control_says_nothing_about_flags_it_lacks():
    control = Control(should_log=True, should_abort_without_save=True)

    control.merge(SimpleNamespace(should_save=True))

    assert flags(control) == {"should_save", "should_log", "should_abort_without_save"}


@pytest.mark.parametrize("returned", [None, True, 3.0, "save", {"should_save": True}, object(), mock.MagicMock()])
def test_whatever_else_is_returned_changes_nothing(returned):
    control = Control(should_log=True)

    control.merge(returned)

    assert flags(control) == {"should_log"}
    assert control.requests == []


def test_a_returned_value_that_is_no_control_is_named_once(caplog):
    control = Control()
    control.author, control.event = "callback 'Mine'", "on_step_end"

    for value in (None, control, True, True):
        control.merge(value)

    [said] = caplog.messages
    assert said.startswith("callback 'Mine' returned a bool from on_step_end, which has no effect; return None, or")
