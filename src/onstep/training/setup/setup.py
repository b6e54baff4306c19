"""Builds a run's model, optimizer, scheduler and data from its configuration."""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from onstep.config import ConfigContainer
from onstep.config.differences import configured_schedule_holds
from onstep.config.lengths import has_rampup_tails, progress_after, schedule_samples, sizes_of, train_iters
from onstep.data import EvalLoader, StreamLoader, TrainLoader
from onstep.distributed import refused_together
from onstep.errors import ConfigError
from onstep.events import Dispatcher
from onstep.models import ModelHook
from onstep.optim import build_loss_scaler, build_optimizer, build_scheduler
from onstep.training.checkpointing.saved_states import callbacks_give_weights
from onstep.training.lifecycle.float32 import slow_float32
from onstep.training.protocols import Trained, UserOptimizer, UserScheduler
from onstep.training.run import Run
from onstep.training.setup.memory import check_device_memory
from onstep.training.setup.model_and_data import build_data, build_model, open_tokenizer
from onstep.training.setup.tokenizer_record import record_tokenizer
from onstep.training.stages.left_out import check_stages

logger = logging.getLogger(__name__)

MODEL_TIMER, DATA_TIMER = "model-and-optimizer-setup", "train/valid/test-data-iterators-setup"


@dataclass
class TrainingSetup:
    """The objects passed to `train()`."""

    model: list[nn.Module]
    optimizer: UserOptimizer | None
    """None in a run that only evaluates, as are scheduler and training data."""
    scheduler: UserScheduler | None
    train_data: TrainLoader | StreamLoader | None
    valid_data: EvalLoader | None
    test_data: EvalLoader | None

    def close(self) -> None:
        """End worker processes."""
        for loader in (self.train_data, self.valid_data, self.test_data):
            if loader is not None:
                loader.close()


def set_up(state: Run, notify: Dispatcher, pre_wrap_hooks: Sequence[ModelHook] = ()) -> TrainingSetup:
    """Build everything of a language-model run; `pre_wrap_hooks` change its model before it is wrapped. Collective.

    Fires `on_data_init_start` before any data file is opened (except those that a `bpe` tokenizer is trained on) and
    `on_init_end` when everything is built. The scheduler exists at `on_data_init_start` unless it requires the length
    of an epoch, which is only known from the data: in a run by epochs, and with a batch-size ramp-up if epochs end in
    partial batches.
    """
    config, world, timers = state.cfg, state.world, state.timers
    ranks = world.data.size
    with timers("tokenizer-setup").measure():
        state.tokenizer = open_tokenizer(state)
    resolve_vocabulary(config, state.tokenizer.vocab_size)
    check_device_memory(config, world)
    with timers(MODEL_TIMER).measure(barrier=True):
        model = build_model(config, world, state, pre_wrap_hooks)
        seed_everything(config.rng.seed + world.data.rank)
        trains, iters = not config.validation.skip_train, train_iters(config, world_size=ranks)
        if trains and world.sizes.pp > 1:
            refused_together(world, lambda: check_stages(model))
        scaler = build_loss_scaler(config.optimizer, config.mixed_precision)
        optimizer = build_optimizer(model, config.optimizer, scaler=scaler, seed=config.rng.seed) if trains else None
        waits = iters is None or has_rampup_tails(config, ranks)
        scheduler = None if optimizer is None or waits else scheduler_for(config, optimizer, iters, ranks)
    notify.model, notify.optimizer, notify.scheduler = model, optimizer, scheduler
    load_checkpoint(state, Trained(model, optimizer, scheduler))
    let_callbacks_give_weights(state, notify)
    notify.on_data_init_start()
    with timers(DATA_TIMER).measure(barrier=True):
        train_data, valid_data, test_data = build_data(config, world, state.tokenizer)
        record_tokenizer(state, state.tokenizer, valid_data, train_data)
    if scheduler is None and train_data is not None and optimizer is not None:
        iters = train_iters(config, train_data.num_samples, world_size=ranks)
        scheduler = scheduler_for(config, optimizer, iters, ranks, train_data.num_samples)
        notify.scheduler = scheduler
    state.entry_point.train_dataloader, state.entry_point.eval_dataloader = train_data, valid_data
    count_steps(state, train_data)
    validation = config.validation
    state.train_state.do_train = trains and bool(iters)
    state.train_state.do_valid = valid_data is not None and validation.eval_iters != 0
    state.train_state.do_test = test_data is not None and validation.eval_iters != 0
    end_set_up(state, notify)
    return TrainingSetup(model, optimizer, scheduler, train_data, valid_data, test_data)


def load_checkpoint(state: Run, trained: Trained) -> None:
    """Pass the checkpoint that the run continues from, if any, to the callbacks' context. Collective."""
    if state.checkpoints is not None:
        with state.timers("load-checkpoint").measure(barrier=True):
            state.checkpoints.load_progress(trained)
    if state.is_resumed:
        state.print_timers(["load-checkpoint"])


def let_callbacks_give_weights(state: Run, notify: Dispatcher) -> None:
    """Fire `on_load_model_weights` in a run whose checkpoints have no weights. Collective."""
    if callbacks_give_weights(state.cfg.checkpoint, notify):
        notify.on_load_model_weights()


def end_set_up(
    state: Run, notify: Dispatcher, tf32: str = "train.tf32=true", bf16: str = "mixed_precision=bf16_mixed"
) -> None:
    """Print how long the set-up took, name a precision that is much faster, and fire `on_init_end`. Collective.

    Args:
        tf32: how the caller's user selects TensorFloat-32.
        bf16: how the caller's user selects bfloat16.
    """
    state.print_timers([MODEL_TIMER, "load-pretrained-checkpoint", DATA_TIMER])
    is_undecided = state.cfg.train.tf32 is None and state.cfg.mixed_precision is None
    note = slow_float32(state.world.device, notify.model, tf32, bf16) if is_undecided and state.world.is_main else None
    if note is not None:
        logger.warning("%s", note)
    notify.on_init_end()


def resolve_vocabulary(config: ConfigContainer, tokenizer_size: int) -> None:
    """Set the model's vocabulary to the tokenizer's, padded; a larger one is kept.

    Raises:
        ConfigError: if the model's vocabulary is smaller than the tokenizer's.
    """
    model = config.model
    if model.vocab_size is None:
        multiple = model.make_vocab_size_divisible_by
        model.vocab_size = -(-tokenizer_size // multiple) * multiple
    elif model.vocab_size < tokenizer_size:
        raise ConfigError(
            f"model.vocab_size={model.vocab_size} must be at least the tokenizer's {tokenizer_size}; leave it unset to "
            f"use the tokenizer's."
        )


def scheduler_for(
    config: ConfigContainer,
    optimizer: UserOptimizer,
    iters: int | None,
    world_size: int = 1,
    num_samples: int | None = None,
) -> UserScheduler:
    """The learning-rate schedule of a run of `iters` steps.

    `world_size` matters if a global batch is rounded down to full micro-batches, `num_samples` of an epoch with a
    batch-size ramp-up if epochs end in partial batches.
    """
    if iters is None:
        raise ConfigError("The run has no length; set train.train_iters, train.train_samples or train.num_epochs.")
    sizes = sizes_of(config, world_size)
    return build_scheduler(
        optimizer,
        config.scheduler,
        config.optimizer,
        train_iters=iters,
        global_batch_size=sizes.last,
        samples_after=schedule_samples(config, num_samples, world_size=world_size),
        override_opt_param_scheduler=configured_schedule_holds(config),
        use_checkpoint_opt_param_scheduler=config.scheduler.use_checkpoint_opt_param_scheduler,
    )


def count_steps(state: Run, train_data: TrainLoader | StreamLoader | None) -> None:
    """Set the counts shown in Hugging Face's view of the progress."""
    config, world, info = state.cfg, state.world, state.info
    train, validation = config.train, config.validation
    assert train.micro_batch_size is not None
    assert train.global_batch_size is not None
    sizes = sizes_of(config, world.data.size)
    row_size = train.micro_batch_size * world.data.size
    state.num_microbatches = max(1, sizes.at(state.train_state.consumed_train_samples) // row_size)
    if validation.eval_global_batch_size and validation.eval_micro_batch_size:
        state.num_eval_microbatches = validation.eval_global_batch_size // (
            validation.eval_micro_batch_size * world.data.size
        )
    num_samples = None if train_data is None else train_data.num_samples
    info.max_steps = train_iters(config, num_samples, world_size=world.data.size) or 0
    info.samples_per_epoch = num_samples if sizes.varies else None
    info.steps_per_epoch = None if train_data is None else train_data.steps_per_epoch(sizes.last // row_size)
    info.num_train_epochs = train.num_epochs or (info.max_steps / info.steps_per_epoch if info.steps_per_epoch else 0)
    info.num_examples, info.num_train_samples = num_samples, sizes.samples_after(info.max_steps)
    if num_samples:
        end = progress_after(info.max_steps, sizes, num_samples, train.drop_last)
        info.num_train_samples = end.consumed
        if sizes.varies:
            info.num_train_epochs = train.num_epochs or end.epochs
        else:
            _name_dropped_tail(state, sizes.last)
    info.logging_steps = config.logger.log_interval
    info.eval_steps, info.save_steps = validation.eval_interval or 0, config.checkpoint.save_interval or 0
    info.train_batch_size = train.micro_batch_size
    info.max_eval_steps = -1 if validation.eval_iters is None else validation.eval_iters
    info.num_processes, info.rank, info.local_rank = world.data.size, world.rank, world.local_rank
    state.control.rank = world.rank


_NAMED_FROM = 0.05
"""Share of an epoch from which a tail that is not trained on is named."""


def _name_dropped_tail(state: Run, global_batch_size: int) -> None:
    """Say how much of each epoch `train.drop_last` leaves out, if the run gets there and it is noticeable."""
    info, num_samples = state.info, state.info.num_examples or 0
    tail = num_samples - (info.steps_per_epoch or 0) * global_batch_size
    is_reached = info.steps_per_epoch and info.max_steps >= info.steps_per_epoch
    if is_reached and tail >= _NAMED_FROM * num_samples and tail > 0 and state.world.is_main:
        logger.warning(
            "the last %d of %d samples of each epoch are less than a global batch of %d and are dropped; "
            "train.drop_last=false trains on them",
            tail,
            num_samples,
            global_batch_size,
        )


def seed_everything(seed: int) -> None:
    """Seed Python's, NumPy's and torch's global generators; the data order has a separate one."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
