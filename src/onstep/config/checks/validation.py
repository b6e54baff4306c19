"""The check of a whole configuration before any work starts, and its copy with every derived value filled in."""

from __future__ import annotations

from onstep.config.checks.batches import check_batches, check_steps
from onstep.config.checks.data import check_data
from onstep.config.checks.model import check_lora_targets, check_trained_model
from onstep.config.checks.optimizer import check_optimizer, check_phases, check_schedule
from onstep.config.checks.parallel import check_parallel
from onstep.config.checks.run import check_checkpoints, check_finetune, check_measuring, check_run, check_watching
from onstep.config.checks.single_values import check_alone, check_values
from onstep.config.container import ConfigContainer
from onstep.config.derived import fill
from onstep.config.hf.conversion import check_trainer
from onstep.config.keys import own_copy
from onstep.config.lengths import train_iters, warmup_and_decay
from onstep.config.section import ConfigSection
from onstep.config.trackers import name_list, tracker_list
from onstep.errors import ConfigError


def validate(config: ConfigContainer, world_size: int | None = None) -> None:
    """Check a configuration for a run on `world_size` ranks; it is not modified.

    Warns (UserWarning) if the warm-up is as long as the learning-rate schedule (it is then shortened), if the run ends
    before its ramp-up of the batch, and if it ends before a step to skip.

    Args:
        config: the configuration to check.
        world_size: the number of ranks, which are the processes of the run; None for the fewest that its sizes allow.

    Raises:
        ConfigError: the first rule that is broken, with the value and the remedy.
    """
    config = own_copy(config)
    check_values(config)
    for name in config.field_names():
        section = getattr(config, name)
        if isinstance(section, ConfigSection):
            section.validate()
    check_alone(config)
    ranks = config.parallel.least_ranks if world_size is None else world_size
    check_parallel(config, ranks)
    data_ranks = config.parallel_sizes(ranks).data
    check_batches(config, data_ranks)
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
    check_watching(config, ranks)
    check_measuring(config, ranks)
    if config.trainer.get("config_overrides"):
        raise ConfigError("trainer.config_overrides cannot be part of a configuration; set the keys that it names.")
    if config.trainer:
        check_trainer(config, data_ranks)
    filled = fill(config, data_ranks)
    iters = train_iters(filled, world_size=data_ranks)
    check_steps(filled, iters, data_ranks)
    if iters is not None:
        check_phases(filled, iters, data_ranks)


def resolve(config: ConfigContainer, world_size: int | None = None) -> ConfigContainer:
    """A validated deep copy with every derived value filled in; the caller's configuration is not modified.

    Filled in: micro and global batch sizes, also of evaluation; the model's `ffn_hidden_size`, `num_query_groups` and
    `kv_channels`; `min_lr`, start and end of the weight decay, `data_seed`; `metric_for_best_model` where checkpoints
    are chosen by it; the warm-up is shortened to the schedule.
    Left as they are: `train_iters` of runs by samples or epochs (see `train_iters()`), and values that depend on the
    tokenizer (`vocab_size`), the machine (`device`, backend) or the run's directory.

    Args:
        config: the configuration, which is not modified.
        world_size: the number of ranks, which are the processes of the run; None for the fewest that its sizes allow.

    Raises:
        ConfigError: as `validate`.
    """
    validate(config, world_size)
    ranks = config.parallel.least_ranks if world_size is None else world_size
    data_ranks = config.parallel_sizes(ranks).data
    resolved = fill(config, data_ranks)
    iters = train_iters(resolved, world_size=data_ranks)
    if iters is not None:
        warmup, decay = warmup_and_decay(resolved, iters, data_ranks)
        unit = "iters" if resolved.train.train_samples is None else "samples"
        if warmup >= decay:
            resolved.scheduler.lr_warmup_fraction = None
            setattr(resolved.scheduler, f"lr_warmup_{unit}", decay - 1)
    return resolved
