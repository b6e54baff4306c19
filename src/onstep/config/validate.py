"""Is this configuration one that can run, asked before any work starts; and the values that follow from others."""

from __future__ import annotations

import math

from onstep.config.data_rules import check_batches, check_data, check_steps
from onstep.config.lengths import batch_sizes, train_iters, warmup_and_decay
from onstep.config.load import PRECISIONS, check_values, to_flat, typed_copy
from onstep.config.model_config import default_ffn_hidden_size
from onstep.config.model_rules import check_lora_targets, check_trained_model
from onstep.config.optimizer_rules import check_optimizer, check_phases, check_schedule
from onstep.config.part import ConfigPart
from onstep.config.parts import ConfigContainer
from onstep.config.reporting import name_list, tracker_list
from onstep.config.run_rules import check_checkpoints, check_finetune, check_measuring, check_run, check_watching
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
    check_batches(config, world_size)
    check_optimizer(config)
    check_schedule(config)
    check_trained_model(config)
    check_data(config)
    check_run(config)
    check_checkpoints(config)
    check_finetune(config)
    check_lora_targets(config)
    tracker_list(config.logger.report_to, "logger.report_to")
    name_list(config.logger.report_names)
    check_watching(config, world_size)
    check_measuring(config, world_size)
    if config.trainer.get("config_overrides"):
        raise ConfigError("trainer.config_overrides has no place in a configuration; set the keys that it names.")
    made_silently(config.trainer)
    filled = fill(config, world_size)
    iters = train_iters(filled, world_size=world_size)
    check_steps(filled, iters, world_size)
    if iters is not None:
        check_phases(filled, iters, world_size)


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
        warmup, decay = warmup_and_decay(resolved, iters, world_size)
        unit = "iters" if resolved.train.train_samples is None else "samples"
        if warmup >= decay:
            resolved.scheduler.lr_warmup_fraction = None
            setattr(resolved.scheduler, f"lr_warmup_{unit}", decay - 1)
    return resolved


def fill(config: ConfigContainer, world_size: int) -> ConfigContainer:
    """A deep copy with derived values filled in. The configuration is one whose single values keep their rules."""
    filled = typed_copy(config)
    _fill_batches(filled, world_size)
    chosen, model, optimizer = filled.checkpoint, filled.model, filled.optimizer
    if chosen.keep_best_n or chosen.load_best_model_at_end or chosen.save_on_best:
        filled.validation.metric_for_best_model = filled.validation.metric_for_best_model or "loss"
    if optimizer.clip_grad == 0:
        optimizer.clip_grad = None
    if optimizer.grad_norm_skip_threshold == math.inf:
        optimizer.grad_norm_skip_threshold = None
    derived = (
        (model, "ffn_hidden_size", default_ffn_hidden_size(model)),
        (model, "num_query_groups", model.num_attention_heads),
        (model, "kv_channels", model.hidden_size // model.num_attention_heads),
        (optimizer, "min_lr", 0.0),
        (filled.scheduler, "start_weight_decay", optimizer.weight_decay),
        (filled.scheduler, "end_weight_decay", optimizer.weight_decay),
        (filled.rng, "data_seed", filled.rng.seed),
    )
    for part, name, value in derived:
        if getattr(part, name) is None:
            setattr(part, name, value)
    if filled.mixed_precision is not None:
        filled.mixed_precision = PRECISIONS.get(filled.mixed_precision, filled.mixed_precision)
    return filled


def _fill_batches(config: ConfigContainer, world_size: int) -> None:
    train, validation = config.train, config.validation
    if train.global_batch_size is None and train.step_batch_size_schedule is not None:
        train.global_batch_size = batch_sizes(train, world_size, config.model.seq_length).nominal[-1]
    if train.global_batch_size is None and train.micro_batch_size is not None:
        train.global_batch_size = train.micro_batch_size * world_size
    if train.micro_batch_size is None and train.global_batch_size is not None:
        train.micro_batch_size = train.global_batch_size // world_size
    if validation.eval_global_batch_size is None:
        rounds = train.decrease_batch_size_if_needed and train.global_batch_size is not None
        sizes = batch_sizes(train, world_size, config.model.seq_length) if rounds else None
        validation.eval_global_batch_size = train.global_batch_size if sizes is None else sizes.last
    if validation.eval_micro_batch_size is None:
        validation.eval_micro_batch_size = train.micro_batch_size
