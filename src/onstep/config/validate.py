"""Is this configuration one that can run? Asked before any work starts."""

from __future__ import annotations

import warnings

from onstep.config.batch_rules import check_batches, check_evaluation_batch, warn_of_short_ramp
from onstep.config.checkpoint_rules import check_checkpoints
from onstep.config.data_rules import check_data
from onstep.config.derived import cut_warmup, fill
from onstep.config.expert_rules import check_experts
from onstep.config.finetune_rules import check_finetune, check_lora_targets
from onstep.config.keys import to_flat, typed_copy
from onstep.config.lengths import sizes_of, train_iters, warmup_and_decay
from onstep.config.loop_rules import check_housekeeping, check_timing, check_watching, warn_of_steps_never_skipped
from onstep.config.model_rules import check_model
from onstep.config.optimizer_rules import check_optimizer
from onstep.config.part import ConfigPart
from onstep.config.parts import ConfigContainer
from onstep.config.reporting import name_list, tracker_list
from onstep.config.rules import check_values
from onstep.config.training_arguments import made_silently
from onstep.errors import ConfigError


def validate(config: ConfigContainer, world_size: int = 1) -> None:
    """Check a configuration for a run on `world_size` data-parallel ranks; nothing is written to it.

    Warns (UserWarning) where the warm-up is as long as the learning-rate schedule: it will be cut; where the run ends
    before its ramp of batch sizes does; and where steps to skip lie behind its end.

    Raises:
        ConfigError: the first rule that is broken, with the value and what to change.
    """
    config = typed_copy(config)
    check_values(to_flat(config))
    for name in config.field_names():
        part = getattr(config, name)
        if isinstance(part, ConfigPart):
            part.validate()
    _check_length(config)
    check_batches(config, world_size)
    check_housekeeping(config, world_size)
    filled = fill(config, world_size)
    check_evaluation_batch(filled.validation, world_size)
    _check_optimizer(config)
    check_optimizer(config)
    _check_schedule(config)
    _check_model(config)
    check_data(config)
    _check_run(config)
    check_checkpoints(config)
    check_finetune(config)
    check_lora_targets(config)
    tracker_list(config.logger.report_to, "logger.report_to")
    name_list(config.logger.report_names)
    check_watching(config, world_size)
    check_timing(config)
    _check_trainer(config)
    _check_schedule_lengths(filled, world_size)


def resolve(config: ConfigContainer, world_size: int = 1) -> ConfigContainer:
    """A validated deep copy with every value filled in that follows from others; the caller's is never written to.

    Filled in: micro and global batch sizes, also of evaluation; the model's `ffn_hidden_size`, `num_query_groups` and
    `kv_channels`; `min_lr`, start and end of the weight decay, `data_seed`; `metric_for_best_model` where checkpoints
    are chosen by it; the warm-up is cut to the schedule.
    Left as they are: `train_iters` of runs by samples or epochs (see `train_iters()`), what takes the tokenizer
    (`vocab_size`), the machine (`device`, backend) or the run's folder.

    Raises:
        ConfigError: as `validate`.
    """
    validate(config, world_size)
    resolved = fill(config, world_size)
    iters = train_iters(resolved, world_size=world_size)
    if iters is not None:
        cut_warmup(resolved, iters, world_size)
    return resolved


def _check_length(config: ConfigContainer) -> None:
    train = config.train
    lengths = {"train_iters": train.train_iters, "train_samples": train.train_samples, "num_epochs": train.num_epochs}
    given = [f"train.{name}={value}" for name, value in lengths.items() if value is not None]
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)} are both lengths of the run; keep one and set the others to null.")
    if not given and not config.validation.skip_train:
        raise ConfigError("the run has no length: set one of train.train_iters, train.train_samples, train.num_epochs.")


def _check_optimizer(config: ConfigContainer) -> None:
    optimizer = config.optimizer
    if optimizer.lr is None:
        if config.validation.skip_train:
            return
        raise ConfigError("optimizer.lr is not set; choose a learning rate such as 3e-4.")
    if optimizer.min_lr is not None and optimizer.min_lr > optimizer.lr:
        raise ConfigError(f"optimizer.min_lr={optimizer.min_lr} must be at most optimizer.lr={optimizer.lr}.")


def _check_schedule(config: ConfigContainer) -> None:
    scheduler = config.scheduler
    _check_units(config)
    if scheduler.lr_warmup_fraction is not None:
        if scheduler.lr_warmup_fraction > 1:
            raise ConfigError(f"scheduler.lr_warmup_fraction={scheduler.lr_warmup_fraction} must be between 0 and 1.")
        if scheduler.lr_warmup_iters or scheduler.lr_warmup_samples:
            raise ConfigError("the warm-up is given twice: keep scheduler.lr_warmup_fraction or its length, not both.")
    wsd = (scheduler.lr_wsd_decay_iters, scheduler.lr_wsd_decay_samples)
    if scheduler.lr_decay_style == "WSD" and wsd == (None, None):
        raise ConfigError("lr_decay_style=WSD takes the length of its decay: set scheduler.lr_wsd_decay_iters.")
    _check_weight_decay(config)


def _check_units(config: ConfigContainer) -> None:
    """A run is counted in iterations or in samples, and so is all of its schedule."""
    by_samples = config.train.train_samples is not None
    foreign, own = ("iters", "samples") if by_samples else ("samples", "iters")
    for name in ("lr_decay", "lr_wsd_decay", "lr_warmup"):
        value = getattr(config.scheduler, f"{name}_{foreign}")
        if value:
            length = "train.train_samples" if by_samples else "train.train_iters or num_epochs"
            raise ConfigError(
                f"scheduler.{name}_{foreign}={value} does not go with a run by {length}; set scheduler.{name}_{own}."
            )


def _check_weight_decay(config: ConfigContainer) -> None:
    scheduler = config.scheduler
    start, end = scheduler.start_weight_decay, scheduler.end_weight_decay
    style = scheduler.weight_decay_incr_style
    if style == "constant" and start != end:
        raise ConfigError(
            f"weight_decay_incr_style=constant takes start_weight_decay == end_weight_decay, got {start} and {end}; "
            "choose linear or cosine for a weight decay that rises."
        )
    if style != "constant" and (start is None or end is None or end < start):
        raise ConfigError(
            f"weight_decay_incr_style={style} takes scheduler.start_weight_decay <= end_weight_decay, "
            f"got {start} and {end}."
        )


def _check_model(config: ConfigContainer) -> None:
    model = config.model
    check_model(model)
    check_experts(model)
    if config.dataset.seq_length != model.seq_length:
        raise ConfigError(
            f"dataset.seq_length={config.dataset.seq_length} and model.seq_length={model.seq_length} must be the same; "
            "set both."
        )


def _check_run(config: ConfigContainer) -> None:
    name = config.run.name
    if name is not None and (not name or "/" in name or "\\" in name or name in (".", "..")):
        raise ConfigError(f"run.name={name!r} must be the name of a folder; put its path into run.output_dir.")
    if config.dist.distributed_backend == "nccl" and config.dist.device == "cpu":
        raise ConfigError("dist.distributed_backend=nccl takes GPUs, got dist.device=cpu; use gloo.")


def _check_trainer(config: ConfigContainer) -> None:
    if config.trainer.get("config_overrides"):
        raise ConfigError("trainer.config_overrides has no place in a configuration; set the keys that it names.")
    made_silently(config.trainer)


def _check_schedule_lengths(filled: ConfigContainer, world_size: int) -> None:
    iters = train_iters(filled, world_size=world_size)
    if iters is None:
        return
    train, scheduler = filled.train, filled.scheduler
    if iters == 0:
        sizes = sizes_of(filled, world_size)
        size = f"train.global_batch_size={train.global_batch_size}"
        step = f"the first step of {sizes.at(0)}" if sizes.varies else f"one step of {size}"
        raise ConfigError(
            f"train.train_samples={train.train_samples} is less than {step} samples; train on at least one batch."
        )
    warn_of_short_ramp(filled, iters, world_size)
    warn_of_steps_never_skipped(filled, iters)
    warmup, decay = warmup_and_decay(filled, iters, world_size)
    unit = "iterations" if train.train_samples is None else "samples"
    wsd = scheduler.lr_wsd_decay_iters or scheduler.lr_wsd_decay_samples
    room = decay - min(warmup, decay - 1)
    if scheduler.lr_decay_style == "WSD" and wsd is not None and wsd > room:
        key = f"scheduler.lr_wsd_decay_{'iters' if unit == 'iterations' else unit}"
        raise ConfigError(
            f"{key}={wsd}: the WSD decay ({wsd} {unit}) is longer than what the schedule ({decay} {unit}) has after "
            f"the warm-up ({warmup} {unit}); choose at most {room}, or a shorter warm-up."
        )
    if warmup > decay:
        key = f"scheduler.lr_warmup_{'iters' if unit == 'iterations' else unit}"
        raise ConfigError(
            f"{key}={warmup} is longer than the learning-rate schedule of {decay} {unit}; choose at most {decay - 1}, "
            "or a longer run."
        )
    if warmup == decay:
        warnings.warn(
            f"the warm-up ({warmup} {unit}) is as long as the learning-rate schedule; it is cut to {decay - 1}.",
            UserWarning,
            stacklevel=4,
        )
