"""Says what becomes of an override of each method of Hugging Face's Trainer, and refuses what a run would need.

`METHODS` is the table; importing it does not import torch. The documentation and `onstep run --explain` read it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import FunctionType
from typing import Any, Literal

from onstep.errors import ConfigError

_STEP = "override training_step, or use a callback (on_forward_backward_end, on_pre_optimizer_step, on_step_end)"
_SAVE = "set save_only_model=True to save none of it, or override _save_checkpoint, to write files beside it"
_AFTER_A_STEP = "override log, _evaluate or _determine_best_metric, or set what is due in a callback's on_step_end"
_LOAD = "load other weights before passing the model, or in a callback's on_checkpoint_load"
_LENGTH = "set max_steps, num_train_epochs, per_device_train_batch_size and gradient_accumulation_steps"
_TRAINING = "in every training"


@dataclass(frozen=True, slots=True)
class Method:
    """What becomes of an override of a method."""

    called: str = ""
    """When it is called; empty for one that never is."""
    refused: str = ""
    """The runs that are refused since they would need it; empty for one that is called, or that no run needs."""
    instead: str = ""
    """What to do instead in a refused run."""
    needed: Callable[[Any], bool] | None = None
    """Whether `train()` of this Trainer would need it; None is always."""
    unneeded: str = ""
    """Why no run here needs it."""

    @property
    def kind(self) -> Literal["called", "refused", "unneeded"]:
        """What becomes of an override."""
        return "called" if self.called else "refused" if self.refused else "unneeded"


def _refused(instead: str, when: str = _TRAINING, needed: Callable[[Any], bool] | None = None) -> Method:
    return Method(refused=when, instead=instead, needed=needed)


def _deletes_checkpoints(trainer: Any) -> bool:
    return trainer.args.save_total_limit is not None


_CONSTRUCTOR, _EVALUATION, _LOADING, _SETUP = "in the constructor", "in an evaluation", "for data", "before training"
_MICRO_BATCH, _SAVING, _BY_YOU = "for a micro-batch", "when a checkpoint or the model is saved", "where you call it"
_CALLED = {
    _CONSTRUCTOR: ("create_accelerator_and_postprocess", "add_callback"),
    _SETUP: (
        "train",
        "call_model_init",
        "_move_model_to_device",
        "_wrap_model",
        "create_optimizer_and_scheduler",
        "create_optimizer",
        "create_scheduler",
        "get_optimizer_cls_and_kwargs",
        "get_decay_parameter_names",
    ),
    _LOADING: (
        "get_train_dataloader",
        "get_eval_dataloader",
        "get_test_dataloader",
        "num_examples",
        "_get_dataloader",
        "_get_train_sampler",
        "_get_eval_sampler",
        "_set_signature_columns_if_needed",
        "_remove_unused_columns",
        "_get_collator_with_removed_columns",
    ),
    _MICRO_BATCH: (
        "training_step",
        "compute_loss",
        "compute_loss_context_manager",
        "autocast_smart_context_manager",
        "_prepare_inputs",
        "_prepare_input",
        "_get_num_items_in_batch",
        "floating_point_ops",
    ),
    _EVALUATION: (
        "evaluate",
        "predict",
        "evaluation_loop",
        "prediction_loop",
        "prediction_step",
        "_evaluate",
        "_determine_best_metric",
    ),
    _SAVING: ("save_model", "_save", "_save_checkpoint"),
    "for a record": ("log", "store_flos"),
    _BY_YOU: (
        "create_model_card",
        "push_to_hub",
        "init_hf_repo",
        "hyperparameter_search",
        "end",
        "save_state",
        "log_metrics",
        "metrics_format",
        "save_metrics",
        "get_learning_rates",
        "get_num_trainable_parameters",
        "get_optimizer_group",
        "pop_callback",
        "remove_callback",
        "is_local_process_zero",
        "is_world_process_zero",
        "get_sp_size",
        "get_cp_size",
        "get_tp_size",
        "_prepare_context_parallel_inputs",
    ),
}
_REFUSED = {
    "_inner_training_loop": _refused(_STEP),
    "_run_epoch": _refused(_STEP),
    "_get_output_dir": _refused("set output_dir"),
    "get_total_train_batch_size": _refused(_LENGTH),
    "_init_training_state": _refused("use a callback's on_train_begin"),
    "_prepare_for_training": _refused("override create_optimizer, create_scheduler or _wrap_model"),
    "_finalize_training": _refused("use a callback's on_train_end"),
    "_validate_args": _refused("check the arguments in __init__, after super().__init__"),
    "_build_accelerator_args": _refused("configure with TrainingArguments"),
    "set_initial_training_values": _refused(_LENGTH),
    "_update_auto_batch_size": _refused("set per_device_train_batch_size, or auto_find_batch_size"),
    "get_batch_samples": _refused("override get_train_dataloader with a loader of those batches"),
    "_clip_grad_norm": _refused(_STEP),
    "_get_grad_norm": _refused(_STEP),
    "_maybe_log_save_evaluate": _refused(_AFTER_A_STEP),
    "_get_learning_rate": _refused("use a callback's on_log"),
    "_track_num_input_tokens": _refused("set include_num_input_tokens_seen, or count in on_train_step_start"),
    "_save_optimizer_and_scheduler": _refused(_SAVE),
    "_save_rng_state": _refused(_SAVE),
    "_save_scaler": _refused(_SAVE),
    "_load_from_checkpoint": _refused(_LOAD),
    "_load_best_model": _refused(_LOAD),
    "_load_optimizer_and_scheduler": _refused(_LOAD),
    "_load_rng_state": _refused(_LOAD),
    "_load_scaler": _refused(_LOAD),
    "_load_callback_state": _refused(_LOAD),
    "_issue_warnings_after_load": _refused(_LOAD),
    "_rotate_checkpoints": _refused(
        "delete directories in a callback's on_save", "with save_total_limit", _deletes_checkpoints
    ),
    "_sorted_checkpoints": _refused(
        "delete directories in a callback's on_save", "with save_total_limit", _deletes_checkpoints
    ),
}
_UNNEEDED = {
    "_push_from_checkpoint": "push_to_hub is refused: nothing is uploaded",
    "_finish_current_push": "push_to_hub is refused: nothing is uploaded",
    "_hp_search_setup": "hyperparameter_search is refused",
    "_report_to_hp_search": "hyperparameter_search is refused",
    "_tune_save_checkpoint": "hyperparameter_search is refused",
    "_defer_fsdp_gradient_reduction": "fsdp is refused",
    "_sync_replicated_trainable_parameters": "fsdp is refused",
    "_has_mixed_mesh_grads": "fsdp and parallelism_config are refused",
    "_mixed_mesh_grad_norm": "fsdp and parallelism_config are refused",
}
METHODS: dict[str, Method] = {
    **{name: Method(called=when) for when, names in _CALLED.items() for name in names},
    **_REFUSED,
    **{name: Method(unneeded=reason) for name, reason in _UNNEEDED.items()},
}
"""What becomes of an override of each method of `transformers.Trainer` (5.x, and names of 4.x), by its name."""


def overrides(trainer: object, name: str) -> bool:
    """Whether a user's class, or an assignment to the object or to a class of Onstep's, replaces a method."""
    return name in vars(trainer) or _owns(type(trainer), name)


def overridden_by(trainer: type, assigned: Iterable[str] = ()) -> list[str]:
    """The methods of the table that a class derived from `Trainer`, its mixins or an assignment replace."""
    names = set(assigned)
    return [name for name in METHODS if name in names or _owns(trainer, name)]


def check_overrides(trainer: object) -> None:
    """Check, before a training, that it would not need an overridden method that is never called.

    Raises:
        ConfigError: if it would; the message names each such method and its replacement.
    """
    kind = type(trainer)
    found = {name: METHODS[name] for name in overridden_by(kind, vars(trainer)) if METHODS[name].refused}
    needed = {name: one for name, one in found.items() if one.needed is None or one.needed(trainer)}
    if needed:
        names = ", ".join(name if one.needed is None else f"{name} ({one.refused})" for name, one in needed.items())
        remedies = "; ".join(f"for {name}: {one.instead}" for name, one in needed.items())
        raise ConfigError(
            f"{kind.__name__} overrides {names}, which Onstep's Trainer never calls, so that the run would differ from "
            f"what the class says. Instead, {remedies}."
        )


def _owns(kind: type, name: str) -> bool:
    """Whether the method of a class is not Onstep's: of a user's class, or assigned to a class of Onstep's."""
    owner = next((one for one in kind.__mro__ if name in vars(one)), None)
    if owner is None or not _is_of_the_trainer(owner.__module__):
        return owner is not None
    method = vars(owner)[name]
    home = method.__globals__.get("__name__") if isinstance(method, FunctionType) else None
    return home is not None and not _is_of_the_trainer(str(home))


def _is_of_the_trainer(module: str) -> bool:
    """Whether a module is Onstep's; its adapters for other libraries override methods as a user does."""
    return module.startswith("onstep.") and not module.startswith("onstep.integrations.")
