"""The tokenizer and the data of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from onstep.config import ConfigContainer
from onstep.config.lengths import sizes_of
from onstep.data import EvalLoader, Tokenizer, TrainLoader, build_datasets, build_tokenizer, learn_bpe, tokenizer_source
from onstep.data.tokenizers import TokenizersTokenizer
from onstep.distributed import World
from onstep.training.run import Run


def open_tokenizer(state: Run) -> Tokenizer:
    """The configured tokenizer. Collective where it is `bpe`.

    A tokenizer that is learned is kept in the run's folder, and a run that continues takes its own, whatever has become
    of the corpus: token ids must go on meaning the same.
    """
    config = state.cfg
    if config.tokenizer.tokenizer_type != "bpe":
        return build_tokenizer(config.tokenizer)
    folder = None if state.run_folder is None else state.run_folder.path
    kept = state.world.share(_kept_tokenizer(folder) if state.world.is_main else None)
    if kept is not None:
        return TokenizersTokenizer(kept)
    tokenizer = _learn(config, state.world)
    if folder is not None and state.world.is_main:
        tokenizer.save(folder)
    return tokenizer


def _kept_tokenizer(folder: Path | None) -> Path | None:
    path = None if folder is None else folder / "tokenizer.json"
    return path if path is not None and path.is_file() else None


def _learn(config: ConfigContainer, world: World) -> TokenizersTokenizer:
    source = tokenizer_source(config.dataset, show_progress=world.is_main)
    return learn_bpe(
        source,
        config.tokenizer.vocab_size,
        config.dataset.cache_dir,
        show_progress=world.is_main,
        wait_for_other=not world.is_main,
    )


def build_data(
    config: ConfigContainer, world: World, tokenizer: Any
) -> tuple[TrainLoader | None, EvalLoader | None, EvalLoader | None]:
    """Loaders of the three splits. The first rank of all writes the token file while the others wait for it."""
    train, valid, test = build_datasets(
        config.dataset,
        tokenizer,
        show_progress=world.is_main,
        wait_for_other=not world.is_main,
        vocab_size=config.model.vocab_size,
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
        global_batch_size=sizes_of(config, world.size).last,
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
