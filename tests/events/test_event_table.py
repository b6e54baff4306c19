"""The table of events, and what derives from it."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import fields

import pytest

import onstep.events
from onstep.events import (
    EVENTS,
    HF_EVENTS,
    VALID_EVENTS,
    Callback,
    CallbackContext,
    CallbackManager,
    TrainerCallback,
)
from onstep.events.events import TRAINING
from onstep.events.registration import author_of

BRIDGE_EVENTS = {
    *("on_train_start", "on_train_step_start", "on_train_step_end", "on_train_end"),
    *("on_eval_start", "on_eval_step_start", "on_eval_step_end", "on_eval_end"),
    *("on_test_start", "on_test_step_start", "on_test_step_end", "on_test_end"),
    *("on_data_init_start", "on_checkpoint_save"),
}

FORGATHER_EVENTS = {
    *("on_init_end", "on_train_begin", "on_train_end", "on_epoch_begin", "on_epoch_end", "on_step_begin"),
    *("on_step_end", "on_substep_end", "on_forward_backward_begin", "on_forward_backward_end", "on_optimizer_step"),
    *("on_pre_optimizer_step", "on_evaluate", "on_predict", "on_prediction_step", "on_save", "on_log"),
    *("on_log_step", "on_train_metrics", "on_load_model_weights"),
}


def names():
    return [event.name for event in EVENTS]


def test_every_event_of_both_conventions_is_in_the_table():
    assert BRIDGE_EVENTS <= VALID_EVENTS
    assert FORGATHER_EVENTS <= HF_EVENTS


def table_in_the_docstring() -> dict[str, str]:
    """Each event of the package's docstring and the text beside it, in order; lines are joined."""
    table = re.findall(r"^    (on_\w+) +(.+(?:\n {8,}.+)*)", onstep.events.__doc__ or "", re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in table}


def test_the_docstring_of_the_package_lists_exactly_the_events_in_order():
    assert list(table_in_the_docstring()) == names()
    assert set(table_in_the_docstring()) == VALID_EVENTS


def test_the_docstring_of_the_package_names_every_event_of_the_hugging_face_convention():
    renamed = {name: re.findall(r"Hugging Face: (on_\w+)\.", text) for name, text in table_in_the_docstring().items()}
    assert {hf for name, others in renamed.items() for hf in (others or [name])} == HF_EVENTS
    assert renamed == {event.name: [event.renamed] if event.renamed else [] for event in EVENTS}


def test_the_docstring_of_the_package_says_when_an_event_fires_and_what_it_has():
    for event in EVENTS:
        training = ["T"] if set(TRAINING) <= set(event.fields) else [one for one in event.fields if one in TRAINING]
        fields_of_event = ", ".join([*training, *event.own_fields])
        expected = f"{event.when}." + (f" Fields: {fields_of_event}." if fields_of_event else "")
        assert re.sub(r" Hugging Face: on_\w+\.$", "", table_in_the_docstring()[event.name]) == expected


def test_a_context_name_belongs_to_one_event():
    assert len(names()) == len(set(names())) == len(VALID_EVENTS)


def test_valid_events_are_the_names_of_the_table_and_what_the_manager_offers():
    assert frozenset(names()) == VALID_EVENTS
    assert CallbackManager().events is VALID_EVENTS


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("on_init_end", "on_train_start"),
        ("on_step_begin", "on_train_step_start"),
        ("on_train_step_start", "on_forward_backward_start"),
        ("on_pre_optimizer_step", "on_optimizer_step"),
        ("on_train_step_end", "on_step_end"),
        ("on_step_end", "on_log_step"),
        ("on_log_step", "on_log"),
        ("on_log", "on_eval_start"),
        ("on_eval_end", "on_checkpoint_save_start"),
        ("on_checkpoint_save_start", "on_checkpoint_save"),
        ("on_final_metrics", "on_train_end"),
        ("on_train_end", "on_test_start"),
        ("on_test_end", "on_run_end"),
    ],
)
def test_the_table_is_in_firing_order(first, second):
    assert names().index(first) < names().index(second)


def test_run_end_is_the_last_event():
    assert names()[-1] == "on_run_end"


def test_test_events_go_with_predict_and_never_with_evaluate():
    hf_names = {event.name: event.hf_name for event in EVENTS}

    assert hf_names["on_eval_end"] == "on_evaluate"
    assert hf_names["on_test_end"] == "on_predict"
    assert hf_names["on_eval_step_end"] == hf_names["on_test_step_end"] == "on_prediction_step"


def test_only_the_three_terminal_events_reach_all():
    assert {event.name for event in EVENTS if event.reaches_all} == {"on_train_end", "on_exception", "on_run_end"}


def test_every_field_of_an_event_is_a_field_of_the_context():
    for event in EVENTS:
        assert set(event.fields) <= {field.name for field in fields(CallbackContext)}


def test_both_base_classes_declare_and_document_every_event():
    for event in EVENTS:
        assert event.when in getattr(Callback, event.name).__doc__
        assert event.when in getattr(TrainerCallback, event.hf_name).__doc__


def test_the_empty_methods_of_the_base_classes_can_be_called():
    assert Callback().on_train_start(object()) is None
    assert TrainerCallback().on_train_begin(args=None, state=None, control=None, model=None) is None


def test_name_of_a_trainer_callback_is_its_class_unless_overridden():
    class Named(TrainerCallback):
        name = "second logger"

    class Plain(TrainerCallback): ...

    assert Plain().name == "Plain"
    assert Named().name == "second logger"
    plain = Plain()
    plain.name = "renamed"
    assert (author_of(plain), author_of(Plain())) == ("renamed", "Plain")


def test_importing_the_engine_imports_neither_torch_nor_transformers():
    code = "import sys, onstep.events; print(sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))"

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "[]"
