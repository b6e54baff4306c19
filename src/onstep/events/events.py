"""Defines the table of events, in firing order; docs, base classes, `VALID_EVENTS` and tests derive from it.

Each event has a name in the context convention (Megatron Bridge's, where Bridge has the event) and a name in the
Hugging Face / Forgather convention. `on_train_step_end` and `on_step_end` are separate events because callbacks rely on
the difference: the first fires before the step counter advances, the second after.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from functools import cached_property
from textwrap import fill


@dataclass(frozen=True)
class Event:
    """An event: a place in the loop where callbacks are called."""

    name: str
    """Name in the context convention, as in `handler(context)`."""
    when: str
    """When it fires, in words."""
    fields: tuple[str, ...] = ()
    """Fields of the context beyond `ALWAYS`; Hugging Face-style handlers get them as additional keywords."""
    renamed: str = ""
    """Name in the Hugging Face convention, if different."""
    per_step: int | None = None
    """For events that fire at every step: 1 if they fire before the step counter advances, 0 if after. None for all
    other events."""
    reaches_all: bool = False
    """Every callback is called even if one of them raises."""

    @property
    def hf_name(self) -> str:
        """Name in the Hugging Face convention, as in `handler(args, state, control, **kwargs)`."""
        return self.renamed or self.name

    @cached_property
    def own_fields(self) -> tuple[str, ...]:
        """The fields specific to this event: neither in `ALWAYS` nor in `TRAINING`."""
        return tuple(name for name in self.fields if name not in (*ALWAYS, *TRAINING))


ALWAYS = ("state", "model", "user_state", "control", "rank", "trainer", "processing_class")
"""Fields of the context that are set at every event (`trainer` and `processing_class` are None if there is none)."""

TRAINING = ("optimizer", "scheduler", "train_dataloader", "eval_dataloader")
"""Training objects: fields of the context that are set during training."""

EVENTS: tuple[Event, ...] = (
    Event(
        "on_checkpoint_load",
        "After a checkpoint is loaded, before the data is opened",
        (*TRAINING, "checkpoint_step", "checkpoint_path"),
    ),
    Event(
        "on_load_model_weights",
        "In a run whose checkpoints have no weights (`checkpoint.components` without `model`), at a fresh start and "
        "after one is loaded: a callback gives the model its weights",
        ("optimizer", "scheduler"),
    ),
    Event(
        "on_data_init_start",
        "After the model, optimizer and scheduler are built, before any data file is opened",
        ("optimizer", "scheduler"),
    ),
    Event(
        "on_init_end",
        "At the end of setup, once per train() and evaluate() call; in Hugging Face's convention once, at the end of "
        "the Trainer's constructor",
        TRAINING,
    ),
    Event("on_train_start", "After `model.train()`, before the first step", TRAINING, renamed="on_train_begin"),
    Event("on_epoch_start", "Before each epoch", TRAINING, renamed="on_epoch_begin"),
    Event("on_step_begin", "Before the step's micro-batches are read", TRAINING, per_step=1),
    Event(
        "on_train_step_start",
        "After the step's micro-batches are read, before `train_step`",
        (*TRAINING, "micro_batches", "sample_ids"),
        per_step=1,
    ),
    Event(
        "on_forward_backward_start",
        "Before the forward and backward pass of each micro-batch, which is on the device",
        (*TRAINING, "micro_batch"),
        renamed="on_forward_backward_begin",
        per_step=1,
    ),
    Event(
        "on_forward_backward_end",
        "After the forward and backward pass of each micro-batch",
        (*TRAINING, "micro_batch", "loss"),
        per_step=1,
    ),
    Event("on_substep_end", "After each micro-batch of a step except the last", TRAINING, per_step=1),
    Event(
        "on_pre_optimizer_step",
        "After gradients are reduced and clipped (raw for a third-party optimizer), before the update",
        (*TRAINING, "grad_norm"),
        per_step=1,
    ),
    Event(
        "on_optimizer_step",
        "After the update, before the scheduler steps and gradients are zeroed",
        (*TRAINING, "grad_norm"),
        per_step=1,
    ),
    Event(
        "on_train_metrics",
        "After the update, with this rank's loss, gradient norm and label count of the step as device tensors",
        (*TRAINING, "loss", "grad_norm", "tokens"),
        per_step=1,
    ),
    Event(
        "on_train_step_end",
        "After `train_step`, before the step counter advances",
        (*TRAINING, "loss_dict", "grad_norm", "skipped_iter", "sample_ids"),
        per_step=1,
    ),
    Event(
        "on_step_end", "After the step counter advances; `control` holds what is due at this step", TRAINING, per_step=0
    ),
    Event(
        "on_decision",
        "On rank 0, when the loop has recorded a decision, such as a request that all ranks agreed on",
        (*TRAINING, "request"),
    ),
    Event(
        "on_command",
        "After ranks agreed on a command that callbacks carry out; `request.details` has its name and data",
        (*TRAINING, "request"),
    ),
    Event("on_log_step", "At a logged step, before `on_log`; callbacks may add to `logs`", (*TRAINING, "logs")),
    Event(
        "on_log",
        "At a logged step, with `logs` complete; also once with the final metrics",
        (*TRAINING, "logs"),
    ),
    Event("on_eval_start", "After `model.eval()`, before the validation loop"),
    Event("on_eval_step_start", "Before each validation batch"),
    Event("on_eval_step_end", "After each validation batch", renamed="on_prediction_step"),
    Event(
        "on_eval_end",
        "After the validation loop, before `model.train()`",
        ("total_loss_dict", "metrics"),
        renamed="on_evaluate",
    ),
    Event(
        "on_checkpoint_save_start",
        "Before a checkpoint is saved",
        ("optimizer", "checkpoint_step"),
        renamed="on_save_begin",
    ),
    Event(
        "on_checkpoint_save",
        "After a checkpoint is durable on disk",
        ("optimizer", "checkpoint_step", "checkpoint_path"),
        renamed="on_save",
    ),
    Event("on_paused", "While the run is paused, about ten times a second; callbacks may ask to resume", TRAINING),
    Event("on_epoch_end", "After each epoch, including one that was stopped early", TRAINING),
    Event(
        "on_final_metrics",
        "After the last step, with the final metrics in `logs`, before `on_log`; callbacks may add to `logs`",
        (*TRAINING, "logs"),
    ),
    Event("on_train_end", "After the training loop, before the final validation and test", TRAINING, reaches_all=True),
    Event("on_test_start", "After `model.eval()`, before the test loop"),
    Event("on_test_step_start", "Before each test batch"),
    Event("on_test_step_end", "After each test batch", renamed="on_prediction_step"),
    Event("on_test_end", "After the test loop", ("total_loss_dict", "metrics"), renamed="on_predict"),
    Event(
        "on_exception",
        "Once, when an exception ends the run; never for a requested exit",
        (*TRAINING, "exception"),
        reaches_all=True,
    ),
    Event(
        "on_run_end",
        "Exactly once, at the very end; `reason` is completed, stopped, preempted or failed",
        (*TRAINING, "reason", "exception"),
        reaches_all=True,
    ),
)

VALID_EVENTS: frozenset[str] = frozenset(event.name for event in EVENTS)
"""Event names of the context convention, as accepted by `CallbackManager.register`."""

BY_NAME: dict[str, Event] = {event.name: event for event in EVENTS}

HF_EVENTS: frozenset[str] = frozenset(event.hf_name for event in EVENTS)
"""Event names of the Hugging Face convention."""


def events_named(name: str) -> tuple[Event, ...]:
    """The events at which a method called `name` is called, in either convention; empty for an unknown name."""
    return tuple(event for event in EVENTS if name in (event.name, event.hf_name))


def event_named(event_name: object) -> Event:
    """The event with this name in the context convention.

    Raises:
        ValueError: for any other name; the message suggests the nearest one.
    """
    event = BY_NAME.get(event_name) if isinstance(event_name, str) else None
    if event is None:
        near = difflib.get_close_matches(str(event_name), sorted(VALID_EVENTS | HF_EVENTS), n=1, cutoff=0.4)
        meant = " or ".join(repr(event.name) for one in near for event in events_named(one))
        hint = f" Did you mean {meant}?" if near else ""
        raise ValueError(f"Unknown event '{event_name}'. Valid events: {', '.join(sorted(VALID_EVENTS))}.{hint}")
    return event


_LISTING = """\
The validation events (`on_eval_*`), the test events (`on_test_*`) and the save events (`on_checkpoint_save*`) fire at
every evaluation, test and save, not only at the position listed. "Fields" are the fields of the context that an event
sets in addition to `state`, `model`, `user_state`, `control`, `rank`, `trainer` and `processing_class`, which every
event sets; Hugging Face-style handlers get them as keyword arguments. T stands for the training objects: `optimizer`,
`scheduler`, `train_dataloader` and `eval_dataloader`. "Hugging Face" gives the name there if it differs.

"""


def listing() -> str:
    """The events in firing order, as text: when each fires, and what its context has."""
    return _LISTING + "\n".join(map(_entry, EVENTS))


def _entry(event: Event) -> str:
    training = ["T"] if set(TRAINING) <= set(event.fields) else [one for one in event.fields if one in TRAINING]
    fields, margin = ", ".join([*training, *event.own_fields]), " " * 30
    further = (f"Fields: {fields}." * bool(fields), f"Hugging Face: {event.renamed}." if event.renamed else "")
    lines = [
        fill(f"{event.when}.", 120, initial_indent=margin, subsequent_indent=margin),
        " ".join(filter(None, further)),
    ]
    return f"    {event.name:26}" + f"\n{margin}".join(filter(None, [lines[0].lstrip(), lines[1]]))
