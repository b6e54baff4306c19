"""Says what happens to an override of each method of Hugging Face's Trainer, and refuses what a run would need.

`METHODS` is the table; importing it does not import torch. The documentation and `onstep run --explain` read it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import FunctionType
from typing import Any, Literal

from onstep.errors import ConfigError

_TRAINING = "in every training"


@dataclass(frozen=True, slots=True)
class Method:
    """What happens to an override of a method."""

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
        """What happens to an override."""
        return "called" if self.called else "refused" if self.refused else "unneeded"


def _refused(instead: str, when: str = _TRAINING, needed: Callable[[Any], bool] | None = None) -> Method:
    return Method(refused=when, instead=instead, needed=needed)


def _deletes_checkpoints(trainer: Any) -> bool:
    return trainer.args.save_total_limit is not None


_CONSTRUCTOR, _SETUP, _RESUME = "in the constructor", "before training", "when a run continues from a checkpoint"
_DATA, _MICRO_BATCH, _STEP_END = "for data", "for each micro-batch", "after each step and epoch"
_EVALUATION, _SAVING, _BY_YOU = "in an evaluation", "when a checkpoint or the model is saved", "where you call it"
_CALLED: dict[str, tuple[str, ...]] = {
    _CONSTRUCTOR: (
        "create_accelerator_and_postprocess",
        "_build_accelerator_args",
        "_validate_args",
    ),
    _SETUP: (
        "train",
        "_hp_search_setup",
        "call_model_init",
        "_move_model_to_device",
        "_wrap_model",
        "create_optimizer_and_scheduler",
        "create_optimizer",
        "create_scheduler",
        "get_optimizer_cls_and_kwargs",
        "get_decay_parameter_names",
        "_get_output_dir",
    ),
    _DATA: (
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
    _RESUME: (
        "_load_from_checkpoint",
        "_load_callback_state",
        "_load_optimizer_and_scheduler",
        "_load_scaler",
        "_load_rng_state",
    ),
    "when weights are loaded by `_load_from_checkpoint` or `_load_best_model`": ("_issue_warnings_after_load",),
    "around each training": ("_inner_training_loop",),
    "when auto_find_batch_size tries a size": ("_update_auto_batch_size",),
    "for each step": ("get_batch_samples", "_get_grad_norm", "_get_learning_rate"),
    "for each step, with max_grad_norm above 0": ("_clip_grad_norm",),
    _MICRO_BATCH: (
        "training_step",
        "compute_loss",
        "compute_loss_context_manager",
        "autocast_smart_context_manager",
        "_prepare_inputs",
        "_prepare_input",
        "_prepare_context_parallel_inputs",
        "_get_num_items_in_batch",
        "_track_num_input_tokens",
        "floating_point_ops",
    ),
    _STEP_END: ("_maybe_log_save_evaluate",),
    _EVALUATION: (
        "evaluate",
        "predict",
        "evaluation_loop",
        "prediction_loop",
        "prediction_step",
        "_evaluate",
        "_report_to_hp_search",
        "_determine_best_metric",
    ),
    _SAVING: ("save_model", "_save", "_save_checkpoint"),
    "when a checkpoint is saved, without save_only_model": (
        "_save_optimizer_and_scheduler",
        "_save_scaler",
        "_save_rng_state",
    ),
    "for a record": ("log", "store_flos"),
    "for the record at the end of training": (
        "get_total_train_batch_size",
        "get_sp_size",
        "get_cp_size",
        "get_tp_size",
    ),
    "at the end of training": ("_finalize_training", "_finish_current_push"),
    "at the end of training, with load_best_model_at_end": ("_load_best_model",),
    "in the constructor, with push_to_hub": ("init_hf_repo",),
    "when a checkpoint has been committed, with push_to_hub": ("_push_from_checkpoint",),
    _BY_YOU: (
        "create_model_card",
        "push_to_hub",
        "hyperparameter_search",
        "end",
        "save_state",
        "log_metrics",
        "metrics_format",
        "save_metrics",
        "get_learning_rates",
        "get_num_trainable_parameters",
        "get_optimizer_group",
        "add_callback",
        "pop_callback",
        "remove_callback",
        "is_local_process_zero",
        "is_world_process_zero",
    ),
}
_REFUSED = {
    "_run_epoch": _refused("override training_step or get_batch_samples, or use a callback's on_epoch_begin"),
    "_init_training_state": _refused("use a callback's on_train_begin"),
    "_prepare_for_training": _refused("override create_optimizer, create_scheduler or _wrap_model"),
    "set_initial_training_values": _refused(
        "set max_steps, num_train_epochs, per_device_train_batch_size and gradient_accumulation_steps"
    ),
    **dict.fromkeys(
        ("_rotate_checkpoints", "_sorted_checkpoints"),
        _refused("delete directories in a callback's on_save", "with save_total_limit", _deletes_checkpoints),
    ),
}
_UNNEEDED = {
    "_tune_save_checkpoint": "a trial has the checkpoints of its run",
    "_defer_fsdp_gradient_reduction": "ddp.sync_each_micro_batch decides when gradients are exchanged",
    "_sync_replicated_trainable_parameters": "all parameters are sharded, or none",
    "_has_mixed_mesh_grads": "the norm of gradients counts every kind of shards",
    "_mixed_mesh_grad_norm": "the norm of gradients counts every kind of shards",
}
METHODS: dict[str, Method] = {
    **{name: Method(called=when) for when, names in _CALLED.items() for name in names},
    **_REFUSED,
    **{name: Method(unneeded=reason) for name, reason in _UNNEEDED.items()},
}
"""What happens to an override of each method of `transformers.Trainer` (5.x, and names of 4.x), by its name."""


OF_ACCELERATOR = {"backward": "training_step", "clip_grad_norm_": "_clip_grad_norm"}
"""Methods of the accelerator, and the method of the Trainer that calls each: a function that is assigned to the
accelerator, `trainer.accelerator.backward = ...`, is called by that one, as if it were overridden."""


def overrides(trainer: object, name: str) -> bool:
    """Whether a user's class, or an assignment to the object, its accelerator or a class of Onstep's, replaces it."""
    return name in vars(trainer) or _owns(type(trainer), name) or _is_below(trainer, name)


def _is_below(trainer: object, name: str) -> bool:
    """Whether what a method calls of the accelerator has been replaced there."""
    if name not in OF_ACCELERATOR.values():
        return False
    assigned = vars(vars(trainer).get("accelerator", object))
    return any(caller == name and method in assigned for method, caller in OF_ACCELERATOR.items())


def overridden_by(trainer: type, assigned: Iterable[str] = ()) -> list[str]:
    """The methods of the table that a class derived from `Trainer`, its mixins or an assignment replace."""
    names = set(assigned)
    return [name for name in METHODS if name in names or _owns(trainer, name)]


def replaces(trainer: object, name: str) -> bool:
    """Whether a user's override of a method does without `super()`: its code does not name the method."""
    owners = [one for one in type(trainer).__mro__ if name in vars(one) and _is_of_user(one, name)]
    methods = [vars(one)[name] for one in owners] + ([vars(trainer)[name]] if name in vars(trainer) else [])
    return any(not _names(method, name) for method in methods)


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


def _names(method: object, name: str) -> bool:
    code = getattr(inspect.unwrap(method) if callable(method) else method, "__code__", None)
    return code is None or name in code.co_names


def _owns(kind: type, name: str) -> bool:
    """Whether the method of a class is not Onstep's."""
    owner = next((one for one in kind.__mro__ if name in vars(one)), None)
    return owner is not None and _is_of_user(owner, name)


def _is_of_user(owner: type, name: str) -> bool:
    """Whether a method in a class itself is not Onstep's: of a user's class, or assigned to a class of Onstep's."""
    if not _is_of_the_trainer(owner.__module__):
        return True
    method = vars(owner)[name]
    home = method.__globals__.get("__name__") if isinstance(method, FunctionType) else None
    return home is not None and not _is_of_the_trainer(str(home))


def _is_of_the_trainer(module: str) -> bool:
    """Whether a module is Onstep's; its adapters for other libraries override methods as a user does."""
    return module.startswith("onstep.") and not module.startswith("onstep.integrations.")
