"""`TrainingArguments` to `ConfigContainer` and back; nothing is lost in either direction."""

from __future__ import annotations

import os
from dataclasses import fields
from typing import Any

from onstep.config.container import ConfigContainer
from onstep.config.field_types import accepts_none, field_types
from onstep.config.hf.argument import KEY_OF, LOG_LEVELS, argument_of
from onstep.config.hf.arguments import TrainingArguments, build_silently, is_greater_better
from onstep.config.hf.optimizers import NATIVE
from onstep.config.hf.schedules import named_schedule, set_schedule
from onstep.config.hf.sharding import plain_parallelism, sharding_keys
from onstep.config.keys import KEYS, diff
from onstep.config.lengths import share_of, steps_of_epochs
from onstep.config.load import merge
from onstep.config.sections.run import DistributedDataParallelConfig
from onstep.config.suggestions import shown
from onstep.config.trackers import tracker_list
from onstep.errors import ConfigError
from onstep.stores.urls import check_place, is_url

MAY_BE_NONE = {name for name, annotation in field_types(TrainingArguments).items() if accepts_none(annotation)}

DDP_FIELDS = {
    "ddp_find_unused_parameters": "find_unused_parameters",
    "ddp_broadcast_buffers": "broadcast_buffers",
    "ddp_bucket_cap_mb": "bucket_cap_mb",
    "ddp_static_graph": "static_graph",
}
"""Arguments whose None is the default of a field of `config.ddp`."""

INTERVALS = {
    "logging": ("logger", "log_interval", "log_on_each_epoch"),
    "eval": ("validation", "eval_interval", "eval_each_epoch"),
    "save": ("checkpoint", "save_interval", "save_each_epoch"),
}
"""Activities with a strategy: the section of the configuration, its field for a number of steps and for each epoch."""

SHARES = tuple(f"{what}_steps" for what in INTERVALS)
"""Intervals that may be a share of the run; a configuration has the resulting number of steps."""


def args_to_config(
    args: TrainingArguments, *, num_samples_per_epoch: int | None = None, world_size: int = 1
) -> ConfigContainer:
    """The configuration that corresponds to the arguments on `world_size` data-parallel ranks.

    Arguments without a key of their own are in `config.trainer`; `config_overrides` are applied last.
    `num_samples_per_epoch` is needed only where an interval is a share of a run whose length is given in epochs.

    Args:
        args: the arguments to convert, Onstep's or Hugging Face's.

    Raises:
        ConfigError: an argument that is not supported, or a share of a run of unknown length.
    """
    args.check()
    config = ConfigContainer()
    for name, key in KEY_OF.items():
        key.set(config, getattr(args, name))
    _set_run(args, config, world_size)
    total_steps = _total_steps(args, config, num_samples_per_epoch)
    _set_intervals(args, config, total_steps)
    _set_evaluation(args, config)
    _set_optimizer(args, config)
    set_schedule(args, config, total_steps)
    _set_checkpoints(args, config)
    _set_surroundings(args, config)
    merge(config, sharding_keys(args))
    config.trainer = _without_a_name(args, config, world_size)
    if args.config_overrides:
        merge(config, args.config_overrides)
        if "trainer" not in args.config_overrides:
            for name in _held_elsewhere(config, world_size):  # the overrides win
                del config.trainer[name]
    return config


def config_to_args(config: ConfigContainer, *, world_size: int = 1) -> TrainingArguments:
    """The arguments that correspond to this configuration; keys without an argument are in `config_overrides`.

    `args_to_config(config_to_args(config))` equals `config`.

    Args:
        world_size: the number of data-parallel ranks.

    Raises:
        ConfigError: a value in `config.trainer` that `TrainingArguments` does not accept.
    """
    named = _named_arguments(config, world_size)
    # Several arguments may set the same value (optim, bf16): keep the user's if it expresses as much.
    as_written = _with_overrides({**named, **config.trainer}, config, world_size)
    as_configured = _with_overrides({**config.trainer, **named}, config, world_size)
    return min(as_written, as_configured, key=lambda args: len(args.config_overrides or ()))


def check_trainer(config: ConfigContainer, world_size: int) -> None:
    """Refuse an entry of `config.trainer` whose value another key holds, if it holds another one.

    Raises:
        ConfigError: naming the entry and the keys, or as `config_to_args`.
    """
    for name, keys in _held_elsewhere(config, world_size).items():
        own = ", ".join(f"{key}={shown(KEYS[key].get(config))}" for key in keys)
        raise ConfigError(
            f"trainer.{name}={shown(config.trainer[name])} has no effect, since a key of the configuration has its "
            f"value: {own}; set that, and drop {name} from trainer."
        )


def _held_elsewhere(config: ConfigContainer, world_size: int) -> dict[str, list[str]]:
    """The entries of `config.trainer` that other keys contradict, with these keys."""
    named = _named_arguments(config, world_size)

    def made(entries: dict[str, Any]) -> ConfigContainer:
        return args_to_config(build_silently({**named, **entries}), world_size=world_size)

    whole, found = made(config.trainer), {}
    for name, given in config.trainer.items():
        if name in (*SHARES, "warmup_steps") and isinstance(given, float) and 0 < given < 1:
            continue  # a share: the steps that it makes depend on the length of the run
        try:
            without = made({other: value for other, value in config.trainer.items() if other != name})
        except ConfigError:  # the others depend on it, as the keywords of a schedule on its name
            continue
        moved = [key for key, _, value in diff(without, whole) if key in KEYS and value != KEYS[key].get(config)]
        if (name not in whole.trainer or name in moved) and (keys := [key for key in moved if key != "trainer"]):
            found[name] = [key for key in keys if argument_of(key) == name] or keys
    return found


def _with_overrides(values: dict[str, Any], config: ConfigContainer, world_size: int) -> TrainingArguments:
    args = build_silently(values)
    differing = diff(args_to_config(args, world_size=world_size), config)
    args.config_overrides = {key: value for key, _, value in differing} or None
    return args


def _without_a_name(args: TrainingArguments, config: ConfigContainer, world_size: int) -> dict[str, Any]:
    """The arguments that cannot be recovered from the configuration."""
    back = build_silently(_named_arguments(config, world_size))
    names = [f.name for f in fields(TrainingArguments) if f.init]
    differing = {name: getattr(args, name) for name in names if getattr(args, name) != getattr(back, name)}
    differing.pop("hub_token", None)  # a configuration is written to files
    if differing.pop("accelerator_config", None) and (changed := args.accelerator_config.changed()):
        differing["accelerator_config"] = changed
    if "parallelism_config" in differing:
        differing["parallelism_config"] = plain_parallelism(differing["parallelism_config"])
    return {name: value for name, value in differing.items() if not (name in SHARES and value and value < 1)}


def _set_run(args: TrainingArguments, config: ConfigContainer, world_size: int) -> None:
    config.run.output_dir, config.run.name = _place_and_name(args.output_dir or "trainer_output")
    if args.max_steps > 0:
        config.train.train_iters = args.max_steps
    else:
        config.train.num_epochs = args.num_train_epochs
    config.train.global_batch_size = args.per_device_train_batch_size * args.gradient_accumulation_steps * world_size
    config.validation.eval_global_batch_size = args.per_device_eval_batch_size * world_size
    config.train.deterministic = args.full_determinism or None
    config.dataset.shuffle = args.train_sampling_strategy != "sequential"


def _place_and_name(output_dir: str) -> tuple[str, str]:
    """`run.output_dir` and `run.name` of a directory, or of a URL in an object store."""
    check_place("output_dir", output_dir)
    if is_url(output_dir):
        directory, _, name = output_dir.rstrip("/").rpartition("/")
        if not is_url(directory):
            raise ConfigError(f"output_dir={output_dir} is a bucket; name the directory of the run: {output_dir}/NAME.")
        return directory, name
    path = os.path.normpath(output_dir)
    directory, name = os.path.split(path)
    if name in ("", ".", ".."):
        directory, name = os.path.split(os.path.abspath(path))
    return directory or ".", name


def _set_intervals(args: TrainingArguments, config: ConfigContainer, total_steps: int | None) -> None:
    """Set the intervals in steps, where a value below 1 is a share of the run, and those in epochs."""
    config.logger.log_interval = 0
    for what, (section, by_steps, by_epoch) in INTERVALS.items():
        strategy, value = getattr(args, f"{what}_strategy"), getattr(args, f"{what}_steps")
        holder = getattr(config, section)
        setattr(holder, by_epoch, strategy == "epoch")
        if strategy != "steps":
            continue
        if value < 1 and total_steps is None:
            raise ConfigError(
                f"TrainingArguments.{what}_steps={value} is a share of the run, whose length in steps is not known "
                "here; give a number of steps, or max_steps."
            )
        setattr(holder, by_steps, int(value) if value >= 1 else share_of(total_steps or 0, value))


def _set_evaluation(args: TrainingArguments, config: ConfigContainer) -> None:
    validation = config.validation
    validation.eval_iters = args.max_eval_steps if args.max_eval_steps > 0 else None
    if args.metric_for_best_model and args.greater_is_better == is_greater_better(args.metric_for_best_model):
        validation.greater_is_better = None
    validation.eval_after_training = args.eval_strategy == "steps"
    if args.eval_strategy == "steps":
        validation.start_eval_at_iter = share_of(1, args.eval_delay) or None
    elif args.eval_strategy == "epoch":
        validation.start_eval_at_epoch = float(args.eval_delay) or None


def _set_optimizer(args: TrainingArguments, config: ConfigContainer) -> None:
    optimizer = config.optimizer
    optimizer.optimizer = NATIVE.get(args.optim, "adam")
    if optimizer.optimizer == "sgd":
        optimizer.sgd_momentum = 0.0
    optimizer.clip_grad = args.max_grad_norm or None
    if args.bf16 or args.mixed_precision == "bf16":
        config.mixed_precision = "bf16_mixed"
    elif args.fp16 or args.mixed_precision == "fp16":
        config.mixed_precision = "fp16_mixed"
        # those of torch's GradScaler, which Hugging Face uses; Megatron's skip the first 16 steps or so
        optimizer.initial_loss_scale, optimizer.loss_scale_window, optimizer.hysteresis = 2.0**16, 2000, 1


def _set_checkpoints(args: TrainingArguments, config: ConfigContainer) -> None:
    checkpoint, strategy = config.checkpoint, args.save_strategy
    checkpoint.save_on_best = strategy == "best"
    checkpoint.save_at_end = strategy in ("steps", "epoch")
    checkpoint.save_optim = checkpoint.save_rng = not args.save_only_model
    checkpoint.most_recent_k = -1 if args.save_total_limit is None else args.save_total_limit
    checkpoint.keep_best_n = args.preserve_n_best if args.preserve_best_model else 0
    if isinstance(args.resume_from_checkpoint, str):
        checkpoint.load = args.resume_from_checkpoint
        checkpoint.exit_on_missing_checkpoint = True  # a mistyped path is an error, never a fresh start
    checkpoint.resume = args.resume_from_checkpoint is not False


def _set_surroundings(args: TrainingArguments, config: ConfigContainer) -> None:
    config.logger.logging_level = LOG_LEVELS[args.log_level]
    config.logger.report_to = tracker_list(args.report_to, "TrainingArguments.report_to") or None
    config.dist.distributed_timeout_minutes = args.ddp_timeout / 60
    config.dist.device = "cpu" if args.use_cpu else None
    for name, key in DDP_FIELDS.items():
        value = getattr(args, name)
        if value is not None:
            setattr(config.ddp, key, float(value) if key == "bucket_cap_mb" else value)


def _total_steps(args: TrainingArguments, config: ConfigContainer, num_samples: int | None) -> int | None:
    """Optimizer steps of the run, or None if they are not known."""
    if args.max_steps > 0:
        return args.max_steps
    if num_samples is None:
        return None
    batch = config.train.global_batch_size or 1
    return steps_of_epochs(args.num_train_epochs, num_samples, batch, args.dataloader_drop_last)


def _named_arguments(config: ConfigContainer, world_size: int) -> dict[str, Any]:
    """The configuration as far as `TrainingArguments` can express it; the rest is missing or approximate."""
    named = {name: key.get(config) for name, key in KEY_OF.items()}
    if config.dataset.num_workers == 0:  # the arguments have it only with workers
        del named["dataloader_prefetch_factor"]
    named |= _named_run(config, world_size)
    named |= _named_intervals(config)
    named |= _named_checkpoints(config)
    named |= _named_distributed(config)
    named |= named_schedule(config.scheduler, config.optimizer)
    levels = {level: name for name, level in LOG_LEVELS.items()}
    named["log_level"] = levels.get(config.logger.logging_level, "passive")
    named["report_to"] = tracker_list(config.logger.report_to, "logger.report_to")
    named["max_eval_steps"] = config.validation.eval_iters or -1
    optims = {optimizer: name for name, optimizer in reversed(NATIVE.items())}
    named["optim"] = optims.get(config.optimizer.optimizer, "adamw_torch_fused")
    named["max_grad_norm"] = config.optimizer.clip_grad or 0.0
    named["bf16"] = config.mixed_precision in ("bf16_mixed", "bf16-mixed")
    named["fp16"] = config.mixed_precision in ("fp16_mixed", "fp16-mixed")
    return {name: value for name, value in named.items() if value is not None or name in MAY_BE_NONE}


def _named_run(config: ConfigContainer, world_size: int) -> dict[str, Any]:
    train, run = config.train, config.run
    directory = "" if run.output_dir == "." else run.output_dir
    named: dict[str, Any] = {"output_dir": os.path.join(directory, run.name) if run.name else run.output_dir}
    if train.train_iters is not None:
        named["max_steps"] = train.train_iters
    elif train.num_epochs is not None:
        named |= {"max_steps": -1, "num_train_epochs": train.num_epochs}
    if train.global_batch_size:
        micro = train.micro_batch_size or max(1, train.global_batch_size // world_size)
        named["per_device_train_batch_size"] = micro
        named["gradient_accumulation_steps"] = max(1, train.global_batch_size // (micro * world_size))
    named["full_determinism"] = bool(train.deterministic)
    named["train_sampling_strategy"] = "random" if config.dataset.shuffle else "sequential"
    return named


def _named_intervals(config: ConfigContainer) -> dict[str, Any]:
    named: dict[str, Any] = {}
    for what, (section, by_steps, by_epoch) in INTERVALS.items():
        holder = getattr(config, section)
        steps = getattr(holder, by_steps) or 0
        if steps > 0:
            named |= {f"{what}_strategy": "steps", f"{what}_steps": steps}
        else:
            named[f"{what}_strategy"] = "epoch" if getattr(holder, by_epoch) else "no"
    if named["eval_strategy"] == "steps":
        named["eval_delay"] = config.validation.start_eval_at_iter or 0
    elif named["eval_strategy"] == "epoch":
        named["eval_delay"] = config.validation.start_eval_at_epoch or 0
    if named["save_strategy"] == "no" and config.checkpoint.save_on_best:
        named["save_strategy"] = "best"
    return named


def _named_checkpoints(config: ConfigContainer) -> dict[str, Any]:
    checkpoint = config.checkpoint
    named: dict[str, Any] = {
        "save_only_model": not (checkpoint.save_optim or checkpoint.save_rng),
        "save_total_limit": checkpoint.most_recent_k if checkpoint.most_recent_k > 0 else None,
        "resume_from_checkpoint": checkpoint.load or (None if checkpoint.resume else False),
    }
    if checkpoint.keep_best_n > 0:
        named |= {"preserve_best_model": True, "preserve_n_best": checkpoint.keep_best_n}
    return named


def _named_distributed(config: ConfigContainer) -> dict[str, Any]:
    default = DistributedDataParallelConfig()
    named: dict[str, Any] = {
        "ddp_timeout": max(1, round(config.dist.distributed_timeout_minutes * 60)),
        "use_cpu": config.dist.device == "cpu",
    }
    for name, key in DDP_FIELDS.items():
        value = getattr(config.ddp, key)
        if value != getattr(default, key):
            named[name] = max(1, round(value)) if key == "bucket_cap_mb" else value
    return named
