"""The values of a configuration that follow from others."""

from __future__ import annotations

import math

from onstep.config.batch_sizes import batch_sizes
from onstep.config.keys import typed_copy
from onstep.config.lengths import warmup_and_decay
from onstep.config.parts import ConfigContainer, ModelConfig
from onstep.config.rules import PRECISIONS

FFN_MULTIPLE = 64
"""The default width of a gated feed-forward block is rounded up to a multiple of this."""


def default_ffn_hidden_size(model: ModelConfig) -> int:
    """Width of a feed-forward block that is left open: as wide as keeps the parameters those of 4 times the hidden
    size without a gate."""
    if not model.gated_linear_unit:
        return 4 * model.hidden_size
    return -(-8 * model.hidden_size // (3 * FFN_MULTIPLE)) * FFN_MULTIPLE


def fill(config: ConfigContainer, world_size: int) -> ConfigContainer:
    """A deep copy with derived values filled in. The configuration is one whose single values keep their rules."""
    filled = typed_copy(config)
    _fill_batches(filled, world_size)
    _fill_optimizer(filled)
    _fill_model(filled.model)
    chosen = filled.checkpoint
    if chosen.keep_best_n or chosen.load_best_model_at_end or chosen.save_on_best:
        filled.validation.metric_for_best_model = filled.validation.metric_for_best_model or "loss"
    if filled.rng.data_seed is None:
        filled.rng.data_seed = filled.rng.seed
    if filled.mixed_precision is not None:
        filled.mixed_precision = PRECISIONS.get(filled.mixed_precision, filled.mixed_precision)
    return filled


def cut_warmup(config: ConfigContainer, iters: int, world_size: int = 1) -> None:
    """Cut the warm-up of a filled configuration to one iteration (or sample) less than the decay."""
    warmup, decay = warmup_and_decay(config, iters, world_size)
    if warmup < decay:
        return
    config.scheduler.lr_warmup_fraction = None
    if config.train.train_samples is None:
        config.scheduler.lr_warmup_iters = decay - 1
    else:
        config.scheduler.lr_warmup_samples = decay - 1


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


def _fill_optimizer(config: ConfigContainer) -> None:
    optimizer, scheduler = config.optimizer, config.scheduler
    if optimizer.min_lr is None:
        optimizer.min_lr = 0.0
    if optimizer.clip_grad == 0:
        optimizer.clip_grad = None
    if optimizer.grad_norm_skip_threshold == math.inf:
        optimizer.grad_norm_skip_threshold = None
    if scheduler.start_weight_decay is None:
        scheduler.start_weight_decay = optimizer.weight_decay
    if scheduler.end_weight_decay is None:
        scheduler.end_weight_decay = optimizer.weight_decay


def _fill_model(model: ModelConfig) -> None:
    if model.ffn_hidden_size is None:
        model.ffn_hidden_size = default_ffn_hidden_size(model)
    if model.num_query_groups is None:
        model.num_query_groups = model.num_attention_heads
    if model.kv_channels is None:
        model.kv_channels = model.hidden_size // model.num_attention_heads
