"""Builds what a run needs from its configuration: model, optimizer, scheduler, data."""

from __future__ import annotations

import os
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from onstep.config import ConfigContainer
from onstep.config.lengths import train_iters
from onstep.data import EvalLoader, TrainLoader, build_datasets, build_tokenizer
from onstep.distributed import World, data_parallel
from onstep.errors import ConfigError
from onstep.models import build_transformer
from onstep.optim import build_loss_scaler, build_optimizer, build_scheduler
from onstep.training.state import GlobalState
from onstep.training.telling import Teller


@dataclass
class Parts:
    """What `train()` is handed."""

    model: list[nn.Module]
    optimizer: Any
    """None, as are scheduler and training data, in a run that only evaluates."""
    scheduler: Any
    train_data: Any
    valid_data: EvalLoader | None
    test_data: EvalLoader | None

    def close(self) -> None:
        """End worker processes."""
        if self.train_data is not None:
            self.train_data.close()


def set_up(state: GlobalState, tell: Teller) -> Parts:
    """Build everything of a language-model run. Collective.

    Tells `on_data_init_start` before any data file is opened and `on_init_end` when all is built. The scheduler is
    there at `on_data_init_start` unless the run's length is given in epochs, which only the data can tell.
    """
    config, world = state.cfg, state.world
    state.tokenizer = state.processing_class = build_tokenizer(config.tokenizer)
    resolve_vocabulary(config, state.tokenizer.vocab_size)
    model = build_model(config, world, state)
    seed_everything(config.rng.seed + world.rank)
    trains, iters = not config.validation.skip_train, train_iters(config)
    scaler = build_loss_scaler(config.optimizer, config.mixed_precision)
    optimizer = build_optimizer(model, config.optimizer, scaler=scaler) if trains else None
    scheduler = scheduler_for(config, optimizer, iters) if trains and iters is not None else None
    tell.model, tell.optimizer, tell.scheduler = model, optimizer, scheduler
    if state.checkpoints is not None:
        state.checkpoints.load_progress(model, optimizer, scheduler)
    tell("on_data_init_start")
    train_data, valid_data, test_data = build_data(config, world, state.tokenizer)
    if scheduler is None and train_data is not None:
        iters = train_iters(config, train_data.num_samples)
        scheduler = tell.scheduler = scheduler_for(config, optimizer, iters)
    state.train_dataloader, state.eval_dataloader = train_data, valid_data
    count_steps(state, train_data)
    validation = config.validation
    state.train_state.do_train = trains and bool(iters)
    state.train_state.do_valid = valid_data is not None and validation.eval_iters != 0
    state.train_state.do_test = test_data is not None and validation.eval_iters != 0
    tell("on_init_end")
    return Parts(model, optimizer, scheduler, train_data, valid_data, test_data)


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


def build_model(config: ConfigContainer, world: World, state: GlobalState) -> list[nn.Module]:
    """The model's chunks, on the device, wrapped for data parallelism; every rank has the same weights. Collective."""
    transformer = build_transformer(config.model, seed=config.rng.seed)
    state.flops_per_token = 6.0 * transformer.num_parameters(exclude_embeddings=True)
    return data_parallel([transformer.to(world.device)], world, config.ddp)


def scheduler_for(config: ConfigContainer, optimizer: Any, iters: int | None) -> Any:
    """The learning-rate schedule of a run of `iters` steps."""
    if iters is None:
        raise ConfigError("The run has no length; set train.train_iters, train.train_samples or train.num_epochs.")
    batch_size = config.train.global_batch_size
    assert batch_size is not None
    return build_scheduler(
        optimizer, config.scheduler, config.optimizer, train_iters=iters, global_batch_size=batch_size
    )


def build_data(
    config: ConfigContainer, world: World, tokenizer: Any
) -> tuple[TrainLoader | None, EvalLoader | None, EvalLoader | None]:
    """Loaders of the three splits. The first rank of all writes the token file while the others wait for it."""
    train, valid, test = build_datasets(
        config.dataset, tokenizer, show_progress=world.is_main, wait_for_other=not world.is_main
    )
    loader = None if config.validation.skip_train else train_loader(config, world, train)
    return loader, eval_loader(config, world, valid), eval_loader(config, world, test)


def train_loader(config: ConfigContainer, world: World, dataset: Any) -> TrainLoader:
    """A loader of this rank's share of the training split."""
    options, data = config.train, config.dataset
    assert options.micro_batch_size is not None
    assert options.global_batch_size is not None
    seed = config.rng.seed if config.rng.data_seed is None else config.rng.data_seed
    return TrainLoader(
        dataset,
        micro_batch_size=options.micro_batch_size,
        global_batch_size=options.global_batch_size,
        rank=world.rank,
        world_size=world.size,
        seed=seed,
        shuffle=data.shuffle,
        drop_last=options.drop_last,
        num_workers=data.num_workers,
        pin_memory=data.pin_memory and world.device.type == "cuda",
        persistent_workers=data.persistent_workers,
    )


def eval_loader(config: ConfigContainer, world: World, dataset: Any) -> EvalLoader | None:
    """A loader that reads a split from its start, in evaluation batches; None where there is no split."""
    if dataset is None:
        return None
    micro, batch = config.validation.eval_micro_batch_size, config.validation.eval_global_batch_size
    assert micro is not None
    assert batch is not None
    return EvalLoader(
        dataset,
        micro_batch_size=micro,
        num_microbatches=batch // (micro * world.size),
        rank=world.rank,
        world_size=world.size,
    )


def count_steps(state: GlobalState, train_data: Any) -> None:
    """Fill in the facts that Hugging Face's view of the progress shows."""
    config, world, facts = state.cfg, state.world, state.facts
    train, validation = config.train, config.validation
    assert train.micro_batch_size is not None
    assert train.global_batch_size is not None
    state.num_microbatches = train.global_batch_size // (train.micro_batch_size * world.size)
    if validation.eval_global_batch_size and validation.eval_micro_batch_size:
        state.num_eval_microbatches = validation.eval_global_batch_size // (
            validation.eval_micro_batch_size * world.size
        )
    facts.max_steps = train_iters(config, None if train_data is None else train_data.num_samples) or 0
    facts.steps_per_epoch = None if train_data is None else train_data.steps_per_epoch(state.num_microbatches)
    facts.num_train_epochs = train.num_epochs or (
        facts.max_steps / facts.steps_per_epoch if facts.steps_per_epoch else 0
    )
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


def set_environment(config: ConfigContainer) -> None:
    """Set the configured environment variables, unless they are set already."""
    for name, value in config.env_vars.items():
        os.environ.setdefault(name, value)
