"""How callbacks come in, in what order they stand, and how they leave."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from unittest import mock

import pytest

from onstep.events import (
    VALID_EVENTS,
    Callback,
    CallbackManager,
    TrainerCallback,
    normalize_callbacks,
    should_fire,
)


class Recorder(Callback):
    """Writes its label into the shared `user_state`."""

    def __init__(self, label="recorder"):
        self.label = label

    def on_train_start(self, context):
        context.user_state.setdefault("told", []).append(self.label)


class HfRecorder(TrainerCallback):
    def __init__(self, label="hf"):
        self.label = label

    def on_train_begin(self, args, state, control, **kwargs):
        kwargs["trainer"].append(self.label)


def calls(manager, notify):
    """The callbacks called at the start of training, in order."""
    order = []
    manager.user_state["told"] = order
    notify(manager, "on_train_start", trainer=order)
    return order


# --- what can be registered


def test_a_new_manager_has_no_callbacks_and_an_empty_user_state():
    manager = CallbackManager()

    assert manager.callbacks == []
    assert manager.user_state == {}
    assert all(manager.list_callbacks(event) == [] and not manager.has_callbacks(event) for event in VALID_EVENTS)


def test_user_state_is_one_dictionary_for_life():
    manager = CallbackManager()
    manager.user_state["kept"] = 1

    assert manager.user_state is manager.user_state
    with pytest.raises(AttributeError):
        manager.user_state = {}


@pytest.mark.parametrize("wrap", [list, tuple, lambda items: [tuple(items[:1]), [items[1:]]]])
def test_lists_and_tuples_also_nested_are_registered_in_order(wrap, notify):
    manager = CallbackManager()

    manager.add(wrap([Recorder("a"), HfRecorder("b"), Recorder("c")]))

    assert calls(manager, notify) == ["a", "b", "c"]


def test_a_class_is_made_without_arguments(notify):
    manager = CallbackManager()

    manager.add([Recorder, HfRecorder])

    assert [type(callback) for callback in manager.callbacks] == [Recorder, HfRecorder]
    assert calls(manager, notify) == ["recorder", "hf"]


def test_a_class_that_needs_arguments_says_so():
    class Needy(Callback):
        def __init__(self, path): ...

    with pytest.raises(TypeError, match="path"):
        CallbackManager().add(Needy)


def test_only_overridden_methods_are_registered():
    manager = CallbackManager()

    manager.add([Recorder(), HfRecorder()])

    assert {event for event in VALID_EVENTS if manager.has_callbacks(event)} == {"on_train_start"}
    assert len(manager.list_callbacks("on_train_start")) == 2


def test_a_method_that_a_base_class_merely_leaves_empty_is_not_registered():
    class Base(Callback):
        def on_train_start(self, context):
            """For children."""

        def on_train_end(self, context): ...

        def on_log(self, context):
            return None

        def on_eval_end(self, context):
            context.user_state["worked"] = True

        on_step_end = lambda self, context: None  # noqa: E731
        on_run_end = staticmethod(lambda context: None)

    class Child(Base):
        def on_train_end(self, context):
            """Overridden, if only by words: its author wants it called."""

    manager = CallbackManager()
    manager.add(Child())

    assert {event for event in VALID_EVENTS if manager.has_callbacks(event)} == {"on_eval_end", "on_train_end"}


@pytest.mark.parametrize("body", ["return 'value'", "raise NotImplementedError", "self.calls = 1", "print"])
def test_a_base_class_method_that_does_anything_is_registered(body):
    space = {"Callback": Callback}
    exec(f"class Base(Callback):\n  def on_log(self, context):\n    'doc'\n    {body}\nclass Child(Base): ...", space)
    manager = CallbackManager()

    manager.add(space["Child"]())

    assert manager.has_callbacks("on_log")


def test_duck_typed_objects_of_both_conventions_are_called(notify):
    class Bridge:
        def on_train_start(self, context):
            context.user_state["told"].append("bridge")

    class HuggingFace:
        def on_train_begin(self, args, state, control, **kwargs):
            kwargs["trainer"].append("hugging face")

    class HuggingFaceByName:
        def on_train_begin(self, *args, **kwargs):
            kwargs["trainer"].append(len(args))

    manager = CallbackManager()
    namespace = SimpleNamespace(on_train_start=lambda context: context.user_state["told"].append("namespace"))
    manager.add([Bridge(), HuggingFace(), HuggingFaceByName(), namespace])

    assert calls(manager, notify) == ["bridge", "hugging face", 3, "namespace"]


def test_a_proxy_brings_what_the_callback_behind_it_brings(notify):
    class Proxy:
        def __init__(self, inner):
            self._inner = inner

        def __getattr__(self, name):
            return getattr(self._inner, name)

    manager = CallbackManager()
    manager.add(Proxy(Recorder("inner")))

    assert {event for event in VALID_EVENTS if manager.has_callbacks(event)} == {"on_train_start"}
    assert calls(manager, notify) == ["inner"]


def test_a_mock_is_called_for_everything_and_steers_nothing(notify):
    manager = CallbackManager()
    everything = mock.Mock()
    manager.add(everything)

    for event in VALID_EVENTS:
        context = notify(manager, event, rank=1)
        assert context.control.vector() == [0] * 7

    everything.on_train_step_end.assert_called_once()
    assert everything.on_prediction_step.call_count == 2


def test_methods_static_class_and_instance_attributes_are_all_methods(notify):
    seen = []

    class Mixed(Callback):
        @staticmethod
        def on_train_start(context):
            seen.append("static")

        @classmethod
        def on_epoch_start(cls, context):
            seen.append(cls.__name__)

        on_step_begin = functools.partial(lambda label, context: seen.append(label), "partial")

    mixed = Mixed()
    mixed.on_train_end = lambda context: seen.append("instance")
    mixed.on_log = None
    manager = CallbackManager()
    manager.add(mixed)
    for event in ("on_train_start", "on_epoch_start", "on_step_begin", "on_train_end"):
        notify(manager, event)

    assert seen == ["static", "Mixed", "partial", "instance"]
    assert not manager.has_callbacks("on_log")


def test_one_method_under_the_names_of_both_conventions_is_called_once(notify):
    class Portable(Callback):
        def on_train_start(self, context):
            context.user_state["told"].append("once")

        on_train_begin = on_train_start

    manager = CallbackManager()
    manager.add(Portable())

    assert calls(manager, notify) == ["once"]


def test_hugging_face_names_in_a_context_style_class_are_called_at_their_event(notify):
    class Mixed(Callback):
        def on_train_begin(self, context):
            context.user_state["told"].append("began")

        def on_evaluate(self, context):
            context.user_state["told"].append("evaluated")

    manager = CallbackManager()
    manager.add(Mixed())
    order = calls(manager, notify)
    notify(manager, "on_eval_end")

    assert order == ["began", "evaluated"]


def test_context_names_in_a_hugging_face_class_are_called(notify):
    class Extra(TrainerCallback):
        def on_train_step_end(self, state, control, loss_dict, **kwargs):
            kwargs["trainer"].append((state.global_step, loss_dict))

    manager, seen = CallbackManager(), []
    manager.add(Extra())
    notify(manager, "on_train_step_end", loss_dict={"lm loss": 1.0}, trainer=seen)

    assert seen == [(0, {"lm loss": 1.0})]


def test_on_prediction_step_reaches_evaluation_and_test(notify):
    class Bar(TrainerCallback):
        batches = 0

        def on_prediction_step(self, args, state, control, **kwargs):
            self.batches += 1

    bar, manager = Bar(), CallbackManager()
    manager.add(bar)
    notify(manager, "on_eval_step_end")
    notify(manager, "on_test_step_end")

    assert bar.batches == 2


def test_an_instance_added_twice_is_called_twice(notify):
    manager, recorder = CallbackManager(), Recorder("twice")

    manager.add(recorder)
    manager.add(recorder)

    assert calls(manager, notify) == ["twice", "twice"]


# --- what is refused


@pytest.mark.parametrize("thing", [None, 3, "on_train_start", {}, object(), print, lambda context: None])
def test_what_is_no_callback_is_refused_with_the_way_out(thing):
    with pytest.raises(TypeError, match=r"is not a callback: .*manager\.register\(event_name, fn\)"):
        CallbackManager().add(thing)


def test_a_callback_class_without_methods_is_accepted():
    manager = CallbackManager()

    manager.add([Callback(), TrainerCallback()])

    assert len(manager.callbacks) == 2


def test_after_a_bad_one_nothing_of_the_list_is_registered():
    manager = CallbackManager()

    with pytest.raises(TypeError):
        manager.add([Recorder(), 3])

    assert manager.callbacks == []
    assert not manager.has_callbacks("on_train_start")


def test_a_method_that_fits_no_convention_is_refused_when_added():
    class Wrong(Callback):
        def on_train_step_end(self, context, loss): ...

    with pytest.raises(TypeError, match=r"Wrong\.on_train_step_end cannot handle 'on_train_step_end'.*Accepted: fn\("):
        CallbackManager().add(Wrong())


def test_a_mistyped_method_warns_and_names_the_nearest_event():
    class Typo(Callback):
        def on_train_step_ends(self, context): ...

    with pytest.warns(
        UserWarning, match=r"Typo\.on_train_step_ends is not an event .*did you mean 'on_train_step_end'"
    ):
        CallbackManager().add(Typo())


def test_an_event_of_another_library_is_answered_with_ours():
    class OfKeras(Callback):
        def on_batch_end(self, batch, logs=None): ...

    with pytest.warns(UserWarning, match=r"OfKeras\.on_batch_end is not an event .*did you mean 'on_step_end'"):
        CallbackManager().add(OfKeras())


def test_the_warning_points_at_the_line_that_adds():
    class Typo(Callback):
        def on_train_step_ends(self, context): ...

    with pytest.warns(UserWarning, match="is not an event") as warned:
        CallbackManager().add([Typo()])

    assert warned[0].filename == __file__


def test_a_duck_typed_object_with_nothing_but_a_typo_is_refused_with_the_hint():
    class Typo:
        def on_train_step_ends(self, context): ...

    with pytest.raises(TypeError, match=r"is not a callback.*did you mean 'on_train_step_end'"):
        CallbackManager().add(Typo())


def test_methods_that_resemble_no_event_are_nobodys_business():
    class Own(Callback):
        def on_click(self, button): ...

        def on_error_page(self): ...

    CallbackManager().add(Own())


@pytest.mark.parametrize(
    ("wrong", "nearest"),
    [
        ("on_train_step_ends", "'on_train_step_end'"),
        ("train_end", "'on_train_end'"),
        ("on_train_begin", "'on_train_start'"),
        ("on_evaluate", "'on_eval_end'"),
        ("on_save", "'on_checkpoint_save'"),
        ("on_prediction_step", "'on_eval_step_end' or 'on_test_step_end'"),
    ],
)
def test_an_unknown_event_is_a_value_error_with_the_nearest_name(wrong, nearest, notify):
    manager = CallbackManager()
    message = rf"^Unknown event '{wrong}'\. Valid events: on_.*Did you mean {nearest}\?$"

    with pytest.raises(ValueError, match=message):
        manager.register(wrong, print)
    with pytest.raises(ValueError, match=message):
        manager.list_callbacks(wrong)
    with pytest.raises(ValueError, match=message):
        manager.explain(wrong)
    with pytest.raises(ValueError, match=message):
        notify(manager, wrong)
    assert manager.has_callbacks(wrong) is False


@pytest.mark.parametrize("name", [None, 3, ["on_log"], print, ""])
def test_an_event_that_is_no_name_at_all_is_a_value_error_too(name):
    with pytest.raises(ValueError, match="Unknown event"):
        CallbackManager().register(name, print)


def test_names_of_the_engine_itself_are_no_events():
    manager = CallbackManager()

    assert not any(manager.has_callbacks(name) for name in ("__init__", "__slots__", "__class__"))


@pytest.mark.parametrize("every", [0, -1, 2.5, "2", None])
def test_every_must_be_a_whole_number_from_one(every):
    with pytest.raises(ValueError, match=r"every must be an integer >= 1, got"):
        CallbackManager().register("on_log", print, every=every)


@pytest.mark.parametrize(
    ("option", "value"), [("ranks", "rank0"), ("ranks", 0), ("on_error", "ignore"), ("on_error", 1)]
)
@pytest.mark.parametrize("base", [Recorder, HfRecorder])
def test_a_mistyped_option_of_our_classes_is_refused(base, option, value):
    with pytest.raises(TypeError, match=rf"{option} of Wrong must be '.*, got {value!r}"):
        CallbackManager().add(type("Wrong", (base,), {option: value})())


def test_options_of_other_meaning_on_foreign_objects_are_left_alone(notify):
    class Foreign:
        ranks = (0, 1)

        def on_error(self): ...

        def on_train_start(self, context):
            context.user_state["told"].append("foreign")

    manager = CallbackManager()
    manager.add(Foreign())

    assert calls(manager, notify) == ["foreign"]


# --- order


def test_order_is_that_of_registration_across_conventions(notify):
    manager = CallbackManager()
    manager.add(Recorder("a"))
    manager.register("on_train_start", lambda context: context.user_state["told"].append("b"))
    manager.add([HfRecorder("c"), Recorder("d")])
    manager.register("on_train_start", lambda state, trainer, **kwargs: trainer.append("e"))

    assert calls(manager, notify) == ["a", "b", "c", "d", "e"]


@pytest.mark.parametrize("anchor", ["instance", "class", "name"])
def test_before_and_after_by_instance_class_and_name(anchor, notify):
    class Anchor(Recorder): ...

    instance = Anchor("anchor")
    where = {"instance": instance, "class": Anchor, "name": "Anchor"}[anchor]
    manager = CallbackManager()
    manager.add([Recorder("first"), instance, Recorder("last")])

    manager.add([Recorder("b1"), HfRecorder("b2")], before=where)
    manager.add((Recorder("a1"), [HfRecorder("a2")]), after=where)

    assert calls(manager, notify) == ["first", "b1", "b2", "anchor", "a1", "a2", "last"]


def test_classes_in_a_list_stay_together_after_their_anchor(notify):
    manager, anchor = CallbackManager(), HfRecorder("anchor")
    manager.add([Recorder("a"), anchor])

    manager.add([Recorder, HfRecorder], after=anchor)

    assert calls(manager, notify) == ["a", "anchor", "recorder", "hf"]


def test_a_place_between_two(notify):
    manager, first, last = CallbackManager(), Recorder("first"), Recorder("last")
    manager.add([first, last])

    manager.add(Recorder("between"), after=first, before=last)

    assert calls(manager, notify) == ["first", "between", "last"]
    with pytest.raises(ValueError, match="Cannot add before"):
        manager.add(Recorder("nowhere"), after=last, before=first)


def test_a_named_callback_is_found_by_its_name(notify):
    class Named(HfRecorder):
        name = "second logger"

    manager = CallbackManager()
    manager.add(Named("named"))
    manager.add(Recorder("before"), before="second logger")

    assert calls(manager, notify) == ["before", "named"]


def test_an_anchor_that_is_not_registered_is_refused_and_the_known_ones_are_named():
    manager = CallbackManager()
    manager.add(Recorder())

    with pytest.raises(ValueError, match="'Other' is not registered; registered callbacks: Recorder"):
        manager.add(HfRecorder(), before="Other")
    assert len(manager.callbacks) == 1


# --- removal


def test_removal_by_instance_class_and_function(notify):
    def fn(context):
        context.user_state["told"].append("fn")

    manager, first = CallbackManager(), Recorder("first")
    manager.add([first, Recorder("second"), HfRecorder()])
    manager.register("on_train_start", fn)

    assert manager.remove(first) is first
    assert manager.remove(HfRecorder).label == "hf"
    assert calls(manager, notify) == ["second", "fn"]
    assert manager.remove(fn) is fn
    manager.remove("Recorder")
    assert manager.callbacks == []
    assert not manager.has_callbacks("on_train_start")


def test_removal_by_class_takes_the_first_of_exactly_that_class():
    class Child(Recorder): ...

    manager = CallbackManager()
    manager.add([Child("child"), Recorder("one"), Recorder("two")])

    assert manager.remove(Recorder).label == "one"
    assert [callback.label for callback in manager.callbacks] == ["child", "two"]


def test_a_registered_method_can_be_removed_although_each_look_makes_a_new_object():
    manager, target = CallbackManager(), Recorder()
    manager.register("on_log", target.on_train_start)

    manager.remove(target.on_train_start)

    assert not manager.has_callbacks("on_log")


def test_of_one_instance_added_twice_one_stays(notify):
    manager, recorder = CallbackManager(), Recorder("a")
    manager.add([recorder, recorder])

    manager.remove(recorder)

    assert calls(manager, notify) == ["a"]


def test_removing_what_was_never_there_is_refused():
    with pytest.raises(ValueError, match="is not registered; registered callbacks: none"):
        CallbackManager().remove(Recorder)


# --- looking at it


def test_list_callbacks_is_a_copy_of_the_callables_as_they_were_given():
    def fn(): ...

    manager, recorder = CallbackManager(), Recorder()
    manager.add(recorder)
    manager.register("on_train_start", fn, every=3)

    listed = manager.list_callbacks("on_train_start")
    assert listed == [recorder.on_train_start, fn]
    listed.clear()
    assert len(manager.list_callbacks("on_train_start")) == 2


def test_explain_prints_the_order_and_what_restricts_it():
    class Writer(HfRecorder):
        ranks = "main"
        name = "writer"

    def log_step(context): ...

    log_step.__qualname__ = "log_step"
    manager = CallbackManager()
    manager.add([Recorder(), Writer()])
    manager.register("on_train_start", log_step)
    manager.register("on_train_start", functools.partial(log_step))

    assert manager.explain("on_train_start").splitlines() == [
        "on_train_start (on_train_begin): After `model.train()`, before the first step.",
        "  1. Recorder.on_train_start",
        "  2. writer.on_train_begin [rank 0 only]",
        "  3. log_step",
        "  4. log_step",
    ]
    assert manager.explain("on_log").splitlines()[1:] == ["  no listeners"]


def test_normalize_callbacks():
    manager = CallbackManager()

    assert normalize_callbacks(None) is None
    assert normalize_callbacks(manager) is manager
    assert normalize_callbacks([]).callbacks == []
    for given in (Recorder(), [Recorder()], (Recorder(),), Recorder, [Recorder]):
        made = normalize_callbacks(given)
        assert isinstance(made, CallbackManager)
        assert [type(callback) for callback in made.callbacks] == [Recorder]


def test_should_fire_needs_a_manager_and_a_listener():
    manager = CallbackManager()
    manager.add(Recorder())

    assert should_fire(manager, "on_train_start") is True
    assert should_fire(manager, "on_train_end") is False
    assert should_fire(manager, "no_such_event") is False
    assert should_fire(None, "on_train_start") is False


def test_the_loops_test_is_true_exactly_where_somebody_listens():
    manager = CallbackManager()
    manager.add(Recorder())

    listened = {event for event in VALID_EVENTS if getattr(manager.listeners, event)}

    assert listened == {"on_train_start"}
    manager.remove(Recorder)
    assert not manager.listeners.on_train_start
