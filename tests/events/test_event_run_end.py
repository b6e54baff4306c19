"""The three events at the end of a run reach every callback, whatever the others raise."""

from __future__ import annotations

import itertools

import pytest

from onstep.events import Callback, CallbackManager

TERMINAL = ("on_train_end", "on_exception", "on_run_end")
ERRORS = (None, ValueError("value"), KeyboardInterrupt(), SystemExit(1))


class Closes(Callback):
    """Notes the call, and then raises what it was given."""

    def __init__(self, label, error, calls):
        self.name, self.error, self.calls = label, error, calls

    def on_train_end(self, context):
        self._close()

    def on_exception(self, context):
        self._close()

    def on_run_end(self, context):
        self._close()

    def _close(self):
        self.calls.append(self.name)
        if self.error is not None:
            raise type(self.error)(*self.error.args)


@pytest.mark.parametrize("event", TERMINAL)
@pytest.mark.parametrize("errors", list(itertools.product(ERRORS, repeat=3)), ids=str)
def test_all_are_called_in_order_and_the_first_error_is_raised(event, errors, notify):
    calls = []
    manager = CallbackManager()
    manager.add([Closes(label, error, calls) for label, error in zip("abc", errors, strict=True)])
    raised = [(label, error) for label, error in zip("abc", errors, strict=True) if error is not None]

    if not raised:
        notify(manager, event)
    else:
        (first, expected), *others = raised
        with pytest.raises(type(expected)) as caught:
            notify(manager, event)
        assert caught.value.__notes__ == [
            f"raised by callback '{first}' during '{event}'",
            *(f"then '{label}' raised {type(error).__name__}: {error}" for label, error in others),
        ]
    assert calls == ["a", "b", "c"]


@pytest.mark.parametrize("event", TERMINAL)
def test_a_tolerated_error_is_a_warning_and_raises_nothing(event, notify):
    calls = []
    tolerant = Closes("tolerant", ValueError("value"), calls)
    tolerant.on_error = "warn"
    manager = CallbackManager()
    manager.add([tolerant, Closes("last", None, calls)])

    with pytest.warns(RuntimeWarning, match="'tolerant' raised ValueError"):
        notify(manager, event)

    assert calls == ["tolerant", "last"]


def test_a_callback_that_raises_the_runs_own_exception_again_hides_nobody(notify):
    calls = []

    class Again(Callback):
        def on_exception(self, context):
            calls.append(type(context.exception).__name__)
            raise context.exception

    manager = CallbackManager()
    manager.add([Again(), Again(), Closes("last", None, calls)])
    error = RuntimeError("the run failed")

    with pytest.raises(RuntimeError) as raised:
        notify(manager, "on_exception", exception=error)

    assert raised.value is error
    assert calls == ["RuntimeError", "RuntimeError", "last"]


def test_hugging_face_handlers_learn_reason_and_exception(notify):
    seen = []
    manager = CallbackManager()
    manager.register("on_run_end", lambda state, reason, exception, **kwargs: seen.append((reason, exception)))
    manager.register("on_run_end", lambda context: seen.append((context.reason, context.exception)))

    notify(manager, "on_run_end", reason="stopped")

    assert seen == [("stopped", None)] * 2


def test_all_other_events_end_at_the_first_error(notify):
    calls = []

    class Fails(Callback):
        def on_log(self, context):
            calls.append(1)
            raise ValueError("first")

    manager = CallbackManager()
    manager.add([Fails(), Fails()])

    with pytest.raises(ValueError, match="first"):
        notify(manager, "on_log")

    assert calls == [1]
