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
    when: str
    fields: tuple[str, ...] = ()
    """What the context holds beyond `ALWAYS`, and what Hugging Face handlers get as further keywords."""
    renamed: str = ""
    """Name in the Hugging Face convention where that is another one."""
    per_step: int | None = None
    """For moments told at every step: 1 where the step counter still holds the number of completed steps before this
    one, 0 where it has advanced. None for all others."""
    reaches_all: bool = False
    """Told to every callback even when one of them raises."""

    @property
    def hf_name(self) -> str:
        """Name in the Hugging Face convention, `handler(args, state, control, **kwargs)`."""
        return self.renamed or self.name

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
        "After a checkpoint was loaded, before data is opened",
        (*TRAINING, "checkpoint_step", "checkpoint_path"),
    ),
    Moment(
        "on_data_init_start",
        "After model, optimizer and scheduler are built, before any data file is opened",
        ("optimizer", "scheduler"),
    ),
    Moment("on_init_end", "At the end of set-up, once for each train() and evaluate()", TRAINING),
    Moment("on_train_start", "After `model.train()`, before the first step", TRAINING, renamed="on_train_begin"),
    Moment("on_epoch_start", "Before each epoch", TRAINING, renamed="on_epoch_begin"),
    Moment("on_step_begin", "Before the step's micro-batches are read", TRAINING, per_step=1),
    Moment(
        "on_train_step_start",
        "The micro-batches are read; before `train_step`",
        (*TRAINING, "micro_batches", "sample_ids"),
        per_step=1,
    ),
    Moment(
        "on_forward_backward_start",
        "Before each micro-batch's forward and backward; it is on the device",
        (*TRAINING, "micro_batch"),
        renamed="on_forward_backward_begin",
        per_step=1,
    ),
    Moment(
        "on_forward_backward_end",
        "After each micro-batch's forward and backward",
        (*TRAINING, "micro_batch", "loss"),
        per_step=1,
    ),
    Moment("on_substep_end", "After each micro-batch but the last of a step", TRAINING, per_step=1),
    Moment(
        "on_pre_optimizer_step",
        "Gradients are reduced and clipped (raw for a foreign optimizer); before the update",
        (*TRAINING, "grad_norm"),
        per_step=1,
    ),
    Moment(
        "on_optimizer_step",
        "After the update, before the scheduler moves and gradients are cleared",
        (*TRAINING, "grad_norm"),
        per_step=1,
    ),
    Moment(
        "on_train_metrics",
        "This rank's loss, gradient norm and label count of the step, as device tensors",
        (*TRAINING, "loss", "grad_norm", "tokens"),
        per_step=1,
    ),
    Moment(
        "on_train_step_end",
        "After `train_step`, before the step counter advances",
        (*TRAINING, "loss_dict", "grad_norm", "skipped_iter", "sample_ids"),
        per_step=1,
    ),
    Moment(
        "on_step_end", "The step counter has advanced; `control` holds what is due at this step", TRAINING, per_step=0
    ),
    Moment("on_log_step", "A step is logged; `logs` may be added to before it is told", (*TRAINING, "logs")),
    Moment("on_log", "`logs` is complete; also told once with the final metrics", (*TRAINING, "logs")),
    Moment("on_eval_start", "After `model.eval()`, before the validation loop"),
    Moment("on_eval_step_start", "Before each validation batch"),
    Moment("on_eval_step_end", "After each validation batch", renamed="on_prediction_step"),
    Moment(
        "on_eval_end",
        "After the validation loop, before `model.train()`",
        ("total_loss_dict", "metrics"),
        renamed="on_evaluate",
    ),
    Moment(
        "on_checkpoint_save_start",
        "Before a checkpoint is taken",
        ("optimizer", "checkpoint_step"),
        renamed="on_save_begin",
    ),
    Moment(
        "on_checkpoint_save",
        "A checkpoint is durable",
        ("optimizer", "checkpoint_step", "checkpoint_path"),
        renamed="on_save",
    ),
    Moment("on_epoch_end", "After each epoch, also one that was stopped", TRAINING),
    Moment(
        "on_final_metrics",
        "All steps are done; `logs` holds the final metrics and may be added to before `on_log` tells them",
        (*TRAINING, "logs"),
    ),
    Moment("on_train_end", "After the training loop, before the final validation and test", TRAINING, reaches_all=True),
    Moment("on_test_start", "After `model.eval()`, before the test loop"),
    Moment("on_test_step_start", "Before each test batch"),
    Moment("on_test_step_end", "After each test batch", renamed="on_prediction_step"),
    Moment("on_test_end", "After the test loop", ("total_loss_dict", "metrics"), renamed="on_predict"),
    Moment(
        "on_exception",
        "Once, when an exception ends the run; never for a decided exit",
        (*TRAINING, "exception"),
        reaches_all=True,
    ),
    Moment(
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


def moment_of(event_name: object) -> Moment:
    """The moment with this name in the context convention.

    Raises:
        ValueError: for any other name, with the nearest one.
    """
    moment = BY_NAME.get(event_name) if isinstance(event_name, str) else None
    if moment is None:
        near = difflib.get_close_matches(str(event_name), sorted(VALID_EVENTS | HF_EVENTS), n=1, cutoff=0.4)
        meant = " or ".join(repr(moment.name) for one in near for moment in moments_named(one))
        hint = f" Did you mean {meant}?" if near else ""
        raise ValueError(f"Unknown event '{event_name}'. Valid events: {', '.join(sorted(VALID_EVENTS))}.{hint}")
    return moment
