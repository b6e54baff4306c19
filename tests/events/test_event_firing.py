"""Calling of callbacks: order, ranks, intervals, requests, and what happens when one of them raises."""

from __future__ import annotations

import pytest

from onstep.errors import ConfigError
from onstep.events import Callback, CallbackManager, Control, TrainerCallback, TrainerControl


def listening(*fns, event="on_train_start"):
    manager = CallbackManager()
    for fn in fns:
        manager.register(event, fn)
    return manager


def raising(error):
    def fail(context):
        raise error

    return fail


class Fails(Callback):
    """Raises at every step, and keeps count."""

    def __init__(self, error=None):
        self.error = error or ValueError("disk full")
        self.calls = 0

    def on_train_step_end(self, context):
        self.calls += 1
        raise self.error

    def on_log(self, context):
        self.calls += 1


# --- calling


def test_firing_what_nobody_listens_to_does_nothing(notify):
    context = notify(CallbackManager(), "on_train_start")

    assert context.control.vector() == [0] * 7


def test_the_context_knows_its_event(notify):
    seen = []

    notify(listening(lambda context: seen.append(context.event)), "on_train_start")

    assert seen == ["on_train_start"]


def test_changes_of_user_state_are_seen_by_everybody_and_kept(notify):
    manager = listening(lambda context: context.user_state.update(count=context.user_state.get("count", 0) + 1))

    notify(manager, "on_train_start")
    notify(manager, "on_train_start")

    assert manager.user_state == {"count": 2}


def test_callbacks_are_called_on_all_ranks_unless_they_want_the_main_one(notify):
    seen = []

    class Everywhere(Callback):
        def on_log(self, context):
            seen.append(("all", context.rank))

    class MainOnly(TrainerCallback):
        ranks = "main"

        def on_log(self, args, state, control, **kwargs):
            seen.append(("main", control.rank))

    def on_main(context):
        seen.append(("fn", context.rank))

    on_main.ranks = "main"
    manager = listening(on_main, event="on_log")
    manager.add([Everywhere(), MainOnly()])
    for rank in (0, 1):
        notify(manager, "on_log", rank=rank, control=Control(rank=rank))

    assert seen == [("fn", 0), ("all", 0), ("main", 0), ("all", 1)]


def test_a_registered_method_keeps_the_options_of_its_object(notify):
    class MainOnly(Callback):
        ranks = "main"
        on_error = "warn"

        def write(self, context):
            raise OSError("full")

    manager = listening(MainOnly().write)

    notify(manager, "on_train_start", rank=1)
    with pytest.warns(RuntimeWarning, match="OSError: full"):
        notify(manager, "on_train_start", rank=0)


# --- every


@pytest.mark.parametrize(("event", "completed"), [("on_train_step_end", -1), ("on_step_begin", -1), ("on_step_end", 0)])
def test_every_means_steps_whose_number_it_divides_also_after_a_resume(event, completed, run, notify):
    manager, steps = CallbackManager(), []
    manager.register(event, lambda context: steps.append(context.state.train_state.step - completed), every=3)

    for number in range(5, 13):
        run.train_state.step = number + completed
        notify(manager, event)

    assert steps == [6, 9, 12]


def test_every_outside_of_steps_counts_tellings(notify):
    manager, calls = CallbackManager(), []
    manager.register("on_eval_end", lambda: calls.append(len(calls)), every=2)

    for _ in range(5):
        notify(manager, "on_eval_end")

    assert len(calls) == 2


def test_every_holds_for_hugging_face_functions_too(run, notify):
    manager, steps = CallbackManager(), []
    manager.register("on_step_end", lambda state, **kwargs: steps.append(state.global_step), every=2)

    for run.train_state.step in range(1, 6):
        notify(manager, "on_step_end")

    assert steps == [2, 4]


# --- changes during a call


def test_a_callback_added_while_being_told_is_told_from_the_next_time_on(notify):
    seen = []
    manager = CallbackManager()

    def late(context):
        seen.append("late")

    def adds(context):
        seen.append("adds")
        manager.register("on_train_start", late)

    manager.register("on_train_start", adds)
    notify(manager, "on_train_start")
    assert seen == ["adds"]
    manager.remove(adds)
    notify(manager, "on_train_start")
    assert seen == ["adds", "late"]


def test_a_callback_removed_while_being_called_leaves_the_others_in_peace(notify):
    seen = []
    manager = CallbackManager()

    def once(context):
        seen.append("once")
        manager.remove(once)

    manager.register("on_train_start", once)
    manager.register("on_train_start", lambda: seen.append("other"))
    notify(manager, "on_train_start")
    notify(manager, "on_train_start")

    assert seen == ["once", "other", "other"]


def test_firing_within_a_callback_keeps_the_author_apart(notify):
    control = Control()

    class Outer(Callback):
        def on_train_start(self, context):
            notify(manager, "on_eval_start", control=context.control)
            context.control.save()

    class Inner(Callback):
        def on_eval_start(self, context):
            context.control.log()

    manager = CallbackManager()
    manager.add([Outer(), Inner()])
    notify(manager, "on_train_start", control=control)

    assert [(request.flag, request.author, request.event) for request in control.requests] == [
        ("should_log", "Inner", "on_eval_start"),
        ("should_save", "Outer", "on_train_start"),
    ]
    assert (control.author, control.event) == ("the loop", "")


# --- control


def test_requests_of_both_conventions_name_author_event_and_rank(notify):
    class Asks(Callback):
        def on_train_step_end(self, context):
            context.control.stop("seen enough")

    class Flags(TrainerCallback):
        name = "flag setter"

        def on_train_step_end(self, control, **kwargs):
            control.should_save = True

    class Returns:
        def on_train_step_end(self, args, state, control, **kwargs):
            return TrainerControl(should_save=True, should_evaluate=True)

    manager = CallbackManager()
    manager.add([Asks(), Flags(), Returns()])
    context = notify(manager, "on_train_step_end", control=Control(rank=2))

    assert [str(request) for request in context.control.requests] == [
        "asked to stop by 'Asks' during 'on_train_step_end' on rank 2: seen enough",
        "asked to save by 'flag setter' during 'on_train_step_end' on rank 2",
        "asked to evaluate by 'Returns' during 'on_train_step_end' on rank 2",
    ]


def test_the_last_control_that_is_returned_wins_but_a_stop_stays(notify):
    class First(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop = True
            control.should_log = True

    class Second(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            return TrainerControl(should_save=True)

    class Third(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            assert control.should_save
            return TrainerControl(should_evaluate=True)

    manager = CallbackManager()
    manager.add([First, Second, Third])
    control = notify(manager, "on_step_end").control

    assert (control.should_save, control.should_log, control.should_evaluate) == (False, False, True)
    assert control.should_training_stop is True
    assert [request.author for request in control.requests if request.flag == "should_training_stop"] == ["First"]


def test_a_later_callback_sees_and_vetoes_what_is_due_and_what_was_asked(notify):
    class NoSaves(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_save = False
            control.should_training_stop = False
            return control

    manager = CallbackManager()
    manager.register("on_step_end", lambda context: context.control.stop("too early"))
    manager.add(NoSaves())
    control = Control()
    control.set_due(log=True, evaluate=False, save=True)
    notify(manager, "on_step_end", control=control)

    assert control.vector() == [1, 0, 0, 0, 0, 0, 0]


def test_a_callback_without_a_name_is_called_after_its_type(notify):
    class Nameless:
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop = True

    class Numbered(Nameless):
        name = 7

    manager = CallbackManager()
    manager.add(Nameless())
    assert notify(manager, "on_step_end").control.requests[0].author == "Nameless"
    manager.add(Numbered(), before=Nameless)
    assert notify(manager, "on_step_end").control.requests[0].author == "Numbered"


# --- errors


def test_an_exception_propagates_at_once_with_a_note_and_the_rest_is_not_called(notify):
    seen = []
    fails = Fails()
    manager = CallbackManager()
    manager.add(fails)
    manager.register("on_train_step_end", lambda: seen.append("after"))

    with pytest.raises(ValueError, match="disk full") as raised:
        notify(manager, "on_train_step_end")

    assert raised.value is fails.error
    assert raised.value.__notes__ == ["raised by callback 'Fails' during 'on_train_step_end'"]
    assert seen == []


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3)])
@pytest.mark.parametrize("on_error", ["raise", "warn", "disable"])
def test_an_exit_is_never_swallowed_and_says_where_it_came_from(error, on_error, notify):
    fails = Fails(error)
    fails.on_error = on_error
    manager = CallbackManager()
    manager.add(fails)

    with pytest.raises(type(error)) as raised:
        notify(manager, "on_train_step_end")

    assert raised.value is error
    assert "raised by callback 'Fails' during 'on_train_step_end'" in error.__notes__


def test_a_stop_iteration_of_a_callback_is_an_error_that_names_it(notify):
    class Runs(Callback):
        def on_run_end(self, context):
            next(iter(()))

    manager = CallbackManager()
    manager.add(Runs())
    with pytest.raises(ConfigError, match="callback 'Runs' raised StopIteration") as raised:
        notify(manager, "on_run_end")
    assert isinstance(raised.value.__cause__, StopIteration)
    assert raised.value.__notes__ == ["raised by callback 'Runs' during 'on_run_end'"]


def test_the_note_names_the_event_although_the_callback_fired_another(notify):
    manager = CallbackManager()

    class Fires(Callback):
        def on_train_start(self, context):
            manager.fire("on_eval_start", context)
            raise ValueError("late")

    manager.add(Fires())
    with pytest.raises(ValueError, match="late") as raised:
        notify(manager, "on_train_start")

    assert raised.value.__notes__ == ["raised by callback 'Fires' during 'on_train_start'"]


def test_nobody_is_the_author_after_an_exception(notify):
    control = Control()

    with pytest.raises(ValueError, match="broken"):
        notify(listening(raising(ValueError("broken"))), "on_train_start", control=control)

    assert control.author == "the loop"


class Unprintable(ValueError):
    def __str__(self):
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    ("error", "text"), [(ValueError("disk full"), "ValueError: disk full"), (Unprintable(), "Unprintable: Unprintable")]
)
def test_warn_goes_on_and_tells_again(error, text, notify):
    class Warns(Fails):
        on_error = "warn"

    warns, manager, seen = Warns(error), CallbackManager(), []
    manager.add(warns)
    manager.register("on_train_step_end", lambda: seen.append("after"))
    for _ in range(2):
        with pytest.warns(RuntimeWarning, match=rf"'Warns' raised {text} during 'on_train_step_end'"):
            notify(manager, "on_train_step_end")

    assert warns.calls == 2
    assert seen == ["after", "after"]


def test_disable_goes_on_without_the_callback_at_every_event(notify):
    class Once(Fails):
        on_error = "disable"

    once, manager = Once(), CallbackManager()
    manager.add(once)
    with pytest.warns(RuntimeWarning, match="it will not be called again"):
        notify(manager, "on_train_step_end")
    notify(manager, "on_train_step_end")
    notify(manager, "on_log")

    assert once.calls == 1
    assert "Once.on_log [disabled]" in manager.explain("on_log")


def test_another_instance_of_a_disabled_class_is_called(notify):
    class Once(Fails):
        on_error = "disable"

    first, second, manager = Once(), Once(), CallbackManager()
    manager.add([first, second])
    with pytest.warns(RuntimeWarning):
        notify(manager, "on_train_step_end")
    first.calls = second.calls = 0
    manager.remove(second)
    manager.add(second)
    notify(manager, "on_log")

    assert (first.calls, second.calls) == (0, 1)


def test_a_disabled_callback_that_is_removed_and_added_again_starts_afresh(notify):
    class Once(Fails):
        on_error = "disable"

    once, manager = Once(), CallbackManager()
    manager.add(once)
    with pytest.warns(RuntimeWarning):
        notify(manager, "on_train_step_end")
    manager.add(manager.remove(once))
    notify(manager, "on_log")

    assert once.calls == 2


@pytest.mark.parametrize("leaves", ["later", "while it raises"])
def test_a_new_callback_never_inherits_the_disabling_of_one_that_is_gone(leaves, notify):
    class Once(Callback):
        on_error = "disable"

        def on_train_step_end(self, context):
            if leaves == "while it raises":
                manager.remove(Once)
            raise ValueError("broken")

    manager, seen = CallbackManager(), []

    class Fresh(Callback):
        def on_log(self, context):
            seen.append(self)

    for _ in range(10):  # an id is likely to be given out again at once
        manager.add(Once())
        with pytest.warns(RuntimeWarning):
            notify(manager, "on_train_step_end")
        if leaves == "later":
            manager.remove(Once)
        manager.add(Fresh())
        notify(manager, "on_log")
        manager.remove(Fresh)

    assert len(seen) == 10
