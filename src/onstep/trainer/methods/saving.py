"""Hugging Face's methods that write the model, the state and the model card."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist
from safetensors.torch import save_file
from safetensors.torch import save_model as save_safetensors
from torch import nn

from onstep.checkpoint.catalog.unfinished import being_written
from onstep.config import TrainingArguments
from onstep.config.hf.sharding import writes_whole_weights
from onstep.distributed import World
from onstep.distributed.main_only import main_only
from onstep.distributed.shards import is_in_shards, whole
from onstep.errors import ConfigError, MainOnlyError
from onstep.events.context import unwrap
from onstep.models import Transformer, hf_obstacle, save_hf
from onstep.models.deferred import gathered, value_of
from onstep.models.hf.family_directory import save_pretrained
from onstep.models.hf.weight_files import write_weights
from onstep.train_state import StateDict
from onstep.trainer.methods.state_files import StateFileMethods
from onstep.trainer.overrides import overrides
from onstep.trainer.own_arguments import local_output_dir
from onstep.trainer.reporting.model_card import Words, model_card
from onstep.trainer.uploads import writing_output

ARGUMENTS_FILE = "training_args.json"


class SavingMethods(StateFileMethods):
    """Hugging Face's methods that write the model, the state and the model card."""

    write_checkpoint: Callable[[], None] | None = None
    """Writes the checkpoint that is due, while `_save_checkpoint` runs; or one now, while an overridden
    `_maybe_log_save_evaluate` runs, which decides whether one is due."""

    @property
    def saved_processing_class(self) -> object:
        """What is saved with the weights to process data: the `processing_class`, else the collator's tokenizer."""
        given = self.processing_class
        return getattr(self.data_collator, "tokenizer", None) if given is None else given

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the weights, processing class and arguments to `output_dir` (default: `args.output_dir`), on rank 0.

        If the model is sharded over ranks, all of them call this, and gather its weights one at a time; an override of
        `_save` is given them all as `state_dict`.

        An override, also of `_save`, is called for the final weights and, as in Hugging Face's Trainer, at each
        checkpoint, with its directory.

        Raises:
            ConfigError: if `model_init` has not created a model yet.
        """
        if self.model is None:
            raise ConfigError(
                "Trainer has no model to save yet: model_init runs when training starts; call train() first."
            )
        in_parts = is_in_shards(self.model)
        with writing_output(self, output_dir) as directory, self._weights_at_rest():
            if self.stages is not None:
                weights = self.stages.weights()
                if self.args.should_save:
                    self._save_alone(directory, state_dict=weights)
            elif in_parts and overrides(self, "_save"):
                weights = whole_weights(self.model, keeps=self.args.should_save)
                if self.args.should_save:
                    self._save_alone(directory, state_dict=weights)
            elif in_parts:
                self._save(directory)
            elif self.args.should_save:
                self._save_alone(directory)

    def _weights_at_rest(self) -> AbstractContextManager[None]:
        """Context in which no weight of a running training is being gathered."""
        return nullcontext() if self.global_state is None else self.global_state.features.pause("export")

    def _save_alone(self, directory: str, **weights: StateDict) -> None:
        """Call `_save`, or its override, on rank 0, where a collective in it raises on all ranks."""
        try:
            with main_only(f"{type(self).__name__}._save", "override _save_checkpoint, which all ranks call"):
                self._save(directory, **weights)
        except MainOnlyError as error:
            if self.global_state is None or not self.global_state.world.postpone(error):
                raise

    def _save(self, output_dir: str | None = None, state_dict: StateDict | None = None) -> None:
        """Write the model, or the given weights, and what belongs to them, on rank 0."""
        is_main = self.args.should_save if self.global_state is None else self.global_state.world.is_main
        if self.model is None:
            return
        directory = Path(local_output_dir(self.args) if output_dir is None else output_dir)
        if is_main:
            save_model(self.model, directory, self.saved_processing_class, state_dict)
            write_arguments(self.args, directory)
        elif state_dict is None and is_in_shards(self.model):
            save_model(self.model, directory, writes=False)

    def _get_output_dir(self, trial: object = None) -> str:
        """The directory with the checkpoints, `checkpoint-<step>`."""
        checkpoints = None if self.global_state is None else self.global_state.checkpoints
        return local_output_dir(self.args) if checkpoints is None else str(checkpoints.root)

    def _save_checkpoint(self, model: nn.Module | None, trial: object = None, metrics: object = None) -> None:
        """Write the checkpoint that is due. Collective; an override is called at each save, on every rank.

        What it writes to `checkpoint-<step>` in `_get_output_dir(trial)`, before or after calling `super()`, becomes
        part of the checkpoint. Saves are then not asynchronous.

        Raises:
            ConfigError: if no checkpoint is due.
        """
        write, state = self.write_checkpoint, self.global_state
        if write is None or state is None:
            raise ConfigError(
                "Trainer._save_checkpoint is called where a checkpoint is due; to save at another time, set "
                "control.should_save = True in a callback; to write only the model, call save_model(directory)."
            )
        directory = os.path.join(self._get_output_dir(trial), f"checkpoint-{state.train_state.step}")
        with being_written(directory, is_main=state.world.is_main):
            if overrides(self, "save_model") or overrides(self, "_save") or writes_weights_beside(model, self.args):
                self.save_model(directory, _internal_call=True)
            self.save_states(directory)
            write()

    def create_model_card(
        self,
        language: Words = None,
        license: Words = None,
        tags: Words = None,
        model_name: str | None = None,
        finetuned_from: str | None = None,
        tasks: Words = None,
        dataset_tags: Words = None,
        dataset: Words = None,
        dataset_args: Words = None,
    ) -> None:
        """Write the facts of the run to `README.md` in `args.output_dir`, with metadata for model hubs, on rank 0.

        Args:
            language: the language of the model's data, by its code.
            license: the license of the model, by its identifier on the Hub.
            tags: the tags of the model on the Hub.
            model_name: the title of the card; None for the name of the directory.
            finetuned_from: the name or directory of the model that was trained further.
            tasks: the tasks that the model is for, by their names on the Hub.
            dataset_tags: the data sets of the Hub that it was trained on, by their names.
            dataset: the data sets in words.
            dataset_args: the configurations of the data sets.
        """
        if self.args.process_index != 0:
            return
        given = {
            "language": language,
            "license": license,
            "tags": tags,
            "base_model": finetuned_from,
            "pipeline_tag": tasks,
            "datasets": dataset_tags,
        }
        card = model_card(
            self.args,
            self.model,
            self.global_state,
            given,
            name=model_name,
            dataset=dataset,
            dataset_args=dataset_args,
        )
        with writing_output(self) as place:
            directory = Path(place)
            directory.mkdir(parents=True, exist_ok=True)
            (directory / "README.md").write_text(card, encoding="utf-8")


def save_model(
    model: nn.Module,
    directory: Path,
    processing_class: object = None,
    state_dict: StateDict | None = None,
    *,
    writes: bool = True,
) -> None:
    """Write `model` to `directory`: with its own `save_pretrained`, as a Hugging Face directory, or as safetensors.

    A plain module, and a `Transformer` without an architecture in `transformers`, can be loaded with
    `safetensors.torch.load_model(module, directory / "model.safetensors")`. `state_dict` is written in place of the
    model's own weights. If these are sharded, all ranks call this, and those that do not write join in gathering them.
    """
    module = unwrap(model)
    in_parts = state_dict is None and is_in_shards(module)
    error = _not_made(directory) if writes else None
    if in_parts:
        error = next((one for one in World(dist.get_rank(), dist.get_world_size()).gather(error) if one), None)
    if error is not None:
        raise error
    if in_parts:
        _save_shards(module, directory, writes=writes)
    elif hasattr(module, "save_pretrained"):
        module.save_pretrained(directory, **({} if state_dict is None else {"state_dict": dict(state_dict)}))
    elif state_dict is not None:
        save_file({name: tensor.contiguous() for name, tensor in state_dict.items()}, directory / "model.safetensors")
    elif isinstance(module, Transformer) and hf_obstacle(module) is None:
        save_hf(module, directory)
    else:
        save_safetensors(module, str(directory / "model.safetensors"))
    if writes and hasattr(processing_class, "save_pretrained"):
        processing_class.save_pretrained(directory)


def _not_made(directory: Path) -> ConfigError | None:
    """Make a directory; why it cannot be made."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        return ConfigError(f"the model cannot be saved in {directory}: {error}; name a directory, not a file")
    return None


def _save_shards(module: nn.Module, directory: Path, *, writes: bool) -> None:
    """Write a model that is sharded over ranks, one tensor at a time. Collective."""
    if is_of(module, "peft"):
        _save_adapters(module, directory, writes=writes)
    elif is_of(module, "transformers"):
        save_pretrained(module, directory, writes=writes)
    elif hasattr(module, "save_pretrained"):
        weights = whole_weights(module, keeps=writes)
        if writes:
            cast(Any, module).save_pretrained(directory, state_dict=weights)
    elif isinstance(module, Transformer) and hf_obstacle(module) is None:
        save_hf(module, directory, writes=writes)
    else:
        names: dict[int, str] = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), name)
        tied = {
            name: names[id(parameter)]
            for name, parameter in module.named_parameters(remove_duplicate=False)
            if names[id(parameter)] != name
        }
        kept = {name: gathered(tensor) for name, tensor in module.state_dict().items() if name not in tied}
        write_weights(kept, directory, sys.maxsize, metadata=tied, writes=writes)


def _save_adapters(module: Any, directory: Path, *, writes: bool) -> None:
    """Write the adapters of a sharded model of `peft`; their weights alone are gathered. Collective."""
    from peft import get_peft_model_state_dict

    state = {name: gathered(tensor) for name, tensor in module.state_dict().items()}
    saved = {
        id(tensor)
        for adapter in module.peft_config
        for tensor in get_peft_model_state_dict(module, state_dict=state, adapter_name=adapter).values()
    }
    weights = {}
    for name, tensor in state.items():
        value = value_of(tensor) if id(tensor) in saved else None
        if writes and value is not None:
            weights[name] = value
    if writes:
        module.save_pretrained(directory, state_dict=weights)


def writes_weights_beside(model: nn.Module | None, args: TrainingArguments) -> bool:
    """Whether each checkpoint of a sharded model also has files of weights that other programs read.

    Those of adapters are small, so that checkpoints always have them.
    """
    is_adapted = model is not None and is_of(unwrap(model), "peft")
    return writes_whole_weights(args) or (is_adapted and model is not None and is_in_shards(model))


def is_of(module: nn.Module, package: str) -> bool:
    """Whether a module's class, or one that it derives from, is of a package."""
    return package in {base.__module__.partition(".")[0] for base in type(module).__mro__}


def whole_weights(model: nn.Module, *, keeps: bool) -> StateDict:
    """The weights of a sharded model in host memory, on a rank that keeps them. Collective."""
    found: StateDict = {}
    for name, tensor in unwrap(model).state_dict().items():
        value = whole(tensor)
        if keeps:
            found[name] = value.detach().cpu()
    return found


def write_arguments(args: TrainingArguments, directory: Path) -> None:
    """Write the arguments as JSON, where Hugging Face's Trainer writes `training_args.bin`."""
    content = json.dumps(args.to_dict(), indent=2, default=str)
    (directory / ARGUMENTS_FILE).write_text(content + "\n", encoding="utf-8")
