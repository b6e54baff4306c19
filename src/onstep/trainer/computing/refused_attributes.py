"""Lists the attributes of Hugging Face's Trainer and accelerate's Accelerator that Onstep lacks, and their remedies."""

from __future__ import annotations

ACCELERATOR = {
    "init_trackers": "set report_to in TrainingArguments",
    "get_tracker": "set report_to in TrainingArguments, and log with trainer.log",
    "trackers": "set report_to in TrainingArguments, and log with trainer.log",
    "save_state": "the Trainer saves checkpoints by save_strategy; a callback can set control.should_save",
    "load_state": "pass resume_from_checkpoint to trainer.train",
    "save_model": "call trainer.save_model",
    "_shared_state": "read the attributes of trainer.accelerator.state",
    "register_for_checkpointing": "give a callback state_dict and load_state_dict",
}
OTHERWISE = "use torch itself, or accelerate's own Accelerator outside of the Trainer"
"""The remedy for any other name."""
CONFIGURE = "it follows from the run; configure with TrainingArguments"
"""Why an attribute of the accelerator cannot be set."""
OF_A_STEP = "the position of a run is in trainer.state"
"""The remedy for what `accelerator.gradient_state` lacks."""
_SHARDED = "the loop and its optimizer handle shards; drop the call"
_LOOP = "it is a step of Hugging Face's loop; override training_step, or use a callback"
TRAINER = {
    "_initial_global_step": "use state.global_step in a callback's on_train_begin",
    "_initial_num_input_tokens_seen": "use state.num_input_tokens_seen in a callback's on_train_begin",
    "_memory_tracker": "set skip_memory_metrics=False in TrainingArguments",
    "_created_lr_scheduler": "trainer.lr_scheduler is None until there is one",
    "_loggers_initialized": "set report_to in TrainingArguments",
    "_loss_shifts_labels": "labels are counted as the loss of the model does",
    "_attn_mask_causal_checked": "sequences are not sharded",
    "neftune_hook_handle": "set neftune_noise_alpha in TrainingArguments",
    **dict.fromkeys(
        (
            "_defer_fsdp_gradient_reduction",
            "_has_mixed_mesh_grads",
            "_mixed_mesh_grad_norm",
            "_mixed_mesh_grads",
            "_sync_replicated_trainable_parameters",
        ),
        _SHARDED,
    ),
    **dict.fromkeys(
        ("_init_training_state", "_prepare_for_training", "_run_epoch", "set_initial_training_values"), _LOOP
    ),
}


def missing_attribute(trainer: object, name: str) -> AttributeError:
    """The error for an attribute that a Trainer does not have."""
    if name in TRAINER:
        return AttributeError(f"Onstep's Trainer has no {name!r}: {TRAINER[name]}.")
    return AttributeError(f"{type(trainer).__name__!r} object has no attribute {name!r}")
