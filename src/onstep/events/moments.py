"""The one table of moments, in firing order: docs, base classes, `VALID_EVENTS` and tests derive from it.

Each moment has a name in the context convention (Megatron Bridge's where it has one) and one in the Hugging Face /
Forgather convention. Two neighbours stay two moments because their users rely on it: `on_train_step_end` is told before
the step counter advances, `on_step_end` after.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Moment:
    """One place where the loop tells its callbacks what just happened or is about to."""

    name: str
    """Name in the context convention, `handler(context)`."""
    hf_name: str
    """Name in the Hugging Face convention, `handler(args, state, control, **kwargs)`."""
    when: str
    fields: tuple[str, ...] = ()
    """What the context holds beyond `ALWAYS`, and what Hugging Face handlers get as further keywords."""
    per_step: int | None = None
    """For moments told at every step: 1 where the step counter still holds the number of completed steps before this
    one, 0 where it has advanced. None for all others."""
    reaches_all: bool = False
    """Told to every callback even when one of them raises."""

    @cached_property
    def own_fields(self) -> tuple[str, ...]:
        """The fields that only this event and its like have."""
        return tuple(name for name in self.fields if name not in (*ALWAYS, *TRAINING))


ALWAYS = ("state", "model", "user_state", "control", "rank", "trainer", "processing_class")
"""Fields of the context that every moment has (`trainer` and `processing_class` are None where there is none)."""

TRAINING = ("optimizer", "scheduler", "train_dataloader", "eval_dataloader")
"""The training objects: fields of the context while training."""

MOMENTS: tuple[Moment, ...] = (
    Moment(
        "on_checkpoint_load",
        "on_checkpoint_load",
        "After a checkpoint was loaded, before data is opened",
        (*TRAINING, "checkpoint_step", "checkpoint_path"),
    ),
    Moment(
        "on_data_init_start",
        "on_data_init_start",
        "After model, optimizer and scheduler are built, before any data file is opened",
        ("optimizer", "scheduler"),
    ),
    Moment("on_init_end", "on_init_end", "At the end of set-up, once for each train() and evaluate()", TRAINING),
    Moment("on_train_start", "on_train_begin", "After `model.train()`, before the first step", TRAINING),
    Moment("on_epoch_start", "on_epoch_begin", "Before each epoch", TRAINING),
    Moment("on_step_begin", "on_step_begin", "Before the step's micro-batches are read", TRAINING, per_step=1),
    Moment(
        "on_train_step_start",
        "on_train_step_start",
        "The micro-batches are read; before `train_step`",
        (*TRAINING, "micro_batches", "sample_ids"),
        per_step=1,
    ),
    Moment(
        "on_forward_backward_start",
        "on_forward_backward_begin",
        "Before each micro-batch's forward and backward; it is on the device",
        (*TRAINING, "micro_batch"),
        per_step=1,
    ),
    Moment(
        "on_forward_backward_end",
        "on_forward_backward_end",
        "After each micro-batch's forward and backward",
        (*TRAINING, "micro_batch", "loss"),
        per_step=1,
    ),
    Moment(
        "on_substep_end",
        "on_substep_end",
        "After each micro-batch but the last of a step",
        TRAINING,
        per_step=1,
    ),
    Moment(
        "on_pre_optimizer_step",
        "on_pre_optimizer_step",
        "Gradients are reduced and clipped (raw for a foreign optimizer); before the update",
        (*TRAINING, "grad_norm"),
        per_step=1,
    ),
    Moment(
        "on_optimizer_step",
        "on_optimizer_step",
        "After the update, before the scheduler moves and gradients are cleared",
        (*TRAINING, "grad_norm"),
        per_step=1,
    ),
    Moment(
        "on_train_metrics",
        "on_train_metrics",
        "This rank's loss, gradient norm and label count of the step, as device tensors",
        (*TRAINING, "loss", "grad_norm", "tokens"),
        per_step=1,
    ),
    Moment(
        "on_train_step_end",
        "on_train_step_end",
        "After `train_step`, before the step counter advances",
        (*TRAINING, "loss_dict", "grad_norm", "skipped_iter", "sample_ids"),
        per_step=1,
    ),
    Moment(
        "on_step_end",
        "on_step_end",
        "The step counter has advanced; `control` holds what is due at this step",
        TRAINING,
        per_step=0,
    ),
    Moment(
        "on_log_step",
        "on_log_step",
        "A step is logged; `logs` may be added to before it is told",
        (*TRAINING, "logs"),
    ),
    Moment("on_log", "on_log", "`logs` is complete; also told once with the final metrics", (*TRAINING, "logs")),
    Moment("on_eval_start", "on_eval_start", "After `model.eval()`, before the validation loop"),
    Moment("on_eval_step_start", "on_eval_step_start", "Before each validation batch"),
    Moment("on_eval_step_end", "on_prediction_step", "After each validation batch"),
    Moment(
        "on_eval_end",
        "on_evaluate",
        "After the validation loop, before `model.train()`",
        ("total_loss_dict", "metrics"),
    ),
    Moment(
        "on_checkpoint_save_start",
        "on_save_begin",
        "Before a checkpoint is taken",
        ("optimizer", "checkpoint_step"),
    ),
    Moment(
        "on_checkpoint_save",
        "on_save",
        "A checkpoint is durable",
        ("optimizer", "checkpoint_step", "checkpoint_path"),
    ),
    Moment("on_epoch_end", "on_epoch_end", "After each epoch, also one that was stopped", TRAINING),
    Moment(
        "on_final_metrics",
        "on_final_metrics",
        "All steps are done; `logs` holds the final metrics and may be added to before `on_log` tells them",
        (*TRAINING, "logs"),
    ),
    Moment(
        "on_train_end",
        "on_train_end",
        "After the training loop, before the final validation and test",
        TRAINING,
        reaches_all=True,
    ),
    Moment("on_test_start", "on_test_start", "After `model.eval()`, before the test loop"),
    Moment("on_test_step_start", "on_test_step_start", "Before each test batch"),
    Moment("on_test_step_end", "on_prediction_step", "After each test batch"),
    Moment("on_test_end", "on_predict", "After the test loop", ("total_loss_dict", "metrics")),
    Moment(
        "on_exception",
        "on_exception",
        "Once, when an exception ends the run; never for a decided exit",
        (*TRAINING, "exception"),
        reaches_all=True,
    ),
    Moment(
        "on_run_end",
        "on_run_end",
        "Exactly once, after everything; `reason` is completed, stopped, preempted or failed",
        (*TRAINING, "reason", "exception"),
        reaches_all=True,
    ),
)

VALID_EVENTS: frozenset[str] = frozenset(moment.name for moment in MOMENTS)
"""Names of the context convention, as `CallbackManager.register` takes them."""

BY_NAME: dict[str, Moment] = {moment.name: moment for moment in MOMENTS}

HF_EVENTS: frozenset[str] = frozenset(moment.hf_name for moment in MOMENTS)
"""Names of the Hugging Face convention."""


def moments_named(name: str) -> tuple[Moment, ...]:
    """The moments that a method called `name` is told at, in either convention; empty for an unknown name."""
    return tuple(moment for moment in MOMENTS if name in (moment.name, moment.hf_name))


def unknown_event(name: object) -> ValueError:
    """The error for an event that does not exist, with the nearest name in the context convention."""
    near = difflib.get_close_matches(str(name), sorted(VALID_EVENTS | HF_EVENTS), n=1, cutoff=0.4)
    meant = " or ".join(repr(moment.name) for moment in moments_named(near[0])) if near else ""
    hint = f" Did you mean {meant}?" if meant else ""
    return ValueError(f"Unknown event '{name}'. Valid events: {', '.join(sorted(VALID_EVENTS))}.{hint}")


def moment_of(event_name: object) -> Moment:
    """The moment with this name in the context convention.

    Raises:
        ValueError: for any other name, with the nearest one.
    """
    moment = BY_NAME.get(event_name) if isinstance(event_name, str) else None
    if moment is None:
        raise unknown_event(event_name)
    return moment
