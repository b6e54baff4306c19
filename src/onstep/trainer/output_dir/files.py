"""Writes the files beside weights that Hugging Face's tools look for: configuration, tokenizer, state and arguments."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from onstep.events.context import unwrap
from onstep.trainer.methods import TrainerMethods
from onstep.trainer.overrides import overrides
from onstep.training.runs.run_dir import RunDir

STATE_FILE, ARGUMENTS_FILE = "trainer_state.json", "training_args.json"
_STATE = (
    "best_global_step",
    "best_metric",
    "best_model_checkpoint",
    "epoch",
    "eval_steps",
    "global_step",
    "is_hyper_param_search",
    "is_local_process_zero",
    "is_world_process_zero",
    "log_history",
    "logging_steps",
    "max_steps",
    "num_input_tokens_seen",
    "num_train_epochs",
    "save_steps",
    "total_flos",
    "train_batch_size",
    "trial_name",
    "trial_params",
)
"""The fields of Hugging Face's `trainer_state.json`, besides `stateful_callbacks`: their states are in the manifest."""


def files_of_checkpoint(trainer: TrainerMethods) -> Callable[[Path], None]:
    """What writes the files into a checkpoint: the state is that of now, even if the file is written later."""
    assert trainer.global_state is not None
    state, name = _state_text(trainer), f"checkpoint-{trainer.global_state.train_state.step}"
    saves_itself = any(overrides(trainer, method) for method in ("save_model", "_save"))

    def write(directory: Path) -> None:
        if saves_itself:
            _write_as_the_user_does(trainer, directory, name)
        _write_configuration(trainer.model, directory)
        processing_class: Any = trainer.processing_class
        if hasattr(processing_class, "save_pretrained"):
            processing_class.save_pretrained(directory)
        _write_records(trainer, state, directory)

    return write


def _write_as_the_user_does(trainer: TrainerMethods, directory: Path, name: str) -> None:
    """Add what an overridden `save_model` writes; a file that the checkpoint has already is not replaced."""
    own = directory / ".of-the-user" / name
    own.mkdir(parents=True)
    trainer.save_model(str(own))
    for path in sorted(own.rglob("*")):
        target = directory / path.relative_to(own)
        if path.is_file() and not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            path.rename(target)
    shutil.rmtree(own.parent)


def write_final_files(trainer: TrainerMethods, directory: RunDir) -> None:
    """Write the final weights, and what belongs to them, to the run's directory."""
    trainer.save_model(str(directory.model))
    if directory.layout == "hugging_face":
        _write_records(trainer, _state_text(trainer), directory.model)


def _write_records(trainer: TrainerMethods, state: str, directory: Path) -> None:
    (directory / STATE_FILE).write_text(state, encoding="utf-8")
    arguments = json.dumps(trainer.args.to_dict(), indent=2, default=str)
    (directory / ARGUMENTS_FILE).write_text(arguments + "\n", encoding="utf-8")


def _state_text(trainer: TrainerMethods) -> str:
    assert trainer.global_state is not None
    state = trainer.global_state.trainer_state
    content = {name: getattr(state, name) for name in _STATE}
    return json.dumps({**content, "stateful_callbacks": {}}, indent=2, sort_keys=True, default=str) + "\n"


def _write_configuration(model: nn.Module | None, directory: Path) -> None:
    """Write what `from_pretrained` needs beside the weights of a `transformers` model, or of its adapter."""
    module: Any = unwrap(model)
    bases = {base.__module__.partition(".")[0] for base in type(module).__mro__}
    if "peft" in bases:
        module.save_pretrained(directory)
    elif "transformers" in bases:
        config = copy.deepcopy(module.config)
        config.architectures = [type(module).__name__]
        config.dtype = str(module.dtype).removeprefix("torch.")
        config.save_pretrained(directory)
        generation = getattr(module, "generation_config", None)
        if generation is not None and module.can_generate():
            generation.save_pretrained(directory)
