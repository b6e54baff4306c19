"""Builds the model, the tokenizer and the data of a language-model run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from onstep.config import ConfigContainer, DatasetConfig, ModelConfig
from onstep.config.lengths import sizes_of
from onstep.config.pipelines import schedule_of
from onstep.data import (
    EvalLoader,
    RecordStream,
    StreamLoader,
    Tokenizer,
    TrainLoader,
    build_datasets,
    build_tokenizer,
    learn_bpe,
    tokenizer_in_run,
    tokenizer_source,
)
from onstep.data.corpus.tokenizers import TokenizersTokenizer
from onstep.distributed import World
from onstep.distributed.pipeline.seats import seats_of_rank
from onstep.distributed.pipeline.whole import WholePipeline
from onstep.distributed.refusals import check_undivided
from onstep.errors import ConfigError, DataError, MissingWeightsError
from onstep.metrics.model_shape import ModelShape, num_active_parameters, num_parameters
from onstep.models import ModelHook, Transformer
from onstep.models.fused_loss import check_fused_loss
from onstep.models.hf.any_directory import LanguageModel
from onstep.models.hf.any_directory import build_model as build_language_model
from onstep.models.hf.causal_lm import CausalLM
from onstep.models.hf.documents_probe import prepare_for_data
from onstep.models.hf.stages import cut as cut_by_list
from onstep.models.hf.stages import num_layers_of
from onstep.models.hf.stages_probe import check_stages
from onstep.models.offloading import check_offloading
from onstep.models.stages import cut
from onstep.training.run import Run
from onstep.training.setup.lora import add_lora, statistics
from onstep.training.setup.outlines import outline_of, with_stand_ins
from onstep.training.setup.placement import is_divided, place
from onstep.training.setup.pretrained import PretrainedSource, find_pretrained, load_pretrained, load_quantized
from onstep.training.setup.quantized_base import quantized_model
from onstep.training.setup.weight_types import set_weight_types, type_at_first
from onstep.training.stages.forward_step import check_chunks

PRETRAINED_TIMER = "load-pretrained-checkpoint"


def build_model(
    config: ConfigContainer, world: World, state: Run, pre_wrap_hooks: Sequence[ModelHook] = ()
) -> list[nn.Module]:
    """The model's chunks, on the device, wrapped for data parallelism, with the same weights on every rank. Collective.

    Pretrained weights are loaded unless the run continues from its own checkpoint, which contains them all. LoRA is
    applied before the `pre_wrap_hooks`, which therefore have the last word on what is trained.

    Raises:
        MissingWeightsError: for fine-tuning without weights.
        ConfigError: if a hook does not return a list of modules, or one of several.
    """
    check_offloading(config.model, world.device)
    check_fused_loss(config.model, world.device)
    source, weights = _source(config, state), None
    in_parts = is_divided(config, world) or world.sizes.pp > 1
    if in_parts and not pre_wrap_hooks:  # hooks may read and change the weights
        language_model, weights = outline_of(config, world, source)
    else:
        language_model = _language_model(config, world, state, source)
    if isinstance(language_model, CausalLM):
        prepare_for_data(language_model, has_documents=packs(config.dataset), seq_length=config.dataset.seq_length)
        idle = language_model.num_idle_parameters()
    else:
        idle = idle_parameters(config.model)
    state.flops_per_token = 6.0 * (language_model.num_parameters(exclude_embeddings=True) - idle)
    if config.peft.peft_scheme is not None:
        with with_stand_ins(language_model):
            add_lora(language_model, config.peft, config.rng.seed)
        if world.is_main:
            print(statistics(language_model), flush=True)  # noqa: T201 - Megatron Bridge's block
    with torch.random.fork_rng(devices=[]):  # what hooks draw depends on the seed too, such as a new head's weights
        torch.manual_seed(config.rng.seed)
        chunks = run_hooks([language_model], pre_wrap_hooks)
    check_chunks(chunks)
    if world.sizes.pp > 1:
        chunks = cut_into_stages(chunks, config, world)
    set_weight_types(chunks, config)
    if weights is None or source is None:
        return place(chunks, world, config, weights=weights)
    with state.timers(PRETRAINED_TIMER).measure(barrier=True):
        return place(chunks, world, config, weights=weights)


def cut_into_stages(chunks: list[nn.Module], config: ConfigContainer, world: World) -> list[nn.Module]:
    """The stages of this rank; the rest of the model is given up.

    Raises:
        ConfigError: for a model that cannot be cut, or layers that the stages cannot share.
        ShardingError: for a parameter that is divided between ranks.
    """
    [model] = chunks
    check_undivided([model], "cut into the stages of a pipeline, for which it must be whole on every rank")
    if isinstance(model, Transformer):
        stages = _stages_of(model, config, world)
    else:
        if isinstance(model, CausalLM):
            check_stages(model.config)
        if is_divided(config, world):
            raise ConfigError(
                f"parallel.pipeline_model_parallel_size={world.sizes.pp} cannot divide the stages of a "
                f"{type(model).__name__} further; set parallel.tensor_model_parallel_size=1 and "
                f"parallel.data_parallel_shard_size=1, or use the model of section model."
            )
        seats = seats_of_rank(config.parallel, num_layers_of(model), world.sizes, world.rank)
        stages = cut_by_list(model, seats)
    pipeline: Any = WholePipeline(stages, world, schedule_of(config.parallel))
    for stage in stages:
        stage.pipeline = pipeline
    return stages


def _stages_of(model: Transformer, config: ConfigContainer, world: World) -> list[nn.Module]:
    if type(model) is not Transformer or model.has_value_head:
        what = "with a value head" if model.has_value_head else f"of the class {type(model).__name__}"
        raise ConfigError(
            f"parallel.pipeline_model_parallel_size={world.sizes.pp} cuts no transformer {what}; let data parallelism "
            f"use the ranks, or parallel.data_parallel_shard_size=-1."
        )
    return [*cut(model, seats_of_rank(config.parallel, model.config.num_layers, world.sizes, world.rank))]


def run_hooks(chunks: list[nn.Module], hooks: Sequence[ModelHook]) -> list[nn.Module]:
    """The chunks after each hook in turn. If a hook raises, a note on its error names it.

    Raises:
        ConfigError: if a hook returns anything but None or a list of modules.
    """
    for hook in hooks:
        name = getattr(hook, "__qualname__", type(hook).__qualname__)
        try:
            given = hook(chunks)
        except Exception as error:
            error.add_note(f"raised by the pre-wrap hook {name}")
            raise
        if given is None:
            continue
        if not isinstance(given, list) or not given or not all(isinstance(chunk, nn.Module) for chunk in given):
            raise ConfigError(
                f"the pre-wrap hook {name} must return None or a list of modules, got {type(given).__name__}; return "
                f"the list that was passed to it."
            )
        chunks = given
    return chunks


def _source(config: ConfigContainer, state: Run) -> PretrainedSource | None:
    """The pretrained weights to start from; None for a run that continues, and for one without any."""
    if state.checkpoints is not None and state.checkpoints.start is not None:
        return None
    source = find_pretrained(config)
    if source is None and config.checkpoint.finetune:
        raise MissingWeightsError(
            f"checkpoint.load={config.checkpoint.load} has no checkpoint yet, so there is nothing to fine-tune; set "
            f"checkpoint.pretrained_checkpoint to the weights to start from."
        )
    return source


def _language_model(
    config: ConfigContainer, world: World, state: Run, source: PretrainedSource | None
) -> LanguageModel:
    quantizes = config.peft.base_quantization is not None
    if source is not None:
        with state.timers(PRETRAINED_TIMER).measure(barrier=True):
            if quantizes:
                return load_quantized(source, config, world)
            return load_pretrained(source, config.model, world, type_at_first(config))
    if quantizes and state.checkpoints is not None and state.checkpoints.start is not None:
        return quantized_model(config, device=world.device)
    return build_language_model(config.model, seed=config.rng.seed, dtype=type_at_first(config))


def packs(data: DatasetConfig) -> bool:
    """Whether sequences hold several documents with attention within each."""
    is_chat = data.kind == "chat" or (data.kind == "stream" and data.stream_of == "chat")
    return data.packing if is_chat else data.reset_attention_mask


def idle_parameters(config: ModelConfig) -> int:
    """Number of expert weights that a token does not use."""
    shape = ModelShape.of(config)
    return 0 if shape is None else num_parameters(shape) - num_active_parameters(shape)


def open_tokenizer(state: Run) -> Tokenizer:
    """The configured tokenizer. Collective for `bpe`.

    A trained tokenizer is stored in the run's directory. A run that continues uses its own, or that of the run whose
    checkpoint it continues from, whatever has happened to the corpus: token ids must keep their meaning.

    Raises:
        DataError: for data that a tokenizer cannot be trained on. Also if the trained tokenizer is missing and the data
            may have changed since (`checkpoint.on_config_change=apply`).
    """
    config, world = state.cfg, state.world
    if config.tokenizer.tokenizer_type != "bpe":
        return build_tokenizer(config.tokenizer, warns=world.is_main)
    directory = None if state.run_dir is None else state.run_dir.path
    kept, problem = world.share(_trained_tokenizer(state, directory) if world.is_main else None)
    if kept is None and problem is not None and config.checkpoint.on_config_change == "apply":
        raise problem
    if kept is not None:
        tokenizer = TokenizersTokenizer(kept)
    else:
        tokenizer = learn_bpe(
            tokenizer_source(config.dataset, show_progress=_shows_progress(config, world)),
            config.tokenizer.vocab_size,
            config.dataset.cache_dir,
            show_progress=_shows_progress(config, world),
            wait_for_other=not world.is_main,
        )
    if directory is not None and world.is_main and kept != directory / TRAINED:
        tokenizer.save(directory)
    return tokenizer


def _shows_progress(config: ConfigContainer, world: World) -> bool:
    return world.is_main and config.logger.console != "quiet"


TRAINED = "tokenizer.json"
"""The tokenizer that a run trained, in its directory."""


def _trained_tokenizer(state: Run, directory: Path | None) -> tuple[Path | None, DataError | None]:
    """The tokenizer that this run, or that of the checkpoint it continues from, has trained; else why there is none."""
    if directory is not None and (directory / TRAINED).is_file():
        return directory / TRAINED, None
    start = None if state.checkpoints is None else state.checkpoints.start
    if start is None:
        return None, None
    try:
        found = tokenizer_in_run(state.cfg.tokenizer, start.path).tokenizer_model
    except DataError as error:
        return None, error
    return None if found is None else Path(found), None


def build_data(
    config: ConfigContainer, world: World, tokenizer: Tokenizer
) -> tuple[TrainLoader | StreamLoader | None, EvalLoader | None, EvalLoader | None]:
    """Loaders of the three splits. The globally first rank writes the token file while the others wait for it."""
    train, valid, test = build_datasets(
        config.dataset,
        tokenizer,
        show_progress=_shows_progress(config, world),
        wait_for_other=not world.is_main,
        vocab_size=config.model.vocab_size,
    )
    loader = None if config.validation.skip_train else train_loader(config, world, train)
    return loader, eval_loader(config, world, valid), eval_loader(config, world, test)


def train_loader(config: ConfigContainer, world: World, dataset: object) -> TrainLoader | StreamLoader:
    """A loader of this rank's share of the training split."""
    options, data = config.train, config.dataset
    assert options.micro_batch_size is not None
    assert options.global_batch_size is not None
    seed = config.rng.seed if config.rng.data_seed is None else config.rng.data_seed
    reading: dict[str, Any] = {
        "micro_batch_size": options.micro_batch_size,
        "global_batch_size": sizes_of(config, world.data.size).last,
        "rank": world.data.rank,
        "world_size": world.data.size,
        "seed": seed,
        "shuffle": data.shuffle,
        "drop_last": options.drop_last,
        **_reading(data, world),
    }
    if isinstance(dataset, RecordStream):
        return StreamLoader(dataset, **{**reading, "persistent_workers": False})  # a pass has workers of its own
    return TrainLoader(dataset, **reading)


def eval_loader(config: ConfigContainer, world: World, dataset: object) -> EvalLoader | None:
    """A loader that reads a split from its start, in evaluation batches; None without a split."""
    if dataset is None:
        return None
    micro, batch = config.validation.eval_micro_batch_size, config.validation.eval_global_batch_size
    assert micro is not None
    assert batch is not None
    return EvalLoader(
        dataset,
        micro_batch_size=micro,
        num_microbatches=batch // (micro * world.data.size),
        rank=world.data.rank,
        world_size=world.data.size,
        **_reading(config.dataset, world),
    )


def _reading(data: DatasetConfig, world: World) -> dict[str, Any]:
    """How the samples of any split are read."""
    return {
        "num_workers": data.num_workers,
        "pin_memory": data.pin_memory and world.device.type == "cuda",
        "persistent_workers": data.persistent_workers,
        "prefetch_factor": data.prefetch_factor,
        "multiprocessing_context": data.multiprocessing_context,
    }
