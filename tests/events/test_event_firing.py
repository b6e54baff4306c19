"""How callbacks are told: order, ranks, intervals, requests, and what happens when one of them raises."""

from __future__ import annotations

import pytest

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


# --- telling


def test_firing_what_nobody_listens_to_does_nothing(tell):
    context = tell(CallbackManager(), "on_train_start")

    assert context.control.vector() == [0] * 7


def test_the_context_knows_its_event(tell):
    seen = []

    tell(listening(lambda context: seen.append(context.event)), "on_train_start")

    assert seen == ["on_train_start"]


def test_changes_of_user_state_are_seen_by_everybody_and_kept(tell):
    manager = listening(lambda context: context.user_state.update(count=context.user_state.get("count", 0) + 1))

    tell(manager, "on_train_start")
    tell(manager, "on_train_start")

    assert manager.user_state == {"count": 2}


def test_callbacks_are_told_on_all_ranks_unless_they_want_the_main_one(tell):
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
        tell(manager, "on_log", rank=rank, control=Control(rank=rank))

    assert seen == [("fn", 0), ("all", 0), ("main", 0), ("all", 1)]


def test_a_registered_method_keeps_the_options_of_its_object(tell):
    class MainOnly(Callback):
        ranks = "main"
        on_error = "warn"

        def write(self, context):
            raise OSError("full")

    manager = listening(MainOnly().write)

    tell(manager, "on_train_start", rank=1)
    with pytest.warns(RuntimeWarning, match="OSError: full"):
        tell(manager, "on_train_start", rank=0)


# --- every


@pytest.mark.parametrize(("event", "completed"), [("on_train_step_end", -1), ("on_step_begin", -1), ("on_step_end", 0)])
def test_every_means_steps_whose_number_it_divides_also_after_a_resume(event, completed, run, tell):
    manager, steps = CallbackManager(), []
    manager.register(event, lambda context: steps.append(context.state.train_state.step - completed), every=3)

    for number in range(5, 13):
        run.train_state.step = number + completed
        tell(manager, event)

    assert steps == [6, 9, 12]


def test_every_outside_of_steps_counts_tellings(tell):
    manager, told = CallbackManager(), []
    manager.register("on_eval_end", lambda: told.append(len(told)), every=2)

    for _ in range(5):
        tell(manager, "on_eval_end")

    assert len(told) == 2


def test_every_holds_for_hugging_face_functions_too(run, tell):
    manager, steps = CallbackManager(), []
    manager.register("on_step_end", lambda state, **kwargs: steps.append(state.global_step), every=2)

    for run.train_state.step in range(1, 6):
        tell(manager, "on_step_end")

    assert steps == [2, 4]


# --- changes while being told


def test_a_callback_added_while_being_told_is_told_from_the_next_time_on(tell):
    seen = []
    manager = CallbackManager()

    def late(context):
        seen.append("late")

    def adds(context):
        seen.append("adds")
        manager.register("on_train_start", late)

    manager.register("on_train_start", adds)
    tell(manager, "on_train_start")
    assert seen == ["adds"]
    manager.remove(adds)
    tell(manager, "on_train_start")
    assert seen == ["adds", "late"]


def test_a_callback_removed_while_being_told_leaves_the_others_in_peace(tell):
    seen = []
    manager = CallbackManager()

    def once(context):
        seen.append("once")
        manager.remove(once)

    manager.register("on_train_start", once)
    manager.register("on_train_start", lambda: seen.append("other"))
    tell(manager, "on_train_start")
    tell(manager, "on_train_start")

    assert seen == ["once", "other", "other"]


def test_firing_within_a_callback_keeps_the_author_apart(tell):
    control = Control()

    class Outer(Callback):
        def on_train_start(self, context):
            tell(manager, "on_eval_start", control=context.control)
            context.control.save()

    class Inner(Callback):
        def on_eval_start(self, context):
            context.control.log()

    manager = CallbackManager()
    manager.add([Outer(), Inner()])
    tell(manager, "on_train_start", control=control)

    assert [(request.flag, request.author, request.event) for request in control.requests] == [
        ("should_log", "Inner", "on_eval_start"),
        ("should_save", "Outer", "on_train_start"),
    ]
    assert (control.author, control.event) == ("the loop", "")


# --- control


def test_requests_of_both_conventions_name_author_event_and_rank(tell):
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
    context = tell(manager, "on_train_step_end", control=Control(rank=2))

    assert [str(request) for request in context.control.requests] == [
        "asked to stop by 'Asks' during 'on_train_step_end' on rank 2: seen enough",
        "asked to save by 'flag setter' during 'on_train_step_end' on rank 2",
        "asked to evaluate by 'Returns' during 'on_train_step_end' on rank 2",
    ]


def test_the_last_control_that_is_returned_wins_but_a_stop_stays(tell):
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
    control = tell(manager, "on_step_end").control

    assert (control.should_save, control.should_log, control.should_evaluate) == (False, False, True)
    assert control.should_training_stop is True
    assert [request.author for request in control.requests if request.flag == "should_training_stop"] == ["First"]


def test_a_later_callback_sees_and_vetoes_what_is_due_and_what_was_asked(tell):
    class NoSaves(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_save = False
            control.should_training_stop = False
            return control

    manager = CallbackManager()
    manager.register("on_step_end", lambda context: context.control.stop("too early"))
    manager.add(NoSaves())
    control = Control()
    control.fill(log=True, evaluate=False, save=True)
    tell(manager, "on_step_end", control=control)

    assert control.vector() == [1, 0, 0, 0, 0, 0, 0]


def test_a_callback_without_a_name_is_called_after_its_type(tell):
    class Nameless:
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop = True

    class Numbered(Nameless):
        name = 7

    manager = CallbackManager()
    manager.add(Nameless())
    assert tell(manager, "on_step_end").control.requests[0].author == "Nameless"
    manager.add(Numbered(), before=Nameless)
    assert tell(manager, "on_step_end").control.requests[0].author == "Numbered"


# --- errors


def test_an_exception_propagates_at_once_with_a_note_and_the_rest_is_not_told(tell):
    seen = []
    fails = Fails()
    manager = CallbackManager()
    manager.add(fails)
    manager.register("on_train_step_end", lambda: seen.append("after"))

    with pytest.raises(ValueError, match="disk full") as raised:
        tell(manager, "on_train_step_end")

    assert raised.value is fails.error
    assert raised.value.__notes__ == ["raised by callback 'Fails' during 'on_train_step_end'"]
    assert seen == []


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3)])
@pytest.mark.parametrize("on_error", ["raise", "warn", "disable"])
def test_an_exit_is_never_swallowed_and_says_where_it_came_from(error, on_error, tell):
    fails = Fails(error)
    fails.on_error = on_error
    manager = CallbackManager()
    manager.add(fails)

    with pytest.raises(type(error)) as raised:
        tell(manager, "on_train_step_end")

    assert raised.value is error
    assert "raised by callback 'Fails' during 'on_train_step_end'" in error.__notes__


def test_the_note_names_the_event_although_the_callback_fired_another(tell):
    manager = CallbackManager()

    class Fires(Callback):
        def on_train_start(self, context):
            manager.fire("on_eval_start", context)
            raise ValueError("late")

    manager.add(Fires())
    with pytest.raises(ValueError, match="late") as raised:
        tell(manager, "on_train_start")

    assert raised.value.__notes__ == ["raised by callback 'Fires' during 'on_train_start'"]


def test_nobody_is_the_author_after_an_exception(tell):
    control = Control()

    with pytest.raises(ValueError, match="broken"):
        tell(listening(raising(ValueError("broken"))), "on_train_start", control=control)

    assert control.author == "the loop"


def test_warn_goes_on_and_tells_again(tell):
    class Warns(Fails):
        on_error = "warn"

    warns, manager, seen = Warns(), CallbackManager(), []
    manager.add(warns)
    manager.register("on_train_step_end", lambda: seen.append("after"))
    for _ in range(2):
        with pytest.warns(RuntimeWarning, match=r"'Warns' raised ValueError: disk full during 'on_train_step_end'"):
            tell(manager, "on_train_step_end")

    assert warns.calls == 2
    assert seen == ["after", "after"]


def test_disable_goes_on_without_the_callback_at_every_event(tell):
    class Once(Fails):
        on_error = "disable"

    once, manager = Once(), CallbackManager()
    manager.add(once)
    with pytest.warns(RuntimeWarning, match="it is told nothing more"):
        tell(manager, "on_train_step_end")
    tell(manager, "on_train_step_end")
    tell(manager, "on_log")

    assert once.calls == 1
    assert "Once.on_log [disabled]" in manager.explain("on_log")


def test_another_instance_of_a_disabled_class_is_told(tell):
    class Once(Fails):
        on_error = "disable"

    first, second, manager = Once(), Once(), CallbackManager()
    manager.add([first, second])
    with pytest.warns(RuntimeWarning):
        tell(manager, "on_train_step_end")
    first.calls = second.calls = 0
    manager.remove(second)
    manager.add(second)
    tell(manager, "on_log")

    assert (first.calls, second.calls) == (0, 1)


def test_a_disabled_callback_that_is_removed_and_added_again_starts_afresh(tell):
    class Once(Fails):
        on_error = "disable"

    once, manager = Once(), CallbackManager()
    manager.add(once)
    with pytest.warns(RuntimeWarning):
        tell(manager, "on_train_step_end")
    manager.add(manager.remove(once))
    tell(manager, "on_log")

    assert once.calls == 2


@pytest.mark.parametrize("leaves", ["later", "while it raises"])
def test_a_new_callback_never_inherits_the_disabling_of_one_that_is_gone(leaves, tell):
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
            tell(manager, "on_train_step_end")
        if leaves == "later":
            manager.remove(Once)
        manager.add(Fresh())
        tell(manager, "on_log")
        manager.remove(Fresh)

    assert len(seen) == 10
