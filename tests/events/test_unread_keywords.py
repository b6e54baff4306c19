"""A Hugging Face-style handler that never reads its `**kwargs` is handed only what it names; all others get all."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from onstep.events import CallbackContext, Control
from onstep.events.events import event_named
from onstep.events.signatures import as_handler

SEEN: list[Any] = []


def reads(args: Any, state: Any, control: Any, **kwargs: Any) -> None:
    SEEN.append(sorted(kwargs))


def reads_beside_another(args: Any, state: Any, control: Any, **kwargs: Any) -> None:
    note(control, kwargs)


def note(control: Any, keywords: dict[str, Any]) -> None:
    SEEN.append(sorted(keywords))


def closes_over(args: Any, state: Any, control: Any, **kwargs: Any) -> None:
    SEEN.append((lambda: sorted(kwargs))())


def shows_all(args: Any, state: Any, control: Any, **kwargs: Any) -> None:
    SEEN.append(sorted(locals()["kwargs"]))


def ignores(args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
    SEEN.append((args, state, control))
    return None


def test_who_reads_the_keywords_is_handed_them() -> None:
    state: Any = SimpleNamespace(args="args", trainer_state="state")
    control = Control()
    SEEN.clear()

    for handler in (reads, reads_beside_another, closes_over, shows_all, ignores):
        context = CallbackContext(state=state, model=[], control=control, event="on_step_end")
        as_handler(handler, event_named("on_step_end"))(context)

    assert "optimizer" in SEEN[0]
    assert SEEN[0] == SEEN[1] == SEEN[2] == SEEN[3]
    assert SEEN[4] == ("args", "state", control)


def names_a_field(args: Any, state: Any, control: Any, logs: Any, **kwargs: Any) -> None:
    SEEN.append((args, state, control, logs))


def names_a_field_by_keyword(args: Any, state: Any, control: Any, *, logs: Any = "default", **kwargs: Any) -> None:
    SEEN.append((args, state, control, logs))


class OptimizedModule:
    """A wrapper that notes when it is asked for the module inside."""

    num_asked = 0

    @property
    def _orig_mod(self) -> Any:
        self.num_asked += 1
        return object()


def test_who_names_a_field_of_the_event_is_handed_that_field_alone() -> None:
    state: Any = SimpleNamespace(args="args", trainer_state="state")
    control, wrapper = Control(), OptimizedModule()
    models: Any = [wrapper]
    SEEN.clear()

    for handler in (names_a_field, names_a_field_by_keyword):
        for logs in ({"loss": 1.0}, None):
            context = CallbackContext(state=state, model=models, control=control, event="on_log", logs=logs)
            as_handler(handler, event_named("on_log"))(context)
    assert [("args", "state", control, {"loss": 1.0}), ("args", "state", control, None)] * 2 == SEEN
    assert wrapper.num_asked == 0, "the model is unwrapped for nobody"

    context = CallbackContext(state=state, model=models, control=control, event="on_log")
    as_handler(reads, event_named("on_log"))(context)
    assert wrapper.num_asked > 0
