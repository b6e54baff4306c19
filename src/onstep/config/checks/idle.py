"""Settings that have no effect in combination with the others: a run names them in one line instead of ignoring them.

A combination that is certainly a mistake is refused elsewhere (`Option.only_with`, `checks.model`). Here are the ones
that a recipe with a few overrides reaches too, so the run continues.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from onstep.config.checks.data import parse_split
from onstep.config.checks.run import has_dir
from onstep.config.container import ConfigContainer
from onstep.config.hf.argument import STYLES
from onstep.config.hf.optimizers import NATIVE
from onstep.config.keys import KEYS
from onstep.config.sections import ModelConfig
from onstep.config.suggestions import WIDTH, shown
from onstep.config.trackers import ALL, BRIDGE_FIELDS, TRACKERS, name_list, tracker_list


@dataclass(frozen=True)
class Idle:
    """Keys that mean something only under a condition."""

    keys: tuple[str, ...]
    need: str
    """The condition, as the line says it."""
    acts: Callable[[ConfigContainer], bool]
    """Whether the condition holds."""


def _keys(section: str, names: str) -> tuple[str, ...]:
    return tuple(f"{section}.{name}" for name in names.split())


def _all_but(section: str, *names: str) -> tuple[str, ...]:
    others = {f"{section}.{name}" for name in names}
    return tuple(key for key in KEYS if key.startswith(f"{section}.") and key not in others)


def _shows_bridge_tags(config: ConfigContainer) -> bool:
    """Whether a configured tracker shows Megatron Bridge's tags."""
    logger = config.logger
    chosen = name_list(logger.report_names)
    if chosen is not None:
        return "bridge" in chosen and bool(_trackers(config))
    return any(getattr(logger, field) is not None for field in BRIDGE_FIELDS.values())


def _trackers(config: ConfigContainer) -> set[str]:
    """The configured trackers, by `report_to` or by a field that enables one."""
    named = tracker_list(config.logger.report_to, "logger.report_to")
    by_field = (name for name, field in BRIDGE_FIELDS.items() if getattr(config.logger, field) is not None)
    return {*(TRACKERS if named == [ALL] else named), *by_field}


def _reports_to(tracker: str) -> Callable[[ConfigContainer], bool]:
    return lambda config: tracker in _trackers(config)


def _is_chosen_start(config: ConfigContainer) -> bool:
    return config.checkpoint.load is not None or config.checkpoint.ckpt_step is not None


def _profiles(config: ConfigContainer) -> bool:
    return config.profiling.use_pytorch_profiler or config.profiling.use_nsys_profiler


def _decays(config: ConfigContainer) -> bool:
    return config.scheduler.lr_decay_style != "constant"


def _warms_up(config: ConfigContainer) -> bool:
    scheduler = config.scheduler
    return bool(scheduler.lr_warmup_fraction or scheduler.lr_warmup_iters or scheduler.lr_warmup_samples)


def _has_validation(config: ConfigContainer) -> bool:
    return parse_split(config.dataset.split)[1] > 0


_LOADS = "checkpoint.load or checkpoint.ckpt_step; a run that merely continues loads everything"
_TAGS = "trackers that show Megatron Bridge's tags: logger.report_names=[bridge] with logger.report_to"
_DIRECTORY = "a directory: run.name or checkpoint.save"

IDLE = (
    Idle(
        _keys("checkpoint", "save_interval save_each_epoch save_on_best non_persistent_save_interval async_save")
        + _keys("checkpoint", "save_optim save_rng components on_save_error most_recent_k keep_every_n keep_best_n")
        + ("checkpoint.validate_replication", "logger.log_progress"),
        _DIRECTORY,
        has_dir,
    ),
    Idle(
        _keys("train", "torch_compile_backend torch_compile_mode"),
        "train.torch_compile=true",
        lambda config: config.train.torch_compile,
    ),
    Idle(("run.output_dir", "run.fresh"), "run.name", lambda config: config.run.name is not None),
    Idle(("checkpoint.load_optim", "checkpoint.load_rng"), _LOADS, _is_chosen_start),
    Idle(("checkpoint.exit_on_missing_checkpoint",), "checkpoint.load", lambda config: bool(config.checkpoint.load)),
    Idle(
        _keys("train", "exit_signals data_timeout"),
        "train.exit_signal_handler=true",
        lambda config: config.train.exit_signal_handler,
    ),
    Idle(
        _keys("train", "manual_gc_interval manual_gc_eval"),
        "train.manual_gc=true",
        lambda config: config.train.manual_gc,
    ),
    Idle(
        ("model.rotary_base",),
        "model.position_embedding_type=rope",
        lambda config: config.model.position_embedding_type == "rope",
    ),
    Idle(
        _keys("optimizer", "adam_beta1 adam_beta2 adam_eps"),
        "optimizer.optimizer=adam or muon",
        lambda config: config.optimizer.optimizer != "sgd",
    ),
    Idle(("optimizer.sgd_momentum",), "optimizer.optimizer=sgd", lambda config: config.optimizer.optimizer == "sgd"),
    Idle(("optimizer.loss_scale",), "mixed_precision", lambda config: config.mixed_precision is not None),
    Idle(
        _keys("optimizer", "initial_loss_scale min_loss_scale loss_scale_window hysteresis"),
        "mixed_precision=fp16_mixed and no optimizer.loss_scale",
        lambda config: config.mixed_precision == "fp16_mixed" and config.optimizer.loss_scale is None,
    ),
    Idle(("optimizer.min_lr", "optimizer.decoupled_min_lr"), "a scheduler.lr_decay_style other than constant", _decays),
    Idle(
        _keys("scheduler", "lr_decay_iters lr_decay_samples"),
        "a scheduler.lr_decay_style other than constant, or lr_warmup_fraction",
        lambda config: _decays(config) or config.scheduler.lr_warmup_fraction is not None,
    ),
    Idle(
        _keys("scheduler", "lr_wsd_decay_style lr_wsd_decay_iters lr_wsd_decay_samples"),
        "scheduler.lr_decay_style=WSD",
        lambda config: config.scheduler.lr_decay_style == "WSD",
    ),
    Idle(("scheduler.lr_warmup_init",), "a warm-up (scheduler.lr_warmup_iters)", _warms_up),
    Idle(
        _keys("validation", "eval_interval eval_each_epoch eval_on_start eval_global_batch_size")
        + _keys("validation", "start_eval_at_iter start_eval_at_epoch metric_for_best_model greater_is_better")
        + _keys("checkpoint", "save_on_best keep_best_n"),
        "evaluations: validation.eval_iters=null or > 0",
        lambda config: config.validation.eval_iters != 0,
    ),
    Idle(
        _keys("validation", "eval_interval eval_each_epoch eval_on_start eval_on_save")
        + _keys("checkpoint", "save_on_best keep_best_n"),
        "a validation share in dataset.split",
        _has_validation,
    ),
    Idle(
        ("validation.start_eval_at_iter",),
        "validation.eval_interval",
        lambda config: config.validation.eval_interval is not None,
    ),
    Idle(
        ("validation.start_eval_at_epoch",),
        "validation.eval_each_epoch=true",
        lambda config: config.validation.eval_each_epoch,
    ),
    Idle(
        ("validation.greater_is_better",),
        "validation.metric_for_best_model",
        lambda config: config.validation.metric_for_best_model is not None,
    ),
    Idle(
        _keys("checkpoint", "keep_every_n keep_best_n"),
        "checkpoint.most_recent_k > 0; -1 keeps every checkpoint",
        lambda config: config.checkpoint.most_recent_k != -1,
    ),
    Idle(
        _keys("dataset", "prefetch_factor multiprocessing_context"),
        "dataset.num_workers > 0",
        lambda config: config.dataset.num_workers > 0,
    ),
    Idle(
        ("logger.timing_log_option",),
        "logger.timing_log_level >= 0",
        lambda config: config.logger.timing_log_level >= 0,
    ),
    Idle(("logger.report_names",), "logger.report_to", lambda config: bool(_trackers(config))),
    Idle(
        _keys("logger", "tensorboard_log_interval log_throughput_to_tensorboard log_timers_to_tensorboard")
        + _keys("logger", "log_validation_ppl_to_tensorboard log_memory_to_tensorboard log_l2_norm_grad_to_tensorboard")
        + _keys("logger", "log_runtime_to_tensorboard log_world_size_to_tensorboard"),
        _TAGS,
        _shows_bridge_tags,
    ),
    Idle(
        ("logger.memory_keys",),
        "logger.log_memory_to_tensorboard=true",
        lambda config: config.logger.log_memory_to_tensorboard,
    ),
    Idle(
        ("logger.runtime_time_unit",),
        "logger.log_runtime_to_tensorboard=true",
        lambda config: config.logger.log_runtime_to_tensorboard,
    ),
    Idle(
        ("logger.throughput_window_size",),
        "logger.log_throughput_to_tensorboard=true",
        lambda config: config.logger.log_throughput_to_tensorboard,
    ),
    Idle(
        _keys("logger", "wandb_exp_name wandb_save_dir wandb_entity"),
        "logger.report_to=[wandb] or logger.wandb_project",
        _reports_to("wandb"),
    ),
    Idle(
        _keys("logger", "mlflow_run_name mlflow_tracking_uri mlflow_tags mlflow_description"),
        "logger.report_to=[mlflow] or logger.mlflow_experiment",
        _reports_to("mlflow"),
    ),
    Idle(
        _keys("logger", "comet_experiment_name comet_workspace comet_tags"),
        "logger.report_to=[comet] or logger.comet_project",
        _reports_to("comet"),
    ),
    Idle(
        _keys(
            "profiling",
            "pytorch_profiler_collect_shapes pytorch_profiler_collect_callstack pytorch_profiler_collect_chakra",
        ),
        "profiling.use_pytorch_profiler=true",
        lambda config: config.profiling.use_pytorch_profiler,
    ),
    Idle(
        ("profiling.record_shapes",),
        "profiling.use_nsys_profiler=true",
        lambda config: config.profiling.use_nsys_profiler,
    ),
    Idle(
        ("profiling.memory_snapshot_path",),
        "profiling.record_memory_history=true",
        lambda config: config.profiling.record_memory_history,
    ),
    Idle(
        _keys("profiling", "use_pytorch_profiler use_nsys_profiler"),
        "a profiling.profile_step_start within the run",
        lambda config: config.profiling.profile_step_start < (config.train.train_iters or math.inf),
    ),
    Idle(
        _keys("profiling", "profile_step_start profile_step_end profile_ranks"),
        "profiling.use_pytorch_profiler, use_nsys_profiler or record_memory_history",
        lambda config: _profiles(config) or config.profiling.record_memory_history,
    ),
    Idle(
        _keys("anomaly", "spike_metrics spike_threshold spike_window spike_warmup"),
        "anomaly.on_spike other than ignore",
        lambda config: config.anomaly.on_spike != "ignore",
    ),
    Idle(
        _all_but("rerun_state_machine", "rerun_mode"),
        "a rerun_state_machine.rerun_mode other than disabled",
        lambda config: config.rerun_state_machine.rerun_mode != "disabled",
    ),
    Idle(
        _keys("ft", "simulated_fault_type simulated_fault_rank simulated_fault_base_delay"),
        "ft.simulate_fault=true",
        lambda config: config.ft.simulate_fault,
    ),
    Idle(
        _all_but("straggler", "log_straggler"),
        "straggler.log_straggler=true",
        lambda config: config.straggler.log_straggler,
    ),
    Idle(("straggler.straggler_ctrlr_port",), "straggler.open_port=true", lambda config: config.straggler.open_port),
    Idle(
        _all_but("nvrx_straggler", "enabled"),
        "nvrx_straggler.enabled=true",
        lambda config: config.nvrx_straggler.enabled,
    ),
    Idle(_all_but("peft", "peft_scheme"), "peft.peft_scheme=lora", lambda config: config.peft.peft_scheme is not None),
)
"""The keys that another key can make meaningless. Not among them: keys that only several ranks or a GPU use, since one
configuration serves many machines, and keys that a callback can use at run time."""

_OF_TRAINER = (
    "label_names",
    "remove_unused_columns",
    "include_for_metrics",
    "prediction_loss_only",
    "eval_do_concat_batches",
    "eval_use_gather_object",
    "batch_eval_metrics",
    "bf16_full_eval",
    "fp16_full_eval",
)
"""Entries of `trainer` that change what is computed."""

_READ_BY_TRAINER = {
    *_keys("model", "seq_length ffn_hidden_size num_query_groups kv_channels"),
    *_keys("dataset", "seq_length shuffle num_workers pin_memory persistent_workers"),
    *_keys("dataset", "prefetch_factor multiprocessing_context"),
}
"""Lengths, with which tokens are counted; sizes that are filled in; and how any dataset is read."""

_GIVEN_TO_TRAINER = tuple(
    key for key in KEYS if key.startswith(("model.", "dataset.", "tokenizer.")) and key not in _READ_BY_TRAINER
)

_DERIVED: dict[str, Callable[[ConfigContainer], float | None]] = {
    "optimizer.min_lr": lambda config: 0,
    "validation.eval_global_batch_size": lambda config: config.train.global_batch_size,
}
"""What `resolve` fills in where these keys are unset."""


def idle_settings(
    config: ConfigContainer, recipes: Sequence[ConfigContainer] = (), *, has_trackers: bool = False
) -> list[tuple[str, list[str]]]:
    """What is set and has no effect, as pairs of the unmet condition and `key=value`, each key once.

    Args:
        recipes: the recipe that `config` was made from, as it is and for a run of this length: nobody has set these.
        has_trackers: whether a callback has trackers of its own, which may use any key of `logger`.
    """
    seen: set[str] = set()
    found = []
    for row in IDLE:
        if row.acts(config) or (has_trackers and row.keys[0].startswith("logger.")):
            continue
        settings = [(key, value) for key, value in _changed(config, row.keys, recipes) if key not in seen]
        seen.update(key for key, _ in settings)
        if settings:
            found.append((row.need, [_setting(key, value) for key, value in settings]))
    return found


def idle_without_trainer(config: ConfigContainer) -> list[tuple[str, list[str]]]:
    """The entries of `trainer` that only the Trainer reads."""
    names = [name for name in _OF_TRAINER if name in config.trainer]
    names += ["optim"] if config.trainer.get("optim", "sgd") not in NATIVE else []
    schedule = config.trainer.get("lr_scheduler_type")
    names += ["lr_scheduler_type"] if schedule and STYLES.get(schedule) != config.scheduler.lr_decay_style else []
    found = [_setting(f"trainer.{name}", config.trainer[name]) for name in names]
    return [("onstep.Trainer, which alone reads them", found)] if found else []


def idle_in_trainer(config: ConfigContainer, model: ModelConfig | None) -> list[tuple[str, list[str]]]:
    """The settings of model, data and tokenizer, which a Trainer is given; unless the given `model` has the same."""
    built = {} if model is None else {f"model.{name}": getattr(model, name) for name in model.field_names()}
    changed = _changed(config, _GIVEN_TO_TRAINER)
    found = [_setting(key, value) for key, value in changed if key not in built or built[key] != value]
    return [("onstep.pretrain; a Trainer uses the model and the datasets that it is given", found)] if found else []


def idle_line(found: Sequence[tuple[str, Sequence[str]]]) -> str | None:
    """One line that names the settings of `idle_settings`; None for none."""
    parts = [f"{', '.join(settings)} (requires {need})" for need, settings in found]
    return f"settings without effect: {'; '.join(parts)}" if parts else None


def _setting(key: str, value: Any) -> str:
    """A key with its value, which is quoted where it would not be read as one word, and cut where it is long."""
    text = str(value)
    return f"{key}={text if text.isprintable() and len(text) <= WIDTH else shown(value)}"


def _changed(
    config: ConfigContainer, keys: tuple[str, ...], recipes: Sequence[ConfigContainer] = ()
) -> Iterator[tuple[str, Any]]:
    for key in keys:
        value, default = KEYS[key].get(config), KEYS[key].default
        is_unset = value == default or (key in _DERIVED and value == _DERIVED[key](config))
        if not is_unset and all(value != KEYS[key].get(recipe) for recipe in recipes):
            yield key, value
