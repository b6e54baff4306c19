"""Exports a run's final weights for other programs: a Hugging Face directory, and a `peft` directory for LoRA."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor, nn

from onstep.analysis.reports.model_card import CARD_FILE, card_of_run
from onstep.config import ModelConfig, PeftConfig
from onstep.distributed import World, attempt
from onstep.distributed.pipeline.seats import is_staged
from onstep.distributed.shards import is_in_shards, whole
from onstep.errors import CheckpointError, ConfigError, MainOnlyError, OnstepError
from onstep.events.context import unwrap
from onstep.files.durability import replace_durably
from onstep.models import Transformer, hf_obstacle
from onstep.models.hf.any_directory import LanguageModel, empty_model, save_directory
from onstep.models.hf.stages import empty_whole
from onstep.training.run import Run
from onstep.training.runs.run_dir import RunDir
from onstep.training.setup.lora import add_lora, has_hf_names, has_lora, merged_model, save_adapter
from onstep.training.setup.pretrained import find_pretrained

logger = logging.getLogger(__name__)


def save_weights(state: Run, model: list[nn.Module]) -> None:
    """Write the final weights to the run's directory, as a directory that Hugging Face loads, on rank 0. Collective.

    With LoRA these are the merged weights, and the adapter goes to `adapter/`. A model that has no class in
    `transformers` is left to its checkpoints, with a warning.
    """
    if is_staged(model):
        _save_stages(state, model)
        return
    module = unwrap(model[0])
    write_final_weights(state, lambda directory: _save(state, module, directory), module)


def _save_stages(state: Run, model: list[nn.Module]) -> None:
    """The same for the stages of a pipeline, which rank 0 gathers. Collective."""
    if state.run_dir is None or not state.cfg.run.save_weights:
        return
    module = whole_of_stages(model, state.world, state.cfg.peft)
    write_final_weights(state, lambda directory: _save(state, module, directory) if module is not None else None, None)


def whole_of_stages(model: list[nn.Module], world: World, peft: PeftConfig | None = None) -> Any:
    """The model whose stages are on the ranks of a pipeline, on the CPU of rank 0; None on others. Collective.

    Args:
        model: the stages of this rank, of a language model of Onstep or a model of `transformers`.
        world: the ranks of the run.
        peft: what has added weights to the model; None for nothing.
    """
    values = weights_of_stages(model, world)
    if values is None:
        return None
    stage: Any = unwrap(model[0])
    dtype = next(iter(values.values())).dtype
    is_ours = isinstance(stage.config, ModelConfig)
    module: Any = empty_model(stage.config, dtype) if is_ours else empty_whole(stage, dtype)
    if peft is not None and peft.peft_scheme is not None:
        add_lora(module, peft, seed=0)
    module.load_state_dict(values)
    return module


def weights_of_stages(model: list[nn.Module], world: World) -> dict[str, Tensor] | None:
    """The weights of all stages of a pipeline, on the CPU of rank 0; None on others. Collective.

    Args:
        model: the stages of this rank.
        world: the ranks of the run.
    """
    stages: list[Any] = [unwrap(chunk) for chunk in model]
    own = {name: value for stage in stages for name, value in stage.state_dict().items()}
    names = world.gather([*own])
    owners = {name: rank for rank in reversed(world.part("pp")) for name in names[rank]}
    dtype, group = next(iter(own.values())).dtype, world.group("pp")
    values: dict[str, Tensor] = {}
    for name, shape in stages[0].whole_shapes.items():
        value = whole(own[name]) if name in own else torch.empty(shape, dtype=dtype, device=world.device)
        dist.broadcast(value, owners[name], group=group)
        if world.is_main:
            values[name] = value.cpu()
    return values if world.is_main else None


def write_final_weights(
    state: Run, write: Callable[[RunDir], None], model: nn.Module | None, *, by_all: bool = False
) -> None:
    """Call `write` if the run should export weights; `checkpoint.on_save_error` decides about failures. Collective.

    It is called on rank 0 alone, unless `model` is sharded, or `by_all` says so: then on all ranks, which gather the
    weights together.

    Raises:
        CheckpointError: if they cannot be written and `on_save_error` is stop; on all ranks, if all write.
    """
    directory, world = state.run_dir, state.world
    in_parts = by_all or (model is not None and is_in_shards(model))
    if directory is None or not (world.is_main or in_parts) or not state.cfg.run.save_weights:
        return
    leaves = state.control.should_abort_without_save or state.exits.decided is not None
    if in_parts:  # a callback may have asked for it since the last step, on one rank
        [leaves] = map(bool, world.agree([int(leaves)]))
    if leaves:
        return
    try:
        if in_parts:
            _on_all(world, partial(write, directory))
        else:
            with world.main_only("writing the final weights", "export them from the newest checkpoint"):
                write(directory)
    except MainOnlyError as error:
        if not world.postpone(error):
            raise
    except ConfigError as error:
        if world.is_main:
            logger.warning(
                "the final weights are only in the checkpoints, where onstep generate and finetune read them: %s", error
            )
    except (OSError, SafetensorError) as error:
        message = (
            f"cannot write the final weights to {directory.model} ({error}); free some space and run the same command "
            f"again, or export them from the newest checkpoint: onstep checkpoint export {directory.path} OUT"
        )
        if state.cfg.checkpoint.on_save_error == "stop":
            raise CheckpointError(message) from error
        if world.is_main:
            logger.warning("%s", message)
        if state.checkpoints is not None:
            state.checkpoints.failure = message


def _on_all(world: World, write: Callable[[], None]) -> None:
    """Call `write` on all ranks; the first error is raised on all of them. Collective."""
    _, error = attempt(write)
    failed = [one for one in world.gather(error) if one is not None]
    if failed:
        raise failed[0]


def _save(state: Run, model: LanguageModel, directory: RunDir) -> None:
    eos_id, writes = state.tokenizer.eos_id, state.world.is_main
    obstacle = hf_obstacle(model) if isinstance(model, Transformer) else None
    if has_lora(model):
        if obstacle is not None or has_hf_names(model):
            if is_in_shards(model):
                _on_all(state.world, lambda: _save_adapter(state, model, directory))
            else:
                _save_adapter(state, model, directory)
        elif writes:
            logger.warning(
                "transformers stores several projections of this model in one matrix, so the adapter cannot be saved; "
                "the merged weights are in %s",
                directory.model,
            )
    if obstacle is not None:
        raise ConfigError(obstacle)
    if has_lora(model):
        model = merged_model(model, state.cfg.peft)
    save_directory(model, directory.model, eos_id=eos_id, writes=writes)
    if writes:
        state.tokenizer.save(directory.model)
        card = card_of_run(directory.path, step=state.train_state.step)
        replace_durably(directory.model / CARD_FILE, card)


def _save_adapter(state: Run, model: LanguageModel, directory: RunDir) -> None:
    writes = state.world.is_main
    save_adapter(model, state.cfg.peft, directory.adapter, _base(state), writes=writes)
    if writes:
        state.tokenizer.save(directory.adapter)


def _base(state: Run) -> str | None:
    """The Hugging Face directory that the adapter applies to; None for a checkpoint, or if the directory is gone."""
    try:
        source = find_pretrained(state.cfg)
    except OnstepError:
        return None
    return str(source.path.resolve()) if source is not None and source.is_hugging_face else None
