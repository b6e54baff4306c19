"""Values of a configuration that derive from others."""

from __future__ import annotations

import math
import signal

from onstep.config.container import ConfigContainer
from onstep.config.keys import leaves, typed_copy
from onstep.config.lengths import batch_sizes
from onstep.config.sections.model import default_ffn_hidden_size


def fill(config: ConfigContainer, world_size: int) -> ConfigContainer:
    """A deep copy with derived values filled in. The single values of the configuration are valid."""
    filled = typed_copy(config)
    _fill_batches(filled, world_size)
    chosen, model, optimizer = filled.checkpoint, filled.model, filled.optimizer
    if chosen.keep_best_n or chosen.load_best_model_at_end or chosen.save_on_best:
        filled.validation.metric_for_best_model = filled.validation.metric_for_best_model or "loss"
    if filled.train.exit_signal is not None:
        filled.train.exit_signals = [_signal_name(filled.train.exit_signal)]
    if optimizer.clip_grad == 0:
        optimizer.clip_grad = None
    if optimizer.grad_norm_skip_threshold == math.inf:
        optimizer.grad_norm_skip_threshold = None
    sizes = (
        (model, "ffn_hidden_size", default_ffn_hidden_size(model.hidden_size, model.gated_linear_unit)),
        (model, "num_query_groups", model.num_attention_heads),
        (model, "kv_channels", model.hidden_size // model.num_attention_heads),
    )
    derived = (
        *(sizes if model.hf_config is None else ()),
        (optimizer, "min_lr", 0.0),
        (filled.scheduler, "start_weight_decay", optimizer.weight_decay),
        (filled.scheduler, "end_weight_decay", optimizer.weight_decay),
        (filled.rng, "data_seed", filled.rng.seed),
        (filled.train, "deterministic", chosen.certify),
    )
    for section, name, value in derived:
        if getattr(section, name) is None:
            setattr(section, name, value)
    for _, holder, name in leaves(filled):
        spellings = holder.option(name).spellings
        if spellings:
            setattr(holder, name, spellings.get(getattr(holder, name), getattr(holder, name)))
    return filled


def _signal_name(asked: str | int) -> str:
    """The name of a signal given by name or number; an unknown number as text."""
    names = {int(one): one.name for one in signal.Signals}
    return asked if isinstance(asked, str) else names.get(int(asked), str(int(asked)))


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
