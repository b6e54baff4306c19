"""Determines what a subclass of Trainer overrides, and refuses one that overrides what is never called here."""

from __future__ import annotations

from collections.abc import Iterable

from onstep.errors import ConfigError

_OPTIMIZER = "pass a factory or an optimizer as optimizers=(optimizer, scheduler)"
_LOADER = "pass the dataset in the form and order that it should be read; a torch IterableDataset is read as it is"
_STEP = "override training_step, or use a callback (on_forward_backward_end, on_pre_optimizer_step, on_step_end)"
_SHARDED = "remove it: models and sequences are not sharded"
_EVALUATION = "override evaluate, or pass compute_metrics and preprocess_logits_for_metrics"
_SAVE = "use a callback's on_save, or a module with its own save_pretrained"

_INSTEAD = {
    "create_optimizer": _OPTIMIZER,
    "create_scheduler": _OPTIMIZER,
    "create_optimizer_and_scheduler": _OPTIMIZER,
    "get_decay_parameter_names": _OPTIMIZER,
    "get_optimizer_cls_and_kwargs": _OPTIMIZER,
    "get_train_dataloader": _LOADER,
    "get_eval_dataloader": _LOADER,
    "get_test_dataloader": _LOADER,
    "_get_dataloader": _LOADER,
    "_get_train_sampler": _LOADER,
    "_get_eval_sampler": _LOADER,
    "_get_collator_with_removed_columns": "pass a data_collator",
    "_remove_unused_columns": "pass a data_collator",
    "_set_signature_columns_if_needed": "pass a data_collator",
    "get_batch_samples": "pass a data_collator",
    "num_examples": "give the dataset a length",
    "floating_point_ops": "use a callback's on_log",
    "store_flos": "use a callback's on_log",
    "_inner_training_loop": _STEP,
    "_run_epoch": _STEP,
    "_clip_grad_norm": _STEP,
    "_get_grad_norm": _STEP,
    "prediction_step": _EVALUATION,
    "prediction_loop": _EVALUATION,
    "evaluation_loop": _EVALUATION,
    "_evaluate": _EVALUATION,
    "_determine_best_metric": _EVALUATION,
    "_maybe_log_save_evaluate": "use a callback's on_log, on_save and on_evaluate",
    "log": "use a callback's on_log",
    "_get_learning_rate": "use a callback's on_log",
    "_save": _SAVE,
    "_save_checkpoint": _SAVE,
    "_save_optimizer_and_scheduler": _SAVE,
    "_save_rng_state": _SAVE,
    "_load_from_checkpoint": _SAVE,
    "_load_best_model": _SAVE,
    "_load_optimizer_and_scheduler": _SAVE,
    "_load_rng_state": _SAVE,
    "_rotate_checkpoints": "set save_total_limit",
    "_get_output_dir": "set output_dir",
    "_build_accelerator_args": "configure with TrainingArguments",
    "_defer_fsdp_gradient_reduction": _SHARDED,
    "_prepare_context_parallel_inputs": _SHARDED,
    "_sync_replicated_trainable_parameters": _SHARDED,
    "_update_auto_batch_size": "set per_device_train_batch_size, or auto_find_batch_size",
    "get_total_train_batch_size": "set per_device_train_batch_size and gradient_accumulation_steps",
    "_hp_search_setup": "run each trial with a Trainer of its own",
}
"""Methods of `transformers.Trainer` (5.x, and names of 4.x) that Onstep never calls, and what to do instead."""
_INTERNAL = (
    "_finalize_training",
    "_finish_current_push",
    "_has_mixed_mesh_grads",
    "_init_training_state",
    "_issue_warnings_after_load",
    "_load_callback_state",
    "_load_scaler",
    "_mixed_mesh_grad_norm",
    "_prepare_for_training",
    "_push_from_checkpoint",
    "_report_to_hp_search",
    "_save_scaler",
    "_track_num_input_tokens",
    "_tune_save_checkpoint",
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
