"""How the loop fires events: what a context is made from, and what an event costs that nobody listens to."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import sys
from types import SimpleNamespace

import pytest

import onstep.events
from onstep.events import Callback, CallbackContext, CallbackManager, Control, Dispatcher, TrainerCallback
from onstep.events.events import EVENTS


@pytest.fixture
def loop_run(run):
    """A run with all that the loop's own has for its callbacks."""
    fields = {"trainer": None, "processing_class": "bpe", "train_dataloader": "train", "eval_dataloader": "eval"}
    for name, value in {"control": Control(), "world": SimpleNamespace(rank=0, size=1), **fields}.items():
        setattr(run, name, value)
    return run


@pytest.fixture
def manager():
    return CallbackManager()


@pytest.fixture
def dispatcher(manager, loop_run):
    return Dispatcher(manager, loop_run, ["chunk"], "optimizer", "scheduler")


class Step:
    """Counts how often its loss is asked for."""

    grad_norm, skipped_iter, sample_ids = 2.0, False, [[7]]
    reads = 0

    @property
    def loss_dict(self):
        self.reads += 1
        return {"loss": 1.0}


def test_fields_are_read_from_the_step_once_and_only_where_somebody_listens(manager, dispatcher):
    step, seen = Step(), []
    dispatcher.on_train_step_end(step)
    assert step.reads == 0

    manager.register("on_train_step_end", seen.append)
    manager.register("on_train_step_end", lambda loss_dict, **kwargs: seen.append(loss_dict))
    dispatcher.on_train_step_end(step)

    context, losses = seen
    assert losses == context.loss_dict == {"loss": 1.0}
    assert (context.grad_norm, context.skipped_iter, context.sample_ids) == (2.0, False, [[7]])
    assert step.reads == 1


def test_keywords_come_before_what_the_step_says_and_what_nobody_gives_is_none(manager, dispatcher):
    seen = []
    manager.register("on_train_step_end", seen.append)

    dispatcher.on_train_step_end(Step(), grad_norm=3.0)
    dispatcher.on_train_step_end(skipped_iter=True)

    assert [context.grad_norm for context in seen] == [3.0, None]
    assert [context.skipped_iter for context in seen] == [False, True]


def test_a_source_that_lacks_a_field_is_an_error(manager, dispatcher):
    manager.register("on_log", lambda: None)

    with pytest.raises(AttributeError, match="logs"):
        dispatcher.on_log(object())


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.name)
def test_a_context_is_what_the_constructor_would_make(event, manager, dispatcher, loop_run):
    seen = []
    manager.register(event.name, seen.append)
    objects = {
        "optimizer": "optimizer",
        "scheduler": "scheduler",
        "train_dataloader": "train",
        "eval_dataloader": "eval",
    }

    getattr(dispatcher, event.name)()

    made = CallbackContext(
        loop_run,
        ["chunk"],
        manager.user_state,
        event=event.name,
        control=loop_run.control,
        processing_class="bpe",
        callback_timer=manager.callback_timer,
        **{name: value for name, value in objects.items() if name in event.fields},
    )
    assert repr(seen[0]) == repr(made)
    assert seen[0].user_state is manager.user_state
    assert dataclasses.replace(seen[0], rank=3).rank == 3
    known = seen[0].hf_keywords()
    assert {"lr_scheduler" if name == "scheduler" else name for name in objects} <= set(known)
    assert [known[name] for name in ("optimizer", "lr_scheduler")] == ["optimizer", "scheduler"]


def test_every_firing_has_a_context_of_its_own(manager, dispatcher):
    seen = []
    manager.register("on_step_end", lambda context: setattr(context, "reason", "mine"))
    manager.register("on_step_end", seen.append)

    dispatcher.on_step_end()
    dispatcher.on_step_end()

    assert seen[0] is not seen[1]
    assert seen[0].control is seen[1].control


def test_callbacks_that_are_added_and_removed_count_from_the_next_event_on(manager, dispatcher):
    seen = []

    def once(context):
        seen.append("once")
        manager.remove(once)

    dispatcher.on_step_end()
    manager.register("on_step_begin", lambda: manager.register("on_step_end", once))
    dispatcher.on_step_begin()
    dispatcher.on_step_end()
    dispatcher.on_step_end()

    assert seen == ["once"]


def test_without_a_manager_every_event_is_a_no_op(loop_run):
    dispatcher = Dispatcher(None, loop_run)

    for event in EVENTS:
        getattr(dispatcher, event.name)(object(), anything=1)


def test_a_name_that_is_no_event_is_an_error(dispatcher):
    with pytest.raises(AttributeError, match="on_stepp_end"):
        dispatcher.on_stepp_end()


def test_endings_reach_everybody(manager, dispatcher):
    seen = []

    class Fails(Callback):
        def on_run_end(self, context):
            raise ValueError("first")

    manager.add(Fails())
    manager.register("on_run_end", seen.append)

    with pytest.raises(ValueError, match="first"):
        dispatcher.on_run_end(reason="completed", exception=None)

    assert [context.reason for context in seen] == ["completed"]


def test_step_and_epoch_stand_in_the_context(manager, dispatcher, loop_run):
    loop_run.train_state.step, loop_run.train_state.epoch = 7, 2
    seen = []
    manager.register("on_step_end", lambda context: seen.append((context.step, context.epoch)))

    dispatcher.on_step_end()

    assert seen == [(7, 2.0)]


class Counting(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        pass


def test_what_keyword_handlers_are_called_with_is_built_once_and_only_for_those_who_look(manager, dispatcher):
    manager.add([Counting() for _ in range(5)])
    calls = _package_calls(dispatcher.on_step_end)
    assert "hf_keywords" not in calls
    assert calls.count("call_with_leading") == 5

    for _ in range(3):
        manager.register("on_step_end", lambda **kwargs: None)
    calls = _package_calls(dispatcher.on_step_end)

    assert calls.count("hf_keywords") == 1
    assert calls[-2:] == ["call_by_keyword"] * 2, "nothing but a wrapper for each further listener"


def test_calls_of_an_event_do_not_grow_with_context_style_listeners(manager, dispatcher):
    assert _package_calls(dispatcher.on_step_end) == []
    for _ in range(5):
        manager.register("on_step_end", lambda context: None)

    assert _package_calls(dispatcher.on_step_end) == ["fire", "call"]


def test_what_is_only_called_on_the_main_rank_costs_other_ranks_nothing(manager, loop_run):
    class MainOnly(Callback):
        ranks = "main"

        def on_step_end(self, context):
            raise AssertionError("this is rank 1")

    loop_run.world.rank = 1
    manager.add(MainOnly())
    dispatcher = Dispatcher(manager, loop_run)

    assert _package_calls(dispatcher.on_step_end) == []
    manager.register("on_step_end", lambda context: None)
    assert _package_calls(dispatcher.on_step_end) == ["fire", "call"]


def test_what_a_callback_skips_as_it_is_configured_is_not_registered(manager, dispatcher):
    class Skips(TrainerCallback):
        def skips_event(self, name):
            return name == "on_prediction_step"

        def on_prediction_step(self, args, state, control, **kwargs):
            raise AssertionError("skipped")

        def on_log(self, args, state, control, **kwargs):
            pass

    manager.add(Skips())

    dispatcher.on_eval_step_end()
    assert [event for event in manager.events if manager.has_callbacks(event)] == ["on_log"]


def test_copies_of_a_manager_have_no_run_of_their_own(manager, dispatcher, loop_run):
    loop_run.train_dataloader = iter([])  # what cannot be copied
    copies = [pickle.loads(pickle.dumps(manager)), copy.deepcopy(manager)]

    for one in copies:
        one.register("on_step_end", lambda: None)

    assert _package_calls(dispatcher.on_step_end) == []


def test_another_event_fired_with_the_same_context_leaves_the_outer_one_alone(manager, dispatcher):
    seen = []

    class Fires(TrainerCallback):
        def on_log(self, args, state, control, logs, **kwargs):
            manager.fire("on_eval_start", context_of["log"])

    context_of, inner = {}, []
    manager.register("on_log", lambda context: context_of.update(log=context))
    manager.add(Fires())
    manager.register("on_eval_start", lambda **kwargs: inner.append("logs" in kwargs))
    manager.register("on_log", lambda logs, **kwargs: seen.append(logs))
    manager.register("on_log", lambda context: seen.append(context.event))

    dispatcher.on_log(logs={"loss": 1.0})

    assert seen == [{"loss": 1.0}, "on_log"]
    assert inner == [False], "keywords are those of the event that is fired"


def _package_calls(work):
    """Names of the functions of `onstep.events` that a call runs."""
    directory, names = onstep.events.__path__[0], []

    def note(frame, event, argument):
        if event == "call" and frame.f_code.co_filename.startswith(directory):
            names.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return names
