"""A Hugging Face-style handler that never reads its `**kwargs` is not handed any; all others are."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from onstep.events import CallbackContext, Control
from onstep.events.events import event_named
from onstep.events.signatures import as_handler

SEEN: list[Any] = []


def reads(args: Any, state: Any, control: Any, **kwargs: Any) -> None:
    SEEN.append(sorted(kwargs))


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

    for handler in (reads, closes_over, shows_all, ignores):
        context = CallbackContext(state=state, model=[], control=control, event="on_step_end")
        as_handler(handler, event_named("on_step_end"))(context)

    assert "optimizer" in SEEN[0]
    assert SEEN[0] == SEEN[1] == SEEN[2]
    assert SEEN[3] == ("args", "state", control)
