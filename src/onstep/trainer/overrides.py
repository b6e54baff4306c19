"""Determines what a subclass of Trainer overrides, and refuses one that overrides what is never called here."""

from __future__ import annotations

from collections.abc import Iterable

from onstep.errors import ConfigError

_STEP = "override training_step, or use a callback (on_forward_backward_end, on_pre_optimizer_step, on_step_end)"
_SAVE = "set save_only_model=True to save none of it, or override _save_checkpoint, to write files beside it"
_AFTER_A_STEP = "override log, _evaluate or _determine_best_metric, or set what is due in a callback's on_step_end"
_LOAD = "load other weights before passing the model, or in a callback's on_checkpoint_load"
_HUB = "upload the directory after training: hf upload REPO OUTPUT_DIR"
_SEARCH = "run each trial with a Trainer of its own"
_SHARDED = "remove it: models and sequences are not sharded"

_INSTEAD = {
    "get_total_train_batch_size": "set per_device_train_batch_size and gradient_accumulation_steps",
    "get_batch_samples": "override get_train_dataloader with a loader of those batches, or pass a data_collator",
    "_inner_training_loop": _STEP,
    "_run_epoch": _STEP,
    "_clip_grad_norm": _STEP,
    "_get_grad_norm": _STEP,
    "_maybe_log_save_evaluate": _AFTER_A_STEP,
    "_get_learning_rate": "use a callback's on_log",
    "_save_optimizer_and_scheduler": _SAVE,
    "_save_rng_state": _SAVE,
    "_load_from_checkpoint": _LOAD,
    "_load_best_model": _LOAD,
    "_load_optimizer_and_scheduler": _LOAD,
    "_load_rng_state": _LOAD,
    "_rotate_checkpoints": "set save_total_limit, or delete directories in a callback's on_save",
    "_get_output_dir": "set output_dir",
    "_hp_search_setup": _SEARCH,
    "_save_scaler": _SAVE,
    "_load_scaler": _LOAD,
    "_load_callback_state": _LOAD,
    "_issue_warnings_after_load": _LOAD,
    "_sorted_checkpoints": "set save_total_limit, or delete directories in a callback's on_save",
    "_push_from_checkpoint": _HUB,
    "_finish_current_push": _HUB,
    "_report_to_hp_search": _SEARCH,
    "_tune_save_checkpoint": _SEARCH,
    "_track_num_input_tokens": "set include_num_input_tokens_seen, or count in a callback's on_train_step_start",
    "_build_accelerator_args": "configure with TrainingArguments",
    "_defer_fsdp_gradient_reduction": _SHARDED,
    "_prepare_context_parallel_inputs": _SHARDED,
    "_sync_replicated_trainable_parameters": _SHARDED,
    "_update_auto_batch_size": "set per_device_train_batch_size, or auto_find_batch_size",
}
"""Methods of `transformers.Trainer` (5.x, and names of 4.x) that Onstep never calls, and what to do instead."""
_INTERNAL = (
    "_finalize_training",
    "_has_mixed_mesh_grads",
    "_init_training_state",
    "_mixed_mesh_grad_norm",
    "_prepare_for_training",
    "_validate_args",
    "set_initial_training_values",
)
_INSTEAD |= dict.fromkeys(_INTERNAL, "use a callback; it is a step of another loop")


def overrides(trainer: object, name: str) -> bool:
    """Whether a user's class, or an assignment to the object, replaces a method of Onstep's `Trainer`."""
    if name in vars(trainer):
        return True
    owner = next((one for one in type(trainer).__mro__ if name in vars(one)), None)
    return owner is not None and not owner.__module__.startswith("onstep.")


def check_overrides(trainer: type, assigned: Iterable[str] = ()) -> None:
    """Check a user's class derived from `Trainer`, with its mixins.

    Args:
        trainer: the class.
        assigned: names assigned to the object, as by ``trainer.create_optimizer = ...``.

    Raises:
        ConfigError: if it overrides a method that would never be called; the message names each and its replacement.
    """
    users = [one for one in trainer.__mro__ if not one.__module__.startswith("onstep.")]
    own = {name for one in users for name in vars(one)}.union(assigned)
    ignored = [name for name in _INSTEAD if name in own]
    if ignored:
        remedies = "; ".join(f"for {name}: {_INSTEAD[name]}" for name in ignored)
        raise ConfigError(
            f"{trainer.__name__} overrides {', '.join(ignored)}, which Onstep's Trainer never calls, so that the run "
            f"would differ from what the class says. Instead, {remedies}."
        )
