"""Builds what a run needs from its configuration: model, optimizer, scheduler, data."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from onstep.config import ConfigContainer
from onstep.config.differences import configured_schedule_holds
from onstep.config.lengths import has_growing_tails, schedule_samples, sizes_of, standing_after, train_iters
from onstep.data import EvalLoader, TrainLoader
from onstep.errors import ConfigError
from onstep.events import Dispatcher
from onstep.optim import build_loss_scaler, build_optimizer, build_scheduler
from onstep.training.protocols import Trained, UserOptimizer, UserScheduler
from onstep.training.run import Run
from onstep.training.setup.model_and_data import build_data, build_model, open_tokenizer

MODEL_TIMER, DATA_TIMER = "model-and-optimizer-setup", "train/valid/test-data-iterators-setup"


@dataclass
class Parts:
    """What `train()` is handed."""

    model: list[nn.Module]
    optimizer: UserOptimizer | None
    """None, as are scheduler and training data, in a run that only evaluates."""
    scheduler: UserScheduler | None
    train_data: TrainLoader | None
    valid_data: EvalLoader | None
    test_data: EvalLoader | None

    def close(self) -> None:
        """End worker processes."""
        if self.train_data is not None:
            self.train_data.close()


def set_up(state: Run, tell: Dispatcher) -> Parts:
    """Build everything of a language-model run. Collective.

    Tells `on_data_init_start` before any data file is opened (but those that a `bpe` tokenizer is learned from) and
    `on_init_end` when all is built. The scheduler is there at `on_data_init_start` unless it takes the length of an
    epoch, which only the data can tell: in a run by epochs, and where batches grow while epochs end in tails.
    """
    config, world, timers = state.cfg, state.world, state.timers
    with timers("tokenizer-setup").measure():
        state.tokenizer = state.door.processing_class = open_tokenizer(state)
    resolve_vocabulary(config, state.tokenizer.vocab_size)
    with timers(MODEL_TIMER).measure(barrier=True):
        model = build_model(config, world, state)
        seed_everything(config.rng.seed + world.rank)
        trains, iters = not config.validation.skip_train, train_iters(config, world_size=world.size)
        scaler = build_loss_scaler(config.optimizer, config.mixed_precision)
        optimizer = build_optimizer(model, config.optimizer, scaler=scaler) if trains else None
        waits = iters is None or has_growing_tails(config, world.size)
        scheduler = None if optimizer is None or waits else scheduler_for(config, optimizer, iters, world.size)
    tell.model, tell.optimizer, tell.scheduler = model, optimizer, scheduler
    load_checkpoint(state, tell)
    tell.on_data_init_start()
    with timers(DATA_TIMER).measure(barrier=True):
        train_data, valid_data, test_data = build_data(config, world, state.tokenizer)
    if scheduler is None and train_data is not None and optimizer is not None:
        iters = train_iters(config, train_data.num_samples, world_size=world.size)
        scheduler = scheduler_for(config, optimizer, iters, world.size, train_data.num_samples)
        tell.scheduler = scheduler
    state.door.train_dataloader, state.door.eval_dataloader = train_data, valid_data
    count_steps(state, train_data)
    validation = config.validation
    state.train_state.do_train = trains and bool(iters)
    state.train_state.do_valid = valid_data is not None and validation.eval_iters != 0
    state.train_state.do_test = test_data is not None and validation.eval_iters != 0
    end_set_up(state, tell)
    return Parts(model, optimizer, scheduler, train_data, valid_data, test_data)


def load_checkpoint(state: Run, tell: Dispatcher) -> None:
    """Put the checkpoint that the run continues from, if there is one, into what `tell` shows callbacks. Collective."""
    if state.checkpoints is not None:
        with state.timers("load-checkpoint").measure(barrier=True):
            state.checkpoints.load_progress(Trained(tell.model, tell.optimizer, tell.scheduler))
    if state.stage.is_resumed:
        state.print_timers(["load-checkpoint"])


def end_set_up(state: Run, tell: Dispatcher) -> None:
    """Print how long the set-up took, and tell `on_init_end`. Collective."""
    state.print_timers([MODEL_TIMER, "load-pretrained-checkpoint", DATA_TIMER])
    tell.on_init_end()


def resolve_vocabulary(config: ConfigContainer, tokenizer_size: int) -> None:
    """Give the model the tokenizer's vocabulary, padded; a larger one is kept.

    Raises:
        ConfigError: when the model's vocabulary is smaller than the tokenizer's.
    """
    model = config.model
    if model.vocab_size is None:
        multiple = model.make_vocab_size_divisible_by
        model.vocab_size = -(-tokenizer_size // multiple) * multiple
    elif model.vocab_size < tokenizer_size:
        raise ConfigError(
            f"model.vocab_size={model.vocab_size} must be at least the tokenizer's {tokenizer_size}; leave it unset to "
            f"take the tokenizer's."
        )


def scheduler_for(
    config: ConfigContainer,
    optimizer: UserOptimizer,
    iters: int | None,
    world_size: int = 1,
    num_samples: int | None = None,
) -> UserScheduler:
    """The learning-rate schedule of a run of `iters` steps.

    `world_size` matters where a global batch is rounded down to whole micro-batches, `num_samples` of an epoch where
    batches grow while epochs end in tails.
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


def count_steps(state: Run, train_data: TrainLoader | None) -> None:
    """Fill in the facts that Hugging Face's view of the progress shows."""
    config, world, facts = state.cfg, state.world, state.facts
    train, validation = config.train, config.validation
    assert train.micro_batch_size is not None
    assert train.global_batch_size is not None
    sizes = sizes_of(config, world.size)
    row_size = train.micro_batch_size * world.size
    state.num_microbatches = max(1, sizes.at(state.train_state.consumed_train_samples) // row_size)
    if validation.eval_global_batch_size and validation.eval_micro_batch_size:
        state.num_eval_microbatches = validation.eval_global_batch_size // (
            validation.eval_micro_batch_size * world.size
        )
    num_samples = None if train_data is None else train_data.num_samples
    facts.max_steps = train_iters(config, num_samples, world_size=world.size) or 0
    facts.samples_per_epoch = num_samples if sizes.varies else None
    facts.steps_per_epoch = None if train_data is None else train_data.steps_per_epoch(sizes.last // row_size)
    facts.num_train_epochs = train.num_epochs or (
        facts.max_steps / facts.steps_per_epoch if facts.steps_per_epoch else 0
    )
    facts.num_examples, facts.num_train_samples = num_samples, sizes.samples_after(facts.max_steps)
    if num_samples:
        end = standing_after(facts.max_steps, sizes, num_samples, train.drop_last)
        facts.num_train_samples = end.consumed
        if sizes.varies:
            facts.num_train_epochs = train.num_epochs or end.epochs
    facts.logging_steps = config.logger.log_interval
    facts.eval_steps = validation.eval_interval or 0
    facts.train_batch_size = train.micro_batch_size
    facts.max_eval_steps = -1 if validation.eval_iters is None else validation.eval_iters
    facts.num_processes, facts.rank, facts.local_rank = world.size, world.rank, world.local_rank
    state.control.rank = world.rank


def seed_everything(seed: int) -> None:
    """Seed Python's, NumPy's and torch's global generators; the order of the data has its own."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
